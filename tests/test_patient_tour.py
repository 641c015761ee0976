"""The commands of docs/patients.md run on a generated cohort, and their files are by patient."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from caprmil import cli
from caprmil.features import bags
from patient_cohort import write_patients

PAGE = Path(__file__).parent.parent / "docs" / "patients.md"
QUICK = """
[model]
dim = 16
heads = 2

[splits]
folds = 2

[train]
epochs = 2
warmup_epochs = 0
lr = 2e-3
"""


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def run_command(line: str) -> str:
    _, *words = line.split()
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"
    return result.output


@pytest.mark.slow
def test_the_commands_of_the_page_on_patients_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_patients(tmp_path, 12)
    others = write_patients(tmp_path / "others", 8, seed=3, prefix="q")
    (others.parent / "features").rename(tmp_path / "new")
    others.rename(tmp_path / "new.csv")
    Path("patients.toml").write_text(block("toml") + QUICK)
    output = {line: run_command(line) for line in block("console").splitlines()}

    predicted = pd.read_csv("predictions.csv")
    assert predicted["patient"].tolist() == [f"q{n:02d}" for n in range(8)]
    assert "slide" not in predicted.columns
    own = next(text for line, text in output.items() if "--patient q01" in line)
    assert "1 patient predicted" in own
    alone = predicted.set_index("patient").loc["q01", "prob_tumour"]
    assert f"{alone:.4f}" in own
    scores = json.loads(Path("runs/patients/scores.json").read_text())
    assert (scores["unit"], scores["patients"]) == ("patient", 12)
    maximum = pd.read_csv("runs/max/predictions.csv")
    assert sorted(maximum["patient"]) == [f"p{n:02d}" for n in range(12)]

    shares = pd.read_csv("runs/patients/explain/p05/slides.csv")
    record = json.loads(Path("runs/patients/explain/p05/explanation.json").read_text())
    total = sum(each["evidence"]["tumour"] for each in record["slides"])
    rest = record["explained"]["rest"]
    logits = record["explained"]["logits"]
    contrast = {
        name: rest[name] - np.mean([v for k, v in rest.items() if k != name]) for name in rest
    }
    whole = logits["tumour"] - logits["normal"]
    assert total + contrast["tumour"] == pytest.approx(whole, abs=1e-4)
    for slide in shares["slide"]:
        patches = pd.read_csv(f"runs/patients/explain/p05/slides/{slide}/patches.csv")
        np.testing.assert_array_equal(patches[["x", "y"]], bags.read(f"features/{slide}.h5").coords)
    told = [text for line, text in output.items() if line.startswith("caprmil explain")]
    assert len(told) == 2
    assert all(slide in text for text in told for slide in shares["slide"])
    decided = pd.read_csv("runs/max/explain/p05/slides.csv")
    assert sorted(decided["weight-prob_tumour"]) == [0, 0, 1][-len(decided) :]
    faithful = pd.read_csv("runs/patients/faithfulness/faithfulness.csv")
    assert set(faithful["slide"]) <= {f"p{n:02d}" for n in range(12)}
    for name in ("runs/patients/report/slides/p05.html", "runs/patients/report/index.html"):
        assert "patient" in Path(name).read_text()
