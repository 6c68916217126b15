"""Peak memory of every rank, predicted and measured, for several models, schedules and numbers of stages.

    python benchmarks/memory.py                             # every rank in this process
    python benchmarks/memory.py --model gpt2 --stages 1     # four cases
    torchrun --nproc-per-node 4 benchmarks/memory.py        # one rank each: two replicas, and sharding
    python benchmarks/memory.py --deepest                   # the deepest GPT within 16 GiB a rank, on meta

``pipe.memory()`` predicts and ``measure_memory(pipe, ...)`` measures; the second step is measured, when the
state of the optimizer is there. Each cell is what was predicted over what was measured, of the rank that is
furthest off. Each model is captured once for all its cases.

``--deepest`` asks the question of Table 1 of GPipe (Huang et al. 2019): the depth grows until no plan fits on
1, 2, 4 and 8 ranks. AdamW is part of the program.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import capture_once, gpt, gpt2, next_token_loss, row, t5, table, text
from memory_meter import measure_memory
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

import pipec
from pipec.errors import InfeasibleError
from pipec.ir.text_format import format_bytes
from pipec.runtime.processes.launch import world

ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)
ROWS, MICROBATCHES, LENGTH, WORDS = 16, 8, 64, 512
WAYS: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "full": {"recompute": "full"},
    "limit 30%": {"budget": 0.3},
    "limit 70%": {"budget": 0.7},
}
"""What is recomputed. A budget is a share of the way from what "none" needs to what "full" does."""
Made = tuple[nn.Module, dict[str, Tensor]]


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


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: (gpt2(128, 4, WORDS, LENGTH), _text("input_ids", "labels")),
    "llama": llama,
    "t5": lambda: (t5(128, 2, WORDS), _text("input_ids", "labels")),
    "resnet": resnet,
}


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
    pipe = pipec.compile(model, microbatches=MICROBATCHES, optimizer=ADAM, **case.options())
    with mock.patch("pipec.capture.tracer.capture", capture_once):
        return pipe.prepare(**inputs), inputs


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


# the deepest model

WIDTH, CONTEXT, VOCABULARY, ROWS_OF_A_MICROBATCH, MICROBATCHES_PER_RANK = 4096, 2048, 32000, 4, 4
LIMIT = 16 << 30


@functools.cache
def deep_model(layers: int) -> nn.Sequential:
    with torch.device("meta"):
        return gpt(WIDTH, VOCABULARY, CONTEXT, layers)


@functools.cache
def fitting(layers: int, num_ranks: int, recompute: str) -> pipec.Pipeline | None:
    """The pipeline that trains so deep a model within the limit, if there is one."""
    microbatches = MICROBATCHES_PER_RANK * num_ranks
    with torch.device("meta"):
        tokens, target = text(ROWS_OF_A_MICROBATCH * microbatches, CONTEXT, VOCABULARY)
    pipe = pipec.compile(
        deep_model(layers),
        num_ranks,
        loss_fn=next_token_loss,
        microbatches=microbatches,
        optimizer=ADAM,
        recompute=recompute,
        memory_limit=LIMIT,
    )
    with suppress(InfeasibleError), mock.patch("pipec.capture.tracer.capture", capture_once):
        return pipe.prepare(tokens, target=target)
    return None


def deepest(num_ranks: int, recompute: str, at_least: int) -> int:
    """How many layers fit, probably ``at_least`` so many."""
    fits = at_least if at_least and fitting(at_least, num_ranks, recompute) else 0
    fails = fits + max(fits, 4)
    while fitting(fails, num_ranks, recompute):
        fits, fails = fails, fails + max(at_least, 4)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if fitting(middle, num_ranks, recompute):
            fits = middle
        else:
            fails = middle
    return fits


def deepest_models(counts: Sequence[int]) -> Iterator[str]:
    """The models that fit, with and without recompute."""
    headings = ("layers", "parameters", "of one rank, none", "predicted")
    yield from table("ranks", "recompute", *headings, numbers_from=2)
    first, known = 0, dict.fromkeys(("none", "auto"), 0)
    for num_ranks, recompute in itertools.product(counts, known):
        layers = known[recompute] = deepest(num_ranks, recompute, known[recompute])
        pipe = fitting(layers, num_ranks, recompute)
        assert pipe is not None, "no model fits, however shallow"
        parameters = sum(each.numel() for each in deep_model(layers).parameters())
        first = first or parameters
        sizes = f"{parameters / 1e6:,.1f} M", f"{parameters / first:.1f}"
        yield row(num_ranks, recompute, layers, *sizes, format_bytes(pipe.memory().peak_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="of these models alone")
    parser.add_argument("--stages", type=int, action="append", help="on so many stages alone")
    parser.add_argument("--deepest", action="store_true", help="the deepest GPT that fits, instead")
    options = parser.parse_args()
    if options.deepest:
        for line in deepest_models(options.stages or [1, 2, 4, 8]):
            print(line, flush=True)
        return
    here, found = world(), list[float]()
    if here.is_distributed:
        dist.init_process_group("gloo")
    say = functools.partial(print, flush=True) if here.rank == 0 else lambda text: None
    counts = [here.size] if here.is_distributed else options.stages or [1, 2, 4]
    headings = ("model", "ranks", "schedule", "precision", "replicas", "shard")
    say("\n".join(table(*headings, *WAYS, numbers_from=len(headings))))
    for setting in settings(options.model or list(MODELS), counts, here.is_distributed):
        numbers = setting.replicas if isinstance(setting.replicas, tuple) else (setting.replicas,)
        how = setting.schedule, setting.precision or "", "-".join(map(str, numbers)), setting.shard or ""
        cells = [setting.model, setting.ranks, *how]
        for way in WAYS.values():
            ratios = [said / most for said, most in measured(replace(setting, **way))]
            found += ratios
            cells.append(f"{furthest(ratios):.3f}")
        say(row(*cells))
    say(f"\n{len(found)} peaks, predicted over measured from {min(found):.3f} to {max(found):.3f}")


if __name__ == "__main__":
    main()
