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
from pipec.errors import InputError


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
    def __init__(self, results: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 5)
        self.results = results

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.last(self.first(x).relu())
        return self.results(logits, F.cross_entropy(logits, y))


class Untraceable(Net):
    """Dynamo cannot trace it, so that make_fx does."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        time.perf_counter()
        return super().forward(x, y)


def accuracy(logits: Tensor) -> Tensor:
    return logits.softmax(1)[:, 0].detach().mean()


FOUND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logits, loss": lambda logits, loss: (logits, loss),
    "loss, logits": lambda logits, loss: (loss, logits),
    "list": lambda logits, loss: [logits, loss],
    "loss in a tuple": lambda logits, loss: (loss,),
    "another key": lambda logits, loss: {"logits": logits, "total_loss": loss},
    "loss among others": lambda logits, loss: {"loss": loss, "penalty": logits.square().mean()},
    "loss is None": lambda logits, loss: {"loss": None, "objective": loss},
    "dataclass": Output,
    "named tuple": Named,
    "nested": lambda logits, loss: (logits, (loss, {"choice": logits.argmax(1)})),
    "inner object": lambda logits, loss: (logits, Inner(loss)),
    "one requires grad": lambda logits, loss: (loss, {"accuracy": accuracy(logits)}),
    "of shape [1]": lambda logits, loss: (logits, loss.reshape(1)),
    "of shape [1], alone": lambda logits, loss: loss.reshape(1),
    "with None and a number": lambda logits, loss: (None, 0.5, loss),
}


def loss_in(results: Any) -> Tensor:
    """The one number that requires a gradient, or that under "loss"."""
    if isinstance(results, Tensor):
        return results.sum()
    if isinstance(results, dict) and results.get("loss") is not None:
        return results["loss"]
    if isinstance(results, tuple | list):
        values = [*results]
    else:
        values = [*(results if isinstance(results, dict) else vars(results)).values()]
    inner = [x for x in values if not isinstance(x, Tensor | float) and x is not None]
    numbers = [x for x in values if isinstance(x, Tensor) and x.requires_grad and x.numel() == 1]
    return numbers[0].sum() if numbers else loss_in(inner[0])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))


@pytest.mark.parametrize("kind", [Net, Untraceable], ids=["dynamo", "make_fx"])
@pytest.mark.parametrize("name", FOUND)
def test_the_one_number_that_requires_a_gradient_is_the_loss(name: str, kind: type[Net]) -> None:
    torch.manual_seed(0)
    model = kind(FOUND[name]).double()
    eager, pipe = copy.deepcopy(model), pipec.compile(model, devices=2, microbatches=4)
    x, y = batch()
    loss = loss_in(eager(x, y))
    loss.backward()
    assert torch.allclose(pipe.step(x, y), loss.detach(), rtol=1e-12)
    assert torch.allclose(pipe.eval_step(x, y), loss.detach(), rtol=1e-12)
    for parameter, expected in zip(pipe.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-10)
    assert torch.allclose(pipe.step(*batch()), loss_in(eager(*batch())), rtol=1)


def two_numbers(logits: Tensor, loss: Tensor) -> Any:
    return {"parts": [loss, logits.square().mean()], "logits": logits}


def test_several_numbers_are_a_question_that_loss_fn_answers() -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(two_numbers).double(), batch()
    with pytest.raises(
        InputError, match=r"output\['parts'\]\[0\], output\['parts'\]\[1\].*loss_fn=\('parts', 0"
    ):
        pipec.compile(copy.deepcopy(model), devices=2, microbatches=4).step(x, y)
    eager = copy.deepcopy(model)
    eager(x, y)["parts"][1].backward()
    pipe = pipec.compile(model, devices=2, microbatches=4, loss_fn=("parts", 1))
    loss, results = pipe.step(x, y, outputs=True)
    assert torch.equal(loss, results["parts"][1])
    for parameter, expected in zip(pipe.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-10)


@pytest.mark.parametrize("key", ["total", 3, ("parts", 7), ("parts", "a")])
def test_a_loss_fn_that_names_nothing_is_refused(key: Any) -> None:
    pipe = pipec.compile(Net(two_numbers).double(), devices=2, microbatches=4, loss_fn=key)
    with pytest.raises(InputError, match=r"loss_fn is .*, where the model returns nothing.*\['parts'\]\[0\]"):
        pipe.step(*batch())


def test_a_loss_fn_that_names_another_result_is_refused() -> None:
    pipe = pipec.compile(Net(two_numbers).double(), devices=2, microbatches=4, loss_fn="logits")
    with pytest.raises(InputError, match=r"one floating-point number, but .* of shape \[b, 5\]"):
        pipe.step(*batch())


@pytest.mark.parametrize("results", [lambda logits, loss: (logits, logits.square()), lambda logits, loss: {}])
def test_no_number_is_no_loss(results: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(InputError, match="the model returns no loss"):
        pipec.compile(Net(results).double(), devices=2, microbatches=4).step(*batch())


@pytest.mark.parametrize("name", ["logits, loss", "list", "another key", "named tuple"])
def test_a_module_returns_the_output_with_its_loss(name: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = Net(FOUND[name]).double(), batch()
    eager, pipe = copy.deepcopy(model), pipec.compile(model, devices=2, microbatches=4)
    loss_in(eager(x, y)).backward()
    results = pipe.as_module(outputs=True)(x, y)
    assert type(results) is type(eager(x, y))
    (loss_in(results) * 2).backward()
    for parameter, expected in zip(pipe.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(parameter.grad, 2 * expected.grad, rtol=1e-10)


def test_a_module_that_returns_the_loss_alone_says_so_when_it_is_unpacked() -> None:
    module = pipec.compile(Net(FOUND["logits, loss"]).double(), devices=2, microbatches=4).as_module()
    with pytest.raises(InputError, match="outputs=True"):
        _, _ = module(*batch())
    with pytest.raises(InputError, match="outputs=True"):
        _ = module(*batch())[1]


def of_logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def of_another_shape(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.view(4, 4))


def raising(output: Tensor, target: Tensor) -> Tensor:
    if output.shape[1] != 3:
        raise ValueError("expected three classes")
    return output.sum()


def of_a_dict(output: Tensor, target: Any) -> Tensor:
    return F.cross_entropy(output, target["labels"])


def of_one_argument(output: Tensor) -> Tensor:
    return output.sum()


class Loss(nn.Module):
    def forward(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (of_logits, r"at test_model_losses.py:\d+: return .*output.logits.*'Tensor' object has no attribute"),
        (of_another_shape, r"at test_model_losses.py:\d+: return .*view\(4, 4\).* is invalid"),
        (raising, r"at test_model_losses.py:\d+: raise ValueError.*ValueError: expected three classes"),
        (of_a_dict, r"at test_model_losses.py:\d+: .*target\[\"labels\"\].*IndexError"),
        (of_one_argument, r"TypeError: of_one_argument\(\) takes 1 positional argument"),
        (Loss(), r"at test_model_losses.py:\d+: .*output\[\"logits\"\].*IndexError"),
    ],
    ids=["attribute", "shape", "raise", "dict", "arguments", "module"],
)
def test_a_failing_loss_function_is_named_with_its_line(loss_fn: Callable[..., Any], error: str) -> None:
    x, y = batch()
    pipe = pipec.compile(nn.Linear(6, 5).double(), devices=2, microbatches=4, loss_fn=loss_fn)
    with pytest.raises(InputError, match=rf"(?s)^loss_fn fails on these arguments.*{error}.*loss_fn expects"):
        pipe.step(x, target=y)


def test_a_loss_function_that_needs_values_is_named_with_its_line() -> None:
    x, y = batch()
    pipe = pipec.compile(
        nn.Linear(6, 5).double(), devices=1, loss_fn=lambda output, y: F.cross_entropy(output, y).item()
    )
    with pytest.raises(pipec.CaptureError, match=r"(?s)^loss_fn cannot be captured.*at .*\.item\(\)"):
        pipe.step(x, target=y)


# parameters that are added to the loss


class TaskWeight(nn.Module):
    """A loss that is weighted by a learned number, which is added to it so that it stays small."""

    def __init__(self, penalty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.weight, self.penalty = nn.Parameter(torch.tensor(0.7)), penalty

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.last(torch.tanh(self.first(x))), y)
        return torch.exp(-self.weight) * loss + self.penalty(self.weight)


@pytest.mark.parametrize("layout", [{"devices": 2}, {"devices": 4, "replicas": 2, "schedule": "zb-h1"}])
@pytest.mark.parametrize(
    "penalty", [lambda weight: weight, lambda weight: weight + weight**2, lambda weight: weight.view(1).sum()]
)
def test_a_parameter_may_be_a_term_of_the_loss(
    penalty: Callable[[Tensor], Tensor], layout: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = TaskWeight(penalty).double()
    eager, pipe = copy.deepcopy(model), pipec.compile(model, microbatches=4, **layout)
    x, y = batch()
    loss = eager(x, y)
    loss.backward()
    torch.testing.assert_close(pipe.step(x, y), loss.detach())
    for (fqn, own), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, msg=fqn)
