"""What capture refuses, and why: the line of the model, what was expected, and a remedy."""

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from awkward_modules import SIZES, WIDTH, Net, Odd, batch
from forward_modules import model
from slow_params import slow_but
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.random import default_generator

import pipec
from pipec.errors import CaptureError, InputError


def step(net: nn.Module, **arguments: Any) -> Tensor:
    loss_fn = arguments.pop("loss_fn", nn.functional.mse_loss)
    pipe = pipec.compile(net, 2, loss_fn=loss_fn, microbatches=len(SIZES))
    inputs = {**batch(), **arguments}
    return pipe.step(inputs.pop("x"), **inputs)


def sine(net: Any, x: Tensor, **others: Any) -> Tensor:
    return x.sin()


def doing(change: Callable[[Any], object]) -> Odd:
    """A forward that changes something, and else nothing."""

    def odd(net: Any, x: Tensor) -> Tensor:
        change(net)
        return x

    return odd


def preparing(prepare: Callable[[Any], object]) -> dict[str, Any]:
    return {"prepare": prepare}


def having(**attributes: Any) -> dict[str, Any]:
    return preparing(lambda net: [setattr(net, *each) for each in attributes.items()])


def losing(loss_fn: Any) -> dict[str, Any]:
    return {"loss_fn": loss_fn}


def branching(net: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + 1
    return x


def packed(net: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), x.shape[1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(net.layer(packed)[0], batch_first=True)[0]


def dispatching(net: Any, x: Tensor) -> Tensor:
    """As a mixture of experts that calls those that some token has chosen. Traced by Dynamo, it fails."""
    if torch.compiler.is_compiling():
        raise TypeError("no mask")
    for expert in (x.sum((0, 1)) > 0).nonzero():
        x = x * f"{expert}".count("0")
    return x


def hook_backward(net: Any) -> None:
    net.layer = nn.Linear(WIDTH, WIDTH)
    net.layer.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


def halve(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.middle.weight.mul_(0.5)
    return x


def fails(net: Any, x: Tensor) -> Tensor:
    raise ValueError("no mask")


def of_own(net: Any, x: Tensor) -> Tensor:
    return x * net.generator.random()


def of_class(net: Any, x: Tensor, z: Tensor) -> Tensor:
    return x * (2 if isinstance(z, Image) else 3)


def hold(net: Any) -> None:
    """Buffers, and views of what training changes."""
    net.register_buffer("one", torch.tensor(1.0))
    net.register_buffer("other", torch.tensor(2.0))
    net.register_buffer("table", torch.zeros(WIDTH, WIDTH))
    net.views = [net.table[:3], net.middle.weight.detach()]


def swap(net: Any, x: Tensor) -> Tensor:
    net.one, net.other = net.other, net.one
    return x * net.one


def read_buffer_view(net: Any, x: Tensor) -> Tensor:
    net.table.add_(1)
    return x * net.views[0].sum()


def seed(net: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + torch.randn(WIDTH)


class Image(Tensor):
    """A tensor that a model may tell from others."""


class Tripled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is nn.functional.linear else result


class Unknown:
    __hash__ = None  # type: ignore[assignment]


@model(weight=lambda: nn.Parameter(torch.ones(WIDTH)))
def TrainedLoss(self: Any, output: Tensor, target: Tensor) -> Tensor:
    return (self.weight * (output - target)).mean()


def typed_loss() -> Any:
    """As in an interactive session: there is no file."""
    typed: dict[str, Any] = {}
    exec(compile("def loss_fn(y, t):\n    return y.sum() * t.max().item()", "<typed>", "exec"), typed)
    return typed["loss_fn"]


def at(code: str, *texts: str) -> str:
    """A pattern of messages that show a line of this file, and say these texts before or after it."""
    others = "".join(f"(?=.*{re.escape(text)})" for text in texts)
    return rf"(?s)^{others}.*  at test_refused\.py:\d+: [^\n]*{re.escape(code)}"


def drawn(source: str) -> str:
    return rf"^the model draws from {source}\. (.|\n)*torch\.where"


IMAGE, ONES = batch()["x"].as_subclass(Image), torch.ones_like(batch()["x"])
HELD = preparing(hold)
WEIGHT_HOOK = "last.weight has a hook on its gradient"
REGISTERS = r"net\.middle\.weight\.register"
OF_SESSION = re.escape("at <typed>:2\n")

REFUSED: dict[str, tuple[Odd, str, *tuple[dict[str, Any], ...]]] = {
    "number": (lambda net, x: x * x.max().item(), at("x.max().item()", "Keep it a tensor")),
    "branch": (branching, at("if x.sum() > 0:", "torch.where")),
    "packed": (
        packed,
        at("packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)", "padded sequences"),
        having(layer=nn.GRU(WIDTH, WIDTH, batch_first=True)),
    ),
    "experts": (dispatching, at("for expert in (x.sum((0, 1)) > 0).nonzero():", "size decides what is")),
    "backward hook": (
        lambda net, x: net.layer(x),
        at("net.layer(x)", "Tensor.register_hook"),
        preparing(hook_backward),
    ),
    "generator": (
        lambda net, x: x + torch.rand(x.shape, generator=net.source),
        at("generator=net.source", "Leave the generator out"),
        having(source=torch.Generator()),
    ),
    "cond": (
        lambda net, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        at("torch.cond", "'cond', which no stage can run", "torch.where"),
    ),
    "scan": (
        lambda net, x: scan(lambda total, row: (total + row, total * row), torch.zeros_like(x[0]), x)[1],
        "the higher-order operator 'scan', which no stage can run",
    ),
    "inverse": (
        lambda net, x: x @ torch.linalg.inv(x.mT @ x + torch.eye(WIDTH)),
        at("torch.linalg.inv", "with_effects", "inv_ex"),
    ),
    "loss without a file": (sine, OF_SESSION, losing(typed_loss())),
    "hook in forward": (doing(lambda net: net.middle.weight.register_hook(lambda _: None)), REGISTERS),
    "post-accumulate hook in forward": (
        doing(lambda net: net.middle.weight.register_post_accumulate_grad_hook(lambda _: None)),
        REGISTERS,
    ),
    "random": (lambda net, x: x if random.random() < 0.5 else x.tanh(), drawn("Python's random module")),
    "numpy": (lambda net, x: x * float(np.random.uniform(1, 2)), drawn("numpy's random module")),
    "array": (
        lambda net, x: x * torch.from_numpy(np.random.rand(WIDTH)).float(),
        drawn("numpy's random module"),
    ),
    "random.Random": (of_own, drawn("model.generator"), having(generator=random.Random(0))),
    "numpy.Generator": (of_own, drawn("model.generator"), having(generator=np.random.default_rng(0))),
    "partial hook": (
        sine,
        "last has a hook of register_backward_hook",
        preparing(lambda net: net.last.register_backward_hook(print)),
    ),
    "hook": (sine, WEIGHT_HOOK, preparing(lambda net: net.last.weight.register_hook(print))),
    "post-accumulate hook": (
        sine,
        WEIGHT_HOOK,
        preparing(lambda net: net.last.weight.register_post_accumulate_grad_hook(print)),
    ),
    "changed parameter": (halve, at("net.middle.weight.mul_(0.5)", "changes middle.weight", "Only buffers")),
    "changed input": (
        lambda net, x, z: x + z.add_(1).sum(),
        at("z.add_(1).sum()", "changes its argument kwargs['z']", "Change a clone of it"),
        {"z": torch.ones(3)},
    ),
    "unregistered tensor": (
        lambda net, x: x * net.weights[0],
        at("net.weights[0]", "requires a gradient but is no parameter of the model"),
        having(weights=[torch.ones(WIDTH, requires_grad=True)]),
    ),
    "unregistered parameter of a model that Dynamo does not trace": (
        lambda net, x: x * net.weights[0] * (time.time() > 0),
        r"shape \(4,\) was not read from its module",
        having(weights=[nn.Parameter(torch.ones(WIDTH))]),
    ),
    "failing": (fails, r"fails on these arguments\n  at test_refused.*\n  ValueError: no mask\nSizes are"),
    "input with a gradient": (sine, r"args\[0\] requires a gradient", {"x": ONES.clone().requires_grad_()}),
    "unknown argument": (sine, r"kwargs\['z'\]\[0\] is a .*Unknown.*register_dataclass", {"z": [Unknown()]}),
    "trained loss": (sine, r"loss_fn\.weight would be trained, but", losing(TrainedLoss())),
    "loss of each row": (sine, r"one floating-.* of shape \[b\]", losing(lambda y, t: (y - t).mean((1, 2)))),
    "whole number": (sine, r"torch\.int64 of shape \[\]", losing(lambda y, t: (y - t).sum().long())),
    "two losses": (sine, "loss_fn returned 2 tensors", losing(lambda y, t: (y.sum(), t.sum()))),
    "float": (sine, "loss_fn returned a float", losing(lambda y, t: 1.0)),
    "no loss": (sine, "loss_fn returned None", losing(lambda y, t: None)),
    "frozen parameter": (
        doing(lambda net: net.middle.weight.requires_grad_(False)),
        "sets requires_grad of a parameter",
    ),
    "no gradient": (doing(lambda net: setattr(net.middle.weight, "grad", None)), "sets or asks for the grad"),
    "replaced parameter": (
        doing(lambda net: setattr(net.middle, "weight", nn.Parameter(net.middle.weight.detach() * 2))),
        "replaces a parameter",
    ),
    "replaced data": (
        doing(lambda net: setattr(net.middle.weight, "data", net.middle.weight.data * 0.5)),
        "replaces a parameter or its data",
    ),
    "seed": (seed, "seeds torch's random generator"),
    "read seed": (lambda net, x: x * (torch.initial_seed() % 7), "seeds torch's random generator"),
    "swapped buffers": (swap, "assigns other, or a view of it, to the buffer one", HELD),
    "weight as a buffer": (
        doing(lambda net: setattr(net, "table", net.middle.weight.detach().t())),
        "assigns middle.weight, or a view of it, to the buffer table",
        HELD,
    ),
    "argument as a buffer": (
        lambda net, x, z: (setattr(net, "one", z), x * z.sum())[1],
        r"assigns argument kwargs\['z'\], or a view of it, to the buffer one",
        {**HELD, "z": torch.ones(3)},
    ),
    "view of a buffer": (read_buffer_view, "shares memory with table, which changes", HELD),
    "view of a weight": (lambda net, x: x @ net.views[1], "shares memory with middle.weight, which", HELD),
    "class of a parameter": (
        sine,
        "middle.weight is a .*Tripled, whose class says",
        preparing(lambda net: setattr(net.middle, "weight", Tripled(net.middle.weight.data))),
    ),
    "class of an argument": (of_class, r"args\[0\] is a .*Image", {"x": IMAGE, "z": ONES}),
    "class of a named argument": (of_class, r"kwargs\['z'\] is a .*Image.*as_subclass", {"z": IMAGE}),
    "sparse argument": (
        lambda net, x, z: x + z.to_dense().sum(),
        r"kwargs\['z'\] has layout torch.sparse_coo",
        {"z": torch.eye(7).to_sparse()},
    ),
}
QUIET = ("packed", "experts", "branch", "number", "backward hook")


@pytest.fixture
def torch_logs(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Messages that torch writes to the terminal by its own loggers, which do not propagate to the root."""
    logger = logging.getLogger("torch")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.name.startswith("torch")]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("name", slow_but(REFUSED, *({*REFUSED} - {"inverse"})))
def test_what_no_stage_can_do_as_eager_torch_does_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], torch_logs: Callable[[], list[str]]
) -> None:
    """Torch's own advice stays off the terminal, and generators as they were."""
    odd, message, *others = REFUSED[name]
    given: dict[str, Any] = others[0] if others else {}
    net = Net(odd, given.get("prepare", lambda net: None))
    states = random.getstate(), np.random.get_state()[2]
    with pytest.raises((CaptureError, InputError), match=message) as caught:
        step(net, **{name: value for name, value in given.items() if name != "prepare"})
    assert states == (random.getstate(), np.random.get_state()[2])
    assert torch.random.default_generator is default_generator
    assert not {"grad", "data", "requires_grad", "requires_grad_", "stride"} & {*vars(Tensor)}
    if name in QUIET:
        assert "/" not in str(caught.value).split("Other ways")[0]
        assert (capsys.readouterr(), torch_logs()) == (("", ""), [])


def test_a_loss_with_parameters_may_be_frozen() -> None:
    assert step(Net(sine), loss_fn=TrainedLoss().requires_grad_(False)).isfinite()


@pytest.mark.slow
def test_an_inverse_without_a_check_is_none_of_these() -> None:
    assert step(Net(lambda net, x: x @ torch.linalg.inv_ex(x.mT @ x + torch.eye(WIDTH)).inverse)).isfinite()
