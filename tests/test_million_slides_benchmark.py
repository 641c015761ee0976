"""The estimate for a million slides is linear, and the page shows its output."""

from pathlib import Path

import pytest

import million_slides
from million_slides import Assumptions, Cost

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_twice_the_slides_cost_twice_as_much() -> None:
    one, two = Cost(Assumptions(slides=500)), Cost(Assumptions(slides=1000))
    for name, (amount, unit) in one.totals.items():
        assert two.totals[name] == (pytest.approx(2 * amount), unit)
    for name, (amount, unit) in one.rates.items():
        assert two.rates[name] == (pytest.approx(2 * amount), unit)


def test_twice_the_time_needs_half_the_machines() -> None:
    one, two = Cost(Assumptions(days=10)), Cost(Assumptions(days=20))
    assert two.rates["GPUs that encode"][0] == pytest.approx(one.rates["GPUs that encode"][0] / 2)
    assert two.totals == one.totals


def test_machines_that_are_idle_half_the_time_must_be_twice_as_many() -> None:
    always, half = Cost(Assumptions(in_use=1.0, days=1)), Cost(Assumptions(in_use=0.5, days=1))
    one, two = (cost.purchase["machines that encode"][0] for cost in (always, half))
    assert one > 10
    assert 2 * one - 1 <= two <= 2 * one


def test_a_bag_is_patches_times_width_times_two_bytes() -> None:
    cost = Cost(Assumptions(slides=1, patches=10_000, width=1024))
    assert cost.totals["bags to keep"] == (pytest.approx(20.48e-6), "TB")


def test_the_bottleneck_moves_from_gpus_to_the_network_and_to_cores() -> None:
    def bottleneck(**given: float) -> str:
        parts = Cost(Assumptions(**given)).node()
        return min(parts, key=lambda name: parts[name])

    assert bottleneck(gpu_rate=100) == "GPUs"
    assert bottleneck(gpu_rate=8000) == "network"
    assert bottleneck(gpu_rate=8000, read_rate=239) == "cores"


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    million_slides.main([])
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_every_assumption_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    million_slides.main(["--slides", "10000", "--gpu-rate", "1200"])
    output = capsys.readouterr().out
    assert "| slides | 10,000 |" in output
    assert "| gpu_rate | 1,200 |" in output
