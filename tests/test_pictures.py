"""Pictures that are no whole slides (cores, crops): encoded as a whole, and joined by patient."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.errors import CohortError
from caprmil.features import bag_files, bags
from caprmil.slides.qc import Record

ENDINGS = {"a1": "bmp", "a2": "png", "b1": "jpg"}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pale crops of 500 px in `crops`, and their bags in `features`."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    (folder / "crops").mkdir()
    for name, ending in ENDINGS.items():
        pixels = rng.normal((243, 240, 244), 2, (500, 500, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "crops" / f"{name}.{ending}")
    rows = ["slide,patient,label", "a1,a,x", "a2,a,x", "b1,b,y"]
    (folder / "labels.csv").write_text("\n".join(rows))
    encode(folder, "features", "--whole", "--patch-px", "250", "--input-px", "64")
    return folder


def encode(folder: Path, out: str, *options: str) -> str:
    scale = ["--slide-mpp", "0.5", "--mpp", "0.5", "--device", "cpu"]
    command = ["encode", str(folder / "crops"), "--out", str(folder / out), *scale, *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_pale_picture_is_encoded_as_a_whole(encoded: Path) -> None:
    for name in ENDINGS:
        bag = bags.read(encoded / "features" / f"{name}.h5")
        assert bag.coords is not None
        assert bag.coords.tolist() == [[0, 0], [250, 0], [0, 250], [250, 250]]
        assert (bag.info.encoder, bag.info.patch_px, bag.info.mpp) == ("lite0@64", 250, 0.5)
    record = Record.read(encoded / "features" / "qc", "a1")
    assert record is not None
    assert (record.state, record.tissue_share) == ("done", 1.0)


def test_the_pictures_of_a_patient_are_one_bag(encoded: Path) -> None:
    config = CohortConfig(unit="patient")
    cohort, _ = load_cohort(encoded / "labels.csv", encoded / "features", config)
    assert [(entry.name, cohort.bags[entry.name].n_patches) for entry in cohort.entries] == [
        ("a", 8),
        ("b", 4),
    ]
    joined = bag_files.read(cohort["a"].path)
    own = [bags.read(encoded / "features" / f"{name}.h5").features for name in ("a1", "a2")]
    np.testing.assert_array_equal(joined.features, np.concatenate(own))
    grid = joined.grid()
    assert grid is not None
    assert grid[:, 0].tolist() == [0, 1, 0, 1, 4, 5, 4, 5]


def test_without_features_the_reason_in_the_table_of_encode_is_named(encoded: Path) -> None:
    broken = encoded / "crops" / "broken.png"
    broken.write_bytes(b"no image")
    command = ["encode", str(broken), str(encoded / "crops"), "--out", str(encoded / "tissue")]
    scale = ["--slide-mpp", "0.5", "--mpp", "0.5", "--device", "cpu"]
    found = CliRunner().invoke(app, [*command, *scale])
    broken.unlink()
    assert found.exit_code == 2
    table = encoded / "all.csv"
    table.write_text("slide,label\nbroken,x\na1,x\nunknown,y\n")
    with pytest.raises(CohortError) as problem:
        load_cohort(table, encoded / "tissue")
    text = str(problem.value)
    assert "a1 (no tissue was found; encode --whole takes all of a picture)" in text
    assert "broken.png is neither a slide that OpenSlide can read nor an image" in text
    assert "qc.csv" in text
    assert "unknown," in text or "unknown." in text


def test_another_size_of_the_input_is_another_encoder(encoded: Path) -> None:
    found = bags.inspect(encoded / "features" / "a1.h5")
    encode(encoded, "plain", "--whole", "--patch-px", "250")
    other = bags.inspect(encoded / "plain" / "a1.h5")
    assert (other.encoder, other.n_patches) == ("lite0", found.n_patches)
    assert other.fingerprint != found.fingerprint
