"""Data sets in the layout of the Hugging Face hub: which of their files hold the training text.

A data set is a folder, on the hub (`hf://datasets/<owner>/<name>`) or anywhere a clone of it lies.
Its card, README.md, may say in its first lines which files are the `train` split of which config.
"""

import re
from functools import lru_cache
from typing import Any, NoReturn

from bert_core import files
from bert_core.errors import CorpusError

CARD = "README.md"
HUB = "hf://datasets/"
TRAIN = "train"
_METADATA = re.compile(rb"\A---\r?\n(.*?)^---\r?$", re.DOTALL | re.MULTILINE)
_DATA = re.compile(r"\.(parquet|jsonl|ndjson|txt|xml)(\.(gz|bz2|zst))?$", re.IGNORECASE)
_FILE = re.compile(r"\.(md|[^./]+\.(gz|bz2|zst)|parquet|jsonl|ndjson|txt|xml)$", re.IGNORECASE)
# A split's name, as a word of its own in a path: train-00000-of-00002.parquet, data/test.jsonl.
_SPLIT = re.compile(
    r"(?:^|[^a-z])(train|training|test|testing|val|valid|validation|dev|eval|evaluation)(?=[^a-z]|$)"
)


def data_files(source: str) -> list[str] | None:
    """The files of the training split of a data set; None if `source` is none: no folder with a
    card, nor on the hub.

    Where its card names several configs, the one called `default` or marked so counts. Without a
    word in the card they are the files with `train` in their names, or all where none is named
    after a split.

    Raises: CorpusError if there is no such split, or several configs and no default.
    """
    metadata = card_metadata(source)
    if metadata is None and not (source.startswith(HUB) and _may_be_a_folder(source)):
        return None
    try:
        patterns = _train_patterns(metadata or {}, source)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{files.join(source, CARD)}: wanted configs with data_files as the hub describes "
            f"them, got others ({error!r}): correct it, or name the files that are meant by a glob"
        ) from error
    if patterns is not None:
        wanted = [path for pattern in patterns for path in files.find_files(pattern)]
        found = sorted({path for path in wanted if _DATA.search(path)})
        return found or _no_data(source, f"its card names {', '.join(patterns)}")
    every = [path for path in files.find_files(source) if _DATA.search(path)]
    named = {path: _SPLIT.search(path[len(source) :].lower()) for path in every}
    if any(named.values()):
        every = [path for path, match in named.items() if match and TRAIN in match[1]]
    return every or _no_data(source, "this data set has none")


def _no_data(source: str, there_is: str) -> NoReturn:
    raise CorpusError(
        f"{source}: wanted a split {TRAIN} in Parquet, JSONL or text, {there_is}: name the files "
        "that are meant by a glob, convert those of another format"
    )


def _may_be_a_folder(source: str) -> bool:
    """Whether to ask for a card below: a server may refuse what is below a file, and a glob, or an
    address in the web, means just what it says."""
    means_files = re.search(r"^https?://|[*?\[]", source) or _DATA.search(source)
    return source != "docstrings" and not means_files


@lru_cache(maxsize=16)
def card_metadata(source: str) -> dict[str, Any] | None:
    """What the card of a data set says in its first lines; None without a card."""
    import yaml

    if not _may_be_a_folder(source):
        return None
    card = files.join(source, CARD)
    try:
        match = _METADATA.match(files.read_bytes(card))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if match is None:
        return None
    try:
        metadata = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        raise CorpusError(
            f"{card}: wanted YAML between its first two lines of ---, it cannot be read ({error}): "
            "correct it, or name the files that are meant by a glob"
        ) from error
    return metadata if isinstance(metadata, dict) else None


def license_of(source: str) -> str | None:
    """The licence that the card of a data set names."""
    named = (card_metadata(source) or {}).get("license")
    return ", ".join(map(str, named if isinstance(named, list) else [named])) if named else None


def _train_patterns(metadata: dict[str, Any], source: str) -> list[str] | None:
    """Globs of the training split of the default config; None if the card names no files."""
    listed = [config for config in metadata.get("configs") or [] if config.get("data_files")]
    configs = {config.get("config_name", "default"): config for config in listed}
    if not configs:
        return None
    default = [name for name, config in configs.items() if config.get("default")]
    chosen = default or [name for name in configs if name == "default" or len(configs) == 1]
    if not chosen:
        raise CorpusError(
            f"{source}: wanted one config, this data set has {', '.join(configs)}: name the files "
            "of the one that is meant by a folder or a glob below it"
        )
    named = configs[chosen[0]]["data_files"]
    if isinstance(named, str) or all(isinstance(each, str) for each in named):
        named = [{"split": TRAIN, "path": named}]
    paths = [each["path"] for each in named if each.get("split", TRAIN) == TRAIN]
    if not paths:
        raise CorpusError(
            f"{source}: wanted a split {TRAIN}, its config {chosen[0]} has "
            f"{', '.join(each['split'] for each in named)}: name the files by a glob"
        )
    flat = [path for each in paths for path in ([each] if isinstance(each, str) else each)]
    return [files.join(source, path) for path in flat]
