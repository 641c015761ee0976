"""The loss on the top patches, and the centred initialisation of CAPRMIL: only training differs."""

import numpy as np
import pytest
import torch

from caprmil.models import create
from caprmil.models.context import SPREAD, ContextStack
from caprmil.models.pooling import top_means

SIZES = (5, 40, 17)


def test_top_means_are_those_of_a_sorted_list() -> None:
    rng = np.random.default_rng(0)
    mask = torch.arange(40) < torch.tensor(SIZES)[:, None]
    logits = torch.from_numpy(rng.normal(size=(3, 40, 2)))
    found = top_means(logits, mask, 8)
    for bag, size in enumerate(SIZES):
        for output in range(2):
            values = sorted(logits[bag, :size, output].tolist(), reverse=True)[:8]
            assert found[bag, output].item() == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("pool", ["mean", "attention", "gated"])
def test_packed_padded_and_single_bags_have_the_same_top_loss(pool: str) -> None:
    torch.manual_seed(0)
    model = create(f"caprmil+{pool}", 12, 3, dim=16, heads=2, dropout=0.0).train()
    for layer in model.modules():
        if hasattr(layer, "p"):
            layer.p = 0.0
    model.top_k = 6
    bags = [torch.randn(size, 12) for size in SIZES]
    labels = torch.tensor([0, 2, 1])
    padded = torch.nn.utils.rnn.pad_sequence(bags, batch_first=True)
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    packed = model.loss(model(torch.cat(bags)[None], sizes=SIZES), labels)
    with_padding = model.loss(model(padded, mask=mask), labels)
    single = [
        model.loss(model(bag[None]), label[None]) for bag, label in zip(bags, labels, strict=True)
    ]
    assert set(packed) == {"bag", "top"}
    for name, term in packed.items():
        torch.testing.assert_close(term, with_padding[name])
        torch.testing.assert_close(term, torch.stack([each[name] for each in single]).mean())


def test_evaluation_has_no_top_loss_and_the_same_logits() -> None:
    torch.manual_seed(0)
    model = create("caprmil", 12, 2, dim=16, heads=2).eval()
    features = torch.randn(1, 30, 12)
    before = model(features)
    model.top_k = 5
    after = model(features)
    assert torch.equal(before.logits, after.logits)
    assert set(model.loss(after, torch.tensor([1]))) == {"bag"}


def test_centred_initialisation_subtracts_the_mean_of_the_slide() -> None:
    torch.manual_seed(0)
    settings = {"heads": 4, "tokens": 3, "mlp_ratio": 2, "learn_temperature": True}
    stack = ContextStack(12, dim=16, depth=2, dropout=0.0, init="centred", **settings)
    block = stack.blocks[0]
    torch.nn.init.zeros_(block.attend.cluster.weight)  # every token is the mean of all patches
    torch.nn.init.zeros_(block.attend.cluster.bias)
    patches = block.norm_attend(stack.project(3 + torch.randn(1, 50, 12)))
    context, _ = block.attend(patches, torch.ones(1, 50, dtype=torch.bool))
    expected = -SPREAD * patches.mean(dim=1, keepdim=True).expand_as(patches)
    torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-5)


def test_centred_initialisation_has_the_parameters_of_the_usual_one() -> None:
    usual, centred = (
        create("caprmil", 12, 2, dim=16, heads=2, init=i) for i in ("usual", "centred")
    )
    centred.load_state_dict(usual.state_dict())
    features = torch.randn(1, 30, 12)
    assert torch.equal(usual.eval()(features).logits, centred.eval()(features).logits)


def test_an_unknown_initialisation_is_refused() -> None:
    with pytest.raises(ValueError, match="init is usual or centred, not 'random'"):
        ContextStack(12, dim=16, depth=1, dropout=0.0, init="random")
