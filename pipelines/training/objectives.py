"""Chooses the objectives of a pretraining run, and checks that its rows were prepared for each."""

from bert_core.data.pairs import LABELS
from bert_core.data.shards import ShardSet
from bert_core.errors import ConfigError

NEEDS: dict[str, tuple[str, str] | None] = {
    "mlm": None,
    "nsp": ("pairs.kind", "nsp"),
    "sop": ("pairs.kind", "sop"),
    "span_boundary": ("masking.strategy", "span"),
    "permuted_mlm": None,
    "emd_mlm": None,
    "rtd": None,
}
"""Objective → how its rows must be prepared: a field of `raybert prepare` and its value; None if
any rows will do."""

MASKED_WORDS = {"mlm", "permuted_mlm", "emd_mlm", "rtd"}
"""Objectives for masked words, of which a run uses exactly one."""


def check_names(names: tuple[str, ...] | None) -> None:
    """Raise ConfigError unless the names are distinct objectives that include one for masked
    words."""
    if names is None:
        return
    if set(names) - NEEDS.keys() or len(set(names)) < len(names):
        raise ConfigError(
            f"objectives: wanted any of {', '.join(NEEDS)}, each once, got {', '.join(names)}"
        )
    if len(MASKED_WORDS & set(names)) != 1:
        raise ConfigError(
            f"objectives: wanted one of {', '.join(sorted(MASKED_WORDS))} among them, got "
            f"{', '.join(names) or 'none'}: the other objectives need one for masked words"
        )
    if {"permuted_mlm", "span_boundary"} <= set(names):
        raise ConfigError(
            "objectives: wanted permuted_mlm without span_boundary, whose tokens beside a span it "
            "shows elsewhere, got both: leave one of the two out"
        )


def objectives_of(names: tuple[str, ...] | None, shards: ShardSet) -> list[str]:
    """Return the objectives in `names`; by default masked words and the objective of the rows'
    label.

    Raises: ConfigError if the rows were not prepared for one in `names`.
    """
    if names is None:
        labels = LABELS.items()
        return ["mlm", *(kind for kind, label in labels if label and label == shards.label)]
    for name in names:
        if (needed := NEEDS[name]) is None:
            continue
        setting, required = needed
        part, _, entry = setting.partition(".")
        value = shards.manifest.config[part][entry]
        if value != required:
            raise ConfigError(
                f"objectives: {name} wants rows prepared with {setting} = {required}, "
                f"{shards.folder} was prepared with {value}: run `raybert prepare` with "
                f"--{setting} {required} into another folder, or leave {name} out"
            )
    return list(names)
