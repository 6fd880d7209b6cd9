"""Which objectives a pretraining run trains: what its rows teach, and what they lack for others."""

from bert_core.data.pairs import LABELS
from bert_core.data.shards import ShardSet
from bert_core.errors import ConfigError

NEEDS: dict[str, tuple[str, str] | None] = {
    "mlm": None,
    "nsp": ("pairs.kind", "nsp"),
    "sop": ("pairs.kind", "sop"),
    "span_boundary": ("masking.strategy", "span"),
    "emd_mlm": None,
    "rtd": None,
}
"""Objective → how its rows have to be prepared: a setting of `raybert prepare` and its value; None
where all rows will do."""

MASKED_WORDS = {"mlm", "emd_mlm", "rtd"}
"""Ways to learn them, of which a run takes one."""


def check_names(names: tuple[str, ...] | None) -> None:
    """Raises: ConfigError unless these are objectives, each once, one for masked words."""
    if names is None:
        return
    if set(names) - NEEDS.keys() or len(set(names)) < len(names):
        raise ConfigError(
            f"objectives: wanted some of {', '.join(NEEDS)}, each once, got {', '.join(names)}"
        )
    if len(MASKED_WORDS & set(names)) != 1:
        raise ConfigError(
            f"objectives: wanted one of {', '.join(sorted(MASKED_WORDS))} among them, got "
            f"{', '.join(names) or 'none'}: the other objectives stand beside masked words"
        )


def objectives_of(names: tuple[str, ...] | None, shards: ShardSet) -> list[str]:
    """The objectives that are asked for; else masked words and what the rows' label says.

    Raises: ConfigError if the rows cannot teach one that is asked for.
    """
    if names is None:
        labels = LABELS.items()
        return ["mlm", *(kind for kind, label in labels if label and label == shards.label)]
    for name in names:
        if (needed := NEEDS[name]) is None:
            continue
        setting, wanted = needed
        part, _, entry = setting.partition(".")
        came = shards.manifest.config[part][entry]
        if came != wanted:
            raise ConfigError(
                f"objectives: {name} wants rows that were prepared with {setting} = {wanted}, "
                f"{shards.folder} was prepared with {came}: run `raybert prepare` with --{setting} "
                f"{wanted} into another folder, or leave {name} out"
            )
    return list(names)
