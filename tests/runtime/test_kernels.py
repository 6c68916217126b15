"""Stages whose functions torch compiles, against the same ones as their source."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.errors import InputError
from pipec.runtime.stages import kernels

pytestmark = pytest.mark.slow

ROWS = [12, 12, 7]


class Model(nn.Module):
    """It draws by ``native_dropout`` and by another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    @classmethod
    def seeded(cls) -> "Model":
        torch.manual_seed(0)
        return cls()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        x = nn.functional.dropout(self.last(x), 0.1, self.training)
        return x * torch.bernoulli(x.sigmoid())


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(
    model: nn.Module, kernels: str, rows: list[int], devices: int = 2
) -> tuple[list[Tensor], nn.Module]:
    """The losses of steps of so many rows each; gradients add up over all of them."""
    model = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=devices, loss_fn=mean_square, microbatches=3, kernels=kernels)
    torch.manual_seed(1)
    batches = [(torch.randn(count, 8), torch.randn(count, 1)) for count in rows]
    return [pipe.step(x, target=target) for x, target in batches], model


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let a stage's functions be compiled by another backend, which keeps the source's bits or fails."""
    monkeypatch.setattr(kernels, "compile_graph", backend)


aot_eager = torch._dynamo.lookup_backend("aot_eager")


def refuse(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise RuntimeError("there is no C++ compiler\nand more lines")


@pytest.fixture(scope="module")
def expected() -> tuple[list[Tensor], nn.Module]:
    return train(Model.seeded(), "source", ROWS)


def test_compiled_functions_have_the_bits_of_their_source_where_their_kernels_have(
    monkeypatch: pytest.MonkeyPatch,
    expected: tuple[list[Tensor], nn.Module],
    recwarn: pytest.WarningsRecorder,
) -> None:
    use_backend(monkeypatch, aot_eager)
    losses, compiled = train(Model.seeded(), "inductor", ROWS)
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    for own, other in zip(compiled.parameters(), expected[1].parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    for own, other in zip(compiled.buffers(), expected[1].buffers(), strict=True):
        assert torch.equal(own, other)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


def test_what_cannot_be_compiled_runs_as_its_source_and_says_why(
    monkeypatch: pytest.MonkeyPatch, expected: tuple[list[Tensor], nn.Module]
) -> None:
    use_backend(monkeypatch, refuse)
    with pytest.warns(UserWarning, match="torch.compile cannot compile") as warned:
        losses, _ = train(Model.seeded(), "inductor", ROWS)
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    told = [text for text in (str(each.message) for each in warned) if "torch.compile cannot" in text]
    named = Counter(text.split(",")[0].split("cannot compile ")[1] for text in told)
    assert named.keys() == {
        f"{phase} of stage_{stage}" for phase in ("forward", "backward") for stage in (0, 1)
    }
    assert {*named.values()} == {2}  # once in the steps of equal microbatches, and once in the others
    assert all("there is no C++ compiler" in text and "\n" not in text for text in told)


def test_inductor(recwarn: pytest.WarningsRecorder) -> None:
    own, other = ([*train(Model.seeded(), kernels, [6], devices=1)] for kernels in ("inductor", "source"))
    torch.testing.assert_close(own[0], other[0])
    torch.testing.assert_close(own[1].first.weight.grad, other[1].first.weight.grad)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


def test_a_name_that_is_no_kind_of_kernels_is_refused() -> None:
    with pytest.raises(InputError, match="kernels is 'triton'; expected one of 'source', 'inductor'"):
        pipec.compile(nn.Linear(2, 2), devices=1, kernels="triton")
