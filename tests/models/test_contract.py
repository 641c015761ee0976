"""The contract of models. Every model in MODELS is tested, at a small width."""

from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.errors import BagError, RecipeError
from caprmil.models import MODELS, POOLS, MILModel, Pool, create
from caprmil.models.layers import weighted_cross_entropy
from caprmil.models.packing import mask_from_sizes, pad_packed
from caprmil.targets import Classification
from small_models import SETTINGS, small_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clam, single": ("clam", {"branches": "single", "k": 2}),
    "clam, subtyping": ("clam", {"subtyping": True}),
    "dsmil, both streams": ("dsmil", {"both_streams": True}),
    "dsmil, value map": ("dsmil", {"value_map": True}),
    "dtfd, maxmins": ("dtfd", {"distil": "maxmins"}),
    "bayesmil, no draws": ("bayesmil", {"draws": 0, "prior": "subtyping"}),
    "sgpmil, shared noise": ("sgpmil", {"noise": "shared"}),
    "sgpmil, normalised": ("sgpmil", {"normalise": True}),
    **{  # the patches of two sources, before models that stream, or do not, or have a loss
        f"sources, {name}": (
            "sources",
            {"image": {"name": name, **SETTINGS[name]}, "widths": [22, 9], "dim": 12},
        )
        for name in ("caprmil", "transmil", "clam")
    },
}
AFTER_CONTEXT = {  # models and pools after the context stack
    f"caprmil+{name}": ("caprmil", {"pool": {"name": name, **SETTINGS.get(name, {})}})
    for name in {*POOLS, *MODELS} - {"mean"}
}
# A pool, a model that streams and has its own loss, and a model that reads a bag as a sequence.
QUICK = {"caprmil+gated", "caprmil+clam", "caprmil+transmil"}
CASES = {**{name: (name, {}) for name in MODELS}, **AFTER_CONTEXT, **VARIANTS}


@pytest.fixture(
    params=[
        pytest.param(case, marks=[pytest.mark.slow] if case in AFTER_CONTEXT.keys() - QUICK else [])
        for case in sorted(CASES)
    ]
)
def model(request: pytest.FixtureRequest) -> MILModel:
    name, settings = CASES[request.param]
    return small_model(name, in_dim=24, n_outputs=3, **settings)


def test_padding_does_not_change_the_output(model: MILModel) -> None:
    short, long = torch.randn(5, 24), torch.randn(9, 24)
    batch = torch.nn.utils.rnn.pad_sequence([short, long], batch_first=True, padding_value=7.0)
    mask = torch.arange(9) < torch.tensor([[5], [9]])

    together = model(batch, mask=mask)

    torch.testing.assert_close(together.logits[:1], model(short[None]).logits)
    assert together.attention[0, 5:].eq(0).all()


def test_padding_does_not_change_the_gradients(model: MILModel) -> None:
    short = torch.randn(1, 5, 24)
    padded = torch.cat([short, torch.full((1, 4, 24), 7.0)], dim=1)
    gradients = []
    for features, mask in [(short, None), (padded, torch.arange(9)[None] < 5)]:
        model.zero_grad()
        sum(model.loss(model(features, mask=mask), torch.tensor([1])).values()).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_packed_bags_have_the_outputs_of_single_bags(model: MILModel) -> None:
    sizes, model = (5, 1, 9), model.double()
    packed, grid = torch.randn(1, 15, 24).double(), torch.randint(9, (1, 15, 2))
    together = model(packed, sizes=sizes, grid=grid)
    bags = zip(packed.split(sizes, dim=1), grid.split(sizes, dim=1), strict=True)
    for number, (bag, cells) in enumerate(bags):
        alone, n = model(bag, grid=cells), bag.shape[1]
        torch.testing.assert_close(together.logits[number], alone.logits[0])
        torch.testing.assert_close(together.embedding[number], alone.embedding[0])
        torch.testing.assert_close(together.attention[number, :n], alone.attention[0])
        assert together.attention[number, n:].eq(0).all()
        for one, other in zip(together.assignments, alone.assignments, strict=True):
            torch.testing.assert_close(one[number, :, :n], other[0])


def test_packed_bags_have_the_gradients_of_padded_bags(model: MILModel) -> None:
    sizes, model = (5, 1, 9), model.double()
    packed, labels = torch.randn(1, 15, 24).double(), torch.tensor([0, 2, 1])
    ways: list[dict[str, Any]] = [
        {"features": packed, "sizes": sizes},
        {"features": pad_packed(packed, sizes), "mask": mask_from_sizes(sizes, packed.device)},
    ]
    gradients = []
    for way in ways:
        model.zero_grad()
        sum(model.loss(model(**way), labels).values()).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", ["bayesmil", "dtfd", "sgpmil"])
def test_packed_bags_draw_in_training_what_single_bags_draw(name: str) -> None:
    """They share the layers before the draws, with the gradients of single bags."""
    model, sizes = small_model(name, 24, 3).double().train(), (5, 1, 9)
    packed, labels = torch.randn(1, 15, 24).double(), torch.tensor([0, 2, 1])
    found = []
    for shared in (True, False):
        torch.manual_seed(1)
        model.zero_grad()
        alone = [packed] if shared else packed.split(sizes, dim=1)
        outputs = [model(bag, sizes=sizes if shared else None) for bag in alone]
        logits = torch.cat([output.logits for output in outputs])
        F.cross_entropy(logits, labels).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), **gradients})
    torch.testing.assert_close(*found)
    assert len(model.shared_parts(packed)) > 0


def test_sizes_that_do_not_sum_to_the_rows_are_refused(model: MILModel) -> None:
    with pytest.raises(ValueError, match=r"sizes=\(5, 5\)"):
        model(torch.ones(1, 9, 24), sizes=(5, 5))
    with pytest.raises(BagError, match="no patches"):
        model(torch.ones(1, 9, 24), sizes=(9, 0))


@pytest.mark.parametrize("junk", [torch.nan, -torch.inf, 1e30])
def test_padding_may_have_any_value(model: MILModel, junk: float) -> None:
    bag = torch.randn(1, 5, 24)
    padded = torch.cat([bag, torch.full((1, 4, 24), junk)], dim=1)
    output = model(padded, mask=torch.arange(9)[None] < 5)
    torch.testing.assert_close(output.logits, model(bag).logits)


def test_patch_order_does_not_matter(model: MILModel) -> None:
    if model.order_matters:
        pytest.skip(f"{type(model).__name__} depends on the order of patches")
    bag, order = torch.randn(1, 9, 24), torch.randperm(9)
    torch.testing.assert_close(model(bag[:, order]).logits, model(bag).logits)


def test_evaluation_does_not_change_the_model(model: MILModel) -> None:
    before = deepcopy(model.state_dict())
    first, second = model(torch.ones(2, 9, 24)), model(torch.ones(2, 9, 24))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(first.logits, second.logits)


def test_every_parameter_has_a_gradient(model: MILModel) -> None:
    model.train()
    model.zero_grad()
    for _ in range(5):  # dropout or saturation may zero a gradient once, not five times
        output = model(torch.randn(4, 9, 24))
        sum(model.loss(output, torch.tensor([0, 2, 1, 0])).values()).backward()
    zero = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A constant added to all scores of a softmax changes nothing: such a bias has no gradient.
    pools = {n for n, module in model.named_modules() if isinstance(module, Pool)}
    assert [n for n in zero if n.removesuffix(".out.bias") not in pools] == []


def test_attention_sums_to_one(model: MILModel) -> None:
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    attention = model(torch.randn(2, 9, 24), mask=mask).attention
    torch.testing.assert_close(attention.sum(dim=1), torch.ones(2))
    assert (attention >= 0).all()


def test_a_bag_may_have_one_patch(model: MILModel) -> None:
    output = model(torch.randn(1, 1, 24))
    assert output.logits.isfinite().all()
    assert output.attention.item() == pytest.approx(1)


def test_an_empty_bag_is_refused(model: MILModel) -> None:
    with pytest.raises(BagError, match="no patches"):
        model(torch.empty(1, 0, 24))
    with pytest.raises(BagError, match="no patches"):
        model(torch.ones(2, 3, 24), mask=torch.tensor([[True, True, True], [False] * 3]))


def test_features_of_another_width_are_refused(model: MILModel) -> None:
    with pytest.raises(BagError, match="32 features each; the model was made for 24"):
        model(torch.ones(1, 3, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_may_have_any_precision(model: MILModel, dtype: torch.dtype) -> None:
    bag = torch.randn(1, 9, 24).to(dtype)
    torch.testing.assert_close(model(bag).logits, model(bag.float()).logits)


def test_a_loaded_model_has_the_outputs_of_the_saved_one(model: MILModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = MILModel.from_pretrained(tmp_path)
    bag = torch.randn(1, 9, 24)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(bag).logits, model(bag).logits)


def test_a_bag_in_chunks_has_the_output_of_the_whole_bag(model: MILModel) -> None:
    bag = torch.randn(1, 23, 24)
    try:
        streamed = model.stream(lambda: bag.split(5, dim=1))
    except NotImplementedError:
        pytest.skip(f"{type(model).__name__} reads a bag as a whole")
    torch.testing.assert_close(streamed.logits, model(bag).logits)


def test_outputs_without_gradients_are_those_with_gradients(model: MILModel) -> None:
    """Without gradients, evaluation may be in chunks, with another order of matrix products."""
    bag = torch.randn(1, 2500, 24)
    expected = model(bag)
    with torch.no_grad():
        found = model(bag)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.embedding, expected.embedding)
    torch.testing.assert_close(found.attention, expected.attention)
    torch.testing.assert_close(found.assignments, expected.assignments)
    assert len(found.assignments) == model.n_assignments


def test_a_class_weight_counts_in_a_batch_of_one(model: MILModel) -> None:
    output, labels = model(torch.randn(1, 9, 24)), torch.tensor([2])
    plain = model.loss(output, labels)["bag"]
    weights = torch.tensor([1.0, 1.0, 3.0])
    model.set_criterion(partial(weighted_cross_entropy, weights=weights))
    torch.testing.assert_close(model.loss(output, labels)["bag"], 3 * plain)


def test_a_model_in_float64_computes_in_float64(model: MILModel) -> None:
    """Outputs and losses of every form: padded, packed, one bag, with and without gradients."""
    model, labels = model.double(), torch.tensor([0, 2])
    model.set_criterion(
        Classification(classes=("a", "b", "c"), class_weights="balanced").criterion([0, 0, 1, 2])
    )
    bags, sizes = torch.randn(1, 14, 24).double(), (5, 9)
    ways: list[dict[str, Any]] = [
        {"features": bags, "sizes": sizes},
        {"features": pad_packed(bags, sizes), "mask": mask_from_sizes(sizes, bags.device)},
        {"features": bags},
    ]
    for memory, training, gradients in product(
        ("whole", "keep", "stream"), (True, False), (True, False)
    ):
        model.train(training).save_memory(memory)
        for way in ways:
            with torch.set_grad_enabled(gradients):
                output = model(**way)
                terms = model.loss(output, labels[: len(output.logits)])
            spread = output.uncertainty
            found = {
                **{name: getattr(output, name) for name in ("logits", "embedding", "attention")},
                **{name: getattr(output, name) for name in ("class_attention", "scores")},
                **{f"assignments {n}": each for n, each in enumerate(output.assignments)},
                **({} if spread is None else vars(spread)),
                **terms,
            }
            found = {name: value.dtype for name, value in found.items() if value is not None}
            assert set(found.values()) == {torch.float64}, (memory, training, gradients, found)


@pytest.mark.parametrize("memory", ["whole", "keep", "stream"])
@pytest.mark.parametrize("depth", [1, 2])
def test_packed_bags_have_assignments_in_every_memory_mode(memory: Any, depth: int) -> None:
    model = small_model("caprmil", 24, 3, depth=depth).double()
    model.save_memory(memory)
    sizes, packed = (5, 1, 9), torch.randn(1, 15, 24).double()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            together = model(packed, sizes=sizes).assignments
        assert len(together) == model.n_assignments == depth
        for number, bag in enumerate(packed.split(sizes, dim=1)):
            plain = model.forward_bags(bag, torch.ones(bag.shape[:2], dtype=torch.bool), None)
            for one, other in zip(together, plain.assignments, strict=True):
                n = bag.shape[1]
                torch.testing.assert_close(one[number, :, :n], other[0])
                assert one[number, :, n:].eq(0).all()


def plant_a_signal(n_bags: int, n_outputs: int) -> tuple[Tensor, Tensor]:
    """Return bags in which half of the patches have a signal of the class, and their labels."""
    labels, bags = torch.arange(n_bags) % n_outputs, torch.randn(n_bags, 8, 24)
    bags[torch.arange(n_bags), :4, labels] += 4.0
    return bags, labels


def learns_a_planted_signal(model: MILModel) -> bool:
    """Return whether a model learns the signal in 40 steps. Training stops when it has."""
    torch.manual_seed(1)
    unseen, expected = plant_a_signal(24, model.n_outputs)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 41):
        bags, labels = plant_a_signal(6, model.n_outputs)
        optimiser.zero_grad()
        sum(model.train().loss(model(bags), labels).values()).backward()
        optimiser.step()
        if step % 5 == 0:
            with torch.no_grad():
                predicted = model.eval()(unseen).logits.argmax(dim=1)
            if (predicted == expected).float().mean() > 0.8:
                return True
    return False


def test_a_planted_signal_is_learnt(model: MILModel) -> None:
    assert learns_a_planted_signal(model)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_two_classes_are_learnt_like_three(name: str) -> None:
    model = small_model(name, in_dim=24, n_outputs=2)
    assert learns_a_planted_signal(model)
    assert model(torch.randn(1, 9, 24)).logits.shape == (1, 2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_published_size_train_and_ignore_padding(name: str) -> None:
    torch.manual_seed(0)
    model = create(name, in_dim=1024, n_outputs=2).eval()
    bag = torch.randn(1, 20, 1024)
    padded = torch.cat([bag, torch.full((1, 4, 1024), 7.0)], dim=1)
    output = model(padded, mask=torch.arange(24)[None] < 20)
    torch.testing.assert_close(output.logits, model(bag).logits)
    torch.testing.assert_close(output.attention.sum(), torch.tensor(1.0))
    sum(model.train().loss(model(bag), torch.tensor([1])).values()).backward()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", sorted(MODELS))  # "caprmil" has the context stack
def test_a_bag_may_have_a_hundred_thousand_patches(name: str) -> None:
    model = small_model(name, in_dim=24, n_outputs=3)
    with torch.no_grad():
        output = model(torch.randn(1, 100_000, 24, dtype=torch.float16))
    assert output.logits.isfinite().all()
    torch.testing.assert_close(output.attention.sum(), torch.tensor(1.0), atol=1e-4, rtol=0)


def is_not_a_sum(model: MILModel) -> bool:
    """Return whether the logits are not sums over patches."""
    model = getattr(model, "image", model)
    last = getattr(model, "pool", model)
    return type(last).__name__ in ("TransMIL", "DGRMIL") or getattr(last, "both_streams", False)


def test_evidence_sums_to_the_logits(model: MILModel) -> None:
    """The rest is a bias or noise, to which no patch contributes, so it cannot hide wrong terms."""
    bag, grid = torch.randn(1, 300, 24), torch.arange(600).reshape(300, 2) // 2
    evidence, output = model.evidence(bag, grid), model(bag, grid=grid[None])
    if is_not_a_sum(model):
        assert evidence is None
        return
    explained = output.aux.get("mean_logits", output.logits)[0]
    torch.testing.assert_close(evidence.terms.sum(dim=0) + evidence.rest, explained)
    assert evidence.terms.shape == (300, 3)
    assert evidence.terms.std(dim=0).min() > 0


def test_evidence_follows_the_order_of_patches(model: MILModel) -> None:
    if is_not_a_sum(model):
        pytest.skip(f"{type(model).__name__} has no exact evidence")
    bag, order = torch.randn(1, 40, 24), torch.randperm(40)
    evidence, permuted = model.evidence(bag), model.evidence(bag[:, order])
    torch.testing.assert_close(permuted.terms, evidence.terms[order])


NEED_CLASSES = {"clam", "dsmil", "dtfd", "dgrmil", "bayesmil", "sgpmil"}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_has_one_output_or_needs_classes(name: str) -> None:
    assert MODELS[name].needs_classes is (name in NEED_CLASSES) or name == "caprmil"
    for both in (name, f"caprmil+{name}"):
        if name in NEED_CLASSES:
            assert create(both, 24, 2).needs_classes
            with pytest.raises(RecipeError, match="needs at least two classes, not 1 output"):
                create(both, 24, 1)
            continue
        model = small_model(both, 24, 1)
        assert not model.needs_classes
        model.set_criterion(lambda logits, values: F.mse_loss(logits[:, 0], values))
        output = model(torch.randn(2, 9, 24))
        assert output.logits.shape == (2, 1)
        terms = model.loss(output, torch.tensor([0.5, -2.0]))
        expected = (output.logits[:, 0] - torch.tensor([0.5, -2.0])).square().mean()
        torch.testing.assert_close(terms["bag"], expected)


def test_a_criterion_is_set_in_all_submodels() -> None:
    model = create("caprmil", 24, 3, pool={"name": "clam"})
    model.set_criterion(lambda logits, _: 0 * logits.sum() + 5)
    assert model.loss(model(torch.randn(1, 9, 24)), torch.tensor([2]))["bag"] == 0.7 * 5


# Patches with counts


@pytest.fixture
def weighted_case(model: MILModel) -> tuple[MILModel, Tensor, Tensor]:
    """A model in float64, a bag, and its grid."""
    columns = torch.arange(12)
    return (
        model.double(),
        torch.randn(1, 12, 24).double(),
        torch.stack([columns % 4, columns // 4], 1),
    )


def test_counts_of_one_give_the_output_of_the_bag(
    weighted_case: tuple[MILModel, Tensor, Tensor],
) -> None:
    model, bag, grid = weighted_case
    weighted = model.forward_weighted(bag, torch.ones(12), grid)
    torch.testing.assert_close(weighted.logits, model(bag, grid=grid[None]).logits)


def test_the_derivative_with_respect_to_a_count_is_the_finite_difference(
    weighted_case: tuple[MILModel, Tensor, Tensor],
) -> None:
    model, bag, grid = weighted_case

    def logit(counts: Tensor) -> Tensor:
        return model.forward_weighted(bag, counts, grid).logits[0, 1]

    counts = torch.ones(12, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(logit(counts), counts)
    for patch in (0, 7):
        step = 1e-5 * F.one_hot(torch.tensor(patch), 12).double()
        with torch.no_grad():
            change = (logit(1 + step) - logit(1 - step)) / 2e-5
        torch.testing.assert_close(derivative[patch], change, rtol=1e-4, atol=1e-7)


def test_a_patch_with_a_count_of_two_equals_two_copies(
    weighted_case: tuple[MILModel, Tensor, Tensor], request: pytest.FixtureRequest
) -> None:
    model, bag, grid = weighted_case
    parts = [each for each in model.modules() if isinstance(each, MILModel)]
    if any(part.order_matters or getattr(part, "draws", 0) for part in parts):
        pytest.skip("one more patch shifts the others, or their random numbers")
    if any(type(part).__name__ == "DTFDMIL" for part in parts):
        pytest.skip("one more patch changes the pseudo-bags")
    counts = 1.0 + F.one_hot(torch.tensor(3), 12)
    twice = torch.cat([bag, bag[:, 3:4]], dim=1)
    cells = torch.cat([grid, grid[3:4]])
    torch.testing.assert_close(
        model.forward_weighted(bag, counts, grid).logits, model(twice, grid=cells[None]).logits
    )
