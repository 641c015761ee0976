"""The benchmark of survival losses runs on a few slides."""

import pytest

import survival


def test_a_table_has_a_row_for_the_oracle_and_each_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "NEW", 20)
    monkeypatch.setattr(survival, "METHODS", {"discrete": {"loss": "discrete", "batch_size": 6}})
    lines = survival.table([12], seeds=1, epochs=1, effect=4.0).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["oracle", "discrete"]
    best = float(lines[2].split(" | ")[2])
    assert best == pytest.approx(survival.oracle(12, 0, 4.0), abs=1e-3)
    assert best > 0.55
