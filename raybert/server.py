"""Servers that answer over HTTP, each in processes of its own."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_core.errors import ConfigError
from pipelines.commands.server_process import ServerProcess as Server
from raybert.fields import arguments_of, configured

__all__ = ["Server", "serve"]
ELSEWHERE = ("apply", "dry_run", "status", "stop")
"""Fields of `raybert serve` that are about a server on a cluster."""


def serve(
    models: Mapping[str, str | os.PathLike[str]] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> Server:
    """Serve models over HTTP, and return once they answer.

    The server runs until `stop`, the end of a `with` block, or the end of this process.

    Args:
        models: names and references, as of `load`.
        config: a TOML file with the fields of `raybert serve`, which those given here override.
        fields: more of them. With neither a port nor a `config`, 8000 is taken, or any free port if
            it is in use.
    Raises: ConfigError if a value cannot be right; ResourceError if the server does not start, with
        its log.
    """
    from pipelines.launch import require_extra
    from tracking.store.ports import free_port

    if models is not None:
        fields["models"] = {name: os.fspath(model) for name, model in models.items()}
    parsed = configured("serve", config, fields)
    if given := [name for name in ELSEWHERE if getattr(parsed, name)]:
        raise ConfigError(
            f"{given[0]}: wanted none, since it is about a server on a cluster, got "
            f"{getattr(parsed, given[0])}: give it to `raybert serve` on a command line"
        )
    require_extra("serve")
    if "port" not in fields and config is None:
        fields["port"] = free_port(parsed.port)
    folder = Path(tempfile.mkdtemp(prefix="raybert-serve-"))
    arguments = arguments_of("serve", config, fields)
    return Server.start(arguments, folder / "serve.log", module="raybert.attached")
