"""Compile time of GPT-2 with 124M parameters, pass by pass, on the meta device: nothing is ever allocated.

``capture`` and ``differentiate`` are torch's own work; everything else is pipec's. ``--first-step`` compares
a narrow GPT-2 of as many layers with ``torch.compile`` and no cache of inductor's, in processor seconds.
``--calls`` has those of the first call of each kind, for this model and for Llamas of 4 and 32 equal layers.
``--ranks`` starts these models under ``torchrun`` on 1, 2 and 4 ranks. Rank 0 compiles for all: its processor
seconds are the critical path, and the first step's on 4 ranks over one rank's is what waiting costs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch._inductor import config as inductor_config
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pipec

TORCH = ("capture", "differentiate")
BATCH, CONTEXT = 8, 1024


def compile_seconds(num_stages: int) -> Mapping[str, float]:
    """Seconds of each pass for a training step, compiled and not run."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        tokens = torch.empty(BATCH, CONTEXT, dtype=torch.int64)
    pipe = pipec.compile(model, devices=num_stages, microbatches=BATCH)
    pipe.prepare(input_ids=tokens, labels=tokens)
    return pipe.compile_seconds


def markdown(seconds: Mapping[str, float]) -> str:
    of_torch = sum(seconds[name] for name in TORCH)
    of_pipec = sum(seconds.values()) - of_torch
    rows = [f"| {name} | {value:.2f} | {value / of_torch:.1%} |" for name, value in seconds.items()]
    total = f"| **all of pipec's own** | {of_pipec:.2f} | {of_pipec / of_torch:.1%} |"
    return "\n".join(["| pass | seconds | of capture + differentiate |", "|---|--:|--:|", *rows, total])


def narrow() -> tuple[GPT2LMHeadModel, torch.Tensor]:
    """A model of 12 layers whose first step is nearly all compilation, and its batch."""
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), torch.randint(512, (BATCH, 64))


def step_of_torch(backend: str) -> None:
    model, tokens = narrow()
    compiled = torch.compile(model, backend=backend)
    with inductor_config.patch(force_disable_caches=True, compile_threads=1):
        compiled(input_ids=tokens, labels=tokens).loss.backward()


def step_of_pipec(dynamic: bool) -> None:
    model, tokens = narrow()
    pipe = pipec.compile(model, devices=2, microbatches=4, dynamic=dynamic)
    pipe.step(input_ids=tokens, labels=tokens)


AOT_EAGER = "torch.compile, aot_eager"

FIRST_STEPS: Mapping[str, Callable[[], None]] = {
    AOT_EAGER: lambda: step_of_torch("aot_eager"),
    "torch.compile, inductor": lambda: step_of_torch("inductor"),
    "pipec, fixed batch and length": lambda: step_of_pipec(dynamic=False),
    "pipec, symbolic batch and length": lambda: step_of_pipec(dynamic=True),
}


def first_steps(num_rounds: int) -> str:
    """A table of the medians of seconds of the processor, each contestant's turn after the other's.

    A round before the others is left out: the first contestant would import what all of them use.
    """
    taken: dict[str, list[float]] = {name: [] for name in FIRST_STEPS}
    for _ in pipec.progress(range(num_rounds + 1), "first steps of GPT-2"):
        for name, step in FIRST_STEPS.items():
            torch.compiler.reset()
            begun = _processor_seconds()
            step()
            taken[name].append(_processor_seconds() - begun)
    taken = {name: seconds[1:] for name, seconds in taken.items()}
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    rows = [
        f"| {name} | {median:.1f} | {min(taken[name]):.1f} to {max(taken[name]):.1f} "
        f"| {median / medians[AOT_EAGER]:.2f} |"
        for name, median in medians.items()
    ]
    header = ["| first step | processor seconds | min to max | / aot_eager |", "|---|--:|--:|--:|"]
    return "\n".join([*header, *rows])


def _processor_seconds() -> float:
    """Of this process, and of those that it started and waited for, such as inductor's C++ compiler."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


VOCABULARY, LENGTH = 512, 64


def gpt2_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * LENGTH,
        n_embd=96,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
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
    """Seconds of the processor for the first call of each kind of one pipeline, from the first step on."""
    torch.compiler.reset()
    tokens, shorter = (torch.randint(VOCABULARY, (BATCH, length)) for length in (LENGTH, LENGTH * 3 // 4))
    pipe = pipec.compile(make(), devices=2, microbatches=4)
    calls: Mapping[str, Callable[[], object]] = {
        "step": lambda: pipe.step(input_ids=tokens, labels=tokens),
        "step of a second length": lambda: pipe.step(input_ids=shorter, labels=shorter),
        "eval_step": lambda: pipe.eval_step(input_ids=tokens, labels=tokens),
        "eval_step after eval()": lambda: pipe.eval().eval_step(input_ids=tokens, labels=tokens),
        "forward": lambda: pipe(input_ids=tokens),
    }
    return {name: _seconds_of(call) for name, call in calls.items()}


def _seconds_of(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def first_calls(num_rounds: int) -> str:
    """A table of medians. A round before the others is left out, as in ``first_steps``."""
    rounds = [
        {name: call_seconds(make) for name, make in MODELS.items()}
        for _ in pipec.progress(range(num_rounds + 1), "first calls")
    ][1:]
    kinds = rounds[0][next(iter(MODELS))]
    medians = {
        name: [statistics.median(taken[name][kind] for taken in rounds) for kind in kinds] for name in MODELS
    }
    rows = [f"| {name} | {' | '.join(f'{each:.1f}' for each in row)} |" for name, row in medians.items()]
    header = [f"| processor seconds of the first | {' | '.join(kinds)} |", "|---|" + "--:|" * len(kinds)]
    return "\n".join([*header, *rows])


RANKS = (1, 2, 4)


def step_on_rank(name: str, folder: Path) -> None:
    """Write how long this rank's first step takes, and its processor seconds: in it, and since its start."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    pipe = pipec.compile(MODELS[name](), microbatches=4)
    begun, used = time.perf_counter(), time.process_time()
    pipe.step(input_ids=tokens, labels=tokens)
    found = time.perf_counter() - begun, time.process_time() - used, time.process_time()
    (folder / os.environ["RANK"]).write_text(json.dumps(found))


def steps_on_ranks(name: str, num_ranks: int) -> list[list[float]]:
    """What each rank has written."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        given = [*torchrun, f"--nproc-per-node={num_ranks}", __file__, "--model", name, "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(given, env=environment, stderr=subprocess.DEVNULL, check=True)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]


def ranks_table(num_rounds: int) -> str:
    """A table of medians, the numbers of ranks taking turns."""
    rows = []
    for name in MODELS:
        taken = [[steps_on_ranks(name, count) for count in RANKS] for _ in range(num_rounds)]
        for place, count in enumerate(RANKS):
            every = [each[place] for each in taken]
            one = statistics.median(each[0][0][1] for each in taken)
            wall, own, total = (statistics.median(ranks[0][k] for ranks in every) for k in range(3))
            other = statistics.median(max((rank[2] for rank in ranks[1:]), default=0.0) for ranks in every)
            rows.append(
                f"| {name} | {count} | {wall:.1f} | {own:.1f} | {own / one:.2f} | {total:.1f} | {other:.1f} |"
            )
    header = [
        "| model | ranks | first step, s | processor s of rank 0 | / one rank's | since start | another's |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*header, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--first-step", action="store_true", help="print the comparison with torch.compile alone"
    )
    parser.add_argument("--calls", action="store_true", help="print the first call of each kind alone")
    parser.add_argument("--ranks", action="store_true", help="print the first step on several ranks alone")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead of JSON")
    args = parser.parse_args()

    if args.calls and args.model:
        print(json.dumps(call_seconds(MODELS[args.model])))
        return
    if args.folder:
        step_on_rank(args.model, args.folder)
        return
    if args.ranks:
        print(ranks_table(args.rounds))
        return
    if args.first_step:
        pipec.log(first_steps(args.rounds))
        return
    if args.calls:
        pipec.log(first_calls(args.rounds))
        return
    rounds = [compile_seconds(args.stages) for _ in pipec.progress(range(args.rounds), "compiling GPT-2")]
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    print(markdown(medians) if args.markdown else json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
