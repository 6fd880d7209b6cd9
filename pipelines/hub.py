"""Data sets in the layout of the Hugging Face hub: which of their files hold the training text.

A data set is a folder, on the hub (`hf://datasets/<owner>/<name>`) or anywhere a clone of it lies.
Its card, README.md, may say in its first lines which files are the `train` split of which config.
"""

import re
from functools import lru_cache
from typing import Any

from bert_core import files
from bert_core.errors import CorpusError

CARD = "README.md"
TRAIN = "train"
_METADATA = re.compile(rb"\A---\r?\n(.*?\n)---\r?$", re.DOTALL | re.MULTILINE)
_DATA = re.compile(r"\.(parquet|jsonl|ndjson|txt|xml)(\.(gz|bz2|zst))?$", re.IGNORECASE)
# A split's name, as a word of its own in a path: train-00000-of-00002.parquet, data/test.jsonl.
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|val|valid|validation|dev|eval)(?=[^a-z]|$)")


def data_files(source: str) -> list[str] | None:
    """The files of the training split of a data set; None if `source` is no folder with a card.

    Where its card names several configs, the one called `default` or marked so counts. Without a
    word in the card they are the files with `train` in their names, or all where none is named
    after a split.

    Raises: CorpusError if there is no such split, or several configs and no default.
    """
    metadata = card_metadata(source)
    if metadata is None:
        return None
    every = [path for path in files.find_files(source) if _DATA.search(path)]
    patterns = _train_patterns(metadata, source)
    if patterns is not None:
        wanted = [path for pattern in patterns for path in files.find_files(pattern)]
        return sorted({path for path in wanted if _DATA.search(path)})
    named = {path: _SPLIT.search(path[len(source) :].lower()) for path in every}
    if any(named.values()):
        every = [path for path, match in named.items() if match and match[1] == TRAIN]
    if not every:
        raise CorpusError(
            f"{source}: wanted a split {TRAIN} in Parquet, JSONL or text, this data set has none: "
            "name the files that are meant by a glob"
        )
    return every


@lru_cache(maxsize=16)
def card_metadata(source: str) -> dict[str, Any] | None:
    """What the card of a data set says in its first lines; None without a card."""
    import yaml

    if source == "docstrings" or re.search(r"[*?\[]", source):
        return None
    card = files.join(source, CARD)
    try:
        match = _METADATA.match(files.read_bytes(card))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if match is None:
        return None
    try:
        metadata = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise CorpusError(
            f"{card}: wanted YAML between its first two lines of ---, it cannot be read ({error}): "
            "correct it, or name the files that are meant by a glob"
        ) from error
    return metadata if isinstance(metadata, dict) else None


def license_of(source: str) -> str | None:
    """The licence that the card of a data set names."""
    named = (card_metadata(source) or {}).get("license")
    return ", ".join(map(str, named)) if isinstance(named, list) else named


def _train_patterns(metadata: dict[str, Any], source: str) -> list[str] | None:
    """Globs of the training split of the default config; None if the card names no files."""
    configs = {c["config_name"]: c for c in metadata.get("configs") or [] if c.get("data_files")}
    if not configs:
        return None
    default = [name for name, config in configs.items() if config.get("default")]
    chosen = default or [name for name in configs if name == "default" or len(configs) == 1]
    if not chosen:
        raise CorpusError(
            f"{source}: wanted one config, this data set has {', '.join(configs)}: name the files "
            "of the one that is meant by a folder or a glob below it"
        )
    listed = configs[chosen[0]]["data_files"]
    if isinstance(listed, str) or all(isinstance(each, str) for each in listed):
        listed = [{"split": TRAIN, "path": listed}]
    paths = [each["path"] for each in listed if each["split"] == TRAIN]
    if not paths:
        raise CorpusError(
            f"{source}: wanted a split {TRAIN}, its config {chosen[0]} has "
            f"{', '.join(each['split'] for each in listed)}: name the files by a glob"
        )
    flat = [path for each in paths for path in ([each] if isinstance(each, str) else each)]
    return [files.join(source, path) for path in flat]
