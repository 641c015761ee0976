"""The paper's figures, as printed.

Tables of "CAPRMIL: Context-Aware Patch Representations for Multiple Instance Learning"; mean and
sample standard deviation over folds or seeds. The paper does not say whether "clam" is single-
or multi-branch.
"""

from typing import NamedTuple


class Figure(NamedTuple):
    """A mean and its spread."""

    mean: float
    std: float


class Ablation(NamedTuple):
    """A row of the ablation table: CAMELYON16, width 128, one block, mean pool."""

    tokens: int
    heads: int
    mlp_ratio: int
    auc: Figure
    ace: Figure
    millions: float
    """Millions of parameters."""


COLUMNS = (
    ("camelyon16", "auc"),
    ("camelyon16", "ace"),
    ("tcga-nsclc", "auc"),
    ("tcga-nsclc", "ace"),
    ("panda", "kappa"),
    ("panda", "ace"),
    ("bracs", "auc"),
    ("bracs", "ace"),
)
_ROWS = """
abmil             .987 .005  .036 .004  .973 .009  .039 .008  .910 .028  .044 .015  .852 .025  .175 .007
clam              .986 .004  .044 .027  .953 .004  .056 .016  .927 .025  .031 .018  .850 .021  .183 .011
transmil          .978 .004  .044 .012  .970 .012  .046 .019  .911 .030  .043 .021  .826 .032  .186 .012
dgrmil            .967 .018  .027 .021  .974 .011  .038 .022  .933 .047  .036 .025  .818 .035  .186 .023
bayesmil          .975 .006  .023 .006  .973 .021  .033 .017  .926 .031  .031 .016  .829 .022  .183 .028
sgpmil            .987 .008  .026 .009  .973 .014  .047 .027  .955 .037  .028 .022  .870 .026  .142 .032
mean              .693 .046  .241 .022  .979 .015  .041 .019  .924 .028  .035 .013  .738 .006  .223 .015
caprmil           .975 .006  .028 .006  .978 .016  .033 .021  .944 .053  .021 .024  .850 .031  .189 .026
caprmil+attention .977 .004  .027 .003  .975 .015  .031 .023  .944 .046  .023 .025  .834 .032  .180 .023
caprmil+gated     .976 .009  .033 .010  .974 .018  .032 .020  .952 .043  .019 .022  .874 .031  .171 .019
"""  # noqa: E501


def _scores() -> dict[str, dict[tuple[str, str], Figure]]:
    table = {}
    for line in _ROWS.strip().splitlines():
        model, *numbers = line.split()
        values = [float(number) for number in numbers]
        figures = [Figure(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        table[model] = dict(zip(COLUMNS, figures, strict=True))
    return table


SCORES = _scores()
"""By model, then by protocol and metric."""

MILLIONS = {
    "abmil": 0.660,
    "clam": 0.920,
    "transmil": 2.67,
    "dgrmil": 4.34,
    "bayesmil": 1.32,
    "sgpmil": 1.21,
    "mean": 0.130,
    "caprmil": 0.314,
    "caprmil+attention": 0.331,
    "caprmil+gated": 0.347,
}
"""Millions of parameters."""

GIGAFLOPS = {
    "abmil": 1.31,
    "clam": 1.84,
    "transmil": 85.02,
    "dgrmil": 79.88,
    "bayesmil": 2.63,
    "sgpmil": 2.44,
    "mean": 0.260,
    "caprmil": 0.628,
}
"""Of a forward pass over 1,000 patches. We found no way of counting that gives the figures of
TransMIL and DGRMIL."""


class Seconds(NamedTuple):
    """Seconds of a training epoch, and of the test set of CAMELYON16 (129 slides)."""

    training: float
    inference: float


SECONDS = {
    "abmil": Seconds(5.5, 0.8),
    "clam": Seconds(7.0, 0.9),
    "transmil": Seconds(13.4, 1.2),
    "dgrmil": Seconds(16.7, 1.5),
    "bayesmil": Seconds(9.5, 1.1),
    "sgpmil": Seconds(9.0, 1.0),
    "caprmil": Seconds(6.3, 0.8),
}
"""The table of times, on one A100 in fp32. It has 2.43 GFLOP for SGPMIL, the first table 2.44."""
GIGAFLOPS_OF_TIMES = GIGAFLOPS | {"sgpmil": 2.43}

ABLATIONS = tuple(
    Ablation(tokens, heads, ratio, Figure(auc, auc_std), Figure(ace, ace_std), millions)
    for tokens, heads, ratio, auc, auc_std, ace, ace_std, millions in (
        (2, 8, 4, 0.971, 0.009, 0.027, 0.007, 0.314),
        (4, 8, 4, 0.975, 0.006, 0.028, 0.006, 0.314),
        (8, 8, 4, 0.974, 0.009, 0.030, 0.008, 0.314),
        (16, 8, 4, 0.973, 0.008, 0.027, 0.008, 0.314),
        (4, 2, 4, 0.971, 0.010, 0.031, 0.011, 0.326),
        (4, 4, 4, 0.972, 0.009, 0.033, 0.011, 0.316),
        (4, 12, 4, 0.972, 0.009, 0.032, 0.006, 0.310),
        (4, 8, 1, 0.973, 0.008, 0.027, 0.006, 0.215),
        (4, 8, 2, 0.969, 0.011, 0.030, 0.008, 0.248),
    )
)
