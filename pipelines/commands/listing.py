"""`raybert list`: what a user can choose from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from bert_core.checks import check_fields
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import read_manifest
from bert_core.model.variants import VARIANTS
from bert_core.wording import nearest, one_of
from pipelines.configure import CONFIGS, purpose_of
from pipelines.runtime.progress import console, say
from tracking.store.server import ARTIFACTS as COPIES

Listed = Literal["variants", "tasks", "formats", "configs", "runs"]
LISTS: dict[Listed, str] = {
    "variants": "encoders to pretrain, with their sizes",
    "tasks": "tasks to fine-tune for, with their rows and options",
    "formats": "published formats of labelled files",
    "configs": "the configs that come with raybert, with a command for each",
    "runs": "finished runs below a folder",
}
FLOPS_LENGTH = 512
"""Length of the row that GFLOP/token is given for, in tokens: forward and backward, no head."""


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Which list to print."""

    what: Listed | None = None
    """`variants` of the encoder, `tasks` with their rows and options, `formats` of labelled sets,
    shipped `configs`, or finished `runs`; by default what can be listed."""
    task: str | None = None
    """With `tasks`: only this one."""
    folder: str = "runs"
    """Where to look for runs."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.task is not None and self.what != "tasks":
            raise ConfigError(f"task: wanted `list tasks` with it, got `list {self.what}`")


def run(config: ListConfig) -> None:
    """Print the list."""
    if config.what is None:
        show_table(["raybert list", "what it shows"], [list(each) for each in LISTS.items()])
        return
    if config.what == "configs":
        _print_configs()
        return
    if config.what == "tasks":
        from bert_core.tasks.catalog import TASKS
        from bert_core.tasks.guide import guide

        if config.task is not None and config.task not in TASKS:
            raise ConfigError(
                f"task: wanted {one_of(TASKS)}, got {config.task!r}{nearest(config.task, TASKS)}"
            )
        say(guide(config.task, metrics=True))
        return
    columns, rows = {
        "variants": _variants,
        "formats": _formats,
        "runs": lambda: _runs(Path(config.folder)),
    }[config.what]()
    show_table(columns, rows)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; on a terminal its last column is cut where that ends."""
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
            say("  ".join(cells).rstrip())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        # Numbers and names stay whole; a narrow terminal cuts the last column.
        longest = max(len(text) for text in (column, *(row[index] for row in rows)))
        last = index == len(columns) - 1
        table.add_column(column, min_width=None if last else longest, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


Listing = tuple[list[str], list[list[str]]]


def _variants() -> Listing:
    from bert_core.model.size import count_parameters, flops_per_token

    columns = [
        "variant",
        "layers",
        "hidden",
        "heads",
        "parameters",
        "published",
        "GFLOP/token",
        "paper",
    ]
    rows = []
    for name, variant in VARIANTS.items():
        config = variant.config
        rows.append(
            [
                name,
                str(config.num_hidden_layers),
                str(config.hidden_size),
                str(config.attention.num_heads),
                f"{count_parameters(config):,}",
                variant.published,
                f"{flops_per_token(config, FLOPS_LENGTH) / 1e9:.3f}",
                variant.paper,
            ]
        )
    return columns, rows


def _formats() -> Listing:
    from bert_core.data.labelled_formats import FORMATS

    rows = [
        [name, known.source, ", ".join(f"{key} = {value}" for key, value in known.columns.items())]
        for name, known in FORMATS.items()
    ]
    return ["format", "published by", "field = column"], rows


def _print_configs() -> None:
    """Print the purpose of each config and, below it, its command on one line, to be copied."""
    for path in sorted(CONFIGS.rglob("*.toml")):
        relative = path.relative_to(CONFIGS.parent)
        say(purpose_of(path))
        say(f"    raybert {relative.parts[1]} --config {relative}")


def _runs(folder: Path) -> Listing:
    rows = []
    for path in sorted(folder.rglob("manifest.json")):
        if COPIES in path.parts:
            continue
        try:
            manifest = read_manifest(str(path.parent))
        except FormatError as error:
            say(f"list: passed over {path.parent}: {error}")
            continue
        seconds = manifest.counts.get("seconds", 0)
        rows.append([str(path.parent), manifest.stage, f"{seconds:,.0f} s", manifest.digest[:8]])
    return ["folder", "stage", "took", "digest"], rows
