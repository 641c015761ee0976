"""The benchmark on real sets compares models on the same bags, and resumes."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import bootstrap
from sklearn.metrics import roc_auc_score

import classic
import real_sets


def test_the_interval_of_a_difference_is_that_of_a_paired_bootstrap() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 100)
    better, worse = (np.clip(rng.normal(0.4 + shift * labels, 0.2), 0, 1) for shift in (0.3, 0.1))
    compared = real_sets.compare(labels, better, worse)

    def difference(rows: np.ndarray) -> float:
        return float(
            roc_auc_score(labels[rows], better[rows]) - roc_auc_score(labels[rows], worse[rows])
        )

    drawn = bootstrap(
        (np.arange(200),), difference, vectorized=False, n_resamples=500, method="percentile",
        random_state=0,
    )  # fmt: skip
    assert compared.difference == pytest.approx(difference(np.arange(200)))
    assert compared.error == pytest.approx(drawn.standard_error, rel=0.15)


def test_the_table_has_every_model_and_finished_repeats_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = [
        np.column_stack([np.full((3, 1), n % 2), np.full((3, 1), n), rng.normal(n % 2, 1, (3, 4))])
        for n in range(20)
    ]
    np.savetxt(tmp_path / "tiny.csv.gz", np.concatenate(rows), delimiter=",")
    monkeypatch.setitem(classic.SETS, "tiny", classic.Shape("Tiny", 20, 10, 60, 4))
    monkeypatch.setattr(real_sets, "Budget", lambda: TINY)
    page = tmp_path / "page.md"
    words = [str(tmp_path), "--sets", "tiny", "--repeats", "1", "--out", str(page)]
    real_sets.main([*words, "--processes", "1"])
    assert all(f"\n| {way} | " in page.read_text() for way in real_sets.WAYS)
    real_sets.main([*words, "--processes", "1"])
    assert "4 of 4 are already in" in capsys.readouterr().out


TINY = real_sets.Budget(epochs=1, warmup_epochs=0)
