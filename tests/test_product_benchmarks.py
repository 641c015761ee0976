"""The benchmarks of products and of encoding run on little input, and print their tables."""

import pytest

import encoding
import onednn


def test_every_model_has_a_row_for_inference_and_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    onednn.main(["--patches", "20", "--width", "8", "--rounds", "1", "--models", "mean", "abmil"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["mean", "mean", "abmil", "abmil"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's export to ONNX calls itself deprecated
def test_all_ways_to_encode_have_the_same_features(capsys: pytest.CaptureFixture[str]) -> None:
    encoding.main(["--patches", "4", "--rounds", "1"])
    first, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("| included encoder")
    assert len(rows) == 5
    assert all(float(row.split(" | ")[-1].strip("| ")) > 0.999 for row in rows)
