"""Models that use torch in less usual ways train as in eager torch, or are refused by name."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair, train_as_eager
from batch_cases import with_backward
from forward_modules import model as module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.errors import CaptureError, InputError, PipecWarning

Loss = Callable[..., Tensor]


class Net(nn.Module):
    """Three layers and a loss, ``loss(net, *arguments)``."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.loss = loss
        self.double()

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.loss(self, x, *others)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))


def check_step(model: nn.Module, *args: Any, **options: Any) -> None:
    train_as_eager(model, *args, error=1e-9, options={"microbatches": 4, **options})


# checkpoints


def checkpointed(use_reentrant: bool) -> Loss:
    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: net.middle(h).tanh(), net.first(x), use_reentrant=use_reentrant)
        return F.cross_entropy(net.last(hidden), y)

    return loss


@pytest.mark.parametrize(
    ("use_reentrant", "frozen", "requires_grad"),
    [(True, True, True), (True, True, False), (True, False, False), (False, True, True)],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_checkpoint_trains_what_it_trains_in_eager_torch(
    use_reentrant: bool, frozen: bool, requires_grad: bool
) -> None:
    model = Net(checkpointed(use_reentrant))
    model.first.requires_grad_(not frozen)
    if requires_grad:  # as enable_input_require_grads() of transformers does
        model.first.register_forward_hook(lambda module, given, output: output.requires_grad_(True))
    check_step(model, *batch())


def nested(net: Net, x: Tensor, y: Tensor) -> Tensor:
    def inner(h: Tensor, scale: float) -> tuple[Tensor, float]:
        return checkpoint(lambda t: net.middle(t).tanh(), h, use_reentrant=True) * scale, scale

    hidden, _ = checkpoint(inner, net.first(x), 2.0, use_reentrant=True)
    return F.cross_entropy(net.last(F.dropout(hidden, 0.0)), y)


def of_a_parameter(net: Net, x: Tensor, y: Tensor) -> Tensor:
    hidden = checkpoint(F.linear, x, net.first.weight, net.first.bias, use_reentrant=True)
    return F.cross_entropy(net.last(hidden), y)


# custom functions that return a view of a parameter


transposed = with_backward(lambda weight: weight.t(), lambda gradient, _: 2 * gradient.t())
itself = with_backward(lambda weight: weight, lambda gradient, _: 3 * gradient)


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(weight.chunk(2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(gradients)


def on_two_stages(function: Callable[[Tensor], Tensor]) -> Loss:
    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        weight = function(net.middle.weight)
        hidden = F.linear(F.linear(net.first(x), weight).tanh(), net.middle.weight)
        return F.cross_entropy(net.last(F.linear(hidden, weight).tanh()), y)

    return loss


def in_halves(net: Net, x: Tensor, y: Tensor) -> Tensor:
    first, second = Halves.apply(net.first.weight)
    return F.cross_entropy(net.last(net.middle(torch.cat([x @ first.t(), x @ second.t()], 1)).tanh()), y)


# covariance


def covariances(net: Net, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(1, 7, device=x.device)
    spread = torch.cov(net.first.weight, correction=0, fweights=weights, aweights=weights / 7).square().sum()
    spread = spread + net.middle.weight.corrcoef().square().sum()
    return F.cross_entropy(net.last(net.first(x)), y) + spread


@pytest.mark.parametrize(
    "loss",
    [nested, of_a_parameter, on_two_stages(transposed), on_two_stages(itself), in_halves, covariances],
)
@pytest.mark.filterwarnings("ignore:the losses of microbatches:pipec.PipecWarning")
def test_an_unusual_loss_trains_as_in_eager_torch(loss: Loss) -> None:
    check_step(Net(loss), *batch(), schedule="zb-h1")


# refused by name


def test_a_batch_norm_of_all_batches_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.BatchNorm1d(8, momentum=None)))
    pipe = pipec.compile(model, devices=2, microbatches=4, loss_fn=lambda output, y: output.mean())
    with pytest.raises(
        CaptureError, match=r"^1\.0 is a BatchNorm1d\(momentum=None\): .* momentum such as 0\.1"
    ):
        pipe.step(torch.randn(16, 6), target=torch.zeros(16))
    model[1].eval()
    assert pipe.step(torch.randn(16, 6), target=torch.zeros(16)).isfinite()


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (torch.jit.script(nn.Linear(6, 5)), "the model"),
        (nn.Sequential(nn.Linear(6, 5), torch.jit.script(nn.Linear(5, 5))), "1"),
        (nn.Sequential(nn.Sequential(torch.jit.trace(nn.Linear(6, 5), torch.randn(2, 6)))), "0.0"),
    ],
    ids=["model", "scripted", "traced"],
)
def test_a_script_module_is_named(model: nn.Module, path: str) -> None:
    with pytest.raises(InputError, match=rf"^{path} is a \w+Module of torch.jit"):
        pipec.compile(model, devices=2)


# models that need the whole batch


def of_a_graph(net: Net, x: Tensor, adjacency: Tensor, y: Tensor, chosen: Tensor | None = None) -> Tensor:
    output = net.last(adjacency @ (adjacency @ net.first(x)).relu())
    return F.cross_entropy(output, y) if chosen is None else F.cross_entropy(output[chosen], y[chosen])


@pytest.mark.parametrize("is_masked", [False, True], ids=["all nodes", "some nodes"])
def test_an_adjacency_matrix_makes_one_microbatch(is_masked: bool) -> None:
    (x, y), adjacency = batch(), torch.rand(16, 16, dtype=torch.float64)
    chosen = (torch.rand(16) > 0.5,) if is_masked else ()
    with pytest.warns(
        PipecWarning, match=r"one microbatch, the whole batch: with fewer rows, .*\n  at test_unus"
    ):
        check_step(Net(of_a_graph), x, adjacency, y, *chosen, microbatches=None)


@pytest.mark.slow
def test_an_adjacency_matrix_is_refused_in_several_microbatches_with_the_remedy() -> None:
    (x, y), adjacency = batch(), torch.rand(16, 16, dtype=torch.float64)
    with pytest.raises(InputError, match="needs all rows at once, pass microbatches=1"):
        pipec.compile(Net(of_a_graph), devices=2, microbatches=4).step(x, adjacency, y)
    check_step(Net(of_a_graph), x, adjacency, y, microbatches=1)
    with pytest.raises(InputError, match=r"(?s)fails on these arguments(?!.*microbatch)"):
        pipec.compile(Net(of_a_graph), devices=2, microbatches=1).step(x, adjacency[:, 1:], y)


# lists of a number for each row


def ctc(output: Tensor, labels: Tensor, lengths: Any, label_lengths: Any) -> Tensor:
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), labels, lengths, label_lengths)


def speech() -> tuple[Tensor, Tensor, list[int], list[int]]:
    torch.manual_seed(1)
    lengths, label_lengths = torch.randint(9, 13, (16,)), torch.randint(2, 5, (16,))
    x = torch.randn(16, 12, 6, dtype=torch.float64)
    return x, torch.randint(1, 5, (16, 4)), lengths.tolist(), label_lengths.tolist()


def test_lengths_may_be_lists_or_tuples() -> None:
    x, labels, lengths, label_lengths = speech()
    model = Net(lambda net, x, *target: ctc(net.last(net.first(x).relu()), *target))
    pair = Pair(model, microbatches=4, batched={1: 0, 2: 0, 3: 0})
    for kind, order in ((list, 1), (tuple, -1)):
        pair.step(x, labels, kind(lengths[::order]), kind(label_lengths[::order]), error=1e-9)


def test_a_target_may_hold_lists() -> None:
    x, labels, lengths, label_lengths = speech()
    target = {"labels": labels, "lengths": lengths, "label_lengths": label_lengths}
    pair = Pair(nn.Linear(6, 5).double(), lambda y, t: ctc(y, **t), devices=1, microbatches=4)
    pair.step(x, target=target, error=1e-9)


def test_a_list_that_the_model_takes_stays_a_list() -> None:
    def scaled(net: Net, x: Tensor, y: Tensor, powers: list[int]) -> Tensor:
        assert isinstance(powers, list)
        return F.cross_entropy(net.last(net.first(x)) * sum(powers), y)

    check_step(Net(scaled), *batch(), [*range(16)])


def test_what_fails_with_lists_and_with_tensors_says_why_with_lists() -> None:
    def failing(net: Net, x: Tensor, lengths: list[int]) -> Tensor:
        raise ValueError(f"cannot take a {type(lengths).__name__}")

    with pytest.raises(InputError, match="cannot take a list"):
        pipec.compile(Net(failing), devices=1, microbatches=4).step(batch()[0], [*range(16)])


# tensors with more in their memory than in their elements


def two() -> Any:
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), tanh=nn.Tanh(), b=nn.Linear(4, 4)))


SHARE: dict[str, Callable[[Any], object]] = {
    "data": lambda net: setattr(net.b.weight, "data", net.a.weight.data),
    "view": lambda net: setattr(net.b, "weight", nn.Parameter(net.a.weight.detach().t())),
    "buffer": lambda net: net.register_buffer("view", net.a.weight.detach()[1:]),
}


@pytest.mark.parametrize("what", SHARE)
def test_parameters_that_share_memory_are_refused(what: str) -> None:
    model = two()
    SHARE[what](model)
    with pytest.raises(InputError, match=r"a\.weight and (b\.weight|view) share memory .* make them one"):
        pipec.compile(model, 2)


def test_one_parameter_under_two_names_and_slices_of_one_memory_are_fine() -> None:
    model, x, flat = two(), torch.randn(4, 4), torch.randn(8)
    model.b.weight = model.a.weight
    model.a.bias.data, model.b.bias.data = flat[:4], flat[4:]
    pair = Pair(model, F.mse_loss, microbatches=1)
    pair.step(x, target=x)
    SHARE["view"](model)
    with pytest.raises(InputError, match="share memory"):
        pair.pipe.step(x, target=x)


@pytest.mark.parametrize("conjugate", [torch.conj, lambda x: x])
def test_gradients_of_complex_parameters_are_summed(conjugate: Callable[[Tensor], Tensor]) -> None:
    def weight() -> nn.Parameter:
        return nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    @module(a=weight, b=weight)
    def Complex(self: Any, x: Tensor) -> Tensor:
        hidden = x.to(torch.complex64) @ conjugate(self.a)
        return (conjugate(hidden) @ self.b.mH).abs().square().mean()

    train_as_eager(Complex(), torch.randn(8, 4))
