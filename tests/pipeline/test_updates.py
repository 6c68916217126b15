"""Steps that end with the optimizer's update: they equal the plain PyTorch script."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_reference import SAME, WIDTH, WORDS, batches, difference, pair
from slow_params import slow
from torch import Tensor, nn, optim
from unsplit_reference import relative_error

import pipec
from pipec.errors import ExecutionError, InputError

DATA_PARALLEL = {"devices": 2, "stages": 1}
TWO_PIPELINES = {"devices": 4, "stages": 4, "schedule": "looped-bfs"}
UNEQUAL = {"devices": 3, "replicas": (2, 1)}


@pytest.mark.parametrize(
    ("name", "shard", "clip", "plan"),
    [
        ("adamw", "optimizer", 0.5, TWO_PIPELINES),
        ("adafactor", "parameters", 0.5, DATA_PARALLEL),
        slow("muon", "optimizer", 0.5, UNEQUAL),
        ("muon", "parameters", 0.5, TWO_PIPELINES),
    ],
)
def test_twenty_steps_are_those_of_the_plain_script(
    name: str, shard: str | None, clip: float | None, plan: dict[str, Any]
) -> None:
    """The weights of the embedding are those of the head, and five microbatches are no multiple of two."""
    pipe, plain = pair(name, 5, clip, shard=shard, **plan)
    for batch in batches(20):
        assert relative_error(pipe.step(**batch), plain.step(batch)) < SAME
    assert difference(pipe, plain) < SAME
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("shard", [None, "gradients", "parameters"])
def test_a_step_that_fails_changes_nothing_and_the_next_one_is_right(shard: str | None) -> None:
    """A replica fails when the other one has started to sum gradients that it then never brings."""
    pipe, plain = pair(shard=shard, **DATA_PARALLEL)
    first, *later = batches(4)
    pipe.step(**first)
    plain.step(first)
    bad = first["words"].clone()
    bad[-1] = WORDS
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    with pytest.raises(ExecutionError, match="out of range"):
        pipe.step(words=bad)
    assert all(torch.equal(*each) for each in zip(before, pipe.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    for batch in later:
        pipe.step(**batch)
        plain.step(batch)
    assert difference(pipe, plain) < SAME
    with pytest.raises(InputError, match="there are no gradients"):
        pipe.optimizer.step()


class Words(nn.Module):
    def __init__(self, between: nn.Module, is_sparse: bool = False) -> None:
        super().__init__()
        self.words, self.between = nn.Embedding(WORDS, WIDTH, sparse=is_sparse), between
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.between(self.words(words).flatten(0, 1)))
        return nn.functional.cross_entropy(logits, words.flatten())


@pytest.mark.slow
def test_replicas_agree_on_buffers_as_if_a_step_that_failed_had_not_been() -> None:
    """One replica has started to average its buffers when the other one fails."""
    left = []
    for fails in (False, True):
        torch.manual_seed(0)
        own = Words(nn.BatchNorm1d(WIDTH)).double()
        pipe = pipec.compile(own, 2, stages=1, microbatches=4, optimizer=partial(optim.AdamW, lr=0.01))
        first, *later = batches(3)
        if fails:
            bad = first["words"].clone()
            bad[-1] = WORDS
            with pytest.raises(ExecutionError, match="out of range"):
                pipe.step(words=bad)
        for batch in (first, *later):
            pipe.step(**batch)
        left.append(pipe.state_dict())
    assert all(torch.equal(tensor, left[1][name]) for name, tensor in left[0].items())


def sparse_model() -> nn.Module:
    torch.manual_seed(0)
    return Words(nn.Identity(), is_sparse=True).double()


def sparse_and_dense(named: Any) -> list[optim.Optimizer]:
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named:
        groups[name.startswith("words")].append((name, parameter))
    return [optim.SparseAdam(groups[True], lr=0.01), optim.AdamW(groups[False], lr=0.01)]


@pytest.mark.parametrize("factory", [partial(optim.SGD, lr=0.1), sparse_and_dense])
def test_sparse_gradients_are_summed_over_replicas(factory: Callable[[Any], Any]) -> None:
    pipe, plain = pair(factory, make=sparse_model, **DATA_PARALLEL)
    for batch in batches(4):
        pipe.step(**batch)
        plain.step(batch)
    assert difference(pipe, plain) < SAME


def test_sparse_gradients_are_not_shared_out() -> None:
    pipe, _ = pair(partial(optim.SGD, lr=0.1), make=sparse_model, shard="optimizer", **DATA_PARALLEL)
    with pytest.raises(InputError, match=r"words.weight has sparse gradients, which shard="):
        pipe.step(**next(batches(1)))


class WholeTensors(optim.SGD):
    """Not known to be elementwise, so that replicas keep shares of whole tensors."""


def test_clipped_steps_have_the_same_bits_on_any_ranks() -> None:
    """Squares are added by parameter. Two microbatches have one sum, on one replica or on two."""
    layouts: list[dict[str, Any]] = [
        {"devices": 1},
        {"devices": 3, "stages": 3},
        {"devices": 4, "replicas": 2},
        {"devices": 2, "stages": 1, "shard": "gradients"},
    ]
    weights = []
    for layout in layouts:
        torch.manual_seed(0)
        own = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).double()
        x = torch.randn(4, WIDTH).double()
        pipe = pipec.compile(
            own,
            loss_fn=nn.functional.mse_loss,
            microbatches=2,
            optimizer=partial(WholeTensors, lr=0.5),
            clip_grad_norm=0.1,
            **layout,
        )
        for _ in range(8):
            pipe.step(x, target=x)
        weights.append(torch.cat([each.detach().flatten() for each in own.parameters()]))
    assert all(torch.equal(weights[0], each) for each in weights[1:])
