"""Operators over torch's own functions: their results are described right, and have eager torch's bits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair, assert_same_bits
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.primitives import CTC_LOSS, INTERPOLATE, RECURRENT_LAYER, ctc_loss, recurrent_network

LENGTH, ROWS, WIDTH = 4, 3, 5

Outcome = list[Tensor | None]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers with dimensions in another order than in memory: what reads them may assume their layout."""
    made = torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(len(shape)))
    return made.permute(*reversed(range(len(shape)))).to(dtype)


def check_descriptions(operator: Any, *arguments: Any) -> None:
    """Fake tensors have the shapes and strides of real ones, and results share no memory."""
    trained = torch.utils._pytree.tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
        arguments,
    )
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator, trained, test_utils=checks)


def outcome(call: Callable[..., Any], *tensors: Tensor, **options: Any) -> Outcome:
    """Results and gradients of a call."""
    given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
    results = torch.utils._pytree.tree_leaves(call(*given, **options))
    weighted = [(y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in results]
    sum(weighted[1:], weighted[0]).backward()
    return [*results, *(x.grad for x in given)]


def assert_equal(found: Outcome, expected: Outcome) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("cell", ["lstm", "gru", "tanh", "relu"])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrent_layer_is_described(cell: str, directions: int) -> None:
    size = {"lstm": 4, "gru": 3}.get(cell, 1) * WIDTH
    h, c = numbers(directions, ROWS, WIDTH), numbers(directions, ROWS, WIDTH) if cell == "lstm" else None
    weights = [numbers(size, WIDTH), numbers(size, WIDTH), numbers(size), numbers(size)] * directions
    check_descriptions(RECURRENT_LAYER, numbers(LENGTH, ROWS, WIDTH), h, c, weights, cell, True, True, True)


KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cell", KINDS)
def test_a_recurrent_network_has_the_bits_of_eager_torch(cell: str, dtype: torch.dtype) -> None:
    """In training and in evaluation, where eager torch runs other kernels without gradients."""
    options = itertools.product([1, 2], [False, True], [False, True], [True, False], [0, 3])
    for num_layers, bidirectional, batch_first, biased, projected in options:
        if projected and cell != "lstm":
            continue
        torch.manual_seed(0)
        given = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": biased}
        given |= {"proj_size": projected} if projected else {}
        network = KINDS[cell](WIDTH, WIDTH, num_layers, **given)
        network.to(dtype)
        states = [numbers(num_layers * (1 + bidirectional), ROWS, projected or WIDTH, dtype=dtype)]
        if cell == "lstm":
            states.append(numbers(num_layers * (1 + bidirectional), ROWS, WIDTH, dtype=dtype))
        x = numbers(*((ROWS, LENGTH) if batch_first else (LENGTH, ROWS)), WIDTH, dtype=dtype)

        def eager(x: Tensor, *states: Tensor, network: Any = network) -> Any:
            return network(x, states if len(states) > 1 else states[0])

        def own(x: Tensor, *states: Tensor, network: Any = network) -> Any:
            begin = states if len(states) > 1 else states[0]
            options = network.bias, network.num_layers, 0.0, network.training, network.bidirectional
            return recurrent_network(cell, x, begin, network._flat_weights, *options, network.batch_first)

        found = []
        for call in (own, eager):
            network.zero_grad()
            made = outcome(call, x, *states)
            found.append(made + [parameter.grad for parameter in network.parameters()])
        assert_equal(*found)
        network.eval()
        with torch.no_grad():
            found = [torch.utils._pytree.tree_leaves(call(x, *states)) for call in (own, eager)]
        assert_equal(*found)


WIDE = 256  # so that layers take most of the time


@model(layers=lambda kind, num_layers: kind(WIDE, WIDE, num_layers, batch_first=True))
def Stack(self: Any, x: Tensor) -> Tensor:
    """Layers of one kind. Their last states are used besides their output."""
    output, last = self.layers(x)
    return output + sum(last if isinstance(last, tuple) else [last]).sum(0)[:, None]


@pytest.mark.parametrize("kind", [nn.LSTM, slow(nn.GRU), slow(nn.RNN)])
@pytest.mark.parametrize("num_layers", [2, slow(4)])
def test_a_stack_is_cut_between_its_layers(kind: type[nn.RNNBase], num_layers: int) -> None:
    """Each layer is on one stage; sequences of another length, and forwards, follow the first cut."""
    torch.manual_seed(0)
    pair = Pair(Stack(kind, num_layers), F.mse_loss, devices=num_layers, microbatches=4)
    for length in (5, 3):
        pair.step(torch.randn(8, length, WIDE), target=torch.ones(8, length, WIDE))
    for layer, stage in enumerate(pair.pipe.plan.stages):
        assert {name[-1] for name in stage.parameters if "weight" in name} == {str(layer)}
    x = torch.randn(8, 4, WIDE)
    with torch.no_grad():
        torch.testing.assert_close(pair.pipe(x), pair.unsplit(x))


def test_weights_are_not_moved_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves weights of a GPU together where a capture replaces them, and Dynamo cannot trace that."""

    def move(layers: nn.RNNBase) -> None:
        raise AssertionError

    with torch.device("meta"):
        net = Stack(nn.LSTM, 4)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    pipe = pipec.compile(net, ["cpu"] * 2, loss_fn=F.mse_loss, microbatches=4)
    pipe.prepare(torch.zeros(8, 5, WIDE), target=torch.zeros(8, 5, WIDE))


@pytest.mark.parametrize("kind", [nn.LSTM, slow(nn.GRU), slow(nn.RNN)])
def test_under_autocast_layers_have_the_bits_of_eager_torch(kind: type[nn.RNNBase]) -> None:
    @model(first=lambda: nn.Linear(WIDTH, WIDTH), layers=lambda: kind(WIDTH, WIDTH, 2, batch_first=True))
    def Cast(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(self.first(x))[0].float()

    torch.manual_seed(0)
    x = torch.randn(8, LENGTH, WIDTH)
    assert_same_bits(Cast(), {"x": x, "target": torch.ones_like(x)}, [2] * 4)


IMAGES = {"linear": (8,), "bilinear": (8, 6), "bicubic": (8, 6), "trilinear": (4, 3, 2)}
TARGETS: tuple[dict[str, Any], ...] = (
    {"size": (3, 7, 5), "scale_factor": None, "recompute_scale_factor": False},
    {"size": None, "scale_factor": (1.7, 1.2, 2.0), "recompute_scale_factor": False},
    {"size": None, "scale_factor": (1.7, 1.2, 2.0), "recompute_scale_factor": True},
)


@pytest.mark.parametrize("target", TARGETS, ids=["size", "factor", "recomputed factor"])
@pytest.mark.parametrize("mode", IMAGES)
def test_an_interpolation(mode: str, target: dict[str, Any]) -> None:
    num = len(IMAGES[mode])
    given = {name: x[:num] if isinstance(x, tuple) else x for name, x in target.items()}
    size, factor, recomputes = given.values()
    images = [torch.randn(2, 4, *IMAGES[mode]), numbers(2, 4, *IMAGES[mode]), torch.randn(2, 4, *[1] * num)]
    if num > 1:
        last = torch.channels_last if num == 2 else torch.channels_last_3d
        images += [image.contiguous(memory_format=last) for image in images]
    for image in images:
        arguments = size, factor, mode, False, recomputes
        check_descriptions(INTERPOLATE, image, *arguments)
        given["recompute_scale_factor"] = recomputes or None
        expected = outcome(F.interpolate, image, mode=mode, **given)
        assert_equal(outcome(lambda x, arguments=arguments: INTERPOLATE(x, *arguments), image), expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_losses_of_connectionist_temporal_classification(reduction: str, zero_infinity: bool) -> None:
    """The last row's target is longer than its input: its loss is infinite."""
    scores, targets = numbers(9, 4, 6).log_softmax(-1), torch.arange(12).view(4, 3) % 5 + 1
    lengths = torch.tensor([9, 9, 7, 2]), torch.tensor([3, 0, 1, 3])
    check_descriptions(CTC_LOSS, scores, targets, lengths[0], lengths[1].clamp_max(1), 0, zero_infinity)
    options = {"reduction": reduction, "zero_infinity": zero_infinity}
    found, expected = (outcome(call, scores, targets, *lengths, **options) for call in (ctc_loss, F.ctc_loss))
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
