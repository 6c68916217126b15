"""Recurrent layers are cut between the steps of a sequence where whole layers make no even stages."""

import copy
import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.graph import TrainingGraph
from pipec.ir import Mode
from pipec.passes.follow_placement import parameter_stages
from pipec.passes.mark_recompute import MarkRecompute

WORDS, WIDTH = 20, 16


class Tagger(nn.Module):
    """Little but recurrent layers, whose last states are used besides their output."""

    def __init__(self, kind: Callable[..., nn.RNNBase], width: int = WIDTH, directions: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, width, batch_first=True, bidirectional=directions == 2)
        self.head = nn.LazyLinear(WORDS)

    def forward(self, words: Tensor) -> Tensor:
        output, last = self.layers(self.words(words))
        states = [
            state.transpose(0, 1).flatten(1) for state in (last if isinstance(last, tuple) else (last,))
        ]
        told = torch.cat(states, 1)[:, None].expand(-1, output.shape[1], -1)
        return self.head(torch.cat([output, told], -1)).mT


def words(rows: int = 8, length: int = 12) -> Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows * length))


def made(kind: Callable[..., nn.RNNBase], width: int = WIDTH, directions: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = Tagger(kind, width, directions)
    model(words())
    return model


def graphs_of(pipe: pipec.Pipeline) -> Mapping[Mode, TrainingGraph]:
    return {each.graph.mode: each.graph for each in pipe._compiler.cache.staged_graphs}


def check_step(pipe: pipec.Pipeline, unsplit: nn.Module, inputs: Tensor) -> None:
    found, expected = pipe.step(inputs, target=inputs), F.cross_entropy(unsplit(inputs), inputs)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    gradients = dict(pipe.named_parameters())
    for name, parameter in unsplit.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def cut_in_time(
    kind: Callable[..., nn.RNNBase], width: int = WIDTH, directions: int = 1
) -> tuple[pipec.Pipeline, nn.Module]:
    """A pipeline that has made a step as eager torch does, on even stages, and the eager model."""
    model = made(kind, width, directions)
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, 3, loss_fn=F.cross_entropy, microbatches=2)
    check_step(pipe, unsplit, words())
    seconds = [sum(stage.cost.seconds.values()) for stage in pipe.plan.stages]
    assert max(seconds) < 1.3 * sum(seconds) / 3
    homes = parameter_stages(graphs_of(pipe)[Mode.TRAIN])
    assert any(len(stages) > 1 for fqn, stages in homes.items() if "weight_hh" in fqn)
    return pipe, unsplit


def test_other_calls_are_cut_where_the_first_one_was() -> None:
    """A batch and a sequence of other lengths, which is shorter than there are parts, and a forward."""
    pipe, unsplit = cut_in_time(nn.GRU, directions=2)
    for rows, length in ((6, 12), (4, 2)):
        check_step(pipe, unsplit, words(rows, length))
    homes = parameter_stages(graphs_of(pipe)[Mode.TRAIN])
    with torch.no_grad():
        torch.testing.assert_close(pipe(words()), unsplit(words()))
    assert parameter_stages(graphs_of(pipe)[Mode.FORWARD]) == homes


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (nn.LSTM, 256),
        (functools.partial(nn.LSTM, proj_size=5), WIDTH),
        (functools.partial(nn.RNN, nonlinearity="relu", bias=False), WIDTH),
    ],
    ids=["oneDNN", "projected", "unbiased"],
)
def test_every_cell_hands_on_its_states(kind: Callable[..., nn.RNNBase], width: int) -> None:
    pipe, _ = cut_in_time(kind, width)
    (staged,) = pipe._compiler.cache.staged_graphs
    again = staged.with_recompute(MarkRecompute(frozenset()))
    assert parameter_stages(again.graph) == parameter_stages(staged.graph), (
        "what computes again has the same cut"
    )
