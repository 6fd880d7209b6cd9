"""The command `raybert`: runs the stage or command that is named.

Only that one is imported, so help and errors are instant.
"""

import importlib
import json
import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from bert_core.errors import ConfigError, RaybertError
from bert_core.wording import nearest, one_of
from pipelines.configure import ALL, COMMANDS, KEYS, STAGES, Command, parse
from pipelines.launch import PARTS, lacking, launch, require_extra, way_out

EXIT_CODES = {
    0: "The work is done.",
    1: "The work failed; the message says what can be done.",
    2: "A setting is wrong: the same command would fail again.",
    130: "Interrupted by Ctrl-C; the same command resumes the work.",
    143: "Ended by SIGTERM; the same command resumes the work.",
}
"""Exit codes of the commands; `submit` and `jobs attach` exit as their job does."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with one of `EXIT_CODES`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    if arguments == ["--version"]:
        from pipelines.runtime.code_version import code_version

        print(f"raybert {code_version()}")
        return
    word, rest = arguments[0], arguments[1:]
    if arguments[:2] == KEYS.split():
        word, rest = KEYS, _named(arguments[2:], "--what", "--name")
    if word not in ALL:
        _fail(f"raybert: wanted {one_of(ALL)}, got {word!r}{nearest(word, ALL)}", 2)
    try:
        code = _run(word, rest)
    except ModuleNotFoundError as error:
        if not lacking(word):  # no extra would fix this
            raise
        _fail(f"raybert {word}: {way_out(word, error.name)}", 1)
    except ConfigError as error:
        _fail(f"raybert {word}: {error}", 2)
    except RaybertError as error:
        _fail(f"raybert {word}: {error}", 1)
    except KeyboardInterrupt:
        _fail(f"raybert {word}: interrupted; run the same command again to resume", 130)
    sys.exit(code)


def _run(word: str, arguments: list[str]) -> int:
    if word == "submit":
        from pipelines.commands import submit

        options, command = submit.split_arguments(arguments)
        return submit.run(parse(word, options), command)
    if word == "jobs":
        from pipelines.commands import jobs

        return jobs.run(parse(word, _named(arguments, "--action", "--job")))
    if word == "list":
        arguments = _named(arguments, "--what", "--task")
    if word == "promote":
        arguments = _named(arguments, "--name", "--version")
    if word == "rollback":
        arguments = _named(arguments, "--name")
    if word == "compare":
        arguments = _named(arguments, "--a", "--b")
    if word == "ui":
        arguments = _named(arguments, "--run")
    if word == "report":
        arguments = _listed(arguments, "--runs")
    if word == "serve":
        arguments = _with_one_value(_with_one_value(arguments, "--models"), "--indexes")
    config = parse(word, arguments)
    if word == "serve" and config.apply is not None:
        config = _applied(config, arguments)
    if word in STAGES:
        launch(word, config)
        return 0
    if word not in PARTS:
        require_extra(word)
    if word == "serve":
        _serve(config)
    else:
        importlib.import_module(ALL[word].module).run(config)
    return 0


def _named(arguments: list[str], *names: str) -> list[str]:
    """Put option names before leading positional arguments: `ID` → `--job ID`, for each name in
    turn."""
    named: list[str] = []
    rest = list(arguments)
    for name in names:
        if rest and not rest[0].startswith("-"):
            named += [name, rest.pop(0)]
    return named + rest


def _listed(arguments: list[str], name: str) -> list[str]:
    """Turn leading positional arguments into one JSON list for the option `name`."""
    values = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    return ([name, json.dumps(values)] if values else []) + arguments[len(values) :]


def _applied(config: Any, arguments: list[str]) -> Any:
    """Load the config file named by `apply`, and let the other arguments override it."""
    for name in ("models", "indexes"):
        if getattr(config, name):
            raise ConfigError(
                f"{name}: wanted them in {config.apply}, which says all that is served, got "
                f"{getattr(config, name)} too: leave out --{name}"
            )
    if not Path(config.apply).is_file():
        raise ConfigError(f"apply: wanted a TOML file, got {config.apply}, which does not exist")
    applied = parse("serve", ["--config", config.apply, *arguments])
    if not applied.models:
        raise ConfigError(f"models: wanted tables [models.<name>] in {config.apply}, got none")
    return applied


def _with_one_value(arguments: list[str], name: str) -> list[str]:
    """Join the values after the option `name`: `--models a=x b=y` → `--models a=x,b=y`"""
    named: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        values = [argument.removeprefix(f"{name}=")] if argument.startswith(f"{name}=") else []
        if values or argument == name:
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0).strip(","))
            named += [name, ",".join(values)] if values else [name]
        else:
            named.append(argument)
    return named


def _serve(config: Any) -> None:
    """Run `serve` with Ray started and stopped here, since `serve` may not import `pipelines`."""
    from pipelines.runtime import cluster

    stays = config.apply is not None or config.status or config.stop
    if stays and not config.dry_run:
        cluster.require_address()
    from serve import app  # takes seconds
    from tracking.store.ports import require_free

    if config.dry_run:
        app.show_file(config)
        return
    if not stays:
        require_free(config.host, config.port)  # before the seconds that Ray takes
    cluster.set_defaults(cluster.NO_SPARE_WORKERS)
    if not stays and cluster.address_to_join(None) is None:
        print("starting Ray", flush=True)
    cluster.connect(
        allow_open_cluster=config.allow_open_cluster,
        in_own_session=True,
        worker_setup=app.WORKER_SETUP,
    )
    try:
        app.perform(config)
    finally:
        cluster.disconnect()


def _help() -> str:
    def lines(commands: dict[str, Command]) -> str:
        return "\n".join(f"  {word:<12}{command.summary}" for word, command in commands.items())

    return (
        "usage: raybert <stage or command> [--config FILE.toml] [--field value …]\n\n"
        f"stages, in pipeline order:\n{lines(STAGES)}\n\n"
        f"commands:\n{lines(COMMANDS)}\n\n"
        "raybert <word> --help lists its fields; --print_config prints its config as TOML.\n"
        "raybert --version prints the version, and the commit of a checkout."
    )


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # -m run from a checkout that is not installed
    main()
