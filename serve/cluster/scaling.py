"""Scales a model's replicas by queued tokens, which show its load better than the number of
requests.

Ray Serve pickles this module by value, so it must not import other modules of ours.
"""

import math
from typing import Any

METRIC = "queue_tokens"


class ByQueuedTokens:
    """A policy of Ray Serve's autoscaling: one replica per so many waiting tokens."""

    def __init__(self, target_queue_tokens: int) -> None:
        """Set `target_queue_tokens`, the number of waiting tokens that justifies a replica."""
        self._target = target_queue_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas wanted, within their limits; `context` is Ray Serve's
        `AutoscalingContext`."""
        waiting = (context.aggregated_metrics or {}).get(METRIC, {})
        replicas = math.ceil(sum(waiting.values()) / self._target)
        # Once no tokens wait, a replica is still needed while requests are in progress.
        replicas = max(replicas, 1 if context.total_num_requests else 0)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(replicas, least), most), {}
