"""Code that runs in Ray Train's controller, and how the driver starts and stops it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import UserCallback
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from bert_core.errors import RaybertError
from pipelines.runtime import cluster
from pipelines.runtime.capacity import recount_nodes
from pipelines.training.gauges import Gauges
from pipelines.training.records import Records, record_all, with_readings
from tracking.runs.goodput import CLUSTER, DEFAULT, Goodput
from tracking.runs.recorder import RunRecorder

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0


class RecordingCallback(UserCallback):
    """Runs in the Ray Train controller: records rank 0's reports in the stage's run, and ends
    training if a worker raised an error that only the user can fix.

    Ray Train never retries after a callback raises.
    """

    def __init__(
        self, output: str, folder: Path, uri: str, copy: str | None, goodput: Goodput
    ) -> None:
        """Prepare to record.

        Args:
            output: the stage's output.
            folder, uri, copy, goodput: for the record of the stage's run.
        """
        self._output, self._folder, self._uri, self._copy = output, folder, uri, copy
        self._goodput = goodput
        self._gauges: Gauges | None = None
        self._recorder: RunRecorder | None = None
        self._waiting: Records = []

    def after_report(self, run_context: Any, metrics: list[dict], checkpoint: Any) -> None:
        # NOTE: an exception here would end the training; `record` never raises.
        records, readings = metrics[0]["records"], [each["system"] for each in metrics]
        self._waiting += with_readings(self._counted(records), readings)
        try:
            self._recorder = self._recorder or RunRecorder.open(
                self._folder, uri=self._uri, copy=self._copy
            )
        except (OSError, RaybertError) as error:
            logger.warning(f"cannot record the run in {self._folder} yet: {error}")
            return
        record_all(self._recorder, self._waiting)
        self._waiting = []
        if metrics[0]["last"]:
            self._hand_over()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._hand_over()
        for error in worker_exceptions.values():
            if (mistake := cluster.users_mistake(error)) is not None:
                # Ends the training, including workers that wait for the failed one. Otherwise Ray
                # Train would restart everything `max_failures` times, only to fail again.
                raise mistake
        recount_nodes()

    def _counted(self, records: Records) -> Records:
        if DEFAULT in self._goodput.prices_usd:
            with suppress(Exception):  # the earlier counts are kept
                self._goodput.nodes = used_nodes(self._goodput.prices_usd)
        records = self._goodput.take(records)
        self._goodput.save(self._folder)
        self._gauges = self._gauges or Gauges(self._output)
        self._gauges.show(records, self._goodput, time.time())
        return records

    def _hand_over(self) -> None:
        if self._recorder is not None:
            self._recorder.close("RUNNING", timeout_s=2.0)
            self._recorder = None


def used_nodes(prices_usd: Mapping[str, float]) -> dict[str, int]:
    """Count the nodes of the cluster by the name of their price, with the cluster itself as one
    more entry."""
    nodes = Counter({CLUSTER: 1})
    for node in ray.nodes():
        if node["Alive"]:
            resources = (name.removeprefix("accelerator_type:") for name in node["Resources"])
            kinds = [*(node["Labels"] or {}).values(), *resources]
            nodes[next((kind for kind in kinds if kind in prices_usd), DEFAULT)] += 1
    return dict(nodes)


class Trainer(TorchTrainer):
    """Aborts a run that is interrupted, and re-raises the interrupt.

    If the run is to end because of SIGTERM, `before_exit` is called first. Ray Train's own SIGINT
    handler is not installed: it would stay in place after the run, and exit the process with code
    1.
    """

    before_exit: Callable[[], None] | None = None
    _controller: Any = None

    def _create_default_callbacks(self) -> list[Any]:
        """Return Ray Train's default callbacks, without those that would start a process for
        nothing."""
        idle: tuple[type, ...] = (DatasetsCallback,)  # workers read shards, not Ray's datasets
        if cluster.started() is not None:
            # It asks the dashboard whether the controller lives: a cluster of our own has none.
            idle += (PlacementGroupCleanerCallback,)
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]  # Ray Train V2 has it
        return [callback for callback in callbacks if not isinstance(callback, idle)]

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller

    def fit(self) -> Any:
        try:
            with cluster.preemption_watch():
                return super().fit()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            if self._controller is not None:
                if self.before_exit is not None and isinstance(interrupt, SystemExit):
                    self.before_exit()
                with suppress(RayError):  # this is how Ray reports its end
                    ray.get(self._controller.abort.remote(), timeout=ABORT_TIMEOUT_S)
            raise
        finally:
            if self._controller is not None:
                ray.kill(self._controller)  # which releases the run's folder
