"""The onnxruntime engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from bert_core.inference.engines.base import GraphBackend, cannot_run


class OnnxRuntime(GraphBackend):
    """Runs a graph at the precision that it was exported with."""

    engine: ClassVar[str] = "onnxruntime"
    requirements: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    runs: ClassVar[Mapping[str, tuple[str, ...]]] = {"fp32": ("fp32",), "int8": ("int8",)}

    def _open(self, path: Path) -> tuple[list[str], dict[str, int | None]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # NOTE: by default onnxruntime uses all cores and pins its threads to them: to the same
        # cores in every worker. Its threads would also spin between passes, on others' cores.
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.enable_mem_pattern = False  # it would keep a pattern for every shape ever seen
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"],
                # The fused operator runs on one core, at a fifth of the two operators' speed.
                disabled_optimizers=["SkipLayerNormFusion"],
            )  # fmt: skip
        except Exception as error:  # NOTE: from C++, each kind with its own class
            raise cannot_run(path, f"onnxruntime {onnxruntime.__version__}", error) from error
        widths = {output.name: output.shape[-1] for output in self.session.get_outputs()}
        outputs = {
            name: width if isinstance(width, int) else None for name, width in widths.items()
        }
        return [value.name for value in self.session.get_inputs()], outputs

    def run(self, feed: Mapping[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
        return self.session.run(list(names), dict(feed))
