"""torch.compile changes only the time, and errors name what is missing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from caprmil.errors import RecipeError, RunError
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


def test_a_model_that_torch_cannot_compile_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    def broken(*_: object, **__: object) -> None:
        raise InternalTorchDynamoError("out of luck\nand much more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(RunError, match=r"compile ABMIL \(out of luck\)\. Set train\.compile"):
        compiled(ABMIL(8, 2))(torch.zeros(1, 3, 8))


def run_in_new_process(code: str) -> None:
    """Run code in a process without shape checks, which torch cannot compile."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", dedent(code)], check=True)


@pytest.mark.slow
def test_a_compiled_model_has_the_gradients_of_the_plain_one() -> None:
    run_in_new_process("""
        import torch
        from caprmil.models import CAPRMIL
        from caprmil.models.compiling import compiled

        # The code generator of torch takes half a minute for this model, and is tested by torch.
        compile = torch.compile
        torch.compile = lambda *a, **k: compile(*a, **k, backend="aot_eager")
        torch.manual_seed(0)
        model = CAPRMIL(24, 2, dim=16, heads=2, dropout=0.0)
        fast = compiled(model)
        for size in (5, 40, 300):
            bag, gradients = torch.randn(1, size, 24), []
            for forward in (model, fast):
                model.zero_grad()
                model.loss(forward(bag), torch.tensor([1]))["bag"].backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    """)


@pytest.mark.slow
def test_a_linear_layer_is_compiled_as_one_graph() -> None:
    run_in_new_process("""
        import torch
        from caprmil.models.products import Linear

        layer, values = Linear(64, 64), torch.randn(64, 64)
        fast = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(fast(values), layer(values))
    """)


def test_training_compiles_on_request_and_keeps_the_names_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caprmil.features import bags
    from caprmil.features.batches import Sample
    from caprmil.targets import Classification
    from caprmil.training.module import TrainConfig, fit

    calls = []

    def compile_nothing(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            calls.append(keywords)
            return forward(*arguments, **keywords)

        return run

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr("caprmil.models.compiling.find_compiler", lambda: "c++")
    arrays = [torch.randn(9 + n, 8).numpy() for n in range(6)]
    samples = [Sample(f"s{n}", bags.from_arrays(a), n % 2) for n, a in enumerate(arrays)]
    model = ABMIL(8, 2, dim=8, hidden=4)
    names = model.state_dict().keys()
    rows = fit(
        model,
        samples[:4],
        samples[4:],
        folder=tmp_path,
        settings=TrainConfig(epochs=2, warmup_epochs=0, compile=True),
        device="cpu",
        target=Classification(classes=("no", "yes")),
    )
    assert len(rows) == 2
    assert len(calls) >= 2 * 4
    assert model.state_dict().keys() == names
