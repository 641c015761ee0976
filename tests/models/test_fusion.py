"""A model of the patches with covariates: concatenation before a linear layer, in every form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from caprmil.errors import BagError, RecipeError
from caprmil.models import MODELS, FusedModel, MILModel, average_slide, create
from caprmil.models.fusion import WAYS, last_layer
from caprmil.models.no_image import NoImage
from caprmil.models.pooling import POOLS
from small_models import small_model

COLUMNS: list[dict[str, Any]] = [{"name": "age", "width": 2}, {"name": "sex", "width": 2}]
CASES = (*sorted(MODELS), "none", "caprmil+gated", "caprmil+dsmil", "caprmil+abmil")
NO_LAST_LAYER = ("bayesmil", "clam", "dsmil", "dtfd", "sgpmil", "none", "caprmil+dsmil")
FILM = tuple(name for name in CASES if name not in NO_LAST_LAYER)
ADDED = ("concatenation", "late")
VALUES = torch.tensor([[0.5, -1.0, 2.0, 0.0], [0.0, 1.0, -1.0, 3.0], [1.0, 1.0, 1.0, 1.0]])


def fused(name: str, **settings: Any) -> FusedModel:
    """A fused model of random weights, so that covariates matter from the start."""
    image = small_model(name, in_dim=24, n_outputs=3)
    model = FusedModel(24, 3, image=image, columns=COLUMNS, dim=8, **settings)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.classify.weight)
    return model.double().eval()


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> FusedModel:
    return fused(request.param)


def added(model: FusedModel, covariates: Tensor) -> Tensor:
    """What the covariates add to the logits, by the products of the weights."""
    return covariates.double() @ model.project.weight.mT @ model.classify.weight.mT


def by_hand(model: FusedModel, bags: Tensor, covariates: Tensor) -> Tensor:
    """The logits of FiLM, as in its paper: a scale and a shift of the embedding of each bag."""
    scale, shift = added(model, covariates).chunk(2, dim=1)
    classify = last_layer(model.image)
    embedding = (1 + scale) * model.image(bags).embedding + shift
    return embedding @ classify.weight.mT + classify.bias


def test_logits_are_those_of_the_image_plus_a_linear_function(model: FusedModel) -> None:
    bags = torch.randn(3, 9, 24).double()
    plain, together = model.image(bags), model(bags, covariates=VALUES)
    torch.testing.assert_close(together.logits, plain.logits + added(model, VALUES))
    assert torch.equal(together.attention, plain.attention)


def test_concatenated_embeddings_before_a_linear_layer_give_the_same_logits() -> None:
    model, bags = fused("caprmil"), torch.randn(3, 9, 24).double()
    classify = model.image.classify
    together = torch.cat([model.image(bags).embedding, model.project(VALUES.double())], dim=1)
    weight = torch.cat([classify.weight, model.classify.weight], dim=1)
    expected = together @ weight.mT + classify.bias
    torch.testing.assert_close(model(bags, covariates=VALUES).logits, expected)


def test_each_slide_of_packed_bags_gets_its_own_covariates(model: FusedModel) -> None:
    sizes, packed = (5, 1, 9), torch.randn(1, 15, 24).double()
    together = model(packed, sizes=sizes, covariates=VALUES)
    for number, bag in enumerate(packed.split(sizes, dim=1)):
        alone = model.of_slide(VALUES[number])(bag)
        torch.testing.assert_close(together.logits[number], alone.logits[0])


@pytest.mark.parametrize("how", ADDED)
@pytest.mark.parametrize("name", CASES)
def test_patches_covariates_and_bias_add_up_to_the_logits(name: str, how: str) -> None:
    model, bag = fused(name, how=how), torch.randn(1, 9, 24).double()
    slide = model.of_slide(VALUES[0], ["63", "female"])
    output, evidence = slide(bag), slide.evidence(bag)
    logits = output.aux.get("mean_logits", output.logits)[0]
    plain = model.of_average_slide()(bag)
    fixed = slide.check_fixed()
    terms = fixed.terms.sum(dim=0)
    torch.testing.assert_close(output.logits[0] - plain.logits[0], terms)
    share = 1.0 if how == "concatenation" else 0.5
    torch.testing.assert_close(terms, share * added(model, VALUES[:1])[0])
    assert fixed.shown == ("63", "female")
    if evidence is not None:
        torch.testing.assert_close(evidence.logits, logits)
        without = model.image.evidence(bag)
        assert without is not None
        torch.testing.assert_close(evidence.terms, share * without.terms)


def test_every_other_form_of_a_slide_has_the_covariates_too(model: FusedModel) -> None:
    bag, slide = torch.randn(1, 9, 24).double(), model.of_slide(VALUES[0])
    expected, shift = slide(bag).logits, added(model, VALUES[:1])
    if slide.streams:
        chunks = lambda: bag.split(4, dim=1)  # noqa: E731
        torch.testing.assert_close(slide.stream(chunks).logits, expected)
    if slide.streams_evidence:
        streamed = slide.stream_evidence(lambda: bag.split(4, dim=1))
        whole = slide.evidence(bag)
        assert whole is not None
        torch.testing.assert_close(streamed.rest, whole.rest)
    if slide.weighs_patches:
        weighted = slide.forward_weighted(bag, torch.ones(9))
        plain = model.image.forward_weighted(bag, torch.ones(9))
        torch.testing.assert_close(weighted.logits, plain.logits + shift)
        torch.testing.assert_close(slide.influence(bag), model.image.influence(bag))
    if slide.token_shape is not None:
        removal = slide.token_removal(lambda: [bag])
        plain = model.image.token_removal(lambda: [bag]).without_token(0, 0, 1)
        torch.testing.assert_close(removal.output().logits, expected)
        torch.testing.assert_close(removal.without_token(0, 0, 1).logits, plain.logits + shift)


def test_the_equations_as_written_have_the_covariates_too(model: FusedModel) -> None:
    """Costs are counted in this form."""
    bag, slide = torch.randn(1, 9, 24).double(), model.of_slide(VALUES[0])
    found = slide.forward_bags(*slide.validate(bag, None), None)
    torch.testing.assert_close(found.logits, slide(bag).logits)


@pytest.mark.parametrize("name", FILM)
def test_film_scales_and_shifts_the_embedding_before_the_last_layer(name: str) -> None:
    model, bags = fused(name, how="film"), torch.randn(3, 9, 24).double()
    expected = by_hand(model, bags, VALUES)
    torch.testing.assert_close(model(bags, covariates=VALUES).logits, expected)
    packed = model(bags.reshape(1, 27, 24), sizes=(9, 9, 9), covariates=VALUES)
    torch.testing.assert_close(packed.logits, expected)


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_film_of_every_patch_in_context_is_film_of_the_pooled_embedding(pool: str) -> None:
    image = create("caprmil", 24, 3, dim=16, heads=2, tokens=3, pool=pool)
    model = FusedModel(24, 3, image=image, columns=COLUMNS, dim=8, how="film").double().eval()
    torch.nn.init.normal_(model.classify.weight)
    bags = torch.randn(3, 9, 24).double()
    mask = torch.arange(9) < torch.tensor([[6], [9], [1]])
    together = model(bags, mask=mask, covariates=VALUES)

    scale, shift = added(model, VALUES).unsqueeze(1).chunk(2, dim=-1)
    patches, _ = image.context(bags, mask)
    modulated = (1 + scale) * patches + shift  # every patch, after the context stack
    _, weights = image.pool(patches, mask)  # which do not see the covariates
    by_hand = image.classify((weights.unsqueeze(-1) * modulated).sum(dim=1))
    torch.testing.assert_close(together.logits, by_hand, rtol=1e-12, atol=1e-12)

    # Attention that scores the modulated patches would see the covariates. A mean has no scores.
    embedding, seen = image.pool(modulated, mask)
    if pool == "mean":
        torch.testing.assert_close(image.classify(embedding), by_hand, rtol=1e-12, atol=1e-12)
    else:
        assert (seen - weights).abs().max() > 1e-3


@pytest.mark.parametrize("name", FILM)
def test_film_of_one_slide_is_the_image_model_with_another_last_layer(name: str) -> None:
    model, bag = fused(name, how="film"), torch.randn(1, 9, 24).double()
    slide, expected = model.of_slide(VALUES[0]), by_hand(model, bag, VALUES[:1])
    torch.testing.assert_close(slide(bag).logits, expected)
    evidence = slide.evidence(bag)
    if evidence is not None:
        torch.testing.assert_close(evidence.logits, expected[0])
    if slide.streams:
        torch.testing.assert_close(slide.stream(lambda: bag.split(4, dim=1)).logits, expected)
    if slide.weighs_patches:
        torch.testing.assert_close(slide.forward_weighted(bag, torch.ones(9)).logits, expected)
    if slide.token_shape is not None:
        torch.testing.assert_close(slide.token_removal(lambda: [bag]).output().logits, expected)
    # What it was made of is as before.
    torch.testing.assert_close(model(bag, covariates=VALUES[:1]).logits, expected)


@pytest.mark.parametrize("name", FILM)
def test_shifts_and_scales_add_up_to_the_difference_to_the_average_slide(name: str) -> None:
    model, bag = fused(name, how="film"), torch.randn(1, 9, 24).double()
    slide, average = model.of_slide(VALUES[0]), model.of_average_slide()
    torch.testing.assert_close(average(bag).logits, model.image(bag).logits)
    output, fixed = slide(bag), slide.check_fixed()
    assert fixed.scales is not None
    parts = fixed.terms + fixed.scales @ output.embedding[0]
    torch.testing.assert_close(parts.sum(dim=0), (output.logits - average(bag).logits)[0])
    # One column is the change that it makes alone: the columns do not act on each other.
    alone = model.of_slide(torch.tensor([*VALUES[0, :2], 0, 0]))(bag)
    torch.testing.assert_close(parts[0], (alone.logits - average(bag).logits)[0])


def test_a_last_layer_makes_the_logits_of_the_embedding_in_training_too() -> None:
    for name in FILM:
        image = small_model(name, in_dim=24, n_outputs=3).double().train()
        output = image(torch.randn(3, 9, 24).double())
        torch.testing.assert_close(last_layer(image)(output.embedding), output.logits)


@pytest.mark.parametrize("name", NO_LAST_LAYER)
def test_film_is_refused_without_one_last_layer(name: str) -> None:
    with pytest.raises(RecipeError, match="Choose how = concatenation or late, or a model that"):
        fused(name, how="film")


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in CASES for how in (WAYS if name in FILM else ADDED)],
)
def test_training_reaches_the_weights_of_the_covariates(name: str, how: str) -> None:
    model = fused(name, how=how).train()
    output = model(torch.randn(3, 9, 24).double(), covariates=VALUES)
    torch.stack(list(model.loss(output, torch.tensor([0, 2, 1])).values())).sum().backward()
    for part in (model.project, model.classify):
        assert part.weight.grad is not None
        assert part.weight.grad.abs().sum() > 0


def test_late_fusion_trains_each_modality_by_its_own_loss() -> None:
    model, labels = fused("caprmil", how="late"), torch.tensor([0, 2, 1])
    bags = torch.randn(3, 9, 24).double()
    output = model(bags, covariates=VALUES)
    logits = model.read(VALUES)
    plain = model.image(bags)
    torch.testing.assert_close(output.logits, (plain.logits + logits) / 2)
    cross_entropy = torch.nn.functional.cross_entropy
    found = model.loss(output, labels)
    torch.testing.assert_close(found["bag"], cross_entropy(plain.logits, labels))
    torch.testing.assert_close(found["covariates"], cross_entropy(logits, labels))


@pytest.mark.parametrize("how", ["concatenation", "film"])
def test_before_training_the_covariates_add_nothing(how: str) -> None:
    image = small_model("caprmil", in_dim=24, n_outputs=3)
    model = FusedModel(24, 3, image=image, columns=COLUMNS, how=how).eval()
    bags = torch.randn(3, 9, 24)
    assert torch.equal(model(bags, covariates=VALUES).logits, image(bags).logits)


@pytest.mark.parametrize("how", WAYS)
def test_a_saved_model_is_loaded_with_its_covariates(how: str, tmp_path: Path) -> None:
    model, bag = fused("caprmil+gated", how=how).float(), torch.randn(1, 9, 24)
    model.save_pretrained(tmp_path / "fused")
    loaded = MILModel.from_pretrained(tmp_path / "fused")
    assert isinstance(loaded, FusedModel)
    assert loaded.settings["columns"] == COLUMNS
    values = VALUES[:1]
    assert torch.equal(loaded(bag, covariates=values).logits, model(bag, covariates=values).logits)
    with pytest.raises(ValueError, match="of one slide"):
        model.of_slide(VALUES[0]).save_pretrained(tmp_path / "slide")


def test_a_model_without_its_covariates_says_which_it_reads() -> None:
    model = fused("mean")
    with pytest.raises(BagError, match="age, sex"):
        model(torch.randn(1, 9, 24))
    assert not model.streams
    with pytest.raises(BagError, match="age, sex"):
        model.evidence(torch.randn(1, 9, 24))
    assert average_slide(model)(torch.randn(1, 9, 24).double()).logits.shape == (1, 3)
    assert average_slide(model.image) is model.image


def test_covariates_alone_do_not_depend_on_the_patches() -> None:
    model = FusedModel(24, 3, image=NoImage(24, 3), columns=COLUMNS).eval()
    torch.nn.init.normal_(model.classify.weight)
    one, other = (model(torch.randn(1, n, 24), covariates=VALUES[:1]).logits for n in (3, 9))
    assert torch.equal(one, other)


def test_other_ways_and_sizes_are_refused() -> None:
    image = small_model("mean", in_dim=24, n_outputs=3)
    with pytest.raises(RecipeError, match="concatenation, late or film"):
        FusedModel(24, 3, image=image, columns=COLUMNS, how="early")
    with pytest.raises(RecipeError, match="dim must be 1"):
        FusedModel(24, 3, image=image, columns=COLUMNS, dim=0)
    with pytest.raises(BagError, match="4"):
        fused("mean").of_slide(torch.zeros(3))
