"""Train Hugging Face's GPT-2, which returns its own loss and ties its embeddings, on four pipeline stages.

python examples/huggingface_gpt2.py                         # every stage in this process
torchrun --nproc-per-node 4 examples/huggingface_gpt2.py    # one stage per process: the same losses
"""

import argparse

import torch
from stdlib_text import load_bytes, sample
from transformers import GPT2Config, GPT2LMHeadModel

import pipec

BATCH, CONTEXT = 16, 64


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def example() -> pipec.Example:
    """For the command line: ``pipec plan examples/huggingface_gpt2.py:example --devices 4``."""
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
    return pipec.Example(make_model(), kwargs={"input_ids": tokens, "labels": tokens})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, validation = load_bytes()
    generator = torch.Generator().manual_seed(0)

    pipe = pipec.compile(make_model(), devices=4, schedule="1f1b", microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)

    for step in (bar := pipec.progress(range(args.steps), "training")):
        tokens = sample(train, BATCH, CONTEXT, generator)
        loss = pipe.step(input_ids=tokens, labels=tokens)
        optimizer.step()
        optimizer.zero_grad()
        bar.show(f"loss {loss:.3f}")
        if step % 10 == 0:
            pipec.log(f"step {step:4}  loss {loss:.6f}")

    pipe.eval()
    tokens = sample(validation, BATCH, CONTEXT, generator)
    pipec.log(f"validation loss {pipe.eval_step(input_ids=tokens, labels=tokens):.6f}")


if __name__ == "__main__":
    main()
