"""Compile time: the passes of GPT-2 with 124 million parameters, and the first calls of small models.

    python benchmarks/compile_time.py                # pass by pass, on the meta device: nothing is allocated
    python benchmarks/compile_time.py --first-step   # beside torch.compile, with no cache of inductor's
    python benchmarks/compile_time.py --calls        # the first call of each kind, and checks before a step

``capture`` and ``differentiate`` are torch's own work; everything else is pipec's. Seconds are those of the
processor except in the first table. A round before the others does not count: it imports what all use.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from common import medians, processor_seconds, row, table
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pipec
from pipec.runtime.executions import STEP
from pipec.runtime.stream.call_arguments import CallArguments

TORCH = ("capture", "differentiate")
BATCH, CONTEXT = 8, 1024
VOCABULARY, LENGTH = 512, 64


def compile_seconds(num_stages: int) -> Mapping[str, float]:
    """Seconds of each pass for a training step, compiled and not run."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        tokens = torch.empty(BATCH, CONTEXT, dtype=torch.int64)
    pipe = pipec.compile(model, devices=num_stages, microbatches=BATCH)
    return pipe.prepare(input_ids=tokens, labels=tokens).compile_seconds


def passes(num_stages: int, rounds: int) -> Iterator[str]:
    found = [compile_seconds(num_stages) for _ in range(rounds)]
    seconds = {name: statistics.median(each[name] for each in found) for name in found[0]}
    of_torch = sum(seconds[name] for name in TORCH)
    of_pipec = sum(seconds.values()) - of_torch
    yield from table("pass", "seconds", "of capture + differentiate")
    for name, value in {**seconds, "**all of pipec's own**": of_pipec}.items():
        yield row(name, f"{value:.2f}", f"{value / of_torch:.1%}")


def narrow() -> tuple[GPT2LMHeadModel, Tensor]:
    """A model of 12 layers whose first step is nearly all compilation, and its batch."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), torch.randint(VOCABULARY, (BATCH, LENGTH))


def step_of_torch(backend: str) -> None:
    model, tokens = narrow()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    with inductor_config.patch(force_disable_caches=True, compile_threads=1):
        compiled(input_ids=tokens, labels=tokens).loss.backward()


def step_of_pipec() -> None:
    model, tokens = narrow()
    torch.compiler.reset()
    pipec.compile(model, devices=2, microbatches=4).step(input_ids=tokens, labels=tokens)


AOT_EAGER = "torch.compile, aot_eager"
FIRST_STEPS: Mapping[str, Callable[[], None]] = {
    AOT_EAGER: lambda: step_of_torch("aot_eager"),
    "torch.compile, inductor": lambda: step_of_torch("inductor"),
    "pipec": step_of_pipec,
}


def first_steps(rounds: int) -> Iterator[str]:
    found = medians(FIRST_STEPS, rounds, clock=processor_seconds)
    yield from table("first step", "processor seconds", "/ aot_eager")
    for name, median in found.items():
        yield row(name, f"{median:.1f}", f"{median / found[AOT_EAGER]:.2f}")


def gpt2_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=96, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def llama_model(num_layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
    )
    return LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "GPT-2, 12 layers": gpt2_model,
    "Llama, 4 layers": lambda: llama_model(4),
    "Llama, 32 layers": lambda: llama_model(32),
}


def call_seconds(make: Callable[[], nn.Module]) -> Mapping[str, float]:
    """Seconds of the first call of each kind of one pipeline, and of the checks before a later step."""
    torch.compiler.reset()
    tokens, shorter = (torch.randint(VOCABULARY, (BATCH, length)) for length in (LENGTH, LENGTH * 3 // 4))
    pipe = pipec.compile(make(), devices=2, microbatches=4)
    inputs: dict[str, object] = {"input_ids": tokens, "labels": tokens}
    calls: Mapping[str, Callable[[], object]] = {
        "step": lambda: pipe.step(**inputs),
        "step of a second length": lambda: pipe.step(input_ids=shorter, labels=shorter),
        "checks before a step": lambda: pipe._executions.agree(STEP, CallArguments((), inputs)),
        "eval_step": lambda: pipe.eval_step(**inputs),
        "eval_step after eval()": lambda: pipe.eval().eval_step(**inputs),
        "forward": lambda: pipe(input_ids=tokens),
    }
    seconds = {}
    for name, call in calls.items():
        begun = time.process_time()
        call()
        seconds[name] = time.process_time() - begun
    return seconds


def first_calls(rounds: int, models: list[str]) -> Iterator[str]:
    found = [{name: call_seconds(MODELS[name]) for name in models} for _ in range(rounds + 1)][1:]
    kinds = list(found[0][models[0]])
    yield from table("processor seconds of the first", *kinds)
    for name in models:
        yield row(name, *(f"{statistics.median(each[name][kind] for each in found):.4g}" for kind in kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4, help="of the table of passes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-step", action="store_true", help="compare with torch.compile instead")
    parser.add_argument("--calls", action="store_true", help="time the first call of each kind instead")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="of --calls")
    args = parser.parse_args()
    lines = passes(args.stages, args.rounds)
    if args.first_step:
        lines = first_steps(args.rounds)
    elif args.calls:
        lines = first_calls(args.rounds, args.models)
    pipec.log("\n".join(lines))


if __name__ == "__main__":
    main()
