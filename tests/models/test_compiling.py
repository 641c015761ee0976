"""torch.compile: asked for, it changes nothing but the time; what is missing is said."""

from pathlib import Path

import pytest
import torch

from caprmil import bags
from caprmil.batches import Sample
from caprmil.errors import RecipeError, RunError
from caprmil.learner import TrainConfig, fit
from caprmil.models import ABMIL, CAPRMIL
from caprmil.models.compiling import compiled, find_compiler


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"no g\+\+ or clang.* set train.compile = false"):
        find_compiler()
    monkeypatch.setenv("CXX", "mine++")
    with pytest.raises(RecipeError, match=r"no mine\+\+ here"):
        compiled(CAPRMIL(8, 2))


def test_what_torch_cannot_compile_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    def broken(*_: object, **__: object) -> None:
        raise InternalTorchDynamoError("out of luck\nand much more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(RunError, match=r"compile ABMIL \(out of luck\)\. Set train\.compile"):
        compiled(ABMIL(8, 2))(torch.zeros(1, 3, 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_answers_and_learns_as_the_plain_one() -> None:
    torch.manual_seed(0)
    model = CAPRMIL(24, 2, dim=16, heads=2, dropout=0.0)
    ask = compiled(model)
    for size in (5, 40, 300):
        bag = torch.randn(1, size, 24)
        gradients = []
        for way in (model, ask):
            model.zero_grad()
            model.loss(way(bag), torch.tensor([1]))["bag"].backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_compiles_if_asked_and_keeps_the_names_of_the_weights(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(f"s{n}", bags.from_arrays(torch.randn(9 + n, 8, generator=generator).numpy()), n % 2)
        for n in range(6)
    ]
    model = ABMIL(8, 2, dim=8, hidden=4)
    settings = TrainConfig(epochs=2, warmup_epochs=0, compile=True)
    history = fit(model, samples[:4], samples[4:], folder=tmp_path, settings=settings, device="cpu")
    assert len(history) == 2
    assert model.state_dict().keys() == ABMIL(8, 2, dim=8, hidden=4).state_dict().keys()
