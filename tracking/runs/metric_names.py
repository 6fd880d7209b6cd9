"""Names the metrics of a run, for all code that writes or reads them: worker, progress, plots,
tables.

A training metric has a bare name, or the prefix `train/` if it is for one part of the loss; a
measured metric has the set of rows it was measured on as prefix: `held_out/mlm_loss`,
`selection/task/accuracy`. Counts of a stage have no `/`: `mlm_loss_before`, `mlm_loss_after`; the
only exception is the seconds of each activity, such as `time/computing_s`.
"""

from collections.abc import Mapping

from bert_core.data.splits import TRAIN

LOSS = "loss"
"""The minimised loss: the weighted sum of the losses of all parts."""
MLM_LOSS, MLM_ACCURACY, NSP_ACCURACY = "mlm_loss", "mlm_accuracy", "nsp_accuracy"
PERPLEXITY = "perplexity"
TASK = "task"
"""Prefix of a task's metrics, after the set of rows."""

LEARNING_RATE, GRAD_NORM, WORKERS = "learning_rate", "grad_norm", "workers"
ELAPSED_S, TOKENS, TOKENS_PER_S = "elapsed_s", "tokens", "tokens_per_s"
TFLOPS_PER_S, MFU = "tflops_per_s", "mfu"
PADDING_SHARE, DATA_WAIT_SHARE, MEMORY_GB = "padding_share", "data_wait_share", "memory_gb"

COMPUTING, RECOMPUTING = "computing", "recomputing"
WAITING_FOR_DATA, CHECKPOINTING, MEASURING = "waiting_for_data", "checkpointing", "measuring"
STARTING, RESTARTING, FINISHING = "starting", "restarting", "finishing"
STOPPED = "stopped"
ACTIVITIES = {
    COMPUTING: "steps that were kept",
    RECOMPUTING: "steps that were lost, and done again",
    WAITING_FOR_DATA: "waiting for batches, mean over the workers",
    CHECKPOINTING: "copying weights, and waiting until a checkpoint is written",
    MEASURING: "measuring the model on other rows",
    STARTING: "until the first step",
    RESTARTING: "from the last report before a loss until the next step",
    FINISHING: "after the last step: the bundle",
    STOPPED: "no driver ran",
}
"""The activities into which a run's wall time is divided, and their meanings."""
GOODPUT, WALL_S, COST_USD = "goodput", "wall_s", "cost_usd"
RECOMPUTED_STEPS = "recomputed_steps"
CLOCK = "clock"
"""Prefix of a clock's readings in a point; the record has their sums instead."""
SYSTEM = "system/"
"""Prefix of how busy the nodes were, by which MLflow's page shows it on a tab of its own."""

WORDS_PER_S = "words_per_s"
UNIGRAM_LOSS, UNIGRAM_ACCURACY = "unigram_loss", "unigram_accuracy"

MEANINGS = {
    LOSS: "Loss that is minimised, mean since the last point",
    MLM_LOSS: "Loss of masked words, in nats",
    MLM_ACCURACY: "Share of the masked words that are predicted",
    NSP_ACCURACY: "Share of the pairs for which it is predicted whether the second text follows",
    PERPLEXITY: "Exponential of the loss of masked words",
    LEARNING_RATE: "Learning rate",
    GRAD_NORM: "Norm of the gradient before clipping",
    WORKERS: "Workers",
    ELAPSED_S: "Seconds of training until this point",
    TOKENS: "Tokens since the last point, without padding",
    TOKENS_PER_S: "Tokens per second of all workers, without padding",
    TFLOPS_PER_S: "Floating-point operations of the model per second, in 10^12",
    MFU: "Share of the GPUs' peak FLOP/s",
    PADDING_SHARE: "Share of the computed tokens that are padding",
    DATA_WAIT_SHARE: "Share of the time that workers wait for batches",
    MEMORY_GB: "Peak memory of the device of the first worker, in GB",
    GOODPUT: "Share of the wall time that went into steps that were kept",
    WALL_S: "Seconds since the run's first start",
    COST_USD: "What the run has cost, in USD",
    RECOMPUTED_STEPS: "Steps that were lost, and done again",
    WORDS_PER_S: "Words per second that a vocabulary was trained on",
    UNIGRAM_LOSS: "Loss of masked words if only their frequencies were known",
    UNIGRAM_ACCURACY: "Accuracy of always predicting the most frequent word",
}
"""Meanings of the metrics with a bare name, for documentation and for Prometheus."""

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
    """Return the name of a metric measured on rows: `on(HELD_OUT, TASK, "accuracy")` is
    `held_out/task/accuracy`."""
    return "/".join([rows, *name])


def on_all(rows: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, renamed as measured on these rows."""
    return {on(rows, name): value for name, value in metrics.items()}


def measured_on(rows: str, record: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a record that were measured on these rows, without the prefix."""
    prefix = on(rows, "")
    return {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}


def time_of(activity: str) -> str:
    """Return the name of the metric for the seconds that an activity took."""
    return on("time", f"{activity}_s")


def is_of_training(name: str) -> bool:
    """Whether a metric was measured on the training rows."""
    return name.rpartition("/")[0] in ("", TRAIN)


def before(metric: str) -> str:
    """Return the name of the count for a metric of the model before training."""
    return f"{metric}_before"


def after(metric: str) -> str:
    """Return the name of the count for a metric of the trained model."""
    return f"{metric}_after"
