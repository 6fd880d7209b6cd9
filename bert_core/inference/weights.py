"""Makes torch compute a bundle, from its weights or without their values."""

import torch

from bert_core.bundle.format import Bundle
from bert_core.bundle.weights import build_model
from bert_core.determinism import fix_products
from bert_core.model.attention import packing
from bert_core.model.layers import without_values
from bert_core.objectives.base import ObjectiveModel
from bert_core.scores import Precision
from bert_core.tasks.base import Task
from bert_core.torch_scores import TorchBackend


def torch_backend(
    bundle: Bundle, task: Task, device: str | None, threads: int | None, precision: Precision
) -> TorchBackend:
    """Return the backend that computes a bundle's scores from its weights.

    Args:
        device: torch's name; None takes the GPU if there is one.
        threads: CPU threads of the whole process, since torch has one pool; None leaves them
            unchanged.
    Raises: see `build_model`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if on_cpu := place.type == "cpu":
        fix_products()
    config = bundle.encoder_config
    model = build_model(bundle, [task.build_objective(config)], require_heads=True)
    packed_from = 0.0 if on_cpu else packing(config, place, precision)
    return TorchBackend(model.to(place).eval(), packed_from, precision=precision)


def model_without_values(bundle: Bundle, task: Task) -> ObjectiveModel:
    """Return the model that a bundle's graph computes, with weights that have shapes but no
    values."""
    config = bundle.encoder_config
    with without_values():
        return ObjectiveModel(config, [task.build_objective(config)]).eval()
