"""Quantizes a graph's matrix products to 8 bits, with the ranges of their inputs fixed beforehand.

Inputs that are given when the graph is exported decide what range of numbers the 8 bits of each
product cover. Nothing is measured at run time, so that a row's numbers never depend on the other
rows of its batch. Embeddings, attention, LayerNorms and activations stay as they are.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

MOST_BYTES = 2_000_000_000
"""Most bytes of weights inside a graph's file: the format is limited to less than 2 GiB."""
LEVELS = 255
"""Steps between the smallest and the largest input of a product, in unsigned 8 bits."""
LARGEST_WEIGHT = 64
"""7 of the weights' bits. x86 CPUs without VNNI add two products in 16 bits, where 8 by 8 bits may
overflow: the loss of accuracy here would not be that on other machines."""

Feed = dict[str, np.ndarray]
Ranges = dict[str, tuple[float, float]]


def ranges_of(model: "ModelProto", feeds: Iterable[Feed], threads: int) -> Ranges:
    """Return the smallest and the largest value that each product's input has at a real token, not
    padding.

    Args:
        feeds: the graph's inputs, batch by batch.
        threads: threads that compute.
    """
    import onnx
    import onnxruntime

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    names = list(dict.fromkeys(node.input[0] for node in _products(probe.graph)))
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    with tempfile.TemporaryDirectory() as scratch:
        save_graph(probe, path := Path(scratch, "probe.onnx"))
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ranges: Ranges = {}
    for feed in feeds:
        for name, values in zip(names, session.run(names, feed), strict=True):
            real = _real(values, feed["attention_mask"] == 1)
            low, high = ranges.get(name, (0.0, 0.0))  # 0 has to be exact, for padding and ReLU
            ranges[name] = min(low, float(real.min())), max(high, float(real.max()))
    return ranges


def _real(values: np.ndarray, attends: np.ndarray) -> np.ndarray:
    """Return `values` without those of padding, if there is a value for every token.

    Args:
        attends: which tokens are not padding.
    """
    if values.shape[:2] == attends.shape:
        return values[attends]
    return values[attends.ravel()] if len(values) == attends.size else values


def quantized(model: "ModelProto", ranges: Ranges) -> "ModelProto":
    """Return the graph with 8-bit products: one scale per product's input, and one per column of
    weights.

    The products are in the standard's form, QuantizeLinear and DequantizeLinear, which engines turn
    into integer products.
    """
    import onnx
    from onnx import helper, numpy_helper

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    weights = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    products = {node.output[0] for node in _products(graph)}
    nodes: list[NodeProto] = []
    constants: dict[str, np.ndarray] = {}

    def add(operator: str, name: str, source: str, **attributes: Any) -> None:
        inputs = [source, f"{name}.scale", f"{name}.zero"]
        nodes.append(helper.make_node(operator, inputs, [f"{name}.{operator}"], **attributes))

    for node in graph.node:
        if node.output[0] in products:
            source, weight = node.input
            if f"{source}.scale" not in constants:
                low, high = ranges[source]
                scale = max(high - low, 1e-9) / LEVELS
                constants[f"{source}.scale"] = np.array(scale, dtype=np.float32)
                constants[f"{source}.zero"] = np.array(round(-low / scale), dtype=np.uint8)
                add("QuantizeLinear", source, source)
                add("DequantizeLinear", source, f"{source}.QuantizeLinear")
            if f"{weight}.scale" not in constants:
                scales = np.maximum(np.abs(weights[weight]).max(0), 1e-9) / LARGEST_WEIGHT
                constants[f"{weight}.scale"] = scales.astype(np.float32)
                constants[f"{weight}.zero"] = np.zeros(len(scales), dtype=np.int8)
                constants[f"{weight}.8bit"] = np.rint(weights[weight] / scales).astype(np.int8)
                add("DequantizeLinear", weight, f"{weight}.8bit", axis=1)
            del node.input[:]
            node.input.extend([f"{source}.DequantizeLinear", f"{weight}.DequantizeLinear"])
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_unused(graph)
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    return result


def save_graph(model: "ModelProto", path: Path) -> None:
    """Write a graph; weights that do not fit into its file are written next to it, in
    `<name>_data`, and removed from `model`."""
    import onnx

    size_bytes = sum(len(each.raw_data) for each in model.graph.initializer)
    large = size_bytes > MOST_BYTES
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}_data")


def _products(graph: "GraphProto") -> list["NodeProto"]:
    """Return the operators that multiply by a matrix of weights."""
    weights = {each.name for each in graph.initializer if len(each.dims) == 2}
    return [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]


def _drop_unused(graph: "GraphProto") -> None:
    """Remove, in place, weights that no operator reads any more."""
    read = {name for node in graph.node for name in node.input}
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name not in read:
            del graph.initializer[place]
