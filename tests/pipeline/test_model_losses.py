"""The loss of a step: wherever a model returns it, and as the result of a module, with a backward."""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair
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
    """Returns ``results`` of logits and loss."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.results, self.config = results, {"hidden_size": 8}
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.last(self.first(x).relu())
        return self.results(logits, F.cross_entropy(logits, y))


def loss_alone(logits: Tensor, loss: Tensor) -> Tensor:
    return loss


def two_numbers(logits: Tensor, loss: Tensor) -> Any:
    return {"parts": [loss, logits.square().mean()], "logits": logits}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))


OPTIONS: dict[str, Any] = {"microbatches": 4, "check": "off"}


def compiled(model: nn.Module, **options: Any) -> pipec.Pipeline:
    return pipec.compile(model, **{"devices": 2, **OPTIONS, **options})


def pair_of(results: Results, expected: Results = loss_alone, **options: Any) -> Pair:
    """A pipeline of a model with these results. The unsplit model returns its loss alone."""
    pair = Pair(Net(results), **OPTIONS, **options)
    pair.unsplit.results, pair.loss_fn = expected, None
    return pair


FOUND: dict[str, Results] = {
    "dict": lambda logits, loss: {"logits": logits, "loss": loss},
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


def at_some_time(results: Results) -> Results:
    """Dynamo cannot trace a look at the clock: make_fx does."""
    return lambda logits, loss: (time.perf_counter(), results(logits, loss))[1]


FOUND |= {
    f"{name}, by make_fx": at_some_time(FOUND[name]) for name in ("loss among others", "dataclass", "nested")
}


@pytest.mark.parametrize("name", FOUND)
def test_the_one_number_that_requires_a_gradient_is_the_loss(name: str) -> None:
    pair = pair_of(FOUND[name])
    pair.step(*batch())
    if name == "logits, loss":
        pair.evaluate(*batch())


def test_several_numbers_are_a_question_that_loss_fn_answers() -> None:
    x, y = batch()
    with pytest.raises(InputError, match=r"output\['parts'\]\[1\].*loss_fn=\('parts', 0"):
        compiled(Net(two_numbers)).step(x, y)
    pair = pair_of(two_numbers, lambda logits, loss: logits.square().mean(), loss_fn=("parts", 1))
    pair.step(x, y)
    loss, results = pair.pipe.step(x, y, outputs=True)
    assert torch.equal(loss, results["parts"][1])


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


def raising(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("expected three classes")


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (lambda output, y: F.cross_entropy(output, y.view(4, 4)), r"fails on .*view\(4, 4\).* is invalid"),
        (raising, r"fails on .*at test_model_losses.py:\d+: raise.*ValueError: expected three classes"),
        (lambda output: output.sum(), r"fails on .*TypeError: .*takes 1 positional argument"),
        (lambda output, y: F.cross_entropy(output, y).item(), r"cannot be captured.*at .*\.item\(\)"),
    ],
)
def test_a_failing_loss_function_is_named_with_its_line(loss_fn: Callable[..., Any], error: str) -> None:
    x, y = batch()
    with pytest.raises((InputError, CaptureError), match=rf"(?s)^loss_fn {error}"):
        compiled(nn.Linear(6, 5).double(), loss_fn=loss_fn).step(x, target=y)


class TaskWeight(Net):
    """A loss that is weighted by a learned number, which is added to it so that it stays small."""

    def __init__(self, penalty: Callable[[Tensor], Tensor]) -> None:
        super().__init__(loss_alone)
        self.weight, self.penalty = nn.Parameter(torch.tensor(0.7, dtype=torch.float64)), penalty

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-self.weight) * super().forward(x, y) + self.penalty(self.weight)


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
    Pair(TaskWeight(penalty), **OPTIONS, **layout).step(*batch())


# the loss of a module


@pytest.mark.parametrize("options", [{"replicas": 2}, {"on_nan": "skip"}])
def test_losses_of_several_models_and_a_weight_have_one_backward(options: dict[str, object]) -> None:
    pairs = [pair_of(loss_alone, **options) for _ in range(2)]
    modules, plain = [each.pipe.as_module() for each in pairs], [each.unsplit for each in pairs]
    weights = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2)]
    x, y = batch()
    for _ in range(2):
        for weight, (first, second) in zip(weights, (modules, plain), strict=True):
            found = [module(k * x, y) for k, module in enumerate([first, first, second])]
            (found[0] * weight + 3 * found[1] + found[2].square()).backward()
    for each in pairs:
        each.check_gradients()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


def test_the_loss_alone_is_where_a_loop_looks_for_it() -> None:
    x, y = batch()
    out, expected = compiled(Net(FOUND["dict"])).as_module()(x, y), Net(FOUND["dict"])(x, y)["loss"]
    assert out.loss is out["loss"] is out[0] is out
    assert f"{out:.6f}" == f"{expected.item():.6f}"
    assert repr(out.detach()) == repr(expected.detach())
    reads = (attrgetter("logits"), itemgetter("logits"), itemgetter(1), tuple)
    for read, error in zip(reads, (AttributeError, KeyError, InputError, InputError), strict=True):
        with pytest.raises(error, match=r"as_module\(outputs=True\)"):
            read(out)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("another key", itemgetter("total_loss", "logits")),
        ("named tuple", attrgetter("objective", "logits")),
    ],
)
def test_a_module_returns_the_output_with_its_loss(name: str, read: Callable[[Any], Any]) -> None:
    """A loss that the script makes of the output has a backward that explains itself."""
    pair, (x, y) = Pair(Net(FOUND[name]), **OPTIONS), batch()
    module = pair.pipe.as_module(outputs=True)
    results, expected = module(x, y), pair.unsplit(x, y)
    assert type(results) is type(expected)
    loss, logits = read(results)
    torch.testing.assert_close(logits.detach(), read(expected)[1].detach())
    with pytest.raises(InputError, match=r"outside of the pipeline.*differentiable"):
        (loss + logits.square().mean()).backward()
    module.zero_grad()
    for each in (module(x, y), expected):
        (2 * read(each)[0]).backward()
    pair.check_gradients()


def test_evaluation_is_the_forward_with_loss_and_outputs() -> None:
    module, plain, (x, y) = compiled(Net(FOUND["dict"])).as_module(), Net(FOUND["dict"]), batch()
    with torch.no_grad():
        found, expected = module(x, y), plain(x, y)
    for name in ("loss", "logits"):
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], expected[name])
    module.eval()
    assert not module.training
    assert not module.first.training
    with pytest.raises(InputError, match=r"evaluation mode.*module\.train\(\)"):
        module(x, y)["loss"].backward()


@pytest.fixture(scope="module")
def pipe() -> pipec.Pipeline:
    pipe = compiled(Net(loss_alone))
    pipe.step(*batch())
    pipe.zero_grad()
    return pipe


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda loss: torch.amp.GradScaler("cpu").scale(loss / 2), 'precision="fp16-mixed"'),
        (lambda loss: (loss.backward(retain_graph=True), loss.backward()), "again on the loss of one step"),
        (lambda loss: loss.backward(create_graph=True), "create_graph=True"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_cannot_be_right_is_refused_by_name(
    pipe: pipec.Pipeline, attempt: Callable[[Tensor], object], message: str
) -> None:
    loss = pipe.as_module()(*batch())
    with pytest.raises(InputError, match=message):
        attempt(loss)


def test_inputs_that_require_a_gradient_are_refused_once_compiled_too(pipe: pipec.Pipeline) -> None:
    pipe.zero_grad()
    x, y = batch()
    for call in (pipe.as_module(), pipe.step):
        with pytest.raises(InputError, match=r"args\[0\] requires a gradient"):
            call(x.requires_grad_(), y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_loop_finds_the_model_behind_it() -> None:
    model = TaskWeight(lambda weight: weight)
    model.register_buffer("shift", torch.zeros(3), persistent=False)
    module = compiled(model).as_module()
    assert module.config is model.config
    assert list(inspect.signature(module.forward).parameters) == ["x", "y"]
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such
    around, names = nn.Sequential(module), [f"0.{name}" for name, _ in model.named_parameters()]
    assert dict(around.named_modules())["0.first"] is model.first
    assert [name for name, _ in around.named_parameters()] == names
    assert [name for name, _ in around.named_buffers()] == ["0.shift"]
    assert {*around.state_dict()} == {*names}
    module(*batch()).backward()
    assert model.weight.grad is not None
    around.float()
    assert all(one is other for one, other in zip(around.parameters(), model.parameters(), strict=True))
    assert model.weight.dtype == torch.float32
    around.load_state_dict({name: torch.zeros_like(each) for name, each in around.state_dict().items()})
    assert not any(parameter.any() for parameter in model.parameters())
