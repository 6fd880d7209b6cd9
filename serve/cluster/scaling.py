"""Scales a model's replicas by queued tokens, which show its load where the number of requests does
not. Ray Serve pickles this module by value: it must not import others of ours."""

import math
from typing import Any

METRIC = "queue_tokens"


class ByQueuedTokens:
    """A policy of Ray Serve's autoscaling."""

    def __init__(self, target_queue_tokens: int) -> None:
        """`target_queue_tokens`: tokens waiting that are worth a replica."""
        self._target = target_queue_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, within their limits; `context` is Ray Serve's
        `AutoscalingContext`."""
        waiting = (context.aggregated_metrics or {}).get(METRIC, {})
        replicas = math.ceil(sum(waiting.values()) / self._target)
        # A replica that works off what waits is still needed while requests are in progress.
        replicas = max(replicas, 1 if context.total_num_requests else 0)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(replicas, least), most), {}
