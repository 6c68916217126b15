"""Breaks rules of the analysis on purpose, one at a time, and says how soon random programs show it.

``python tests/helpers/analysis_mutations.py [--seconds 60]`` prints a line for each rule; the exit status is
how many were not found.
"""

import argparse
import itertools
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from fuzz_batch_analysis import Tally, fault_of
from random_batch_programs import Program, draw_program

from pipec.capture.batch import rules
from pipec.capture.batch.dependence import Dependence, PerRow, SumOverRows, Whole
from pipec.capture.batch.dependence_tracker import DependenceTracker
from pipec.capture.batch.operator_call import OperatorCall, per_row_among


def presumed(call: OperatorCall) -> Dependence:
    """What sizes alone suggest: rows along the one dimension that grows with the batch, or a sum."""
    dims = [dim for dim, size in enumerate(call.shape) if call.is_row_multiple(size)]
    if len(dims) == 1:
        size = call.shape[dims[0]]
        return PerRow(dims[0], inner=size // call.rows)
    return SumOverRows() if per_row_among(call.values) else Whole()


NAMES = (
    *("_softmax", "sort", "cumsum", "flip", "roll", "index_select", "gather", "index", "tril", "mm", "bmm"),
    *(
        "native_layer_norm",
        "view",
        "_unsafe_view",
        "permute",
        "transpose",
        "cat",
        "repeat",
        "arange",
        "index_put",
    ),
    *(
        "amax",
        "index_add",
        "scatter_add",
        "select",
        "slice",
        "convolution",
        "nll_loss_forward",
        "std",
        "expand",
    ),
)


def broken() -> Iterator[tuple[str, AbstractContextManager[object]]]:
    """The rules of operators, and of writing through views and numbers of rows."""
    for name in NAMES:
        if name in rules.RULES:
            yield name, mock.patch.dict(rules.RULES, {name: presumed})  # type: ignore[arg-type]
    yield (
        "writing into a part",
        mock.patch.object(DependenceTracker, "_beside", lambda self, call, other, *_: self.value_of(other)),
    )
    yield "numbers of rows", mock.patch.object(OperatorCall, "require_no_row_numbers", return_value=None)
    yield (
        "sizes that grow",
        mock.patch.object(DependenceTracker, "_checked", lambda self, call, tensor, value: value),
    )


class Recording(dict[str, Any]):
    """The rules, and the names of those that were asked for."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        super().__init__(rules)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


@dataclass(frozen=True)
class Tried:
    """A program that is right, the operators that it calls, and the seconds until it had been tried."""

    program: Program
    operators: frozenset[str]
    seconds: float


def tried(seconds: float) -> Iterator[Tried]:
    """The programs that a fuzzer tries in so many seconds of the processor."""
    begun = time.process_time()
    for seed in itertools.count():
        program, recording = draw_program(seed), Recording(rules.RULES)
        with mock.patch.object(rules, "RULES", recording):
            fault = program.names and fault_of(program, Tally())
        passed = time.process_time() - begun
        if passed > seconds:
            return
        if program.names and not fault:
            yield Tried(program, frozenset(recording.asked), passed)


def first_to_show(
    name: str, patch: AbstractContextManager[object], programs: Iterable[Tried]
) -> Tried | None:
    """The first program that is wrong with a rule broken; programs without the operator stay as they are."""
    for each in programs:
        if name in rules.RULES and name not in each.operators:
            continue
        with patch:
            if fault_of(each.program, Tally()):
                return each
    return None


@contextmanager
def quietly() -> Iterator[None]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    missed = 0
    with quietly():
        programs = list(tried(options.seconds))
        for name, patch in broken():
            found = first_to_show(name, patch, programs)
            missed += found is None
            after = (
                f"found after {found.seconds:.1f} s, by seed {found.program.seed}" if found else "NOT FOUND"
            )
            print(f"{name:22} {after}", flush=True)
    print(f"{len(programs)} programs in {options.seconds:.0f} s")
    return missed


if __name__ == "__main__":
    sys.exit(main())
