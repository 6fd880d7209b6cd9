"""An ONNX graph of a model, run by onnxruntime; `export` creates it.

A graph scores every token or row of padded rows. The requested scores are picked from these by the
same code as torch's (`Objective.picked`).
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
"""Packages needed to run a graph, and to create one."""
TOKENS_PER_THREAD = 512
"""Tokens per pass and thread: what operators pass to each other then stays in the cache."""
MOST_SCORES = 1 << 26
"""Most scores per pass: a masked-word head has one per vocabulary entry at every token."""


class GraphBackend(Backend):
    """onnxruntime on the CPU. Safe to call from several threads at once."""

    requirements: ClassVar[tuple[str, ...]] = RUNNING

    def __init__(self, path: Path, model: ObjectiveModel, threads: int) -> None:
        """Load the graph.

        Args:
            model: the model that the graph computes, on `meta`.
            threads: threads that compute, the caller's included.
        Raises: ResourceError if onnxruntime is not installed; FormatError if it cannot run the
            graph, or the graph has another head.
        """
        check_installed(RUNNING, f"{path}: an ONNX graph")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # NOTE: by default onnxruntime takes all cores and pins its threads to them, to the same
        # ones in every worker. Its threads would also spin between passes, on others' cores.
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.enable_mem_pattern = False  # it keeps one for every shape ever seen
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"],
                # The fused operator runs on one core, at a fifth of the two operators' speed.
                disabled_optimizers=["SkipLayerNormFusion"],
            )  # fmt: skip
        except Exception as error:  # NOTE: from C++, each kind with its own class
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
                f"{path}: wanted a graph for {self.name} with the outputs "
                f"{', '.join(self._outputs)}, got {', '.join(outputs)}: export the model for this "
                "task"
            )
        width = outputs[self._outputs[0]]
        scores = width if isinstance(width, int) else 1
        self.budget_tokens = max(PAD_MULTIPLE, min(self.budget_tokens, MOST_SCORES // scores))

    def logits(self, batch: Batch) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in batch.items() if name in self._inputs}
        if "attention_mask" not in given:
            given["attention_mask"] = np.ones_like(given["input_ids"])
        outputs = [torch.from_numpy(one) for one in self.session.run(self._outputs, given)]
        every = outputs[0] if len(outputs) == 1 else torch.stack(outputs, dim=-1)
        return self.objective.picked(every, batch)


def check_installed(packages: tuple[str, ...], what: str) -> None:
    """Raises: ResourceError naming the packages that `what` needs and that are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"{what} needs the packages {', '.join(packages)}, {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install --constraint constraints.txt '.[export]'"
        )
