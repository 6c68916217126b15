"""Recurrent networks: each layer and direction is an operator, with eager torch's bits, for any length."""

import copy

import pytest
import torch
import torch.nn.functional as F
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec

ROWS, MICROBATCHES, WIDTH = 8, 4, 6

WIDE = 256  # so that layers take most of the time


class Every(nn.Module):
    """Layers of all kinds, with all options; first and last states are given and used."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"batch_first": True, "num_layers": 2}
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True, **kind)
        self.unbiased = nn.LSTM(2 * WIDTH, WIDTH, bias=False, **kind)
        self.gru = nn.GRU(WIDTH, WIDTH, bidirectional=True, **kind)
        self.relu = nn.RNN(2 * WIDTH, WIDTH, nonlinearity="relu", bias=False, **kind)
        self.projected = nn.LSTM(WIDTH, WIDTH, proj_size=3, **kind)
        self.tanh = nn.RNN(3, WIDTH, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0].expand(4, -1, -1).contiguous()
        x, (h, c) = self.lstm(x, (first, first.tanh()))
        x, _ = self.unbiased(x)
        x, last = self.gru(x, h)
        x, _ = self.relu(x)
        x, (_, state) = self.projected(x)
        x, _ = self.tanh(x.transpose(0, 1))
        return x.sum(0) + (c[0] + last[3] + state[1]).repeat(1, 2)


class Stack(nn.Module):
    """Layers of one kind, whose last states are used besides their output."""

    def __init__(self, kind: type[nn.RNNBase], num_layers: int) -> None:
        super().__init__()
        self.layers = kind(WIDE, WIDE, num_layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.layers(x)
        return output + sum(last if isinstance(last, tuple) else [last]).sum(0)[:, None]


def made(make: type[nn.Module], *arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return make(*arguments)


def numbers(length: int, width: int) -> Tensor:
    return torch.randn(ROWS, length, width, generator=torch.Generator().manual_seed(1))


def check_bits(pipe: pipec.Pipeline, unsplit: nn.Module, x: Tensor, target: Tensor) -> None:
    """The loss and gradients of a step are those of eager torch over the same microbatches."""
    sizes, given = [ROWS // MICROBATCHES] * MICROBATCHES, {"x": x, "target": target}
    expected = unsplit_step(lambda x, target: F.mse_loss(unsplit(x), target), given, sizes)
    found = StepResult.of(pipe.step(x, target=target), pipe.unsplit_model)
    assert_equal(found, StepResult.of(expected, unsplit))


@pytest.mark.slow
def test_every_layer_has_the_bits_of_eager_torch() -> None:
    model = made(Every)
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, 4, loss_fn=F.mse_loss, microbatches=MICROBATCHES)
    check_bits(pipe, unsplit, numbers(5, WIDTH), torch.ones(ROWS, 2 * WIDTH))


@pytest.mark.parametrize("kind", [nn.LSTM, slow(nn.GRU), slow(nn.RNN)])
@pytest.mark.parametrize("num_layers", [2, 4])
def test_a_stack_is_cut_between_its_layers(kind: type[nn.RNNBase], num_layers: int) -> None:
    """Each layer is on one stage; sequences of another length, and forwards, follow the first cut."""
    model = made(Stack, kind, num_layers)
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, num_layers, loss_fn=F.mse_loss, microbatches=MICROBATCHES)
    for length in (5, 3):
        check_bits(pipe, unsplit, numbers(length, WIDE), torch.ones(ROWS, length, WIDE))
        pipe.zero_grad()
        unsplit.zero_grad()
    for layer, stage in enumerate(pipe.plan.stages):
        assert {name[-1] for name in stage.parameters if "weight" in name} == {str(layer)}
    with torch.no_grad():
        torch.testing.assert_close(pipe(numbers(4, WIDE)), unsplit(numbers(4, WIDE)))


def test_weights_are_not_moved_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves those of a GPU together where a capture replaces them, and Dynamo cannot trace that."""

    def move(layers: nn.RNNBase) -> None:
        raise AssertionError

    with torch.device("meta"):
        model = Stack(nn.LSTM, 4)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    pipe = pipec.compile(model, ["cpu"] * 2, loss_fn=F.mse_loss, microbatches=MICROBATCHES)
    pipe.prepare(numbers(5, WIDE), target=numbers(5, WIDE))


@pytest.mark.parametrize("kind", [nn.LSTM, slow(nn.GRU), slow(nn.RNN)])
def test_under_autocast_layers_have_the_bits_of_eager_torch(kind: type[nn.RNNBase]) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layers(self.first(x))[0].float()

    model = made(Cast)
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, 2, loss_fn=F.mse_loss, microbatches=MICROBATCHES)
    check_bits(pipe, unsplit, numbers(5, WIDTH), torch.ones(ROWS, 5, WIDTH))
