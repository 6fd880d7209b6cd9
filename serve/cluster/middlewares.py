"""The middlewares that Ray Serve puts around applications in every process that serves HTTP."""

from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.context import _get_internal_replica_context
from starlette.middleware import Middleware

from serve.cluster.no_replica import GivesUp
from serve.cluster.one_write import OneWrite
from serve.cluster.pass_of_proxy import ThroughProxy, pass_of_proxy
from serve.cluster.plain_text import JSONErrors, ReadableHeaders


def middlewares() -> list[Middleware]:
    """Return the middlewares, the outermost last.

    Ray Serve calls this by the name that `serve.cluster.haproxy` gives it.
    """
    is_replica = _get_internal_replica_context() is not None
    # Behind HAProxy, Serve's own proxy only gets requests that have no replica; else it gets all.
    is_fallback = RAY_SERVE_ENABLE_HA_PROXY and not is_replica
    wanted = pass_of_proxy()
    return [
        Middleware(ReadableHeaders),
        Middleware(JSONErrors),
        *([Middleware(GivesUp)] if is_fallback else []),
        *([] if wanted is None else [Middleware(ThroughProxy, wanted)]),
        Middleware(OneWrite),
    ]
