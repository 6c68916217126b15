"""Recurrent networks: each layer and direction is an operator, with eager torch's bits, for any length."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from slow_params import slow
from torch import Tensor, nn

import pipec

ROWS, MICROBATCHES, WIDTH = 8, 4, 6

WIDE = 256
"""So wide that layers take most of the time."""


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


class Language(nn.Module):
    """Four layers of an LSTM between words and words."""

    def __init__(self, width: int, num_layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.lstm = nn.LSTM(width, width, num_layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, 20)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(words))[0])


class Stack(nn.Module):
    """Layers of one kind, whose last states are used besides their output."""

    def __init__(self, kind: type[nn.RNNBase], num_layers: int) -> None:
        super().__init__()
        self.layers = kind(WIDE, WIDE, num_layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.layers(x)
        return output + sum(last if isinstance(last, tuple) else [last]).sum(0)[:, None]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def words(length: int = 5) -> Tensor:
    return torch.randint(0, 20, (ROWS, length), generator=torch.Generator().manual_seed(length))


def made(make: type[nn.Module], *arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return make(*arguments)


def microbatches(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    return zip(*(tensor.chunk(MICROBATCHES) for tensor in tensors), strict=True)


def numbers(length: int, width: int) -> Tensor:
    return torch.randn(ROWS, length, width, generator=torch.Generator().manual_seed(1))


def check_bits(pipe: pipec.Pipeline, unsplit: nn.Module, x: Tensor, target: Tensor) -> None:
    """The loss and gradients of a step are those of eager torch over the same microbatches."""
    found, terms = pipe.step(x, target=target), list[Tensor]()
    for inputs, targets in microbatches(x, target):
        terms.append(F.mse_loss(unsplit(inputs), targets) / MICROBATCHES)
        terms[-1].backward()
    assert torch.equal(found, sum(terms[1:], terms[0]).detach())
    gradients = dict(pipe.named_parameters())
    different = [n for n, p in unsplit.named_parameters() if not torch.equal(p.grad, gradients[n].grad)]
    assert different == []


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
    homes = [
        {parameter[-1] for parameter in stage.parameters if "weight" in parameter}
        for stage in pipe.plan.stages
    ]
    assert homes == [{str(layer)} for layer in range(num_layers)]
    with torch.no_grad():
        torch.testing.assert_close(pipe(numbers(4, WIDE)), unsplit(numbers(4, WIDE)))


@pytest.mark.slow
def test_dropout_between_layers_draws_the_same_wherever_layers_are() -> None:
    outcomes = []
    for num_stages in (1, 3):
        model = made(Language, 16, 3, 0.5)
        pipe = pipec.compile(model, num_stages, loss_fn=loss, microbatches=MICROBATCHES)
        torch.manual_seed(3)
        found = pipe.step(words(), target=words())
        outcomes.append([found, *(parameter.grad for parameter in pipe.parameters())])
    assert all(map(torch.equal, *outcomes))
    eager = loss(made(Language, 16, 3, 0.5).eval()(words()), words())
    assert not torch.equal(outcomes[0][0], eager.detach())


def test_weights_are_not_moved_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves those of a GPU together where a capture replaces them, and Dynamo cannot trace that."""

    def move(layers: nn.RNNBase) -> None:
        assert len({weight.data_ptr() for weight in layers._flat_weights}) > 0  # type: ignore[union-attr]
        raise AssertionError

    with torch.device("meta"):
        model = Language(16)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    pipe = pipec.compile(model, ["cpu"] * 2, loss_fn=loss, microbatches=MICROBATCHES)
    pipe.prepare(words(), target=words())


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
