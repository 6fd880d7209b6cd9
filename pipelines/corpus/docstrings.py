"""The built-in corpus: docstrings of the standard library and of raybert's dependencies.

A module is a document. Held-out modules are chosen by the hash of their name; a docstring that
occurs twice is kept once, preferably in a training module, so that no held-out text is trained on.
The labelled set asks which library a docstring is from, given its opening; its pairs are summaries
with the texts that they sum up.
"""

import hashlib
import json
import sysconfig
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.data.docstrings import docstrings_of, normalised, opening
from bert_core.manifest import Manifest, Output, is_complete
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import StageConfig
from tracking.runs.recorder import DatasetInput
from tracking.runs.story import amount

STANDARD_LIBRARY = "python"
# Import name → distribution. raybert depends on all of them, so every machine has them.
LIBRARIES = {
    "matplotlib": "matplotlib",
    "networkx": "networkx",
    "numpy": "numpy",
    "pandas": "pandas",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "sympy": "sympy",
    "torch": "torch",
}
# Folders without prose of their own: tests and vendored code. Private folders are left out too.
LEFT_OUT = frozenset({"site-packages", "test", "tests", "idlelib"})
MODULES_PER_TASK = 200
ROW_GROUP_BYTES = 2 << 20
LARGEST_MODULE_BYTES = 512 << 10  # larger ones are tables and generated code
SHORTEST_OPENING = 80  # characters
SHORTEST_SUMMARY = 20
FORMAT = 2
"""Version of the folder's format: if an older version left other files, a new folder is made."""


@dataclass(frozen=True, kw_only=True)
class DocstringsConfig(StageConfig):
    """Which modules are held out."""

    held_out_share: float = 0.08
    """Share of the modules held out of training."""
    seed: int = 0
    """Seed that selects the held-out modules."""


@dataclass(frozen=True, kw_only=True)
class DocstringsCounts(Counts):
    modules: int
    held_out_modules: int
    characters: int
    duplicates_left_out: int
    labelled_train: int
    labelled_held_out: int

    @property
    def line(self) -> str:
        return f"{amount(self.characters)} characters in {self.modules:,} modules"

    @property
    def sentence(self) -> str:
        return (
            f"The text is {amount(self.characters)} characters of prose from {self.modules:,} "
            f"modules, {self.held_out_modules:,} of which no training sees."
        )


@dataclass(frozen=True)
class Module:
    """A Python module with the docstrings in it."""

    library: str
    name: str
    docstrings: list[str]


def corpus(*, force: bool = False) -> Manifest:
    """Build the corpus if it does not exist yet."""
    return run(DocstringsConfig(output=folder(), force=force))


def folder() -> str:
    """Return the folder of the corpus: one per combination of library versions."""
    content = json.dumps([FORMAT, _versions()], sort_keys=True)
    label = hashlib.sha256(content.encode()).hexdigest()[:8]
    return str(Path("runs").absolute() / f"docstrings-{label}")


def _made() -> str:
    if not is_complete(folder()):
        corpus()
    return folder()


def corpus_file() -> str:
    """Return the path of a Parquet file with the columns text, module, library and split."""
    return files.join(_made(), "documents.parquet")


def labelled_file(split: str) -> str:
    """Return the path of a JSONL file with text, label (the library) and module."""
    return files.join(_made(), f"library-{split}.jsonl")


def pairs_file(split: str) -> str:
    """Return the path of a JSONL file with text (a docstring's summary) and text_pair (the opening
    of what follows it)."""
    return files.join(_made(), f"pairs-{split}.jsonl")


def run(config: DocstringsConfig) -> Manifest:
    """Read the docstrings of every library and write the corpus and its labelled set."""
    inputs = [DatasetInput(name, release, name) for name, release in _versions().items()]
    return run_stage("docstrings", config, inputs, lambda _: _write(config))


def _versions() -> dict[str, str]:
    libraries = {name: version(distribution) for name, distribution in LIBRARIES.items()}
    return {STANDARD_LIBRARY: sysconfig.get_python_version(), **libraries}


def _write(config: DocstringsConfig) -> Result:
    modules = _read_modules(config)
    held_out = {module.name for module in modules if _is_held_out(module.name, config)}
    seen: set[str] = set()
    openings: set[str] = set()
    documents: list[dict[str, str]] = []
    labelled: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    pairs: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    duplicates = 0
    # Training modules first: of two equal docstrings the held-out one is dropped.
    for module in sorted(modules, key=lambda module: (module.name in held_out, module.name)):
        split = "held_out" if module.name in held_out else "train"
        new = []
        for docstring in module.docstrings:
            words = normalised(docstring)
            duplicates += words in seen
            if words not in seen:
                seen.add(words)
                new.append(docstring)
        if new:
            row = {"module": module.name, "library": module.library, "split": split}
            documents.append({"text": "\n\n".join(new), **row})
        for line in {opening(docstring): None for docstring in new}:
            if len(line) >= SHORTEST_OPENING and normalised(line) not in openings:
                openings.add(normalised(line))
                labelled[split].append(
                    {"text": line, "label": module.library, "module": module.name}
                )
        pairs[split] += [pair for docstring in new if (pair := _pair(docstring)) is not None]
    output = Path(config.output)
    table = pa.Table.from_pylist(documents)
    rows_per_group = max(1, len(documents) * ROW_GROUP_BYTES // max(1, table.nbytes))
    documents_path = output / "documents.parquet"
    pq.write_table(table, documents_path, row_group_size=rows_per_group, compression="none")
    sets = {"library": labelled, "pairs": pairs}
    labelled_paths = [output / f"{name}-{split}.jsonl" for name in sets for split in labelled]
    written = [rows for splits in sets.values() for rows in splits.values()]
    for path, rows in zip(labelled_paths, written, strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files.write_bytes(str(path), text.encode())
    counts = DocstringsCounts(
        modules=len(documents),
        held_out_modules=sum(row["split"] == "held_out" for row in documents),
        characters=sum(len(row["text"]) for row in documents),
        duplicates_left_out=duplicates,
        labelled_train=len(labelled["train"]),
        labelled_held_out=len(labelled["held_out"]),
    )
    outputs = {path.name: Output.of(str(path)) for path in (documents_path, *labelled_paths)}
    return Result(outputs=outputs, counts=counts)


def _pair(docstring: str) -> dict[str, str] | None:
    """Split a docstring into its summary and what follows; None if either is too short."""
    summary, _, rest = docstring.partition("\n\n")
    pair = {"text": opening(summary), "text_pair": opening(rest)}
    is_long = len(pair["text"]) >= SHORTEST_SUMMARY and len(pair["text_pair"]) >= SHORTEST_OPENING
    return pair if is_long else None


def _is_held_out(module: str, config: DocstringsConfig) -> bool:
    hashed = hashlib.sha256(f"{config.seed}:{module}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64 < config.held_out_share


def _read_modules(config: DocstringsConfig) -> list[Module]:
    sources = _source_files()
    tasks = [sources[i : i + MODULES_PER_TASK] for i in range(0, len(sources), MODULES_PER_TASK)]
    modules: list[Module] = []
    with meter("reading modules", len(sources), "modules") as progress:
        for index, parsed in run_tasks(_parse, tasks, config):
            modules.extend(Module(**module) for module in parsed)
            progress.add(len(tasks[index]))
    return modules


def _parse(task: list[tuple[str, str, str]]) -> list[dict]:
    modules = (
        Module(library, name, docstrings_of(Path(path).read_bytes()))
        for library, name, path in task
    )
    return [asdict(module) for module in modules if module.docstrings]


def _source_files() -> list[tuple[str, str, str]]:
    """Return (library, dotted name, path) of every module, sorted by name."""
    paths = sysconfig.get_paths()
    roots = {STANDARD_LIBRARY: (Path(paths["stdlib"]), Path(paths["stdlib"]))}
    for library in LIBRARIES:
        for site in (Path(paths["purelib"]), Path(paths["platlib"])):
            if (site / library).is_dir():
                roots[library] = (site / library, site)
    modules = []
    for library, (root, base) in roots.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            private = any(part.startswith("_") for part in parts[:-1])
            left_out = private or LEFT_OUT.intersection(parts)
            if not left_out and path.stat().st_size <= LARGEST_MODULE_BYTES:
                name = ".".join(parts).removesuffix(".__init__")
                modules.append((library, f"{library}:{name}", str(path)))
    return sorted(modules, key=lambda row: row[1])
