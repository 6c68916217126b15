"""Peak memory of every rank, predicted and measured, for several models, schedules and numbers of stages.

    python benchmarks/memory.py                             # every rank in this process
    python benchmarks/memory.py --short                     # one case alone
    torchrun --nproc-per-node 4 benchmarks/memory.py        # one rank each: two replicas, and sharding

``pipe.memory()`` predicts and ``measure_memory(pipe, ...)`` measures; the second step is measured, when the
state of the optimizer is there. Each cell is what was predicted over what was measured, of the rank that is
furthest off. Each model is captured once for all its cases.
"""

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from pipec.capture.tracer import CaptureRequest, capture
from pipec.graph import TrainingGraph, copy_graph
from pipec.runtime.processes.launch import world

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from memory_meter import measure_memory

ROWS, MICROBATCHES, LENGTH, WORDS = 16, 8, 64, 512
WAYS: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "full": {"recompute": "full"},
    "limit 30%": {"budget": 0.3},
    "limit 70%": {"budget": 0.7},
}
"""What is recomputed. A budget is a share of the way from what "none" needs to what "full" does."""
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
    replicas: int | tuple[int, ...] = 1
    shard: str | None = None
    precision: str | None = None

    def options(self) -> dict[str, Any]:
        return {
            "devices": self.ranks,
            "schedule": self.schedule,
            "recompute": self.recompute,
            "replicas": self.replicas,
            "shard": self.shard,
            "precision": self.precision,
            "memory_limit": None if self.budget is None else self.limit(self.budget),
        }

    def limit(self, share: float) -> int:
        full, none = (most_predicted(replace(self, recompute=each, budget=None)) for each in ("full", "none"))
        return math.ceil(full + share * (none - full))


@functools.cache
def made(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def compiled(case: Case) -> tuple[pipec.Pipeline, dict[str, Tensor]]:
    """A pipeline that is prepared. Ranks of a process share a model, of which other processes keep parts."""
    model, inputs = made.__wrapped__(case.model) if world().is_distributed else made(case.model)
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    pipe = pipec.compile(model, microbatches=MICROBATCHES, optimizer=adam, **case.options())
    with mock.patch("pipec.compiler.compile.capture", once):
        return pipe.prepare(**inputs), inputs


def once(request: CaptureRequest) -> TrainingGraph:
    """Capture a model the first time alone, in each precision: that takes most of the time."""
    key = type(request.model), torch.is_autocast_enabled("cpu")
    if key not in CAPTURED:
        CAPTURED[key] = capture(request)
    return copy_graph(CAPTURED[key])


CAPTURED: dict[tuple[type[nn.Module], bool], TrainingGraph] = {}


@functools.cache
def most_predicted(case: Case) -> float:
    """What the rank needs that needs most."""
    return compiled(case)[0].memory().peak_bytes


def measured(case: Case) -> list[tuple[float, float]]:
    """Predicted and measured bytes of each rank."""
    pipe, inputs = compiled(case)
    pipe.step(**inputs)
    found = measure_memory(pipe, **inputs)
    return [(said.peak_bytes, most.peak_bytes) for said, most in zip(pipe.memory(), found, strict=True)]


def settings(models: Sequence[str], counts: Sequence[int], processes: bool) -> Iterator[Case]:
    """Every schedule on so many stages; in processes, two replicas of half as many, sharded or not.

    Then bf16-mixed on two ranks, and a stage on three ranks before one on the fourth.
    """
    shards = (None, "optimizer", "gradients", "parameters") if processes else (None,)
    replicas = 2 if processes else 1
    for model, count, schedule in itertools.product(models, counts, ("gpipe", "1f1b", "zb-h1")):
        if count > replicas or schedule == "gpipe":
            for shard in shards:
                yield Case(model, count, schedule, replicas=replicas, shard=shard)
    for model, count in itertools.product(models, counts):
        if count == 2:
            yield Case(model, count, "1f1b", replicas=replicas, precision="bf16-mixed")
        if count == 4:
            yield Case(model, count, "1f1b", replicas=(3, 1))


def furthest(ratios: Sequence[float]) -> float:
    """The ratio of the rank that is furthest off."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one case alone")
    parser.add_argument("--model", choices=MODELS, action="append", help="of these models alone")
    parser.add_argument("--stages", type=int, action="append", help="on so many stages alone")
    options = parser.parse_args(arguments)
    here, found = world(), list[float]()
    if here.is_distributed:
        dist.init_process_group("gloo")
    say = functools.partial(print, flush=True) if here.rank == 0 else lambda text: None
    counts = [here.size] if here.is_distributed else options.stages or [1, 2, 4]
    chosen, ways = settings(options.model or list(MODELS), counts, here.is_distributed), WAYS
    if options.short:
        chosen, ways = iter([Case("gpt2", counts[-1], "1f1b")]), {"none": WAYS["none"]}
    say(f"| model | ranks | schedule | precision | replicas | shard | {' | '.join(ways)} |")
    say(f"|---|--:|---|---|--:|---|{'--:|' * len(ways)}")
    for setting in chosen:
        numbers = setting.replicas if isinstance(setting.replicas, tuple) else (setting.replicas,)
        how = setting.schedule, setting.precision or "", "-".join(map(str, numbers)), setting.shard or ""
        cells = [setting.model, setting.ranks, *how]
        for way in ways.values():
            ratios = [said / most for said, most in measured(replace(setting, **way))]
            found += ratios
            cells.append(f"{furthest(ratios):.3f}")
        say(f"| {' | '.join(map(str, cells))} |")
    say(f"\n{len(found)} peaks, predicted over measured from {min(found):.3f} to {max(found):.3f}")
    return found


if __name__ == "__main__":
    main()
