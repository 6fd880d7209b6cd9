"""An ONNX graph of a model, run by onnxruntime; `export` makes them.

A graph scores every token or row of padded rows. What of it is asked for is picked by the very code
that torch's scores come from (`Objective.picked`).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bert_core.batches import PAD_MULTIPLE
from bert_core.errors import FormatError, ResourceError
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.scores import Backend

RUNNING, EXPORTING = ("onnxruntime",), ("onnx", "onnxscript", "onnxruntime")
"""Packages that running a graph needs, and making one."""
TOKENS_PER_THREAD = 512
"""Tokens of one pass for each thread: what operators hand to each other stays in its cache."""
MOST_SCORES = 1 << 26
"""Most scores of one pass: a head of words has one for each entry of the vocabulary, everywhere."""


class GraphBackend(Backend):
    """onnxruntime on the CPU. Calls from several threads at once are allowed."""

    requirements: ClassVar[tuple[str, ...]] = RUNNING

    def __init__(self, path: Path, model: ObjectiveModel, threads: int) -> None:
        """Load the graph.

        Args:
            model: what the graph computes, on `meta`.
            threads: that compute, the caller's among them.
        Raises: ResourceError if onnxruntime is not installed; FormatError if it cannot run the
            graph, or that is one of another head.
        """
        check_installed(RUNNING, f"{path}: an ONNX graph")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # NOTE: without a number onnxruntime takes all cores and binds its threads to them, in every
        # worker the same ones. Its threads would also spin between passes, on others' cores.
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.enable_mem_pattern = False  # kept for every shape there ever was
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"],
                # What is fused there runs on one core, at a fifth of the two operators' speed.
                disabled_optimizers=["SkipLayerNormFusion"],
            )  # fmt: skip
        except Exception as error:  # NOTE: of C++, each kind a class of its own
            raise FormatError(
                f"{path}: wanted a graph that onnxruntime {onnxruntime.__version__} can run: "
                f"{error}: export the bundle again, or install another onnxruntime"
            ) from error
        self._inputs = [one.name for one in self.session.get_inputs()]
        outputs = {one.name: one.shape[-1] for one in self.session.get_outputs()}
        super().__init__(model, 1.0, TOKENS_PER_THREAD * threads)
        self._outputs = list(self.objective.graph_outputs)
        if not self._outputs or not outputs.keys() >= set(self._outputs):
            raise FormatError(
                f"{path}: wanted the outputs {', '.join(self._outputs)} of a graph for "
                f"{self.name}, it has {', '.join(outputs)}: export the model for this task"
            )
        width = outputs[self._outputs[0]]
        scores = width if isinstance(width, int) else 1
        self.budget_tokens = max(PAD_MULTIPLE, min(self.budget_tokens, MOST_SCORES // scores))

    def logits(self, batch: Batch) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in batch.items() if name in self._inputs}
        if "attention_mask" not in given:
            given["attention_mask"] = np.ones_like(given["input_ids"])
        found = [torch.from_numpy(one) for one in self.session.run(self._outputs, given)]
        every = found[0] if len(found) == 1 else torch.stack(found, dim=-1)
        return self.objective.picked(every, batch)


def check_installed(packages: tuple[str, ...], what: str) -> None:
    """Raises: ResourceError naming those that `what` needs and are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"{what} wants the packages {', '.join(packages)}, {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install --constraint constraints.txt '.[export]'"
        )
