"""Peak memory of every rank, predicted and measured: two processes over gloo, one rank each.

    torchrun --nproc-per-node 2 benchmarks/memory.py

The meter counts the storages that torch operators make and forgets them when they are freed. Weights are
there before it begins, and their gradients come from a step before the one that is measured.
"""

import weakref
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import pipec
from pipec.ir.text import format_bytes
from pipec.plan.memory import plan_memory

ROWS, MICROBATCHES = 16, 8


class Meter(TorchDispatchMode):
    """The bytes of all storages that were made while it was active and are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in filter(lambda leaf: isinstance(leaf, Tensor), tree_leaves(returned)):
            self._note(tensor.untyped_storage())
        return returned

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(n_layer=8, n_embd=256, n_head=4, vocab_size=4096, n_positions=128)
    tokens = torch.randint(4096, (ROWS, 128))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    images = torch.randn(ROWS, 3, 224, 224)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.zeros(ROWS).long()}


def row(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], schedule: str, recompute: str) -> str:
    """Predicted and measured bytes of this rank."""
    torch.manual_seed(0)
    model, inputs = make()
    pipe = pipec.compile(model, 2, schedule=schedule, microbatches=MICROBATCHES, recompute=recompute)
    for _ in range(2):
        pipe.step(**inputs)
    held = sum(tensor.nbytes for tensor in (*pipe.parameters(), *pipe.buffers()))
    held += sum(parameter.grad.nbytes for parameter in pipe.parameters() if parameter.grad is not None)
    with Meter() as meter:
        pipe.step(**inputs)
    rank = pipe._ranks.world.rank
    predicted, measured = plan_memory(pipe.plan, pipe.programs)[rank].peak_bytes, held + meter.peak
    shown = (format_bytes(predicted), format_bytes(measured), f"{predicted / measured:.2f}")
    return f"| {' | '.join([make.__name__, schedule, recompute, str(rank), *shown])} |"


def main() -> None:
    for make in (gpt2, vit):
        for schedule, recompute in product(("gpipe", "1f1b", "zb-h1"), ("none", "full")):
            print(row(make, schedule, recompute), flush=True)


if __name__ == "__main__":
    main()
