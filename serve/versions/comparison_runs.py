"""Records comparisons in MLflow: one run per pair of versions."""

import tempfile
from pathlib import Path

from serve.versions.comparison import Pairing, Tally
from tracking.runs.recorder import RunRecorder

EXPERIMENT = "raybert/candidates"


class CandidateRuns:
    """Keeps a run per pair of versions, with the sums so far as its metrics."""

    def __init__(self, tracking_uri: str) -> None:
        self._uri = tracking_uri
        self._folder = Path(tempfile.mkdtemp(prefix="raybert-candidates-"))
        self._runs: dict[Pairing, tuple[RunRecorder, Tally]] = {}

    def record(self, pairing: Pairing, tally: Tally) -> None:
        """Add a replica's tally, without waiting for MLflow."""
        if pairing not in self._runs:
            self._runs[pairing] = (self._open(pairing), Tally())
        run, total = self._runs[pairing]
        total.add(tally)
        run.record(total.requests + total.failed, total.metrics())

    def close(self) -> None:
        """End the runs."""
        for run, _ in self._runs.values():
            run.close()

    def _open(self, pairing: Pairing) -> RunRecorder:
        versions = [
            version or digest[:12]
            for version, digest in (
                (pairing.version, pairing.digest),
                (pairing.candidate_version, pairing.candidate_digest),
            )
        ]
        name = f"{pairing.name}: {' against '.join(versions)}"
        return RunRecorder.open(
            self._folder
            / "-".join((pairing.name, pairing.digest[:12], pairing.candidate_digest[:12])),
            uri=self._uri,
            experiment=EXPERIMENT,
            run_name=name,
            params=vars(pairing),
        )
