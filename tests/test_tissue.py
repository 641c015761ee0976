"""Tissue detection: correct where simple thresholds fail, with flags for review."""

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from caprmil.config import digest, parse
from caprmil.errors import RecipeError, SlideError
from caprmil.slides.tissue import Tissue, TissueConfig, find
from caprmil.synthetic import thumbnails
from caprmil.synthetic.thumbnails import CASES, SyntheticThumbnail, thumbnail

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CAPRMIL_DATA", ROOT.parent / "shared" / "data")) / "slides"
SHAPE = (360, 460)


@cache
def detected(case: str, seed: int) -> tuple[SyntheticThumbnail, Tissue]:
    made = thumbnail(case, seed, shape=SHAPE)
    return made, find(made.image, made.mpp)


def iou(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    return float((found & truth).sum() / (found | truth).sum())


TISSUE = [case for case in CASES if CASES[case].tissue != "none"]
HARD = ("scraps", "dust", "thin biopsy", "biopsy, tint, slope", "biopsy, more pen")
HARD += ("biopsy, black pen", "blue across tissue", "IHC with pen", "IHC, pale, slope")
"""Cases with the lowest overlap. They are tested with more seeds than the others."""
BLANK = [case for case in CASES if CASES[case].tissue == "none"]


def with_seeds(cases: list[str]) -> list[Any]:
    """Return every third case with seed 200; the others and more seeds are slow tests."""
    slow = [(case, seed) for seed in (201, 202) for case in cases if case in HARD]
    slow += [(case, 203) for case in cases]
    slow += [(case, 200) for number, case in enumerate(cases) if number % 3]
    return [
        *((case, 200) for case in cases[::3]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in slow),
    ]


@pytest.mark.parametrize(("case", "seed"), with_seeds(TISSUE))
def test_tissue_is_found_in_every_case(case: str, seed: int) -> None:
    made, found = detected(case, seed)
    assert iou(found.mask, made.truth) > 0.75
    assert "no tissue" not in found.flags


@pytest.mark.parametrize(("case", "seed"), with_seeds(BLANK))
def test_blank_glass_has_no_tissue(case: str, seed: int) -> None:
    _, found = detected(case, seed)
    assert not found.mask.any()
    assert "no tissue" in found.flags
    assert found.area_mm2 == 0


@pytest.mark.slow
def test_the_mean_overlap_over_all_cases_is_high() -> None:
    scores = [iou(found.mask, made.truth) for made, found in (detected(c, 200) for c in TISSUE)]
    assert np.mean(scores) > 0.93


@pytest.mark.parametrize("case", CASES)
def test_flags_match_the_case(case: str) -> None:
    made, found = detected(case, 200)
    assert ("pen" in found.flags) == made.pen.any()
    assert ("no glass" in found.flags) == (CASES[case].tissue == "everywhere")
    assert not (found.mask & found.pen).any()


def test_pale_tissue_is_flagged_and_normal_tissue_is_not() -> None:
    assert "faint" in detected("pale", 200)[1].flags
    assert detected("normal", 200)[1].flags == ()


def test_the_same_image_gives_the_same_mask() -> None:
    made, found = detected("pale, vignette", 200)
    assert (find(made.image, made.mpp).mask == found.mask).all()


def test_a_rotated_slide_gives_a_rotated_mask() -> None:
    made, found = detected("vignette", 200)
    rotated = find(np.rot90(made.image), made.mpp)
    assert iou(np.rot90(rotated.mask, -1), found.mask) > 0.98


def test_sizes_are_in_micrometres_not_pixels() -> None:
    made, found = detected("blue pen", 200)
    width, height = made.image.shape[1] * 2, made.image.shape[0] * 2
    larger = Image.fromarray(made.image).resize((width, height), Image.Resampling.BILINEAR)
    twice = find(np.asarray(larger), made.mpp / 2)
    assert iou(twice.mask[::2, ::2], found.mask) > 0.95
    assert twice.area_mm2 == pytest.approx(found.area_mm2, rel=0.05)


def test_minimum_area_and_hole_size_are_settings() -> None:
    made, found = detected("scraps", 200)
    fewer = find(made.image, made.mpp, TissueConfig(min_area_um2=100_000))
    assert 0 < fewer.area_mm2 < found.area_mm2
    made, found = detected("fat", 200)
    assert find(made.image, made.mpp, TissueConfig(max_hole_um2=0)).area_mm2 < found.area_mm2


def test_tissue_with_the_colour_of_red_ink_is_tissue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "EOSIN", (0.06, 0.8, 0.6))
    scene = thumbnails.Scene(tissue="cores", stain=1.4)
    made = thumbnails.draw(scene, np.random.default_rng(1), SHAPE)
    found = find(made.image, made.mpp)
    assert iou(found.mask, made.truth) > 0.85
    assert found.flags == ()


def kidney(seed: int, *, light: float, blob: float) -> NDArray[np.uint8]:
    """Return H&E to all borders: pink, with purple areas of many cells that are about `blob` px."""
    rng = np.random.default_rng(seed)

    def noise(size: float) -> NDArray[np.float64]:
        field = ndimage.gaussian_filter(rng.normal(size=(160, 220)), size, mode="wrap")
        return field / field.std()

    haematoxylin = 0.25 + 0.6 * (noise(blob) > 0.7) + 0.03 * noise(1)
    eosin = (0.4 + 0.08 * noise(6) + 0.03 * noise(1)).clip(0.05)
    density = np.multiply.outer(haematoxylin, (0.6, 0.7, 0.36))
    density += np.multiply.outer(eosin, (0.08, 0.8, 0.36))
    image = 255 * light * 10**-density + rng.normal(size=(160, 220, 3))
    return image.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("light", [0.45, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("blob", [5, 20])
def test_tissue_to_all_borders_has_no_pen_at_any_scale_and_light(light: float, blob: float) -> None:
    image = kidney(0, light=light, blob=blob)
    for step in (1, 2):
        small = Image.fromarray(image).reduce(step)
        found = find(np.asarray(small), 8.0)
        assert found.flags == ("no glass",)
        assert found.mask.all()


@pytest.mark.parametrize("light", [0.6, 1.0])
@pytest.mark.parametrize("ink", ["black pen", "green pen"])
def test_pen_on_tissue_to_all_borders_is_found(light: float, ink: str) -> None:
    image, stroke = kidney(0, light=light, blob=20), np.zeros((160, 220), dtype=bool)
    stroke[60:90] = True
    image[stroke] = (image[stroke] * 10.0 ** -np.array(thumbnails.INKS[ink])).astype(np.uint8)
    found = find(image, 8.0)
    assert found.flags == ("no glass", "pen")
    assert found.pen[stroke].mean() > 0.5
    assert found.pen[~stroke].mean() < 0.2


def test_ink_is_kept_if_reject_ink_is_off() -> None:
    made, found = detected("blank with pen", 200)
    kept = find(made.image, made.mpp, TissueConfig(reject_ink=False))
    assert kept.mask[made.pen].mean() > 0.9
    assert "pen" not in kept.flags
    assert not found.mask.any()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 1)])
@pytest.mark.parametrize("value", [0, 128, 255])
def test_tiny_and_uniform_images_have_a_result(shape: tuple[int, int], value: int) -> None:
    found = find(np.full((*shape, 3), value, dtype=np.uint8), 8.0)
    assert found.mask.shape == shape
    assert found.flags


def test_invalid_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"thumbnail\.shape"):
        find(np.zeros((4, 4), dtype=np.uint8), 8.0)
    with pytest.raises(SlideError, match="mpp=0"):
        find(np.zeros((4, 4, 3), dtype=np.uint8), 0)


def test_settings_are_parsed_checked_and_hashed() -> None:
    assert parse({"min_area_um2": 5}, into=TissueConfig).min_area_um2 == 5.0
    assert digest(TissueConfig()) != digest(TissueConfig(min_density=0.03))
    with pytest.raises(RecipeError, match="mpp must be more than 0, not -8"):
        TissueConfig(mpp=-8)
    with pytest.raises(RecipeError, match="closing_um must be 0 or more"):
        TissueConfig(closing_um=float("nan"))


def real(name: str, reduce: int) -> NDArray[np.uint8]:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not here")
    with Image.open(DATA / name) as image:
        return np.asarray(image.convert("RGB").reduce(reduce))


def test_a_real_biopsy_is_found_without_blue_ink_and_frame() -> None:
    image = real("thumbnail-with-ink.jpeg", 4)
    found = find(image, 8.0)
    assert found.flags == ("pen",)
    assert 0.25 < found.mask.mean() < 0.35
    assert not found.mask[image.min(axis=2) >= 253].mean() > 0.02
    blue = image[..., 2].astype(int) - image[..., 0] > 60
    assert found.mask[blue].mean() < 0.05


def test_a_real_green_stroke_over_tissue_is_excluded() -> None:
    found = find(real("thumbnail-green-pen.png", 1), 8.0)
    assert "pen" in found.flags
    assert 0.12 < found.pen.mean() < 0.3
    assert found.mask[:200, :250].mean() > 0.85
    assert found.mask[200:300, 270:350].mean() < 0.05


@pytest.mark.parametrize(
    ("name", "mpp", "least", "most"),
    [("CMU-1-Small-Region.svs", 0.5, 0.3, 0.5), ("tcga-cr-7395-01a-01-ts1.svs", 2.0, 0.5, 0.7)],
)
def test_real_slides_have_the_visible_share_of_tissue(
    name: str, mpp: float, least: float, most: float
) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not here")
    openslide = pytest.importorskip("openslide")
    with openslide.OpenSlide(DATA / name) as slide:
        size = [round(side * mpp / 8) for side in slide.dimensions]
        found = find(np.asarray(slide.get_thumbnail(size)), 8.0)
    assert least < found.mask.mean() < most
    assert found.flags == ()


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tissue_script", ROOT / "benchmarks" / "tissue_rules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tissue_script"] = module
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_prints_its_table_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script()
    small = {"normal": CASES["normal"], "blank": CASES["blank"]}
    monkeypatch.setattr(script, "CASES", small)
    monkeypatch.setattr(script, "thumbnail", lambda case, seed: thumbnail(case, seed, shape=SHAPE))
    options = ["--out", str(tmp_path / "page.md"), "--picture", str(tmp_path / "sheet.png")]
    script.main(["--cases", *small, "--seeds", "1", *options])
    page = (tmp_path / "page.md").read_text()
    assert page in capsys.readouterr().out
    assert page.startswith("| case | ours |")
    assert "Made by `python benchmarks/tissue_rules.py --first 100 --seeds 1`" in page
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > SHAPE[1]
