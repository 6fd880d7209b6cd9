"""Whether probabilities mean what they say: of answers given 0.8, are eight in ten right? Pure.

Source: Guo et al. 2017, section 2: answers are sorted by probability into bins of equal width, each
without its lower end, and the bins' gaps are weighted by their share of all answers. The mean
squared difference is Brier's score (1950) of the given answers only, without the probabilities of
other labels.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

BINS = 15
"""As in the source."""


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities and actual shares, bin by bin."""

    edges: Float[np.ndarray, "edges"]
    """From 0 to 1, one more than there are bins."""
    counts: Int[np.ndarray, "bins"]
    """How many answers fell into each bin."""
    confidence: Float[np.ndarray, "bins"]
    """The mean probability in each bin; NaN if it is empty."""
    accuracy: Float[np.ndarray, "bins"]
    """The share of right answers in each bin; NaN if it is empty."""
    brier_score: float
    """Mean of (probability − 1 or 0)² over all."""

    @property
    def expected_calibration_error(self) -> float:
        """Mean over all answers of the gap in their bin between mean probability and the share of
        right answers."""
        filled = self.counts > 0
        gaps = np.abs(self.confidence - self.accuracy)[filled]
        return float((gaps * self.counts[filled]).sum() / self.counts.sum())

    @property
    def table(self) -> list[dict[str, float]]:
        """One entry per non-empty bin: `above` and `up_to`, `count`, `confidence`, `accuracy`."""
        return [
            {
                "above": float(self.edges[place]),
                "up_to": float(self.edges[place + 1]),
                "count": int(self.counts[place]),
                "confidence": float(self.confidence[place]),
                "accuracy": float(self.accuracy[place]),
            }
            for place in np.flatnonzero(self.counts)
        ]


def reliability(
    confidence: Float[np.ndarray, "claims"], is_right: Bool[np.ndarray, "claims"], bins: int = BINS
) -> Reliability:
    """Compute how well the probabilities of at least one answer fit the outcomes.

    Args:
        confidence: the probability of each answer, from 0 to 1; 0 falls into the first bin.
        is_right: whether each answer is right.
    """
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.digitize(confidence, edges[1:-1], right=True)
    counts = np.bincount(place, minlength=bins)

    def means(values: Float[np.ndarray, "claims"]) -> Float[np.ndarray, "bins"]:
        sums = np.bincount(place, weights=values, minlength=bins)
        return np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)

    return Reliability(
        edges=edges,
        counts=counts,
        confidence=means(confidence),
        accuracy=means(is_right.astype(np.float64)),
        brier_score=float(np.mean((confidence - is_right) ** 2)),
    )
