"""The engines that run graphs. A new one is a file and an entry here."""

from bert_core.inference.engines.base import GraphBackend
from bert_core.inference.engines.onnxruntime import OnnxRuntime
from bert_core.inference.engines.openvino import OpenVino

ENGINES: dict[str, type[GraphBackend]] = {one.engine: one for one in (OnnxRuntime, OpenVino)}
"""By name; the first is the one whose scores an export measures, where it can run the graph."""
