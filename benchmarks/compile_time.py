"""Compile time of GPT-2 with 124M parameters, pass by pass, on the meta device: nothing is ever allocated.

``capture`` and ``differentiate`` are torch's own work; everything else is pipec's.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipec

TORCH = ("capture and differentiate",)
BATCH, CONTEXT = 8, 1024


def compile_seconds(num_stages: int) -> Mapping[str, float]:
    """Seconds of each pass for a training step, compiled and not run."""
    os.environ["PIPEC_CACHE_DIR"] = ""  # what is measured would be read from disk
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead of JSON")
    args = parser.parse_args()

    rounds = [compile_seconds(args.stages) for _ in pipec.progress(range(args.rounds), "compiling GPT-2")]
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    print(markdown(medians) if args.markdown else json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
