"""What capture refuses, and why: the line of the model, what was expected, and a remedy."""

import inspect
import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from awkward_modules import SIZES, WIDTH, Between, Branch, batch
from torch import Tensor, nn

import pipec
from pipec.errors import CaptureError, InputError


def step(model: nn.Module, loss_fn: Callable[..., Any] = nn.functional.mse_loss, **arguments: Any) -> Tensor:
    pipe = pipec.compile(model, 2, loss_fn=loss_fn, microbatches=len(SIZES))
    inputs = {**batch(), **arguments}
    return pipe.step(inputs.pop("x"), **inputs)


# what cannot be captured


class Number(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class BackwardHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Dispatching(nn.Module):
    """As a mixture of experts that calls those that some token has chosen. Traced by Dynamo, it fails."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise TypeError("no mask")
        for expert in (x.sum((0, 1)) > 0).nonzero():
            x = x * f"{expert}".count("0")
        return x


REFUSED = [
    (
        Packed,
        "packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)",
        "the layer with the padded sequences",
    ),
    (Dispatching, "for expert in (x.sum((0, 1)) > 0).nonzero():", "size decides what is computed"),
    (Branch, "if x.sum() > 0:", "torch.where"),
    (Number, "return x * x.max().item()", "Keep it a tensor"),
    (BackwardHook, "return self.layer(x)", "with Tensor.register_hook: there it is captured"),
]


@pytest.fixture
def torch_logs(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What torch writes to the terminal through its own loggers, which do not propagate to the root."""
    logger = logging.getLogger("torch")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.name.startswith("torch")]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("make", "line", "remedy"), REFUSED, ids=[make.__name__ for make, *_ in REFUSED])
def test_what_cannot_be_captured_names_the_line_and_a_remedy(
    make: type[nn.Module],
    line: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    torch_logs: Callable[[], list[str]],
) -> None:
    """And torch's own advice about it stays off the terminal."""
    with pytest.raises(CaptureError) as caught:
        step(Between(make))
    message = str(caught.value)
    assert f"  at {place(make, line)}: {line}\n" in message
    assert remedy in message
    assert "/" not in message.split("Other ways")[0]
    assert (capsys.readouterr(), torch_logs()) == (("", ""), [])


def test_a_line_without_source_is_named_by_its_place_alone() -> None:
    """As in an interactive session."""
    typed: dict[str, Any] = {}
    exec(compile("def loss_fn(y, t):\n    return y.sum() * t.max().item()", "<typed>", "exec"), typed)
    with pytest.raises(CaptureError, match=r"at <typed>:2\n"):
        step(nn.Linear(WIDTH, WIDTH), typed["loss_fn"])


class HookedInside(nn.Module):
    """It registers a hook on its weight at every call."""

    def __init__(self, register: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register = register

    def forward(self, x: Tensor) -> Tensor:
        self.register(self.weight)
        return x * self.weight


def on_gradient(weight: Tensor) -> None:
    weight.register_hook(lambda gradient: 2 * gradient)


def on_accumulation(weight: Tensor) -> None:
    weight.register_post_accumulate_grad_hook(lambda weight: None)


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (on_gradient, "weight.register_hook(lambda gradient: 2 * gradient)"),
        (on_accumulation, "weight.register_post_accumulate_grad_hook(lambda weight: None)"),
    ],
)
def test_hooks_that_forward_registers_on_leaves_are_refused(
    register: Callable[[Tensor], object], message: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        step(Between(partial(HookedInside, register)))
    assert message in str(caught.value)


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        square = x.transpose(1, 2) @ x + torch.eye(WIDTH)
        return x @ torch.linalg.inv(square)


class CheckedInverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        square = x.transpose(1, 2) @ x + torch.eye(WIDTH)
        return x @ torch.linalg.inv_ex(square).inverse


@pytest.mark.slow
def test_operators_that_check_values_are_refused_and_their_others_are_not() -> None:
    with pytest.raises(CaptureError, match="with_effects") as caught:
        step(Between(Inverse))
    line = "return x @ torch.linalg.inv(square)"
    assert f"at {place(Inverse, line)}: {line}\n" in str(caught.value)
    assert "inv_ex" in str(caught.value)
    assert step(Between(CheckedInverse)).isfinite()


class LayerDrop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x
        return x.tanh()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.uniform(1, 2))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.rand(WIDTH)).float()


class OwnGenerator(nn.Module):
    def __init__(self, kind: Callable[[int], Any]) -> None:
        super().__init__()
        self.generator = kind(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.generator.random()


@pytest.mark.parametrize(
    ("make", "generator"),
    [
        (LayerDrop, "Python's random module"),
        (Scaled, "numpy's random module"),
        (Noise, "numpy's random module"),
        (partial(OwnGenerator, random.Random), "model.awkward.generator"),
        (partial(OwnGenerator, np.random.default_rng), "model.awkward.generator"),
    ],
    ids=["random", "numpy", "array", "random.Random", "numpy.Generator"],
)
def test_draws_that_are_not_torchs_are_refused(make: Callable[[], nn.Module], generator: str) -> None:
    """A pipeline would repeat them. Refusing leaves the generators as they were."""
    states = random.getstate(), np.random.get_state()[2]
    with pytest.raises(CaptureError) as caught:
        step(Between(make))
    assert str(caught.value).startswith(f"the model draws from {generator}. ")
    assert "torch.where" in str(caught.value)
    assert states == (random.getstate(), np.random.get_state()[2])


def place(owner: type, text: str) -> str:
    """``file.py:57``: where the line stands in the file of a class."""
    file = Path(inspect.getfile(owner))
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return f"{file.name}:{lines.index(text) + 1}"


# what a pipeline would compute differently from eager torch, or not at all


class ChangesItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


class ChangesItsInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class HiddenWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [torch.ones(WIDTH, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0]


class HiddenParameter(nn.Module):
    """It looks at the clock, so that Dynamo does not trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0] * (time.time() > 0)


class TrainedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.weight * (output - target)).mean()


def hooked(register: Callable[[nn.Parameter, Callable[[Any], None]], object]) -> nn.Module:
    model = Between(nn.Identity)
    register(model.last.weight, lambda _: None)
    return model


def partially_hooked() -> nn.Module:
    model = Between(nn.Identity)
    model.last.register_backward_hook(lambda module, inputs, outputs: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: partially_hooked(), "last has a hook of register_backward_hook, which a pipeline would not"),
        (
            lambda: Between(partial(ChangesItsWeight, WIDTH, WIDTH)),
            r"changes awkward.weight\n  at test_refused.py:\d+: .*\nOnly buffers of the model can",
        ),
        (
            lambda: ChangesItsInput(WIDTH, WIDTH),
            r"changes its argument args\[0\]\n  at test_refused.py:\d+: .*\nChange a clone of it",
        ),
        (
            lambda: Between(HiddenWeight),
            r"shape \(4,\) requires a gradient but is no parameter of the model\n  at test_refused",
        ),
        (lambda: Between(HiddenParameter), r"shape \(4,\) was not read from its module"),
        (lambda: hooked(Tensor.register_hook), "last.weight has a hook on its gradient"),
        (lambda: hooked(Tensor.register_post_accumulate_grad_hook), "last.weight has a hook on its gradient"),
    ],
    ids=[
        "partial hook",
        "changed parameter",
        "changed input",
        "unregistered parameter",
        "unregistered parameter of a model that Dynamo does not trace",
        "hook",
        "post-accumulate hook",
    ],
)
def test_a_model_that_would_train_differently_is_refused(
    model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises((CaptureError, InputError), match=message):
        step(model())


def test_an_input_that_requires_a_gradient_is_refused() -> None:
    with pytest.raises(InputError, match=r"args\[0\] requires a gradient, but pipec computes gradients of"):
        step(nn.Linear(WIDTH, WIDTH), x=batch()["x"].requires_grad_())


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda output, target: (output - target).mean((1, 2)), r"torch\.float32 of shape \[b\]"),
        (lambda output, target: (output - target).sum().long(), r"torch\.int64 of shape \[\]"),
        (lambda output, target: (output.sum(), target.sum()), "2 tensors"),
        (lambda output, target: 1.0, "a float"),
        (lambda output, target: None, "None"),
    ],
    ids=["one per row", "whole number", "two", "float", "none"],
)
def test_a_loss_that_is_not_one_number_is_refused(loss_fn: Callable[..., Any], found: str) -> None:
    with pytest.raises(
        InputError, match=f"must be one floating-point number, but .*loss_fn returned {found}. Reduce it"
    ):
        step(nn.Linear(WIDTH, WIDTH), loss_fn)


def test_a_loss_with_parameters_to_train_is_refused_and_may_be_frozen() -> None:
    with pytest.raises(InputError, match=r"loss_fn\.weight would be trained, but belongs to no stage"):
        step(nn.Linear(WIDTH, WIDTH), TrainedLoss())
    assert step(nn.Linear(WIDTH, WIDTH), TrainedLoss().requires_grad_(False)).isfinite()


def test_an_output_that_counts_the_batch_is_refused() -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return super().forward(x), 2 * x.shape[0]

    pipe = pipec.compile(Counted(WIDTH, WIDTH), 1, microbatches=2)
    with pytest.raises(CaptureError, match=r"the size of the batch\n  at test_refused.*2 \* x\.shape"):
        pipe(batch()["x"])


def test_an_argument_of_a_class_that_torch_cannot_take_apart_is_refused() -> None:
    class Unknown:
        __hash__ = None  # type: ignore[assignment]

    class Taking(nn.Linear):
        def forward(self, x: Tensor, extra: object) -> Tensor:
            return super().forward(x)

    with pytest.raises(InputError, match=r"kwargs\['extra'\]\[0\] is a .*Unknown.*register_dataclass"):
        step(Taking(WIDTH, WIDTH), extra=[Unknown()])
