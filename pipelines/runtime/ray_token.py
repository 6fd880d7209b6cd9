"""Handles Ray's token: which token this process has, and whether a cluster requires one."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bert_core.errors import ResourceError
from pipelines.runtime.nodes import token_path
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from grpc import Channel

ANSWER_TIMEOUT_S = 30.0
HOW_TO_START = "`ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`"

_chose_auth_mode = False  # whether we set RAY_AUTH_MODE, not the user


def token() -> str | None:
    """Return the token that Ray would send; None if there is none, or it cannot be read."""
    path = token_path()
    if path is None:
        return os.environ["RAY_AUTH_TOKEN"]
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def set_auth_mode(mode: str) -> None:
    """Set whether Ray's processes require the token from each other, unless the user has set it.

    If it is unset, `ray.init` turns it on, `ray start` does so only if there is a token, and an
    explicit address never does, so the three cannot connect to each other.
    """
    global _chose_auth_mode
    if "RAY_AUTH_MODE" in os.environ and not _chose_auth_mode:
        return
    os.environ["RAY_AUTH_MODE"], _chose_auth_mode = mode, True
    if "ray" in sys.modules:
        from ray._raylet import Config  # type: ignore[attr-defined]  # compiled, and no stub

        Config.initialize("")  # Ray has already read it, and reads it again here


def reset_auth_mode() -> None:
    """Undo `set_auth_mode`, which held for one cluster, not for the next one or a child's."""
    global _chose_auth_mode
    if _chose_auth_mode:
        os.environ.pop("RAY_AUTH_MODE", None)
        _chose_auth_mode = False


def settle(
    address: str, refuses: Callable[[str | None], bool], *, allow_open_cluster: bool
) -> None:
    """Have Ray send the token only to a cluster that requires one; in any other, Ray's actors would
    die.

    Args:
        refuses: whether the cluster refuses a call with this token, or with none.
    Raises: ResourceError if the cluster requires no token and that is not allowed, or refuses ours;
        what `refuses` raises.
    """
    requires_token = refuses(None)
    if not requires_token:
        danger = "requires no token: anyone who reaches its ports can run code on it"
        if not allow_open_cluster:
            raise ResourceError(
                f"wanted a Ray cluster that requires a token, the one at {address} {danger}; "
                f"restart it with {HOW_TO_START}, or join it anyway with --allow_open_cluster"
            )
        say(f"warning: the Ray cluster at {address} {danger}")
    set_auth_mode("token" if requires_token else "disabled")
    if requires_token and refuses(token()):
        raise _wrong_token(address)


def cluster_refuses(host: str, token: str | None, *, is_client_server: bool) -> bool:
    """Whether Ray refuses a call with this token, or without one.

    Calls directly, not through Ray, which would send this process's token, or try for minutes.

    Args:
        host: host and port of the cluster's GCS, or of its client server (`ray://`).
    Raises: ConnectionError if nobody answers.
    """
    import grpc

    service = "RayletDriver/ClusterInfo" if is_client_server else "NodeInfoGcsService/CheckAlive"
    with _channel(host) as channel:
        call = channel.unary_unary(f"/ray.rpc.{service}")
        try:
            call(b"", timeout=ANSWER_TIMEOUT_S, metadata=list(_authorization(token).items()))
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(error.details()) from error
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _channel(host: str) -> "Channel":
    """Open a channel as Ray does, with its certificates if TLS is on."""
    import grpc

    direct = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(host, direct)
    from ray._common.tls_utils import load_certs_from_env

    chain, key, authority = load_certs_from_env()
    return grpc.secure_channel(host, grpc.ssl_channel_credentials(authority, key, chain), direct)


def job_server_refuses(url: str, token: str | None) -> bool:
    """Whether the job server at `url` refuses a call with this token, or without one.

    Raises: ConnectionError if nobody answers.
    """
    import httpx

    version, headers = f"{url.rstrip('/')}/api/version", _authorization(token)
    try:
        status = httpx.get(version, timeout=ANSWER_TIMEOUT_S, headers=headers).status_code
    except httpx.TransportError as error:
        raise ConnectionError(str(error)) from error
    return status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


def _wrong_token(address: str) -> ResourceError:
    path = token_path()
    place = "RAY_AUTH_TOKEN" if path is None else str(path)
    got = f"none in {place}" if token() is None else f"another one in {place}"
    return ResourceError(
        f"wanted the token of the Ray cluster at {address}, could not reach or join it with "
        f"{got}: copy the cluster's, which `ray get-auth-token` prints on its head, to "
        "~/.ray/auth_token or RAY_AUTH_TOKEN"
    )
