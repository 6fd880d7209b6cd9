"""What Ray Serve puts around all of its own, in each process that has an HTTP server."""

from ray.serve.context import _get_internal_replica_context
from starlette.middleware import Middleware

from serve.giving_up import GivesUp
from serve.one_write import OneWrite


def middlewares() -> list[Middleware]:
    """For Ray Serve, which calls this by the name that `serve.haproxy` gives it."""
    is_replica = _get_internal_replica_context() is not None
    return [Middleware(OneWrite), *([] if is_replica else [Middleware(GivesUp)])]
