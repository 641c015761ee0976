"""The checks of a model: correct models pass, and each kind of error is found."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from caprmil.features import bags
from caprmil.models import ABMIL, CAPRMIL, MODELS, MILModel, Output
from caprmil.runs.check import Finding
from caprmil.runs.check import check as check_trained
from caprmil.runs.inference import TrainedModel
from caprmil.targets import Classification


def check(model: MILModel, paths: list[Path]) -> list[Finding]:
    target = Classification(classes=tuple("abc"[: model.n_outputs]))
    return check_trained(TrainedModel(model, target), paths)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"small": 1, "middle": 40, "large": 301}
    return [
        bags.write(tmp_path / f"{name}.h5", torch.randn(n, 24, generator=generator).numpy())
        for name, n in sizes.items()
    ]


@pytest.mark.parametrize("model", [CAPRMIL(24, 2), ABMIL(24, 3)])
def test_the_models_of_the_package_pass(model: MILModel, paths: list[Path]) -> None:
    findings = check(model, paths)
    assert len(findings) == 6
    assert all(finding.holds and finding.deviation is not None for finding in findings)


def test_a_model_that_counts_padding_fails(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountsPadding(ABMIL):
        def forward_bags(self, features: Tensor, mask: Tensor, grid: Tensor | None) -> Output:
            return super().forward_bags(features, torch.ones_like(mask), grid)

    monkeypatch.setitem(MODELS, "mine", CountsPadding)
    broken = [f.promise for f in check(CountsPadding(24, 2), paths) if not f.holds]
    assert "padding" in broken


def test_a_model_that_depends_on_the_order_fails(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FirstOnly(ABMIL):
        def patches(self, features: Tensor) -> Tensor:
            first = super().patches(features)[:, :1]
            return first.expand(-1, features.shape[1], -1)

    monkeypatch.setitem(MODELS, "mine", FirstOnly)
    broken = [f.promise for f in check(FirstOnly(24, 2), paths) if not f.holds]
    assert "order of patches" in broken


def test_a_property_that_a_model_does_not_claim_is_not_checked(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole(ABMIL):
        order_matters = True
        evaluates_in_chunks = False

        def stream_bag(self, chunks: object, *, keep: bool) -> Output:
            raise NotImplementedError

    monkeypatch.setitem(MODELS, "mine", Whole)
    missing = {f.promise for f in check(Whole(24, 2), paths) if f.deviation is None}
    assert missing == {"order of patches", "bag in chunks"}


def test_a_model_that_returns_nan_fails(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class ReturnsNan(ABMIL):
        def forward_bags(self, features: Tensor, mask: Tensor, grid: Tensor | None) -> Output:
            if not mask.all():
                features = features * torch.nan
            return super().forward_bags(features, mask, grid)

    monkeypatch.setitem(MODELS, "mine", ReturnsNan)
    assert [f.promise for f in check(ReturnsNan(24, 2), paths) if not f.holds] == ["padding"]


def test_a_model_that_loses_precision_fails(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LosesPrecision(ABMIL):
        def patches(self, features: Tensor) -> Tensor:
            patches = super().patches(features)
            return patches if patches.dtype == torch.float64 else patches.round(decimals=1)

    monkeypatch.setitem(MODELS, "mine", LosesPrecision)
    assert [f.promise for f in check(LosesPrecision(24, 2), paths) if not f.holds] == [
        "double precision"
    ]
