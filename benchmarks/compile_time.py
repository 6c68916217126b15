"""Compile time: pass by pass, and first steps beside torch.compile.

    python benchmarks/compile_time.py                # GPT-2 with 124 million parameters, on the meta device
    python benchmarks/compile_time.py --large        # 80 layers of width 10,240 on 64 stages, once
    python benchmarks/compile_time.py --first-step   # beside torch.compile, with no cache of inductor's

``capture`` and ``differentiate`` are torch's own work; everything else is pipec's. Seconds of first steps are
those of the processor. A round before the others does not count there: it imports what all use.
"""

import argparse
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from common import gpt2, medians, processor_seconds, row, table
from torch import Tensor
from torch._inductor import config as inductor_config
from transformers import GPT2Config, GPT2LMHeadModel

import pipec

TORCH = ("capture", "differentiate")
VOCABULARY, LENGTH, BATCH = 512, 64, 8
SMALL = GPT2Config()
LARGE = GPT2Config(
    vocab_size=51200,
    n_positions=2048,
    n_embd=10240,
    n_layer=80,
    n_head=80,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def compile_seconds(config: GPT2Config, num_stages: int, batch: int) -> Mapping[str, float]:
    """Seconds of each pass for a training step, compiled and not run."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        tokens = torch.empty(batch, config.n_positions, dtype=torch.int64)
    pipe = pipec.compile(model, devices=num_stages, microbatches=batch)
    return pipe.prepare(input_ids=tokens, labels=tokens).compile_seconds


def passes(config: GPT2Config, num_stages: int, batch: int, rounds: int) -> Iterator[str]:
    found = [compile_seconds(config, num_stages, batch) for _ in range(rounds)]
    seconds = {name: statistics.median(each[name] for each in found) for name in found[0]}
    of_torch = sum(seconds[name] for name in TORCH)
    of_pipec = sum(seconds.values()) - of_torch
    yield from table("pass", "seconds", "of capture + differentiate")
    for name, value in {**seconds, "**all of pipec's own**": of_pipec}.items():
        yield row(name, f"{value:.2f}", f"{value / of_torch:.1%}")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield f"\nthe whole process: {processor_seconds():.1f} processor seconds, {most / 2**20:.2f} GiB at most"


def narrow() -> tuple[GPT2LMHeadModel, Tensor]:
    """A model of 12 layers whose first step is nearly all compilation, and its batch."""
    return gpt2(64, 12, VOCABULARY, LENGTH), torch.randint(VOCABULARY, (BATCH, LENGTH))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="compile 101 billion parameters instead")
    parser.add_argument("--first-step", action="store_true", help="compare with torch.compile instead")
    args = parser.parse_args()
    if args.first_step:
        lines = first_steps(args.rounds)
    elif args.large:
        lines = passes(LARGE, num_stages=64, batch=64, rounds=1)
    else:
        lines = passes(SMALL, num_stages=4, batch=BATCH, rounds=args.rounds)
    pipec.log("\n".join(lines))


if __name__ == "__main__":
    main()
