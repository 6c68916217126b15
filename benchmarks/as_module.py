"""What a step costs through ``pipe.as_module()``, beside ``pipe.step``: seconds, and their ratio.

python benchmarks/as_module.py
torchrun --nproc-per-node 2 benchmarks/as_module.py

A small GPT, with AdamW and accumulation over 1 and 2 mini-batches. Both ways take turns, mini-batch by
mini-batch, and the ratio is the median of theirs.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pipec

ROWS, TOKENS, PAIRS = 8, 128, 40


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=2000, n_positions=TOKENS, use_cache=False)
    return GPT2LMHeadModel(config)


def seconds(call: Callable[[int], object], accumulation: int) -> float:
    start = time.perf_counter()
    call(accumulation)
    return time.perf_counter() - start


def main() -> None:
    pipe, other = (pipec.compile(model(), devices=2, microbatches=4) for _ in range(2))
    module = other.as_module()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (pipe, module)]
    ids = torch.randint(0, 2000, (ROWS, TOKENS))

    def with_step(accumulation: int) -> None:
        for _ in range(accumulation):
            pipe.step(input_ids=ids, labels=ids)
        optimizers[0].step()
        optimizers[0].zero_grad()

    def with_module(accumulation: int) -> None:
        for _ in range(accumulation):
            module(input_ids=ids, labels=ids).loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    for accumulation in (1, 2):
        times = []
        for k in range(PAIRS + 2):
            ways = [with_step, with_module] if k % 2 else [with_module, with_step]
            measured = {way: seconds(way, accumulation) for way in ways}
            times.append((measured[with_step], measured[with_module]))
        ratios = [other / own for own, other in times[2:]]
        own, other_seconds = (statistics.median(each) for each in zip(*times[2:], strict=True))
        pipec.log(
            f"accumulation {accumulation}: step {own * 1e3:.1f} ms, module {other_seconds * 1e3:.1f} ms, "
            f"ratio {statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
