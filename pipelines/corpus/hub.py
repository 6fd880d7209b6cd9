"""Data sets in the layout of the Hugging Face hub: which of their files are of which split.

A data set is a folder, on the hub (`hf://datasets/<owner>/<name>`) or anywhere a clone of it lies.
Its card, README.md, may say in its first lines which files are the `train` split of which config.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from bert_core import files
from bert_core.data.splits import TRAIN
from bert_core.errors import CorpusError
from pipelines.corpus.readers import ENDINGS

CARD = "README.md"
HUB = "hf://datasets/"
_METADATA = re.compile(rb"\A---\r?\n(.*?)^---\r?$", re.DOTALL | re.MULTILINE)
_SPLITS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "val", "valid", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}


class Kind(NamedTuple):
    """Files that are read for one purpose."""

    words: str
    """What they are, for messages."""
    names: re.Pattern[str]
    """What their names hold."""


def _named(endings: Iterable[str]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, endings))
    return re.compile(rf"\.({names})(\.(gz|bz2|zst))?$", re.IGNORECASE)


TEXTS = Kind(
    "in Parquet, JSONL, CSV, TSV or text",
    _named(ending for ending in ENDINGS if ending != "md"),  # the card is Markdown too
)
TABLES = Kind(
    "in Parquet, JSONL, CSV or TSV",
    _named(ending for ending, reader in ENDINGS.items() if reader.rows not in (None, "lines")),
)
ANY = Kind("beside the card", re.compile(rf"^(?!.*/{CARD}$)"))
_FILE = re.compile(rf"\.([^./]+\.(gz|bz2|zst)|{'|'.join(ENDINGS)})$", re.IGNORECASE)


def data_files(
    source: str, splits: Sequence[str] = (TRAIN,), kind: Kind = TEXTS
) -> list[str] | None:
    """The files of the first of these splits that a data set has; None if `source` is none: no
    folder with a card, nor on the hub.

    Where its card names several configs, the one called `default` or marked so counts. Without a
    word in the card the names of its files tell; where none is named after a split, all are `train`
    as on the hub.

    Raises: CorpusError if there is no such split, or several configs and no default.
    """
    metadata = card_metadata(source)
    if metadata is None and not (source.startswith(HUB) and _may_be_a_folder(source)):
        return None
    try:
        named = _named_splits(metadata or {}, source)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{files.join(source, CARD)}: wanted configs with data_files as the hub describes "
            f"them, got others ({error!r}): correct it, or name the files that are meant by a glob"
        ) from error
    if named is not None:
        patterns = named[_chosen(source, named, splits)]
        wanted = [path for pattern in patterns for path in files.find_files(pattern)]
        found = sorted({path for path in wanted if kind.names.search(path)})
        return found or _no_data(source, splits, kind, f"its card names {', '.join(patterns)}")
    every = [path for path in files.find_files(source) if kind.names.search(path)]
    if TRAIN in splits and not _splits_of(source, every):
        return every or _no_data(source, splits, kind, "this data set has none")
    return _of_first_split(source, every, splits, kind)


def folder_files(
    source: str, splits: Sequence[str], kind: Kind, *, asked: bool
) -> list[str] | None:
    """The files of the first of these splits in a folder that is no data set, by their names; all
    of them where these tell of one split at most, unless it is `asked` for. None if `source` is no
    folder: a file, a glob or an address in the web.

    Raises: CorpusError if there is no such split.
    """
    if not _may_be_a_folder(source) or (found := files.find_files(source)) == [source]:
        return None
    every = [path for path in found if kind.names.search(path)]
    if every and not asked and len(_splits_of(source, every)) < 2:
        return every
    return _of_first_split(source, every, splits, kind)


def _of_first_split(source: str, paths: list[str], splits: Sequence[str], kind: Kind) -> list[str]:
    for split in splits:
        found = [path for path in paths if _is_of(split, _below(source, path))]
        if found:
            return found
    others = ", ".join(_splits_of(source, paths))
    return _no_data(source, splits, kind, f"its files are named after {others or 'no split'}")


def _splits_of(source: str, paths: Sequence[str]) -> list[str]:
    names = [_below(source, path) for path in paths]
    return [split for split in _SPLITS if any(_is_of(split, name) for name in names)]


def _below(folder: str, path: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def _is_of(split: str, name: str) -> bool:
    """Whether a split's name is a word of its own in a path: train-00000-of-00002.parquet,
    data/test.jsonl."""
    words = "|".join(map(re.escape, _SPLITS.get(split, (split.lower(),))))
    return re.search(rf"(?:^|[^a-z])({words})(?=[^a-z]|$)", name.lower()) is not None


def _no_data(source: str, splits: Sequence[str], kind: Kind, there_is: str) -> NoReturn:
    raise CorpusError(
        f"{source}: wanted a split {' or '.join(splits)} {kind.words}, {there_is}: name the files "
        "that are meant by a glob, convert those of another format"
    )


def _may_be_a_folder(source: str) -> bool:
    """Whether to ask for a card below: a server may refuse what is below a file, and a glob, or an
    address in the web, means just what it says."""
    means_files = re.search(r"^https?://|[*?\[]", source) or _FILE.search(source)
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


def class_names(source: str) -> dict[str, list[str]]:
    """Column → names of its classes, as the card of a data set tells them; of several configs what
    none of them tells otherwise."""
    told = (card_metadata(source) or {}).get("dataset_info") or []
    found: dict[str, list[str]] = {}
    differ = set()
    try:
        for info in [told] if isinstance(told, dict) else told:
            for feature in info.get("features") or []:
                names = _class_names(feature)
                if names and found.setdefault(feature["name"], names) != names:
                    differ.add(feature["name"])
    except (AttributeError, KeyError, TypeError, ValueError):  # written by hand, of another shape
        return {}
    return {column: names for column, names in found.items() if column not in differ}


def _class_names(feature: Mapping[str, Any]) -> list[str] | None:
    """The names of a class label, or of a list of them."""
    for kind in ("dtype", "sequence", "list"):
        inner = feature.get(kind)
        if isinstance(inner, dict):
            if "class_label" not in inner:
                return _class_names(inner)
            names = inner["class_label"]["names"]
            numbered = names.items() if isinstance(names, dict) else enumerate(names)
            return [str(name) for _, name in sorted((int(n), name) for n, name in numbered)]
    return None


def license_of(source: str) -> str | None:
    """The licence that the card of a data set names."""
    named = (card_metadata(source) or {}).get("license")
    return ", ".join(map(str, named if isinstance(named, list) else [named])) if named else None


def _named_splits(metadata: dict[str, Any], source: str) -> dict[str, list[str]] | None:
    """Globs of every split of the default config; None if the card names no files."""
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
    splits: dict[str, list[str]] = {}
    for each in named:
        paths = [each["path"]] if isinstance(each["path"], str) else each["path"]
        splits.setdefault(each.get("split", TRAIN), []).extend(
            files.join(source, path) for path in paths
        )
    return splits


def _chosen(source: str, named: Mapping[str, Any], splits: Sequence[str]) -> str:
    """The first of `splits` that a card names, in its words or in others of the same meaning."""
    for split in splits:
        if split in named:
            return split
        alike = [name for name in named if split in _SPLITS and _is_of(split, name)]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise CorpusError(
                f"{source}: wanted one split {split}, its card names {', '.join(alike)}: name the "
                "one that is meant"
            )
    raise CorpusError(
        f"{source}: wanted a split {' or '.join(splits)}, its card names {', '.join(named)}: "
        "name one of them, or the files by a glob"
    )
