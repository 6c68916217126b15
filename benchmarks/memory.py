"""Peak memory of every rank, predicted and measured, for several models, schedules and numbers of stages.

    python benchmarks/memory.py                             # every rank in this process
    python benchmarks/memory.py --short                     # one case alone
    torchrun --nproc-per-node 4 benchmarks/memory.py        # one rank each: two replicas, and sharding

``pipe.memory()`` predicts and ``pipe.measure_memory(...)`` measures; the second step is measured, when the
state of the optimizer is there. A budget is a share of the way from what "none" needs to what "full" does.
Each model is captured once for all its cases.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import pipec
from pipec.capture.tracer import capture
from pipec.graph import TrainingGraph, copy_graph
from pipec.ir.text import format_bytes
from pipec.runtime.launch import world

ROWS, MICROBATCHES, LENGTH, WORDS = 16, 8, 64, 512
BUDGETS = (0.3, 0.7)
Made = tuple[nn.Module, dict[str, Tensor]]


def gpt2() -> Made:
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), _text("input_ids", "labels")


def llama() -> Made:
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config), _text("input_ids", "labels")


def t5() -> Made:
    config = T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=128,
        d_ff=512,
        d_kv=32,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), _text("input_ids", "labels")


def resnet() -> Made:
    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    pixels = torch.randn(ROWS, 3, 64, 64)
    return ResNetForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(ROWS) % 10}


def _text(*names: str) -> dict[str, Tensor]:
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    return dict.fromkeys(names, tokens)


MODELS: dict[str, Callable[[], Made]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "resnet": resnet}


@dataclass(frozen=True)
class Case:
    """A model as it is run on so many ranks, perhaps with a budget."""

    model: str
    ranks: int
    schedule: str
    recompute: str = "auto"
    budget: float | None = None
    replicas: int = 1
    shard: str | None = None

    def options(self) -> dict[str, Any]:
        return {
            "devices": self.ranks,
            "schedule": self.schedule,
            "recompute": self.recompute,
            "replicas": self.replicas,
            "shard": self.shard,
            "memory_limit": None if self.budget is None else self.limit(self.budget),
        }

    def limit(self, share: float) -> int:
        full, none = (most_predicted(replace(self, recompute=each, budget=None)) for each in ("full", "none"))
        return math.ceil(full + share * (none - full))

    def __str__(self) -> str:
        recompute = self.recompute if self.budget is None else f"{self.budget:.0%}"
        cells = self.model, self.ranks, self.schedule, recompute, self.replicas, self.shard or ""
        return " | ".join(map(str, cells))


@functools.cache
def made(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def compiled(case: Case) -> tuple[pipec.Pipeline, dict[str, Tensor]]:
    """A pipeline that is prepared. Ranks of a process share a model, of which other processes keep parts."""
    model, inputs = made.__wrapped__(case.model) if world().distributed else made(case.model)
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    pipe = pipec.compile(model, microbatches=MICROBATCHES, optimizer=adam, **case.options())
    with mock.patch("pipec.compiler.compiler.capture", once):
        return pipe.prepare(**inputs), inputs


def once(model: nn.Module, *args: Any, **options: Any) -> TrainingGraph:
    """Capture a model the first time alone: that takes most of the time."""
    if type(model) not in CAPTURED:
        CAPTURED[type(model)] = capture(model, *args, **options)
    return copy_graph(CAPTURED[type(model)])


CAPTURED: dict[type[nn.Module], TrainingGraph] = {}


@functools.cache
def most_predicted(case: Case) -> float:
    """What the rank needs that needs most."""
    return compiled(case)[0].memory().peak_bytes


def measured(case: Case) -> list[tuple[float, float]]:
    """Predicted and measured bytes of each rank."""
    pipe, inputs = compiled(case)
    pipe.step(**inputs)
    found = pipe.measure_memory(**inputs)
    return [(said.peak_bytes, most.peak_bytes) for said, most in zip(pipe.memory(), found, strict=True)]


def cases(models: Sequence[str], counts: Sequence[int], processes: bool) -> Iterator[Case]:
    """Every schedule on so many stages; in processes, two replicas of half as many, sharded or not."""
    ways: list[dict[str, Any]] = [{"recompute": each} for each in ("none", "full")]
    ways += [{"budget": each} for each in BUDGETS]
    shards = (None, "optimizer", "gradients", "parameters") if processes else (None,)
    replicas = 2 if processes else 1
    for model, count, schedule in itertools.product(models, counts, ("gpipe", "1f1b", "zb-h1")):
        if count > replicas or schedule == "gpipe":
            for way, shard in itertools.product(ways, shards):
                yield Case(model, count, schedule, **way, replicas=replicas, shard=shard)


def row(case: Case, pairs: Sequence[tuple[float, float]]) -> str:
    """A case with what was predicted and measured of each rank, and the ratio that is furthest off."""
    said, most = (", ".join(map(format_bytes, each)) for each in zip(*pairs, strict=True))
    ratio = max((one / other for one, other in pairs), key=lambda each: abs(each - 1))
    return f"| {case} | {said} | {most} | {ratio:.3f} |"


HEAD = """\
| model | ranks | schedule | recompute | replicas | shard | predicted, by rank | measured, by rank | ratio |
|---|--:|---|---|--:|---|---|---|--:|"""


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one case alone")
    parser.add_argument("--model", choices=MODELS, action="append", help="of these models alone")
    parser.add_argument("--stages", type=int, action="append", help="on so many stages alone")
    options = parser.parse_args(arguments)
    here, ratios = world(), list[float]()
    if here.distributed:
        dist.init_process_group("gloo")
    say = functools.partial(print, flush=True) if here.rank == 0 else lambda text: None
    say(HEAD)
    counts = [here.size] if here.distributed else options.stages or [1, 2, 4]
    chosen = cases(options.model or list(MODELS), counts, here.distributed)
    for case in [Case("gpt2", counts[-1], "1f1b", "none")] if options.short else chosen:
        pairs = measured(case)
        ratios += [said / most for said, most in pairs]
        say(row(case, pairs))
    say(f"\nratios from {min(ratios):.3f} to {max(ratios):.3f}")
    return ratios


if __name__ == "__main__":
    main()
