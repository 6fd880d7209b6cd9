"""Loads a bundle's weights into a model."""

from collections.abc import Sequence

from torch import Tensor

from bert_core.bundle.format import Bundle, load_bundle
from bert_core.bundle.layout import WEIGHTS
from bert_core.bundle.writing import submodels_of
from bert_core.errors import FormatError
from bert_core.model.sharing import load_plain_state, plain_state
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.tasks.base import Task


def build_model(
    bundle: Bundle,
    objectives: Sequence[Objective],
    *,
    task: Task | None = None,
    require_heads: bool = False,
) -> ObjectiveModel:
    """Return a model with the bundle's weights and these objectives.

    The whole encoder comes from the bundle. A head, or the pooler, keeps its initial weights if the
    bundle lacks it or has it in another shape (another number of labels), unless `require_heads`.

    Args:
        task: what the model is to learn; if its labels come from rows, the bundle's head counts as
            missing if it was trained for other labels, or for the same labels in another order.
        require_heads: raise instead of keeping initial weights.
    Raises: FormatError if the bundle has a graph instead of weights, the encoder's weights do not
        fit its config, or a required head is missing.
    """
    model = ObjectiveModel(require_weights(bundle).encoder_config, objectives)
    needed, stored = plain_state(model), _stored(bundle, model)
    unfit = _unfit(needed, stored)
    fresh = {_part(name) for name in unfit}
    if "encoder" in fresh or (require_heads and fresh):
        name = next(name for name in unfit if require_heads or _part(name) == "encoder")
        actual = f"shape {tuple(stored[name].shape)}" if name in stored else "none"
        raise FormatError(
            f"{WEIGHTS}: wanted {name} of shape {tuple(needed[name].shape)}, got {actual}: "
            "the weights do not belong to this config.json; write the bundle again"
        )
    learned = None if bundle.task is None else bundle.task.labels
    if task is not None and task.labels_of_rows and learned not in (None, task.labels):
        fresh |= {objective.name for objective in objectives}
    load_plain_state(model, {name: stored[name] for name in needed if _part(name) not in fresh})
    return model


def require_weights(bundle: Bundle) -> Bundle:
    """Return the bundle itself. Raises: FormatError if it has a graph instead of weights."""
    if bundle.graph is not None:
        raise FormatError(
            f"wanted a bundle with {WEIGHTS}, got an exported one with {bundle.graph} "
            "instead: give the bundle that it was exported from"
        )
    return bundle


def fresh_parts(bundle: Bundle, model: ObjectiveModel) -> set[str]:
    """Return the parts of a model that a bundle has no weights for: objectives by name, `pooler`,
    `encoder`."""
    return {_part(name) for name in _unfit(plain_state(model), _stored(bundle, model))}


def _stored(bundle: Bundle, model: ObjectiveModel) -> dict[str, Tensor]:
    """Return a bundle's tensors by their names in a model, submodels included."""
    tensors = dict(bundle.state)
    for folder, prefix, _ in submodels_of(model):
        if folder in bundle.submodels:
            state = load_bundle(bundle.submodels[folder]).state
            tensors |= {prefix + name: tensor for name, tensor in state.items()}
    return tensors


def _unfit(needed: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are missing or have another shape."""
    return [
        name
        for name, tensor in needed.items()
        if name not in stored or stored[name].shape != tensor.shape
    ]


def _part(name: str) -> str:
    """Return the part that a tensor belongs to, which is loaded as a whole or not at all: encoder,
    pooler or a head."""
    if name.startswith("encoder.pooler."):
        return "pooler"
    return "encoder" if name.startswith("encoder.") else name.split(".")[1]
