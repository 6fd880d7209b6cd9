"""Finds the files of each split of a data set in the layout of the Hugging Face hub.

A data set is a folder on the hub (`hf://datasets/<owner>/<name>`), or a clone of one anywhere. The
metadata at the top of its card, README.md, may say which files are the `train` split of a config.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from bert_core import files
from bert_core.compression import SUFFIXES
from bert_core.data.splits import TRAIN
from bert_core.errors import CorpusError
from pipelines.corpus.data_files import data_among, report
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
    """A kind of data file, such as texts or tables."""

    words: str
    """Description for messages."""
    names: re.Pattern[str]
    """Matches their names."""
    beside: Callable[[str], str] | None = None
    """Returns the path of the file that belongs to one; None if none does."""


_OF_GIT = re.compile(r"/\.git(?:/|attributes$|ignore$|keep$)")
_COMPRESSED = "|".join(SUFFIXES)


def _named(endings: Iterable[str]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, endings))
    return re.compile(rf"\.({names})(\.({_COMPRESSED}))?$", re.IGNORECASE)


_MARKDOWN = _named(["md"])
TEXTS = Kind(
    "in Parquet, JSON, CSV, TSV or text",
    # Markdown beside these files describes the data set, as its card does.
    _named(ending for ending in ENDINGS if ending != "md"),
)
TABLES = Kind(
    "in Parquet, JSON, CSV or TSV",
    _named(ending for ending, reader in ENDINGS.items() if reader.rows not in (None, "lines")),
)
ANY = Kind("besides the card", re.compile(rf"^(?!.*/{CARD}$)"))


def of_suffix(suffix: str, beside: Callable[[str], str] | None = None) -> Kind:
    """Return the kind of files with a suffix."""
    return Kind(f"ending in {suffix}", re.compile(rf"{re.escape(suffix)}$", re.IGNORECASE), beside)


_FILE = re.compile(rf"\.([^./]+\.({_COMPRESSED})|{'|'.join(ENDINGS)})$", re.IGNORECASE)


def data_files(
    source: str, splits: Sequence[str] = (TRAIN,), kind: Kind = TEXTS
) -> list[str] | None:
    """Return the files of the first of these splits that a data set has; None if `source` is not a
    data set (neither on the hub nor a folder with a card).

    If its card lists several configs, the one named or marked `default` is used. If the card says
    nothing, the file names decide; if none is named after a split, all are `train`, as on the hub.

    Raises: CorpusError if no such split exists, or there are several configs and no default.
    """
    metadata = card_metadata(source)
    if metadata is None and not (source.startswith(HUB) and may_be_a_folder(source)):
        return None
    try:
        named = _named_splits(metadata or {}, source)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{files.join(source, CARD)}: wanted configs with data_files in the hub's format, "
            f"got another format ({error!r}): correct it, or give the files as a glob"
        ) from error
    if named is not None:
        patterns = named[_chosen(source, named, splits)]
        matches = [path for pattern in patterns for path in files.find_files(pattern)]
        paths = sorted({path for path in matches if kind.names.search(path)})
        return paths or _no_data(source, splits, kind, f"its card lists {', '.join(patterns)}")
    listed = found(source)
    paths = _of_kind(source, listed, kind)
    if kind is TEXTS and not paths:  # a folder of Markdown whose README.md begins with metadata
        paths = [path for path in listed if _MARKDOWN.search(path) and ANY.names.search(path)]
    if TRAIN in splits and not splits_of(source, paths):
        return paths or _no_data(source, splits, kind, "this data set has none")
    return _of_first_split(source, paths, splits, kind)


def folder_files(
    source: str, splits: Sequence[str], kind: Kind, *, required: bool
) -> list[str] | None:
    """Return the files of the first of these splits, by their names, in a folder that is not a data
    set. Return all files if the names show at most one split, unless a split is `required`. Return
    None if `source` is not a folder but a file, a glob or a web address.

    Raises: CorpusError if no such split exists.
    """
    if not may_be_a_folder(source) or files.is_file(source):
        return None
    paths = _of_kind(source, found(source), kind)
    if paths and not required and len(splits_of(source, paths)) < 2:
        return paths
    return _of_first_split(source, paths, splits, kind)


def found(source: str) -> list[str]:
    """Return the files of a source that hold data, and report those that are ignored.

    Raises: CorpusError if there are none.
    """
    paths, hidden = files.find_all(source)
    if not paths:
        return files.find_files(source)  # it says what is wrong
    report(source, [path for path in hidden if not _OF_GIT.search(path)], "hidden")
    return data_among(source, paths)


def _of_kind(source: str, listed: Sequence[str], kind: Kind) -> list[str]:
    paths = [path for path in listed if kind.names.search(path)]
    if paths:
        known = {*paths}
        if kind.beside:
            known |= {kind.beside(path) for path in paths}
        others = [path for path in listed if path not in known]
        report(source, [path for path in others if below(source, path) != CARD], "of other kinds")
    return paths


def _of_first_split(source: str, paths: list[str], splits: Sequence[str], kind: Kind) -> list[str]:
    for split in splits:
        of_split = [path for path in paths if is_of(split, below(source, path))]
        if of_split:
            return of_split
    others = ", ".join(splits_of(source, paths))
    return _no_data(source, splits, kind, f"its files are named after {others or 'no split'}")


def splits_of(source: str, paths: Sequence[str]) -> list[str]:
    names = [below(source, path) for path in paths]
    return [split for split in _SPLITS if any(is_of(split, name) for name in names)]


def below(folder: str, path: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def is_of(split: str, name: str) -> bool:
    """Whether a split's name is a whole word in a path: train-00000-of-00002.parquet,
    data/test.jsonl."""
    words = "|".join(map(re.escape, _SPLITS.get(split, (split.lower(),))))
    return re.search(rf"(?:^|[^a-z])({words})(?=[^a-z]|$)", name.lower()) is not None


def _no_data(source: str, splits: Sequence[str], kind: Kind, there_is: str) -> NoReturn:
    raise CorpusError(
        f"{source}: wanted a split {' or '.join(splits)} {kind.words}, {there_is}: give the files "
        "as a glob, and convert files of other formats"
    )


def may_be_a_folder(source: str) -> bool:
    """Whether to look for a card in `source`. A server may refuse paths below a file, and a glob or
    a web address means exactly the files it names."""
    means_files = re.search(r"^https?://|[*?\[]", source) or _FILE.search(source)
    return source != "docstrings" and not means_files


@lru_cache(maxsize=16)
def card_metadata(source: str) -> dict[str, Any] | None:
    """Return the metadata at the top of a data set's card; None without a card."""
    import yaml

    if not may_be_a_folder(source):
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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an invalid date raises it too
        reason = " ".join(str(error).split())
        raise CorpusError(
            f"{card}: wanted YAML between its first two lines of ---, it cannot be read ({reason}"
            "): correct it, or give the files as a glob"
        ) from error
    return metadata if isinstance(metadata, dict) else None


def class_names(source: str) -> dict[str, list[str]]:
    """Map each column to the names of its classes, as stated in the card of a data set; columns on
    which several configs disagree are left out."""
    infos = (card_metadata(source) or {}).get("dataset_info") or []
    classes: dict[str, list[str]] = {}
    differ = set()
    try:
        for info in [infos] if isinstance(infos, dict) else infos:
            for feature in info.get("features") or []:
                names = _class_names(feature)
                if names and classes.setdefault(feature["name"], names) != names:
                    differ.add(feature["name"])
    except (AttributeError, KeyError, TypeError, ValueError):  # hand-written, in another structure
        return {}
    return {column: names for column, names in classes.items() if column not in differ}


def _class_names(feature: Mapping[str, Any]) -> list[str] | None:
    """Return the class names of a feature that is a class label, or a list of class labels; else
    None."""
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
    """Return the licence stated in the card of a data set; None if it states none."""
    named = (card_metadata(source) or {}).get("license")
    return ", ".join(map(str, named if isinstance(named, list) else [named])) if named else None


def _named_splits(metadata: dict[str, Any], source: str) -> dict[str, list[str]] | None:
    """Return the globs of each split of the default config; None if the card lists no files."""
    listed = [config for config in metadata.get("configs") or [] if config.get("data_files")]
    configs = {config.get("config_name", "default"): config for config in listed}
    if not configs:
        return None
    default = [name for name, config in configs.items() if config.get("default")]
    chosen = default or [name for name in configs if name == "default" or len(configs) == 1]
    if not chosen:
        raise CorpusError(
            f"{source}: wanted one config, this data set has {', '.join(configs)}: give the files "
            "of the one you want as a folder or a glob below it"
        )
    named = configs[chosen[0]]["data_files"]
    if isinstance(named, str) or all(isinstance(each, str) for each in named):
        named = [{"split": TRAIN, "path": named}]
    splits: dict[str, list[str]] = {}
    for entry in named:
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        split = str(entry.get("split") or TRAIN)  # YAML reads `split: 2024` as a number
        splits.setdefault(split, []).extend(files.join(source, path) for path in paths)
    return splits


def _chosen(source: str, named: Mapping[str, Any], splits: Sequence[str]) -> str:
    """Return the first of `splits` that a card lists, by that name or a synonym."""
    for split in splits:
        if split in named:
            return split
        alike = [name for name in named if split in _SPLITS and is_of(split, name)]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise CorpusError(
                f"{source}: wanted one split {split}, its card lists {', '.join(alike)}: name the "
                "one you want"
            )
    raise CorpusError(
        f"{source}: wanted a split {' or '.join(splits)}, its card lists {', '.join(named)}: "
        "name one of them, or give the files as a glob"
    )
