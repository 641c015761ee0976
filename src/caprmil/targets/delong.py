"""How far each slide moves the area under the ROC curve: DeLong's variance, with clusters.

E. R. DeLong et al., Biometrics 44 (1988); N. A. Obuchowski, Biometrics 53 (1997); the ranks are
those of X. Sun and W. Xu, IEEE Signal Processing Letters 21 (2014).
"""

import numpy as np
from numpy.typing import NDArray


def auc_influence(
    labels: NDArray[np.integer], probabilities: NDArray[np.floating], owners: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the influence of each slide on the AUC: the mean over the classes that have one."""
    classes = probabilities.shape[1]
    hits = [labels == code for code in (range(classes) if classes > 2 else (1,))]
    scores = probabilities.T if classes > 2 else probabilities.T[1:]
    pairs = zip(hits, scores, strict=True)
    known = [(own, scored) for own, scored in pairs if 0 < own.sum() < len(own)]
    return np.mean([_of_class(*each, owners) for each in known], axis=0)


def _of_class(
    hits: NDArray[np.bool_], scores: NDArray[np.float64], owners: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return how far the placement of each slide is from the area, over their number.

    The placement of a hit (V10 in DeLong) is the share of misses below it, that of a miss (V01)
    the share of hits above it. A single patient has no spread: its influence is NaN.
    """
    from scipy.stats import rankdata

    values = np.empty(len(hits))
    ranks = rankdata(scores)
    for own in (hits, ~hits):
        size, others = np.count_nonzero(own), np.count_nonzero(~own)
        below = (ranks[own] - rankdata(scores[own])) / others
        placed = below if own is hits else 1 - below
        patients = len(np.unique(owners[own]))
        spread = np.sqrt(patients / (patients - 1)) / size if patients > 1 else np.nan
        values[own] = (placed - placed.mean()) * spread
    return values
