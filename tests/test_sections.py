"""Synthetic slides: real pyramids, reproducible, with ground truth."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from caprmil.errors import CaprmilError, CohortError, UnknownNameError
from caprmil.io.leftovers import final_name
from caprmil.synthetic import ARTEFACTS, KINDS, TRUTH_UM, Section, SlideCohort

pytestmark = pytest.mark.slow

SMALL = Section(seed=3, width=1200, height=1000, tumour=0.2)
STUDY = SlideCohort(slides=4, width=700, height=600, tumour=0.1)


@pytest.fixture(scope="module")
def plain() -> NDArray[np.uint8]:
    return SMALL.render().image


def on_grid(image: NDArray[np.uint8], mpp: float) -> NDArray[np.uint8]:
    """Return an image on the truth grid."""
    size = [round(side * mpp / TRUTH_UM) for side in image.shape[1::-1]]
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX))


def truth_of(section: Section) -> NDArray[np.uint8]:
    """Return the truth, cropped like `on_grid`."""
    rows, columns = (round(n * section.mpp / TRUTH_UM) for n in (section.height, section.width))
    return section.truth()[:rows, :columns]


def sharpness(image: NDArray[np.uint8]) -> float:
    return float(np.abs(np.diff(image.astype(float), axis=0)).mean())


def write_rounded_up(image: NDArray[np.uint8], path: Path, *, mpp: float) -> Path:
    """Write a pyramid with level sizes rounded up, like some scanners; libvips rounds down."""
    cm = (1e4 / mpp, 1e4 / mpp)
    with tifffile.TiffWriter(path) as tiff:
        for level in range(4):
            width, height = (-(-side // 2**level) for side in image.shape[1::-1])
            small = np.asarray(Image.fromarray(image).resize((width, height)))
            tiff.write(
                small,
                tile=(256, 256),
                photometric="rgb",
                compression="jpeg",
                subfiletype=int(level > 0),
                resolution=(cm[0] / 2**level, cm[1] / 2**level),
                resolutionunit="CENTIMETER",
            )
    return path


def test_a_section_is_the_same_every_time(plain: NDArray[np.uint8]) -> None:
    assert np.array_equal(replace(SMALL).render().image, plain)
    assert not np.array_equal(replace(SMALL, seed=4).render().image, plain)


def test_a_section_is_the_same_in_another_process(plain: NDArray[np.uint8]) -> None:
    code = (
        f"import hashlib; from caprmil.synthetic import Section; image = {SMALL}.render().image; "
    )
    code += "print(hashlib.sha256(image).hexdigest(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == hashlib.sha256(plain).hexdigest()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_share_of_tumour_is_as_requested(share: float, seed: int) -> None:
    kinds = replace(SMALL, seed=seed, tumour=share).truth()
    share_found = (kinds == KINDS.index("tumour")).sum() / (kinds > 0).sum()
    assert share_found == pytest.approx(share, abs=0.001)


def test_only_the_tumour_differs_between_the_labels() -> None:
    normal, tumour = (replace(SMALL, tumour=share).render() for share in (0.0, 0.2))
    assert np.array_equal(normal.tissue, tumour.tissue)
    same = ~tumour.tumour
    assert np.array_equal(normal.kinds[same], tumour.kinds[same])
    changed = on_grid((normal.image != tumour.image).any(axis=2).astype(np.uint8) * 255, 1.0)
    near = tumour.tumour[: changed.shape[0], : changed.shape[1]]
    assert changed[near].mean() > 10 * changed[~near].mean()


def test_every_kind_of_tissue_has_its_colour() -> None:
    section = replace(SMALL, width=2000, height=1600)
    image, kinds = on_grid(section.render().image, 1.0).astype(int), truth_of(section)
    assert set(np.unique(kinds)) == set(range(len(KINDS)))
    glass, stroma, fat, lymphocytes, _, tumour = (image[kinds == k].mean(axis=0) for k in range(6))
    assert min(glass) > 230
    assert stroma[0] > stroma[2] > stroma[1] + 10  # pink
    assert fat.min() > stroma.max() - 5  # nearly empty
    assert max(lymphocytes[0], tumour[0]) < stroma[0] - 15  # nuclei absorb red
    assert tumour[2] - tumour[0] > stroma[2] - stroma[0] + 10  # purple


def test_the_tissue_of_the_image_is_that_of_the_ground_truth(plain: NDArray[np.uint8]) -> None:
    bright = on_grid(plain, 1.0).min(axis=2) > 235
    kinds = truth_of(SMALL)[: bright.shape[0], : bright.shape[1]]
    assert bright[kinds == 0].mean() > 0.9  # edges are irregular
    assert bright[kinds == KINDS.index("stroma")].mean() < 0.02
    assert plain[:20].min() > 225  # a margin of glass
    assert plain[:, -20:].min() > 225


def test_two_scales_show_the_same_tissue(plain: NDArray[np.uint8]) -> None:
    finer = replace(SMALL, width=2400, height=2000, mpp=0.5)
    assert np.array_equal(finer.truth(), SMALL.truth())
    coarse, fine = on_grid(plain, 1.0), on_grid(finer.render().image, 0.5)
    tissue = truth_of(SMALL) > 0
    assert np.abs(coarse.astype(int) - fine)[tissue].mean() < 6
    assert np.corrcoef(coarse[tissue].ravel(), fine[tissue].ravel())[0, 1] > 0.95


@pytest.mark.parametrize("mpp", [0.7, 4.0])
def test_any_scale_can_be_rendered(mpp: float) -> None:
    section = Section(width=round(1500 / mpp), height=round(1201 / mpp), mpp=mpp)
    assert section.render().image.shape == (section.height, section.width, 3)


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_artefacts_do_not_change_the_truth(artefact: str, plain: NDArray[np.uint8]) -> None:
    rendered = replace(SMALL, artefacts=(artefact,)).render()
    assert np.array_equal(rendered.kinds, SMALL.truth())
    assert (rendered.image != plain).any(axis=2).mean() > 0.005


def test_pen_covers_glass_and_tissue(plain: NDArray[np.uint8]) -> None:
    drawn = replace(SMALL, artefacts=("pen",)).render().image.astype(int)
    inked = (drawn.min(axis=2) < 110) & (plain.min(axis=2) > 230)
    assert 0.002 < inked.mean() < 0.2
    assert (np.abs(drawn - plain).max(axis=2) > 0).mean() < 0.3  # the rest is unchanged


def test_a_tint_changes_the_colour_of_glass(plain: NDArray[np.uint8]) -> None:
    tinted = replace(SMALL, artefacts=("tint",)).render().image
    assert np.abs(tinted[0, 0].astype(int) - plain[0, 0]).max() >= 15


def test_a_fold_is_darker_tissue(plain: NDArray[np.uint8]) -> None:
    change = replace(SMALL, artefacts=("fold",)).render().image.astype(int) - plain
    assert change.max() <= 0
    assert 0.005 < (change.min(axis=2) < -25).mean() < 0.2


def test_blur_reduces_the_sharpness_of_a_part(plain: NDArray[np.uint8]) -> None:
    blurred = replace(SMALL, artefacts=("blur",)).render().image
    assert sharpness(blurred) < 0.95 * sharpness(plain)
    lost = (blurred != plain).any(axis=2)
    assert 0.02 < lost.mean() < 0.9
    assert plain[lost].mean() == pytest.approx(blurred[lost].mean(), abs=2)


def test_openslide_reads_pixels_levels_and_scale(tmp_path: Path, plain: NDArray[np.uint8]) -> None:
    with openslide.OpenSlide(SMALL.write(tmp_path / "slide.tiff")) as slide:
        assert slide.level_dimensions == ((1200, 1000), (600, 500), (300, 250), (150, 125))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(1.0, rel=1e-4)
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert slide.properties["openslide.level[0].tile-width"] == "256"
        stored = np.asarray(slide.read_region((0, 0), 0, (1200, 1000)).convert("RGB"))
    assert np.abs(stored.astype(int) - plain).mean() < 4  # JPEG
    assert [file.name for file in tmp_path.iterdir()] == ["slide.tiff"]


def test_openslide_recognises_an_aperio_file(tmp_path: Path) -> None:
    section = Section(width=2100, height=2001, mpp=0.5)
    path = section.write(tmp_path / "slide.svs", vendor="aperio")
    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        assert slide.properties["openslide.objective-power"] == "20"
        assert float(slide.properties["openslide.mpp-y"]) == 0.5
        assert slide.level_dimensions[-1] == (131, 125)


def test_pyramids_can_be_written_with_rounded_up_levels(
    tmp_path: Path, plain: NDArray[np.uint8]
) -> None:
    path = write_rounded_up(plain[:901, :1101], tmp_path / "slide.tiff", mpp=0.5)
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1101, 901), (551, 451), (276, 226), (138, 113))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5, rel=1e-4)


def test_a_slide_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "slide.tiff").write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        SMALL.write(tmp_path / "slide.tiff")


def test_invalid_sections_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'pen'"):
        Section(artefacts=("pem",))
    with pytest.raises(ValueError, match="must be between 0 and"):
        Section(tumour=0.7)
    with pytest.raises(ValueError, match="500 um"):
        Section(width=1000, mpp=0.25)
    with pytest.raises(UnknownNameError, match="vendor"):
        SMALL.write("slide.tiff", vendor="leica")  # type: ignore[arg-type]


def test_the_smallest_section_has_tissue() -> None:
    smallest = Section(width=500, height=500, tumour=0.5)
    shares = [(replace(smallest, seed=seed).truth() > 0).mean() for seed in range(60)]
    assert min(shares) > 0.1


def test_a_written_cohort_has_the_generated_content(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    table = STUDY.write(tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(n, 4) for n in (1, 2, 3, 4)]
    rows = table.read_text().splitlines()
    assert rows[0] == "slide,patient,label"
    assert rows[2] == "slide_001,patient_001,tumour"
    for n, row in enumerate(rows[1:]):
        with Image.open(tmp_path / "truth" / f"slide_{n:03d}.png") as stored:
            kinds = np.asarray(stored)
        assert np.array_equal(kinds, STUDY.section(n).truth())
        assert (kinds == KINDS.index("tumour")).any() == row.endswith("tumour")
        assert openslide.OpenSlide.detect_format(tmp_path / "slides" / f"slide_{n:03d}.tiff")


def test_slides_of_a_cohort_differ_and_some_have_artefacts() -> None:
    sections = [replace(STUDY, spoilt=0.5).section(n) for n in range(40)]
    assert len({section.seed for section in sections}) == 40
    artefacts = [section.artefacts for section in sections if section.artefacts]
    assert 10 < len(artefacts) < 30
    assert {artefact for (artefact,) in artefacts} == set(ARTEFACTS)


def test_an_interrupted_cohort_is_resumed(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        STUDY.write(tmp_path, progress=stop, workers=1)
    existing = {file: file.stat().st_mtime_ns for file in (tmp_path / "slides").iterdir()}
    assert 1 <= len(existing) < 4
    assert not (tmp_path / "labels.csv").exists()
    table = STUDY.write(tmp_path)
    assert len(list((tmp_path / "slides").iterdir())) == 4
    everything = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    assert existing.items() <= everything.items()
    assert STUDY.write(tmp_path) == table
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")} == everything


def test_the_files_of_a_section_that_is_being_written_are_known_as_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next start removes them, if the process was killed."""
    seen: list[Path] = []
    bands = Section._bands

    def watched(section: Section, anatomy: Any) -> Any:
        seen.extend(tmp_path.iterdir())
        return bands(section, anatomy)

    monkeypatch.setattr(Section, "_bands", watched)
    Section(width=512, height=512).write(tmp_path / "a.tiff")
    assert seen
    assert all(final_name(path) for path in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiff"]


def test_a_folder_with_another_cohort_or_table_is_not_changed(tmp_path: Path) -> None:
    study = replace(STUDY, slides=1)
    table = study.write(tmp_path)
    with pytest.raises(CohortError, match="another cohort"):
        replace(study, seed=1).write(tmp_path)
    table.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        study.write(tmp_path)
    assert table.read_text() == "mine"
