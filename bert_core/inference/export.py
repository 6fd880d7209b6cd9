"""Exports a model as an ONNX graph, for the `engines` and other tools that read the format.

Inputs, outputs and files are named as in Hugging Face's optimum.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bert_core.collation import collate
from bert_core.data.windows import Window
from bert_core.errors import FormatError
from bert_core.inference.engines.base import TOKENS_PER_THREAD, check_installed, groups_of_width
from bert_core.inference.quantization import Feed, quantized, ranges_of, save_graph
from bert_core.objectives.base import ObjectiveModel
from bert_core.torch_scores import TorchBackend

if TYPE_CHECKING:
    from onnx import ModelProto

EXPORTING = ("onnx", "onnxscript", "onnxruntime")
"""Packages needed to create a graph."""
OPSET = 23
"""The first opset with attention as one operator."""
TOLERANCE = 1e-4
"""Largest difference allowed between a graph's scores and torch's; relative for scores above 1."""
EXAMPLE = (2, 8)
"""Rows and tokens of the traced example: any numbers but 1, which torch treats as constant."""


class Graph(nn.Module):
    """The computation to export: from padded rows to the scores of every token, or of every row."""

    def __init__(self, model: ObjectiveModel) -> None:
        """Build the computation. Raises: FormatError if the model's objective has no graph."""
        super().__init__()
        self.model = model
        self.objective = TorchBackend(model).objective
        graph_scores = self.objective.graph_scores
        if graph_scores is None:
            raise FormatError(
                f"wanted a head that has an ONNX graph, got {self.objective.name}, whose "
                "computation depends on the length of each row: use the bundle as it is, or "
                "fine-tune a model for the task without that option"
            )
        self.outputs = graph_scores.outputs
        segments = model.encoder.config.embeddings.type_vocab_size > 1
        self.inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if segments else [])]

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"],
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "..."], ...]:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": types,
        }
        encoded = self.model.encode(batch, all_layers=self.objective.reads_layers)
        tokens = self.objective.position_key is not None
        if tokens:
            encoded = replace(encoded, hidden=encoded.hidden.flatten(0, 1))
        words = self.model.encoder.embeddings.word_embeddings.weight
        every = self.objective.every(encoded, words)
        every = every.unflatten(0, input_ids.shape) if tokens else every
        return every.unbind(-1) if len(self.outputs) > 1 else (every,)


def export_graph(
    model: ObjectiveModel, path: Path, calibration: tuple[Sequence[Window], int] | None = None
) -> None:
    """Write the graph of a model with one objective, for any number of rows of any length.

    Args:
        model: on the CPU.
        path: of the graph; weights that do not fit into its file are stored next to it, in
            `<name>_data`.
        calibration: windows that decide the ranges of 8-bit products, and the id of padding; None
            keeps fp32.
    Raises: FormatError if the model's computation cannot be exported; ResourceError if a package is
        missing.
    """
    check_installed(EXPORTING, "an export to ONNX")
    graph = Graph(model).eval()
    with _quiet():
        proto = _traced(graph)
        if calibration is not None:
            feeds = _feeds(graph, *calibration)
            proto = quantized(proto, ranges_of(proto, feeds, torch.get_num_threads()))
        save_graph(proto, path)


def _feeds(graph: Graph, windows: Sequence[Window], pad_id: int) -> Iterator[Feed]:
    """Yield the graph's inputs for windows, batch by batch."""
    for group in groups_of_width(windows, TOKENS_PER_THREAD):
        batch = collate([windows[place] for place in group], pad_id)
        batch.setdefault("attention_mask", np.ones_like(batch["input_ids"]))
        yield {name: batch[name] for name in graph.inputs}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs that torch and onnxruntime write for their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _traced(graph: Graph) -> "ModelProto":
    config = graph.model.encoder.config
    rows = torch.export.Dim("batch_size")
    tokens = torch.export.Dim("sequence_length", max=config.max_length)
    with torch.no_grad():
        program = torch.onnx.export(
            graph,
            tuple(torch.ones(EXAMPLE, dtype=torch.int64) for _ in graph.inputs),
            input_names=graph.inputs,
            output_names=list(graph.outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes={name: {0: rows, 1: tokens} for name in graph.inputs},
            verbose=False,
        )
    assert program is not None
    return _without_remarks(program.model_proto)


def _without_remarks(proto: "ModelProto") -> "ModelProto":
    """Return the graph without the metadata that the exporter adds to each node.

    The metadata is the lines of Python that the node comes from, with their paths on this machine.
    With it, the file's bytes would depend on where raybert is installed.
    """
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
    for values in (proto.graph.value_info, proto.graph.input, proto.graph.output):
        for value in values:
            value.ClearField("metadata_props")
    for tensor in proto.graph.initializer:
        tensor.ClearField("metadata_props")
    proto.graph.ClearField("metadata_props")
    return proto


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the largest difference between two lists of scores; relative for scores above 1.

    Raises: FormatError if the shapes differ, or if one is finite where the other is not.
    """
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        real = np.isfinite(a)
        if a.shape != b.shape or (real != np.isfinite(b)).any():
            raise FormatError(
                f"wanted scores of shape {a.shape} in the same places, the graph gave "
                f"{b.shape}: report this, with the model"
            )
        apart = np.abs(a[real] - b[real]) / np.maximum(1, np.abs(a[real]))
        most = max(most, float(apart.max(initial=0.0)))
    return most
