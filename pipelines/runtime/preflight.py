"""Checks that a stage makes before it reads or computes anything, so that it fails in seconds.

If the output is complete, nothing is checked: the stage is skipped.
"""

from bert_core import files, storage
from bert_core.errors import ResourceError
from bert_core.manifest import is_complete
from pipelines.runtime import cluster, doctor_checks, nodes
from pipelines.runtime.capacity import Gpus, require_room
from pipelines.runtime.stage_config import StageConfig
from pipelines.runtime.storage_checks import check_cache, check_excludes, marker
from tracking.cache import cache_folder
from tracking.store import server

WITHOUT_RAY = ("publish", "export")
ONE_BY_ONE = ("tune",)
"""Stages that need the CPUs of one worker: with more they do more at a time."""


def preflight(stage: str, config: StageConfig) -> None:
    """Check what `stage` needs before it starts.

    It needs a writable output, which must keep a second writer out if it is in an object store; a
    cache if the output is not on this machine; MLflow; and the cluster that it is to join.

    If MLflow does not answer, the stage still runs: records are sent later. If MLflow refuses
    access, the stage does not run.

    Raises: RaybertError with the way out.
    """
    if is_complete(config.output) and not config.force:
        return
    address = cluster.address_to_join(config.address)
    joins = address is not None and config.num_workers != 0 and stage not in WITHOUT_RAY
    if joins:  # before anything that imports Ray
        cluster.connect(address=address, allow_open_cluster=config.allow_open_cluster)
    if config.record_copy is not None:
        check_cache(cache_folder())
    with marker(config.output) as path:
        if storage.opens(config.output):
            check_excludes(config.output, path)
        server.require_consent(server.tracking_uri(config.tracking_uri))
        if joins:
            _check_cluster(stage, config, path)


def _check_cluster(stage: str, config: StageConfig, marker: str) -> None:
    workers = 1 if stage in ONE_BY_ONE else config.least_workers
    gpus: Gpus = "one each" if config.require_gpus else "none"
    require_room(workers, config.threads_per_worker, gpus=gpus, wait=config.wait)
    here = nodes.facts()
    for node in nodes.nodes_of_cluster(files.absolute(marker)):
        if not node.cpus:
            continue
        doctor_checks.check_answered(node)
        for check in (doctor_checks.check_versions, doctor_checks.check_disk):
            try:
                check(node, here)
            except ResourceError as error:
                raise ResourceError(f"{node.name}: {error}") from error
        doctor_checks.check_shared(node, config.output)
