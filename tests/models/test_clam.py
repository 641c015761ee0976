"""CLAM against its paper: sizes, the smooth SVM, and the patches in the instance loss."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import CLAM
from caprmil.models.clam import smooth_svm


@pytest.mark.parametrize(
    ("n_outputs", "settings", "parameters"),
    [
        (2, {}, 922_247),
        (2, {"branches": "multi"}, 922_632),
        (2, {"hidden": 256}, 790_791),
        (2, {"hidden": 256, "branches": "multi"}, 791_048),
        (3, {"branches": "single"}, 923_786),
        (6, {"branches": "single"}, 928_403),
        (3, {}, 924_556),
        (6, {}, 930_328),
    ],
)
def test_the_number_of_parameters_is_that_of_the_release(
    n_outputs: int, settings: dict[str, Any], parameters: int
) -> None:
    assert cost.parameters(CLAM(1024, n_outputs, **settings)) == parameters


@pytest.mark.parametrize(("branches", "gflop"), [("single", 1.837), ("multi", 1.838)])
def test_the_instance_classifiers_add_a_thousandth_of_the_operations(
    branches: str, gflop: float
) -> None:
    measured = cost.flops(CLAM(1024, 2, branches=branches), n_patches=1000)
    assert measured / 1e9 == pytest.approx(gflop, rel=2e-3)


def test_two_classes_have_one_branch_and_three_have_a_branch_each() -> None:
    two, three = CLAM(24, 2), CLAM(24, 3)
    assert (two.attend.branches, two.k) == (1, 32)
    assert (three.attend.branches, three.k) == (3, 16)
    assert CLAM(24, 3, branches="single").k == 32
    assert CLAM(24, 3, k=8).k == 8


def plain_svm(scores: Tensor, target: int) -> Tensor:
    """Return the general smooth top-1 SVM loss with temperature and margin 1, or its hard form."""
    raised = scores + (torch.arange(len(scores)) != target) - scores[target]
    hard = (scores[0] - scores[1]).abs() >= math.log(1000)
    return raised.max() if hard else raised.logsumexp(dim=0)


@pytest.mark.parametrize("margin", [-50.0, -6.91, -6.9, -1.0, 0.0, 1.0, 6.9, 6.91, 50.0])
def test_the_smooth_svm_loss_is_the_general_form(margin: float) -> None:
    expected = plain_svm(torch.tensor([0.3, 0.3 + margin]), target=1)
    torch.testing.assert_close(smooth_svm(torch.tensor([margin]))[0], expected)


def test_the_smooth_svm_loss_has_known_values() -> None:
    losses = smooth_svm(torch.tensor([1.0, 0.0, 7.0, -7.0]))
    torch.testing.assert_close(losses, torch.tensor([math.log(2), math.log(1 + math.e), 0, 8]))


def plain_instance_loss(model: CLAM, bag: Tensor, label: int) -> Tensor:
    """Return the instance loss of one bag, patch by patch."""
    patches = model.project(bag)
    classifiers = model.instance_classifier.weight.unflatten(0, (model.n_outputs, 2))
    biases = model.instance_classifier.bias.unflatten(0, (model.n_outputs, 2))
    k, total = min(model.k, len(bag) // 2), torch.zeros(())
    for c in range(model.n_outputs) if model.subtyping else [label]:
        scores = model.attend.branch_scores(patches[None])[0, c if model.multi else 0].tolist()
        order = sorted(range(len(bag)), key=scores.__getitem__)
        chosen = [(n, 1 if c == label else 0) for n in order[-k:]]
        chosen += [(n, 0) for n in order[:k] if c == label]
        losses = [plain_svm(classifiers[c] @ patches[n] + biases[c], t) for n, t in chosen]
        total = total + sum(losses) / len(losses)
    return total / (model.n_outputs if model.subtyping else 1)


@pytest.mark.parametrize("branches", ["single", "multi"])
@pytest.mark.parametrize("subtyping", [False, True])
@pytest.mark.parametrize("k", [2, 16])
def test_the_instance_loss_uses_the_patches_of_highest_and_lowest_attention(
    branches: str, subtyping: bool, k: int
) -> None:
    torch.manual_seed(0)
    model = CLAM(24, 3, branches=branches, subtyping=subtyping, k=k).eval()
    bags, mask = 3 * torch.randn(2, 9, 24), torch.arange(9) < torch.tensor([[7], [9]])
    loss = model.loss(model(bags, mask=mask), torch.tensor([2, 0]))["instance"]
    plain = [plain_instance_loss(model, bags[0, :7], 2), plain_instance_loss(model, bags[1], 0)]
    torch.testing.assert_close(loss, 0.3 * sum(plain) / 2)


def test_the_terms_of_the_loss_have_their_weights() -> None:
    model, labels = CLAM(24, 2, instance_weight=0.1).eval(), torch.tensor([1])
    output = model(torch.randn(1, 9, 24))
    terms = model.loss(output, labels)
    torch.testing.assert_close(terms["bag"], 0.9 * F.cross_entropy(output.logits, labels))
    assert CLAM(24, 2, instance_weight=0.0).loss(output, labels)["instance"] == 0


def test_no_patch_is_both_positive_and_negative_in_the_instance_loss() -> None:
    model = CLAM(24, 2).eval()
    output = model(torch.ones(1, 6, 24))  # equal attention
    margins = output.aux["margins"]
    margins.retain_grad()
    model.loss(output, torch.tensor([1]))["instance"].backward()
    assert margins.grad is not None
    assert margins.grad[0, :, 1].sign().sort().values.tolist() == [-1, -1, -1, 1, 1, 1]


def test_a_bag_of_one_patch_has_no_instance_loss() -> None:
    model = CLAM(24, 2).eval()
    assert model.loss(model(torch.randn(1, 1, 24)), torch.tensor([1]))["instance"] == 0


def test_the_instance_loss_has_no_gradient_in_the_attention() -> None:
    model = CLAM(24, 2)
    model.loss(model(torch.randn(1, 9, 24)), torch.tensor([1]))["instance"].backward()
    assert model.project[0].weight.grad is not None
    assert all(parameter.grad is None for parameter in model.attend.parameters())


def test_logits_are_sums_over_patches() -> None:
    bags = torch.randn(2, 9, 24, dtype=torch.float64)
    for branches in ("single", "multi"):
        model = CLAM(24, 3, branches=branches).double().eval()
        output, patches = model(bags), model.project(bags)
        shares = output.attention[:, None] if branches == "single" else output.class_attention
        each = shares * (model.classify.weight @ patches.mT)  # per class and patch
        expected = each.sum(dim=-1) + model.classify.bias
        torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)


def test_each_class_has_its_own_attention_with_several_branches() -> None:
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    output = CLAM(24, 3)(torch.randn(2, 9, 24), mask=mask)
    assert output.class_attention is not None
    torch.testing.assert_close(output.class_attention.sum(dim=-1), torch.ones(2, 3))
    torch.testing.assert_close(output.class_attention.mean(dim=1), output.attention)
    assert output.class_attention[0, :, 5:].eq(0).all()
    assert CLAM(24, 2)(torch.randn(2, 9, 24)).class_attention is None


def test_scores_are_the_probabilities_of_the_instance_classifiers() -> None:
    model, bag = CLAM(24, 3).eval(), torch.randn(1, 9, 24)
    pairs = model.instance_classifier(model.project(bag)).unflatten(-1, (3, 2))
    torch.testing.assert_close(model(bag).scores, pairs.softmax(dim=-1)[..., 1])


def test_scores_of_padding_are_zero() -> None:
    output = CLAM(24, 2)(torch.randn(1, 9, 24), mask=torch.arange(9)[None] < 5)
    assert output.scores is not None
    assert output.scores[0, 5:].eq(0).all()


@pytest.mark.parametrize(
    "settings", [{"branches": "two"}, {"k": 0}, {"instance_weight": 1.5}, {"instance_weight": -0.1}]
)
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        CLAM(24, 2, **settings)


@pytest.mark.parametrize("branches", ["single", "multi"])
def test_evaluation_in_chunks_has_the_output_and_loss_of_the_whole_bag(branches: str) -> None:
    torch.manual_seed(0)
    model = CLAM(24, 3, dim=16, hidden=8, branches=branches, subtyping=True).double().eval()
    bag, label = torch.randn(1, 2500, 24, dtype=torch.float64), torch.tensor([1])
    whole = model(bag)  # with gradients, a bag is not divided into chunks
    with torch.no_grad():
        chunked = model(bag)
    for name in ("logits", "embedding", "attention", "scores"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name))
    torch.testing.assert_close(chunked.aux, whole.aux)
    torch.testing.assert_close(model.loss(chunked, label), model.loss(whole, label))
