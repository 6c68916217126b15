"""Draws random programs over a batch and checks every claim about their values against brute force.

``python tests/helpers/fuzz_batch_analysis.py --seconds 3600`` goes on for so long; ``--seed 17 --count 1``
tries one again and prints it; ``--whole`` trains a pipeline of each program instead, and compares it with
eager torch.
"""

import argparse
import functools
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from batch_analysis_check import Checked, SkippedError, check_graph
from batch_comparison import BatchCase, BrokenCase, ComparisonStatus, compare_with_eager
from random_batch_programs import BATCHED, ROWS, SIZES, TRAINED, WIDTH, Program, arguments, draw_program
from torch import Tensor, fx, nn

MOST_FAULTS = 10
"""A run ends after so many wrong programs."""


@dataclass
class Tally:
    """What has come of programs so far; ``faults`` has those that are wrong, by seed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[int, str] = field(default_factory=dict)
    num_claims: int = 0
    num_proved: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common())
        return (
            f"{self.outcomes.total()} programs: {kinds}; {self.num_proved} of {self.num_claims} values are "
            f"proved; {len(self.faults)} programs are wrong"
        )


def claims_of(program: Program) -> Checked:
    """What is claimed of the results of all statements, the last one first."""
    function = program.function(f"({', '.join(reversed(program.names))},)", program.reads)
    given = {name: x for name, x in arguments().items() if name in program.reads}
    return check_graph(fx.symbolic_trace(function), given, BATCHED, SIZES, TRAINED)


def fault_of(program: Program, tally: Tally) -> str:
    """What is wrong about a program, or nothing."""
    try:
        checked = claims_of(program)
    except SkippedError as error:
        tally.outcomes[f"skipped ({error})"] += 1
        return ""
    tally.outcomes[checked.said] += 1
    tally.num_claims += checked.num_claims
    tally.num_proved += checked.num_proved
    return "\n".join(checked.wrong[:3])


def fuzz(seeds: Iterable[int], is_whole: bool = False, seconds: float = float("inf")) -> Tally:
    """Try the programs of these seeds, for at most so many seconds of the processor."""
    tally, end = Tally(), time.process_time() + seconds
    for seed in seeds:
        if time.process_time() > end or len(tally.faults) >= MOST_FAULTS:
            break
        program = draw_program(seed, 3 if is_whole else 6)
        fault = (fault_of_pipeline if is_whole else fault_of)(program, tally) if program.names else ""
        if fault:
            tally.faults[seed] = f"{program.source}\n{fault}"
    return tally


fuzz_whole = functools.partial(fuzz, is_whole=True)


class ProgramModel(nn.Module):
    """A layer, and what a program makes of its rows."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.c, self.t = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.program = program.function(program.names[-1])

    def forward(self, h: Tensor, s: Tensor, w: Tensor, k: Tensor, m: Tensor, p: Tensor) -> Tensor:
        return self.program(torch.tanh(self.first(h)), s, w, k, m, p, self.c, self.t)


def weighted(y: Tensor, target: Tensor) -> Tensor:
    """A loss in which no element counts as much as another of its row."""
    if y.ndim and y.shape[0] == target.shape[0]:
        return (y.flatten(1).square().mean(1) * target).mean() if y.ndim > 1 else (y * target).mean()
    return y.sin().mean()


def fault_of_pipeline(program: Program, tally: Tally) -> str:
    """What is wrong after a step of a pipeline of the program, or nothing."""
    case = BatchCase(
        lambda: ProgramModel(program),
        lambda rows: tuple(arguments(rows)[name] for name in BATCHED),
        lambda rows: arguments(rows, 1)["w"],
        weighted,
        rows=(ROWS,),
        options={"batched": {**dict.fromkeys(BATCHED, 0), "target": 0}},
        name=f"seed {program.seed}",
    )
    try:
        result = compare_with_eager(case)
    except BrokenCase:
        tally.outcomes["skipped"] += 1
        return ""
    tally.outcomes[result.verdict] += 1
    wrong = ComparisonStatus.SILENT, ComparisonStatus.RAW, ComparisonStatus.WARNED_WRONG
    return f"{result.verdict}: {result.message}" if result.verdict in wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    if options.count == 1:
        print(draw_program(options.seed, 3 if options.whole else 6).source, "\n")
    seeds = range(options.seed, options.seed + options.count)
    tally = fuzz(seeds, options.whole, options.seconds)
    print(*(f"seed {seed}\n{fault}\n" for seed, fault in tally.faults.items()), tally, sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    main()
