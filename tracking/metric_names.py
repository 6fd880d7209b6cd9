"""Names of the metrics of a run, for all code that writes or reads them: worker, progress, plots,
tables.

A training metric has a bare name, or the prefix `train/` if it is for one part of the loss; a
measured metric has the set of rows it was measured on as prefix: `held_out/mlm_loss`,
`selection/task/accuracy`. Counts of a stage have no `/`: `mlm_loss_before`, `mlm_loss_after`.
"""

from collections.abc import Mapping

from bert_core.data.splits import TRAIN

LOSS = "loss"
"""What is minimised: the weighted sum of the losses of all parts."""
MLM_LOSS, MLM_ACCURACY, NSP_ACCURACY = "mlm_loss", "mlm_accuracy", "nsp_accuracy"
PERPLEXITY = "perplexity"
TASK = "task"
"""Prefix of a task's metrics, after the set of rows."""

LEARNING_RATE, GRAD_NORM, WORKERS = "learning_rate", "grad_norm", "workers"
ELAPSED_S, TOKENS, TOKENS_PER_S = "elapsed_s", "tokens", "tokens_per_s"
TFLOPS_PER_S, MFU = "tflops_per_s", "mfu"
PADDING_SHARE, DATA_WAIT_SHARE, MEMORY_GB = "padding_share", "data_wait_share", "memory_gb"

SYSTEM = "system/"
"""Prefix of how busy the nodes were, by which MLflow's page shows it on a tab of its own."""

WORDS_PER_S = "words_per_s"
UNIGRAM_LOSS, UNIGRAM_ACCURACY = "unigram_loss", "unigram_accuracy"

CURVES = {
    "scores": ("score", f"/{TASK}/"),
    "loss": ("loss (nats)", LOSS),
    "accuracy": ("accuracy", "accuracy"),
    "learning_rate": ("learning rate", LEARNING_RATE),
    "throughput": ("tokens/s", TOKENS_PER_S),
}
"""Plot → the label of its axis, and the text that the names of its metrics contain. A metric is
drawn in the first plot that matches."""


def on(rows: str, *name: str) -> str:
    """A metric measured on rows: `on(HELD_OUT, TASK, "accuracy")` is `held_out/task/accuracy`."""
    return "/".join([rows, *name])


def on_all(rows: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, renamed as measured on these rows."""
    return {on(rows, name): value for name, value in metrics.items()}


def measured_on(rows: str, record: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a record that were measured on these rows, without the prefix."""
    prefix = on(rows, "")
    return {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}


def is_of_training(name: str) -> bool:
    """Whether a metric is for the training rows."""
    return name.rpartition("/")[0] in ("", TRAIN)


def before(metric: str) -> str:
    """Count for the metric of the model before training."""
    return f"{metric}_before"


def after(metric: str) -> str:
    """Count for the metric of the trained model."""
    return f"{metric}_after"
