"""Metrics of predicted numbers, with scipy. Pure functions."""

import numpy as np
from jaxtyping import Float


def correlations(
    predicted: Float[np.ndarray, "rows"], labels: Float[np.ndarray, "rows"]
) -> dict[str, float]:
    """Return `pearson`, `spearman`, their mean `correlation` (GLUE's for STS-B), `mse`, and its
    root `rmse`, which is in the labels' unit.

    If either array is constant, the correlations are undefined and reported as 0.
    """
    from scipy.stats import pearsonr, spearmanr

    varies = len(labels) > 1 and np.ptp(predicted) > 0 and np.ptp(labels) > 0
    pearson = float(pearsonr(predicted, labels).statistic) if varies else 0.0
    spearman = float(spearmanr(predicted, labels).statistic) if varies else 0.0
    mse = float(np.mean((predicted - labels) ** 2))
    return {
        "pearson": pearson,
        "spearman": spearman,
        "correlation": (pearson + spearman) / 2,
        "mse": mse,
        "rmse": mse**0.5,
    }
