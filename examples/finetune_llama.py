"""Fine-tune a Llama from a folder of Hugging Face, in bfloat16, on as many GPUs as there are processes.

    torchrun --nproc-per-node 8 examples/finetune_llama.py Meta-Llama-3.1-8B --data tokens.npy

No process ever holds the whole model: each reads the weights of its own stages. docs/gpus.md goes through it
line by line. Without --data, batches are random tokens.
"""

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

import pipec


def batch(data: Path | None, number: int, shape: tuple[int, int], vocabulary: int) -> Tensor:
    """The ``number``-th mini-batch, the same in each process: consecutive pieces of a long text."""
    if data is None:
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(number))
    tokens, count = np.load(data, mmap_mode="r"), shape[0] * shape[1]
    places = np.arange(number * count, (number + 1) * count) % len(tokens)
    return torch.from_numpy(tokens[places].astype(np.int64)).view(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="config.json and safetensors, as save_pretrained writes them"
    )
    parser.add_argument("--data", type=Path, help="a one-dimensional .npy of tokens; default: random ones")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32, help="of a mini-batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to, and to go on from")
    args = parser.parse_args()

    pipe = pipec.from_pretrained(
        args.folder,
        microbatches=args.microbatches,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-5, fused=True),
        clip_grad_norm=1.0,
        dtype="bfloat16",
    )
    pipe.train()
    vocabulary = AutoConfig.from_pretrained(args.folder).vocab_size
    next_batch = functools.partial(batch, args.data, shape=(args.rows, args.length), vocabulary=vocabulary)
    tokens = next_batch(0)
    pipe.prepare(input_ids=tokens, labels=tokens)
    pipec.log(pipe.plan)

    checkpoints = None
    if args.checkpoints is not None:
        checkpoints = pipec.CheckpointManager(args.checkpoints, every=100, keep=2, asynchronous=True)
        checkpoints.resume(pipe)
    while pipe.num_steps < args.steps:
        tokens = next_batch(pipe.num_steps)
        loss = pipe.step(input_ids=tokens, labels=tokens)
        pipec.log(f"step {pipe.num_steps}: loss {float(loss):.4f}")
        if checkpoints is not None:
            checkpoints.step(pipe)


if __name__ == "__main__":
    main()
