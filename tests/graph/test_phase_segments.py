"""Backwards that consist of several functions: sums over replicas between them change no bit."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_models import Factory, gpt2_with_dropout, perceptron, resnet
from slow_params import slow
from torch import fx

import pipec
from pipec.compiler.staged_graph import StagedGraph
from pipec.graph import send
from pipec.graph.phase_segments import split_into_segments
from pipec.ir import ShardingLevel

DIVIDED, WHOLE = 1, 1 << 40
"""The least bytes of a bucket: so few that every backward is divided, and so many that none is."""

REPLICAS: dict[str, dict[str, Any]] = {
    "1x2": {"devices": 2, "stages": 1},
    "2x2": {"devices": 4, "replicas": 2, "schedule": "zb-h1"},
    "2-1": {"devices": 3, "replicas": (2, 1)},
    "updates": {"devices": 2, "stages": 1, "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2)},
}
SHARDS = [{**REPLICAS["updates"], "shard": shard} for shard in ShardingLevel]


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        *(slow(gpt2_with_dropout, REPLICAS[name]) for name in ("1x2", "2x2", "2-1")),
        slow(resnet, REPLICAS["1x2"]),
        slow(resnet, REPLICAS["2-1"]),
        slow(perceptron, REPLICAS["updates"]),
        *(slow(perceptron, each) for each in SHARDS[:-1]),
        (perceptron, SHARDS[-1]),
    ],
)
def test_sums_that_overlap_the_backward_change_no_bit(
    factory: Factory, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of each round, too."""
    monkeypatch.setattr(StagedGraph, "_with_fewest_sums", StagedGraph._evaluate)
    found = []
    for least_bytes in (WHOLE, DIVIDED):
        monkeypatch.setattr("pipec.plan.buckets.LEAST_BYTES", least_bytes)
        model, inputs = factory()
        pipe = pipec.compile(model, microbatches=4, **options)
        torch.manual_seed(0)
        losses = [pipe.step(**inputs) for _ in range(3)]
        assert bool(pipe.plan.segments) == (least_bytes == DIVIDED)
        gradients = [each.grad for each in pipe.parameters() if each.grad is not None]
        found.append([*losses, *gradients, *pipe.full_state_dict().values()])
    assert all(map(torch.equal, *found))


def test_a_backward_may_send_what_the_forward_made() -> None:
    """A mask that the stage makes for its loss, and that a gradient before it is multiplied by as well."""
    graph = fx.Graph()
    sent = graph.call_function(send, (graph.placeholder("mask"), 0))
    assert split_into_segments(SimpleNamespace(outputs=[]), [sent], [["w"]]) == [{sent}]  # type: ignore[arg-type]
