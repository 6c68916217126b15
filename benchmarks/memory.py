"""Peak memory of every rank, predicted and measured, for several models, schedules and numbers of stages.

    python benchmarks/memory.py                             # every rank in this process
    python benchmarks/memory.py --short                     # one case alone
    torchrun --nproc-per-node 4 benchmarks/memory.py        # one rank each: replicas and sharding, too

``pipe.memory()`` predicts and ``pipe.measure_memory(...)`` measures; the second step is measured, when the
state of the optimizer is there.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from pipec.ir.text import format_bytes
from pipec.runtime.launch import world

ROWS, MICROBATCHES, LENGTH, WORDS = 16, 8, 64, 512
Made = tuple[nn.Module, dict[str, Tensor]]


def gpt2() -> Made:
    config = GPT2Config(
        n_layer=8, n_embd=128, n_head=4, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), _text("input_ids", "labels")


def llama() -> Made:
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config), _text("input_ids", "labels")


def t5() -> Made:
    config = T5Config(
        num_layers=4,
        num_decoder_layers=4,
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
    """A model as it is run on so many ranks."""

    model: str
    ranks: int
    schedule: str
    recompute: str
    replicas: int = 1
    shard: str | None = None

    def options(self) -> dict[str, Any]:
        return {
            "devices": self.ranks,
            "schedule": self.schedule,
            "recompute": self.recompute,
            "replicas": self.replicas,
            "shard": self.shard,
        }


def measured(case: Case) -> list[tuple[float, float]]:
    """Predicted and measured bytes of each rank."""
    torch.manual_seed(0)
    model, inputs = MODELS[case.model]()
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    pipe = pipec.compile(model, microbatches=MICROBATCHES, optimizer=adam, **case.options())
    pipe.step(**inputs)
    found = pipe.measure_memory(**inputs)
    return [(said.peak_bytes, most.peak_bytes) for said, most in zip(pipe.memory(), found, strict=True)]


def cases(models: list[str], counts: Sequence[int], replicated: bool) -> Iterator[Case]:
    """Every schedule on these numbers of stages; replicas and sharding first, if there are replicas."""
    schedules, recompute = ("gpipe", "1f1b", "zb-h1"), ("none", "full")
    for model in models:
        for shard in (None, "optimizer", "gradients", "parameters") if replicated else ():
            yield Case(model, counts[0], "1f1b", "none", 2, shard)
        for count, schedule, again in itertools.product(counts, schedules, recompute):
            if count > 1 or schedule == "gpipe":
                yield Case(model, count, schedule, again)


def row(case: Case, rank: int, said: float, most: float) -> str:
    shown = (case.model, case.ranks, case.schedule, case.recompute, case.replicas, case.shard or "", rank)
    return (
        f"| {' | '.join(map(str, shown))} | {format_bytes(said)} | {format_bytes(most)} | {said / most:.3f} |"
    )


HEAD = """\
| model | ranks | schedule | recompute | replicas | shard | rank | predicted | measured | ratio |
|---|--:|---|---|--:|---|--:|--:|--:|--:|"""


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
        for rank, (said, most) in enumerate(measured(case)):
            ratios.append(said / most)
            say(row(case, rank, said, most))
    say(f"\nratios from {min(ratios):.3f} to {max(ratios):.3f}")
    return ratios


if __name__ == "__main__":
    main()
