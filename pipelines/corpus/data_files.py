"""Decides which files of a folder or glob hold data, and reports the files it ignores."""

import re
from collections.abc import Sequence
from functools import lru_cache

from bert_core import files
from bert_core.data.contents import JSON_ENDINGS
from pipelines.runtime.progress import counted, say

SHOWN = 4
"""How many of the files that are passed over are named."""
# Files that accompany data but hold none, in any folder.
_BESIDE_DATA = re.compile(
    r"""(?:^|/)(?:
      [^/]*-multistream-index\d*\.txt[^/]*  # of a Wikipedia dump: places in the dump, and titles
    | [^/]*-(?:rss|siteinfo[^/]*)\.(?:xml|json)(?:\.\w+)? | dumpstatus\.json | dumpruninfo\.\w+
    | (?:[^/]*[-_.])?(?:md5|sha1|sha256|sha512|check|b2)sums?(?:\.txt)?
    | [^/]+\.(?:md5|sha1|sha256|sha512|crc|crc32|sfv|asc|sig|lock)
    | dataset_infos?\.json | dataset_dict\.json | state\.json | croissant[^/]*\.json
    | datapackage\.json | Thumbs\.db | desktop\.ini
    )$""",
    re.VERBOSE | re.IGNORECASE,
)
# Files that describe the folder they are in.
_ABOUT = re.compile(
    r"(?:README|LICEN[CS]E|NOTICE|CITATION|CHANGELOG|AUTHORS|CONTRIBUTING)(?:[-_.]\w+)*",
    re.IGNORECASE,
)


def data_among(source: str, paths: Sequence[str]) -> list[str]:
    """Return the files of a source that hold data, or all files if none seems to; report the rest.

    A file that the source names is data whatever its name. In a folder, README, LICENSE and the
    like describe the folder, and a `.json` file beside tables of other kinds describes those
    tables.
    """
    if list(paths) in ([source], [files.absolute(source)]):
        return list(paths)
    folder = f"{source.rstrip('/')}/"
    data = [
        path
        for path in paths
        if not _BESIDE_DATA.search(path)
        and not (path.startswith(folder) and _ABOUT.fullmatch(path[len(folder) :]))
    ]
    suffixes = {path: files.suffixes(path)[0] for path in data}
    tables = {"parquet", "csv", "tsv", *JSON_ENDINGS} - {"json"}
    if tables & {*suffixes.values()} and "*" not in source:
        data = [path for path in data if suffixes[path] != "json"]
    kept = {*data}
    report(source, [path for path in paths if path not in kept] if data else [], "beside the data")
    return data or list(paths)


def report(source: str, passed: Sequence[str], what: str) -> None:
    """Say which files of a source are ignored, once per process."""
    if passed:
        _say(source, tuple(passed), what)


@lru_cache(maxsize=64)
def _say(source: str, passed: tuple[str, ...], what: str) -> None:
    names = [path.removeprefix(f"{source.rstrip('/')}/") for path in passed[:SHOWN]]
    more = f" and {len(passed) - SHOWN:,} more" if len(passed) > SHOWN else ""
    say(f"{source}: passed over {counted(len(passed), 'file')} {what}: {', '.join(names)}{more}")
