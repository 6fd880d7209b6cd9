"""Models that answer in this process."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor


def load(
    model: str | os.PathLike[str],
    *,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    tracking_uri: str | None = None,
) -> "Predictor":
    """Return a model, whose `predict(inputs)` answers a list of texts or of the task's own inputs.

    Args:
        model: a bundle's folder or URI, the output of a stage that made one, `models:/name@alias`
            of the registry, or `owner/name@revision` of the Hugging Face hub.
        task: another task that the same model answers; `Predictor` says of this and of the next
            five which values there are.
        tracking_uri: MLflow's tracking URI, for models of the registry.
    Raises: ConfigError if there is no such model; FormatError if it is damaged, or cannot do the
        task; ResourceError if the registry or the hub does not answer.
    """
    from bert_core.inference.predictor import Predictor
    from tracking.models.references import Reference

    folder = Reference.parse(os.fspath(model)).fetch(uri=tracking_uri)
    return Predictor(
        folder,
        device=device,
        threads=threads,
        task=task,
        options=options,
        precision=precision,
        backend=backend,
    )
