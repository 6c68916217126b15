"""Models whose batches cannot be split, lists of microbatches for them, and plain accumulation of these.

As a script it trains such a model on all ranks, and compares with plain accumulation on each.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Model = nn.Module
Microbatch = Any


class Rows(nn.Module):
    """A few layers, and a batch norm, for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(self.norm(x))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class Graphs(nn.Module):
    """Classifies graphs that are merged into one: nodes are rows of one tensor, graphs of another."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if k == 0 else width, width) for k in range(depth))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor, num_graphs: int) -> Tensor:
        source, to = edge_index
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + torch.zeros_like(x).index_add(0, to, x[source])
        pooled = x.new_zeros(num_graphs, x.shape[1]).index_add(0, batch, x)
        return nn.functional.cross_entropy(self.out(pooled), y)


class Images(nn.Module):
    """Classifies two images of different sizes together."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, images: Sequence[Tensor], labels: Tensor) -> Tensor:
        maps = [torch.relu(self.early(image[None])) for image in images]
        features = torch.cat([torch.relu(self.late(each)).mean((2, 3)) for each in maps])
        return nn.functional.cross_entropy(self.out(torch.tanh(self.hidden(features))), labels)


def llama() -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=30, num_key_value_heads=2, use_cache=False, **sizes))


def experts() -> Model:
    """With the balance loss of each microbatch, and hooks that its first call installs under a lock."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "vocab_size": 30}
    sizes |= {"num_key_value_heads": 2, "shared_expert_intermediate_size": 8}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(use_cache=False, output_router_logits=True, **sizes))


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


KINDS: Mapping[str, tuple[Callable[[], Model], Callable[[int], Microbatch], Callable[..., Any] | None]] = {
    "rows": (Rows, rows, squares),
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
    model: Model, microbatches: Sequence[Microbatch], weights: Sequence[float], loss_fn: Any = None
) -> float:
    """The loss of plain accumulation, which adds gradients to ``.grad``."""
    total = 0.0
    for microbatch, weight in zip(microbatches, weights, strict=True):
        if loss_fn is not None:
            loss = loss_fn(model(microbatch[0]), microbatch[1])
        else:
            output = model(**microbatch)
            loss = output if isinstance(output, Tensor) else output.loss
        (weight * loss).backward()
        total += weight * loss.item()
    return total


def difference(pipe: Any, model: Model) -> float:
    """The largest difference of gradients, where this rank has them, and of buffers."""
    plain = dict(model.named_parameters())
    found = [
        (parameter.grad - plain[name].grad).abs().max().item()
        for name, parameter in pipe.named_parameters()
        if parameter.grad is not None and plain[name].grad is not None
    ]
    state, buffers = pipe.state_dict(all_ranks=True), dict(model.named_buffers())
    return max(found + [(state[name] - x).abs().max().item() for name, x in buffers.items() if name in state])


def compare(kind: str, counts: Sequence[int] = (3, 2, 5), **options: Any) -> None:
    """Make steps with lists of so many microbatches, and accumulate the same plainly."""
    import pipec

    torch.manual_seed(0)
    is_single = kind == "experts"  # whose grouped products have no float64
    torch.set_default_dtype(torch.float32 if is_single else torch.float64)
    make_model, make, loss_fn = KINDS[kind]
    model = make_model()
    plain = copy.deepcopy(model)
    pipe = pipec.compile(model, loss_fn=loss_fn, **options)
    for step, microbatches in enumerate(lists_of(make, counts)):
        weights = None if step != 1 else [0.3 + k for k in range(len(microbatches))]
        loss = pipe.step(microbatches=microbatches, weights=weights).item()
        mean = [1 / len(microbatches)] * len(microbatches)
        expected = accumulate(plain, microbatches, weights or mean, loss_fn)
        digits = 1e-6 if make is tokens else 1e-12  # transformers computes the loss in float32
        assert abs(loss - expected) <= digits * abs(expected), (step, loss, expected)
        assert difference(pipe, plain) < (1e-6 if is_single else 1e-12), step
    assert pipe.plan.variables
    assert not pipe.plan.fixed_sizes


if __name__ == "__main__":
    for options in ({}, {"schedule": "interleaved-1f1b"}, {"schedule": "zb-h1"}):
        compare(sys.argv[1], devices=int(sys.argv[2]), replicas=int(sys.argv[3]), **options)
    print("equal")
