"""`raybert list`: what a user can choose from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from bert_core.checks import check_fields
from bert_core.manifest import read_manifest
from bert_core.model.variants import VARIANTS
from pipelines.configure import CONFIGS
from pipelines.runtime.progress import console, say

Listed = Literal["variants", "tasks", "formats", "configs", "runs"]
FLOPS_LENGTH = 512
"""Length of the row that GFLOP/token is given for, in tokens: forward and backward, no head."""


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """What to list."""

    what: Listed = "variants"
    """`variants` of the encoder, `tasks` with their rows and options, `formats` of labelled sets,
    shipped `configs`, or finished `runs`."""
    folder: str = "runs"
    """Where to look for runs."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: ListConfig) -> None:
    """Print the list."""
    if config.what == "configs":
        _print_configs()
        return
    if config.what == "tasks":
        from bert_core.tasks.guide import guide

        say(guide(metrics=True))
        return
    columns, rows = {
        "variants": _variants,
        "formats": _formats,
        "runs": lambda: _runs(Path(config.folder)),
    }[config.what]()
    show_table(columns, rows)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table whose last column is cut where the terminal ends."""
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
        with open(path, encoding="utf-8") as file:
            first = file.readline()
        relative = path.relative_to(CONFIGS.parent)
        if first.startswith("#"):
            say(first.lstrip("# ").rstrip())
        say(f"    raybert {relative.parts[1]} --config {relative}")


def _runs(folder: Path) -> Listing:
    rows = []
    for path in sorted(folder.rglob("manifest.json")):
        manifest = read_manifest(str(path.parent))
        seconds = manifest.counts.get("seconds", 0)
        rows.append([str(path.parent), manifest.stage, f"{seconds:,.0f} s", manifest.digest[:8]])
    return ["folder", "stage", "took", "digest"], rows
