"""``pipec plan --devices 64`` of a GPT with 101 billion parameters, on meta: seconds and peak memory.

The model is as Hugging Face writes it: 80 layers of width 10240, a batch of 64 times 2,048 tokens.
"""

import argparse
import json
import resource
import time
from collections.abc import Mapping

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipec

BATCH, CONTEXT, VOCABULARY, WIDTH, HEADS = 64, 2048, 51200, 10240, 80


def example(num_layers: int = 80) -> pipec.Example:
    """What ``pipec plan`` is pointed at; it holds no memory."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=num_layers,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        tokens = torch.empty(BATCH, CONTEXT, dtype=torch.int64)
    return pipec.Example(model, kwargs={"input_ids": tokens, "labels": tokens})


def figures(num_devices: int, num_layers: int) -> Mapping[str, float]:
    """Wall-clock seconds of each step; CPU seconds and peak memory of the process, imports included."""
    started = time.perf_counter()
    shown = example(num_layers)
    seconds = {"model on meta": time.perf_counter() - started}
    pipe = pipec.compile(shown.model, devices=num_devices, microbatches=BATCH, dynamic=False)
    seconds |= pipe.prepare(**shown.kwargs).compile_seconds
    started = time.perf_counter()
    pipec.log(pipe.plan)
    seconds["simulate and print"] = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    return seconds | {
        "parameters": float(sum(parameter.numel() for parameter in shown.model.parameters())),
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": 1024.0 * used.ru_maxrss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    args = parser.parse_args()
    pipec.log(json.dumps(figures(args.devices, args.layers), indent=2))


if __name__ == "__main__":
    main()
