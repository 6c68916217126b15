"""The loss in a model's results: wherever a model returns it, a step trains it, or asks which one it is."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.errors import CaptureError, InputError

Results = Callable[[Tensor, Tensor], Any]


@dataclass
class Output:
    logits: Tensor
    total: Tensor


class Named(NamedTuple):
    logits: Tensor
    objective: Tensor


class Inner:
    def __init__(self, cost: Tensor) -> None:
        self.cost = cost


class Net(nn.Module):
    """Returns ``results`` of logits and loss. Dynamo cannot trace a look at the clock: make_fx does."""

    def __init__(self, results: Results, looks_at_the_clock: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.results, self.looks_at_the_clock = results, looks_at_the_clock
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.looks_at_the_clock:
            time.perf_counter()
        logits = self.last(self.first(x).relu())
        return self.results(logits, F.cross_entropy(logits, y))


def loss_alone(logits: Tensor, loss: Tensor) -> Tensor:
    return loss


def two_numbers(logits: Tensor, loss: Tensor) -> Any:
    return {"parts": [loss, logits.square().mean()], "logits": logits}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))


def compiled(model: nn.Module, **options: Any) -> pipec.Pipeline:
    return pipec.compile(model, **{"devices": 2, "microbatches": 4, "check": "off", **options})


def require_gradients(model: nn.Module, loss: Tensor, eager: nn.Module) -> None:
    loss.backward()
    for (fqn, own), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, msg=fqn)


FOUND: dict[str, Results] = {
    "logits, loss": lambda logits, loss: (logits, loss),
    "list": lambda logits, loss: [loss, logits],
    "another key": lambda logits, loss: {"logits": logits, "total_loss": loss},
    "loss among others": lambda logits, loss: {"loss": loss, "penalty": logits.square().mean()},
    "loss is None": lambda logits, loss: {"loss": None, "objective": loss},
    "dataclass": Output,
    "named tuple": Named,
    "nested": lambda logits, loss: (logits, (loss, {"choice": logits.argmax(1)})),
    "inner object": lambda logits, loss: (logits, Inner(loss)),
    "one requires grad": lambda logits, loss: (loss, {"accuracy": logits[:, 0].detach().mean()}),
    "of shape [1], alone": lambda logits, loss: loss.reshape(1),
    "with None and a number": lambda logits, loss: (None, 0.5, loss),
}
OF_MAKE_FX = ("loss among others", "dataclass", "nested")


@pytest.mark.parametrize(
    ("name", "by_make_fx"), [*((name, False) for name in FOUND), *((name, True) for name in OF_MAKE_FX)]
)
def test_the_one_number_that_requires_a_gradient_is_the_loss(name: str, by_make_fx: bool) -> None:
    model, eager, (x, y) = Net(FOUND[name], by_make_fx), Net(loss_alone), batch()
    pipe, loss = compiled(model), eager(x, y)
    torch.testing.assert_close(pipe.step(x, y), loss.detach())
    require_gradients(model, loss, eager)
    if name == "logits, loss":
        torch.testing.assert_close(pipe.eval_step(x, y), loss.detach())


def test_several_numbers_are_a_question_that_loss_fn_answers() -> None:
    model, eager, (x, y) = Net(two_numbers), Net(two_numbers), batch()
    with pytest.raises(InputError, match=r"output\['parts'\]\[1\].*loss_fn=\('parts', 0"):
        compiled(copy.deepcopy(model)).step(x, y)
    loss, results = compiled(model, loss_fn=("parts", 1)).step(x, y, outputs=True)
    assert torch.equal(loss, results["parts"][1])
    require_gradients(model, eager(x, y)["parts"][1], eager)


@pytest.mark.parametrize(
    ("results", "loss_fn", "keyword"),
    [
        (two_numbers, "total", "where the model returns nothing"),
        (two_numbers, ("parts", 7), r"where the model returns nothing.*\['parts'\]\[0\]"),
        (two_numbers, "logits", r"one floating-point number, but .* of shape \[b, 5\]"),
        (lambda logits, loss: (logits, logits.square()), None, "the model returns no loss"),
        (lambda logits, loss: {}, None, "the model returns no loss"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(results: Results, loss_fn: Any, keyword: str) -> None:
    with pytest.raises(InputError, match=keyword):
        compiled(Net(results), loss_fn=loss_fn).step(*batch())


@pytest.mark.parametrize("name", ["another key", "named tuple"])
def test_a_module_returns_the_output_with_its_loss(name: str) -> None:
    model, eager, (x, y) = Net(FOUND[name]), Net(loss_alone), batch()
    results = compiled(model).as_module(outputs=True)(x, y)
    assert type(results) is type(Net(FOUND[name])(x, y))
    (2 * (results["total_loss"] if isinstance(results, dict) else results.objective)).backward()
    require_gradients(model, 2 * eager(x, y), eager)


def test_a_module_that_returns_the_loss_alone_says_so_when_it_is_unpacked() -> None:
    module = compiled(Net(FOUND["logits, loss"])).as_module()
    with pytest.raises(InputError, match="outputs=True"):
        _, _ = module(*batch())
    with pytest.raises(InputError, match="outputs=True"):
        _ = module(*batch())[1]


def raising(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("expected three classes")


class Loss(nn.Module):
    def forward(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (lambda output, y: F.cross_entropy(output, y.view(4, 4)), r"view\(4, 4\).* is invalid"),
        (raising, r"at test_model_losses.py:\d+: raise ValueError.*ValueError: expected three classes"),
        (lambda output: output.sum(), r"TypeError: .*takes 1 positional argument"),
        (Loss(), r"at test_model_losses.py:\d+: .*output\[\"logits\"\].*IndexError"),
    ],
    ids=["shape", "raise", "arguments", "module"],
)
def test_a_failing_loss_function_is_named_with_its_line(loss_fn: Callable[..., Any], error: str) -> None:
    x, y = batch()
    pipe = compiled(nn.Linear(6, 5).double(), loss_fn=loss_fn)
    with pytest.raises(InputError, match=rf"(?s)^loss_fn fails on these arguments.*{error}.*loss_fn expects"):
        pipe.step(x, target=y)


def test_a_loss_function_that_needs_values_is_named_with_its_line() -> None:
    x, y = batch()
    pipe = compiled(nn.Linear(6, 5).double(), loss_fn=lambda output, y: F.cross_entropy(output, y).item())
    with pytest.raises(CaptureError, match=r"(?s)^loss_fn cannot be captured.*at .*\.item\(\)"):
        pipe.step(x, target=y)


class TaskWeight(nn.Module):
    """A loss that is weighted by a learned number, which is added to it so that it stays small."""

    def __init__(self, penalty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.weight, self.penalty = nn.Parameter(torch.tensor(0.7)), penalty
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.last(torch.tanh(self.first(x))), y)
        return torch.exp(-self.weight) * loss + self.penalty(self.weight)


@pytest.mark.parametrize(
    ("penalty", "layout"),
    [
        (lambda weight: weight, {"devices": 4, "replicas": 2, "schedule": "zb-h1"}),
        (lambda weight: weight + weight**2, {}),
        (lambda weight: weight.view(1).sum(), {}),
    ],
)
def test_a_parameter_may_be_a_term_of_the_loss(
    penalty: Callable[[Tensor], Tensor], layout: dict[str, Any]
) -> None:
    model, eager, (x, y) = TaskWeight(penalty), TaskWeight(penalty), batch()
    loss = eager(x, y)
    torch.testing.assert_close(compiled(model, **layout).step(x, y), loss.detach())
    require_gradients(model, loss, eager)
