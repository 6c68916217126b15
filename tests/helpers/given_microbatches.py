"""Models whose batches cannot be split, lists of microbatches for them, and plain accumulation of these.

As a script it trains such a model on all ranks, and compares with plain accumulation on each.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import huggingface_models
import torch
from awkward_modules import Pair
from forward_modules import model as module
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from unsplit_reference import loss_of

Microbatch = Any


def deep(first: int, width: int, depth: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width if k else first, width) for k in range(depth))


@module(layers=lambda: deep(8, 8, 4), norm=lambda: nn.BatchNorm1d(8), out=lambda: nn.Linear(8, 3))
def Rows(self: Any, x: Tensor) -> Tensor:
    """A few layers, and a batch norm, for any number of rows."""
    for layer in self.layers:
        x = torch.tanh(layer(x))
    return self.out(self.norm(x))


@module(layers=lambda width=8, depth=4: deep(6, width, depth), out=lambda width=8, _=4: nn.Linear(width, 3))
def Graphs(self: Any, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor, num_graphs: int) -> Tensor:
    """Classifies graphs that are merged into one: nodes are rows of one tensor, graphs of another."""
    source, to = edge_index
    for layer in self.layers:
        x = torch.tanh(layer(x))
        x = x + torch.zeros_like(x).index_add(0, to, x[source])
    pooled = x.new_zeros(num_graphs, x.shape[1]).index_add(0, batch, x)
    return cross_entropy(self.out(pooled), y)


@module(
    early=lambda: nn.Conv2d(3, 4, 3, padding=1),
    late=lambda: nn.Conv2d(4, 4, 3, padding=1),
    out=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
)
def Images(self: Any, images: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Classifies two images of different sizes together."""
    maps = [torch.relu(self.early(image[None])) for image in images]
    features = torch.cat([torch.relu(self.late(each)).mean((2, 3)) for each in maps])
    return cross_entropy(self.out(features), labels)


def llama() -> nn.Module:
    """Without a cache, with which transformers does not keep documents apart."""
    model: Any = huggingface_models.llama()[0]
    model.config.use_cache = False
    return model


def experts() -> nn.Module:
    """With the balance loss of each microbatch, and hooks that its first call installs under a lock."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes |= {"num_key_value_heads": 2, "shared_expert_intermediate_size": 8, **huggingface_models.SIZES}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(output_router_logits=True, **sizes))


def rows(number: int) -> Microbatch:
    count = 2 + 3 * number % 7
    return torch.randn(count, 8), torch.randn(count, 3)


def graphs(number: int, nodes: int = 0, edges: int = 0, count: int = 0) -> Microbatch:
    count, edges = count or 2 + number % 3, edges or 5 + 2 * number % 9
    nodes = nodes or count + 3 + number % 5
    return {
        "x": torch.randn(nodes, 6),
        "edge_index": torch.randint(nodes, (2, max(edges, 0))),
        "batch": torch.randint(count, (nodes,)).sort().values,
        "y": torch.randint(3, (count,)),
        "num_graphs": count,
    }


def tokens(number: int) -> Microbatch:
    """Documents one after the other, as transformers packs them without padding."""
    lengths = [2 + (number + 2 * k) % 5 for k in range(1 + number % 3)]
    ids = torch.randint(30, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def images(number: int) -> Microbatch:
    sizes = [(4 + (number + 2 * k) % 5, 5 + (3 * number + k) % 4) for k in range(2)]
    return {"images": [torch.randn(3, *size) for size in sizes], "labels": torch.randint(3, (2,))}


KINDS: Mapping[
    str, tuple[Callable[[], nn.Module], Callable[[int], Microbatch], Callable[..., Any] | None]
] = {
    "rows": (Rows, rows, mse_loss),
    "graphs": (Graphs, graphs, None),
    "tokens": (llama, tokens, None),
    "images": (Images, images, None),
    "experts": (experts, tokens, None),
}


def lists_of(make: Callable[[int], Microbatch], counts: Sequence[int]) -> Iterator[list[Microbatch]]:
    """Lists of so many microbatches, no two of which have the same sizes."""
    number = 0
    for count in counts:
        yield [make(number + k) for k in range(count)]
        number += count


def accumulate(
    model: nn.Module, microbatches: Sequence[Microbatch], weights: Sequence[float], loss_fn: Any = None
) -> float:
    """The loss of plain accumulation, which adds gradients to ``.grad``."""
    total = 0.0
    for microbatch, weight in zip(microbatches, weights, strict=True):
        if loss_fn is not None:
            loss = loss_fn(model(microbatch[0]), microbatch[1])
        else:
            loss = loss_of(model(**microbatch))
        (weight * loss).backward()
        total += weight * loss.item()
    return total


def same(
    pair: Pair,
    microbatches: Sequence[Microbatch],
    weights: Any = None,
    of_loss: float = 1e-12,
    of_gradients: float = 1e-10,
) -> None:
    """A step makes the loss of plain accumulation, gradients, where this rank has them, and buffers."""
    count = len(microbatches)
    factors = [1.0 if weights == "sum" else 1 / count] * count if weights in (None, "sum") else weights
    loss = pair.pipe.step(microbatches=microbatches, weights=weights).item()
    expected = accumulate(pair.unsplit, microbatches, factors, pair.loss_fn)
    assert math.isclose(loss, expected, rel_tol=of_loss, abs_tol=1e-12), (loss, expected)
    state, plain = pair.pipe.state_dict(all_ranks=True), dict(pair.unsplit.named_parameters())
    found = [(name, x.grad, plain[name].grad) for name, x in pair.pipe.named_parameters()]
    found += [(name, state[name], x) for name, x in pair.unsplit.named_buffers() if name in state]
    for name, value, other in found:
        assert "RANK" in os.environ or (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (value - other).abs().max() < of_gradients, name


def compare(kind: str, counts: Sequence[int] = (3, 2, 5), **options: Any) -> None:
    """Make steps with lists of so many microbatches, and accumulate the same plainly."""
    torch.manual_seed(0)
    is_single = kind == "experts"  # whose grouped products have no float64
    torch.set_default_dtype(torch.float32 if is_single else torch.float64)
    make_model, make, loss_fn = KINDS[kind]
    pair = Pair(make_model(), loss_fn, **{"microbatches": None, **options})
    for step, microbatches in enumerate(lists_of(make, counts)):
        weights = None if step != 1 else [0.3 + k for k in range(len(microbatches))]
        of_loss = 1e-6 if make is tokens else 1e-12  # transformers computes it in float32
        same(pair, microbatches, weights, of_loss, 1e-6 if is_single else 1e-10)
    assert pair.pipe.plan.variables
    assert not pair.pipe.plan.fixed_sizes


if __name__ == "__main__":
    for options in ({}, {"schedule": "interleaved-1f1b"}, {"schedule": "zb-h1"}):
        compare(sys.argv[1], devices=int(sys.argv[2]), replicas=int(sys.argv[3]), **options)
    print("equal")
