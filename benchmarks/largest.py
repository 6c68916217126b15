"""The largest GPT that trains under a fixed limit per rank, on 1, 2, 4 and 8 ranks.

    python benchmarks/largest.py planned      # on meta: layers of width 4096, 16 GiB
    python benchmarks/largest.py run          # layers of width 128, 24 MiB: a step of it is run and measured
    python benchmarks/largest.py run --short  # on 1 and 2 ranks

The depth grows until no plan fits, as in Table 1 of GPipe (Huang et al. 2019); AdamW is part of the program.
Without recompute the model is as deep as ``recompute="none"`` allows.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from models import gpt, next_token_loss
from torch import Tensor, nn

import pipec
from pipec.capture.tracer import CaptureRequest, capture
from pipec.compiler.infeasible import infeasible_error
from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph, copy_graph
from pipec.ir.text_format import format_bytes

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from memory_meter import measure_memory

ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)
MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True)
class Sizes:
    """A GPT but for its depth, the rows of a microbatch, and what a rank may hold."""

    width: int
    context: int
    vocabulary: int
    rows: int
    limit: int
    device: str

    @functools.cache  # noqa: B019
    def model(self, layers: int) -> nn.Sequential:
        torch.manual_seed(0)
        with torch.device(self.device):
            return gpt(self.width, self.vocabulary, self.context, layers)

    def batch(self, num_ranks: int) -> tuple[Tensor, Tensor]:
        rows = self.rows * MICROBATCHES_PER_RANK * num_ranks
        with torch.device(self.device):
            tokens = torch.randint(self.vocabulary, (rows, self.context + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


PLANNED = Sizes(width=4096, context=2048, vocabulary=32000, rows=4, limit=16 << 30, device="meta")
RUN = Sizes(width=128, context=64, vocabulary=256, rows=2, limit=24 << 20, device="cpu")


def once(request: CaptureRequest) -> TrainingGraph:
    """Capture a model the first time alone: its graph is the same for any number of ranks."""
    if request.model not in CAPTURED:
        CAPTURED[request.model] = capture(request)
    return copy_graph(CAPTURED[request.model])


CAPTURED: dict[nn.Module, TrainingGraph] = {}


def at_once(evaluated: EvaluatedPlan, search: object = None, where: str = "") -> None:
    """Refuse a plan that lacks memory, and do not look for a limit that would be enough."""
    if any(evaluated.excess_bytes):
        raise infeasible_error(evaluated)


@functools.cache
def fitting(sizes: Sizes, layers: int, num_ranks: int, recompute: str) -> pipec.Pipeline | None:
    """The pipeline that trains so deep a model within the limit, if there is one."""
    tokens, target = sizes.batch(num_ranks)
    pipe = pipec.compile(
        sizes.model(layers),
        num_ranks,
        loss_fn=next_token_loss,
        microbatches=MICROBATCHES_PER_RANK * num_ranks,
        optimizer=ADAM,
        recompute=recompute,
        memory_limit=sizes.limit,
    )
    patched = mock.patch.multiple("pipec.compiler.compile", capture=once, require_memory=at_once)
    with suppress(InfeasibleError), patched:
        return pipe.prepare(tokens, target=target)
    return None


def deepest(sizes: Sizes, num_ranks: int, recompute: str, at_least: int) -> int:
    """How many layers fit; ``at_least`` so many are known to."""
    fits, fails = at_least, at_least + max(at_least, 4)
    while fitting(sizes, fails, num_ranks, recompute):
        fits, fails = fails, fails + max(at_least, 4)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if fitting(sizes, middle, num_ranks, recompute):
            fits = middle
        else:
            fails = middle
    return fits


def measured(sizes: Sizes, pipe: pipec.Pipeline, num_ranks: int) -> str:
    """The peak of the rank that needs most in a real step, where there is memory to run one."""
    if sizes.device == "meta":
        return ""
    tokens, target = sizes.batch(num_ranks)
    pipe.step(tokens, target=target)
    return format_bytes(measure_memory(pipe, tokens, target=target).peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["planned", "run"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--short", action="store_true", help="1 and 2 ranks alone")
    options = parser.parse_args()
    table(PLANNED if options.part == "planned" else RUN, [1, 2] if options.short else options.ranks)


def table(sizes: Sizes, counts: Sequence[int]) -> None:
    print(f"at most {format_bytes(sizes.limit)} a rank\n")
    print("| ranks | recompute | layers | parameters | of one rank, none | predicted | measured |")
    print("|--:|---|--:|--:|--:|--:|--:|", flush=True)
    first, known = 0, dict.fromkeys(("none", "auto"), 0)
    for num_ranks in counts:
        for recompute in known:
            layers = known[recompute] = deepest(sizes, num_ranks, recompute, known[recompute])
            pipe = fitting(sizes, layers, num_ranks, recompute)
            assert pipe is not None, "no model fits, however shallow"
            parameters = sum(each.numel() for each in sizes.model(layers).parameters())
            first = first or parameters
            cells = (
                num_ranks,
                recompute,
                layers,
                f"{parameters / 1e6:,.1f} M",
                f"{parameters / first:.1f}",
                format_bytes(pipe.memory().peak_bytes),
                measured(sizes, pipe, num_ranks),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
