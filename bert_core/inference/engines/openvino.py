"""The OpenVINO engine."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_core.errors import ResourceError
from bert_core.inference.engines.base import GraphBackend, cannot_run

HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32", "int8_bf16": "bf16"}
"""Precision → that of what is not in 8 bits."""


class OpenVino(GraphBackend):
    """Runs a graph; on CPUs with bfloat16, it can also compute in bfloat16 whatever is not in 8
    bits."""

    engine: ClassVar[str] = "openvino"
    requirements: ClassVar[tuple[str, ...]] = ("openvino",)
    runs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "fp32": ("fp32", "bf16"),
        "int8": ("int8", "int8_bf16"),
    }

    def _open(self, path: Path) -> tuple[list[str], dict[str, int | None]]:
        import openvino

        core = openvino.Core()
        hint = HINTS[self.precision]
        if hint == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise ResourceError(
                f"{path}: wanted a CPU that computes in bfloat16 (AVX512_BF16 or AMX) for the "
                f"precision {self.precision}, got one that does not: choose another precision"
            )
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": hint,
            "INFERENCE_NUM_THREADS": self.threads,
            # Each pass uses all threads.
            "NUM_STREAMS": 1,
            # By default every process pins its threads to the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            compiled = core.compile_model(core.read_model(path), "CPU", settings)
        except Exception as error:  # NOTE: from C++: a RuntimeError for every fault
            raise cannot_run(path, f"openvino {openvino.__version__}", error) from error
        self._request, self._lock = compiled.create_infer_request(), threading.Lock()
        widths = {port.any_name: port.partial_shape[-1] for port in compiled.outputs}
        outputs = {
            name: width.get_length() if width.is_static else None for name, width in widths.items()
        }
        return [port.any_name for port in compiled.inputs], outputs

    def run(self, feed: Mapping[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
        with self._lock:  # an infer request holds the memory of a single pass
            self._request.infer(dict(feed), share_inputs=True)
            return [self._request.get_tensor(name).data.copy() for name in names]
