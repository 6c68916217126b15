"""Breaks rules of the analysis on purpose, one at a time, and says how soon random programs show it.

``python tests/break_rules.py [--seconds 60]`` prints a line for each rule; the exit status is how many were
not found.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch
from fuzz_batch import Tally, fault_of
from random_programs import draw_program

from pipec.capture.batch import rules
from pipec.capture.batch.call import OperatorCall, rows_among
from pipec.capture.batch.tracker import Tracker
from pipec.capture.batch.values import Rows, Sum, Value, Whole


def presumed(call: OperatorCall) -> Value:
    """What sizes alone suggest: rows along the one dimension that grows with the batch, or a sum."""
    dims = [dim for dim, size in enumerate(call.shape) if call.is_tagged(size)]
    if len(dims) == 1:
        size = call.shape[dims[0]]
        return Rows(dims[0], inner=size // call.rows)
    return Sum() if rows_among(call.values) else Whole()


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
        mock.patch.object(Tracker, "_beside", lambda self, call, other, *_: self.value_of(other)),
    )
    yield "numbers of rows", mock.patch.object(OperatorCall, "require_no_numbers", return_value=None)
    yield "sizes that grow", mock.patch.object(Tracker, "_checked", lambda self, call, tensor, value: value)


def seconds_to_find(patch: AbstractContextManager[object], seconds: float) -> tuple[float, int, str]:
    """Processor seconds and programs until one is wrong that is right without the patch; and that program."""
    begun, seed = time.process_time(), 0
    while time.process_time() < begun + seconds:
        program = draw_program(seed)
        seed += 1
        with patch:
            fault = program.names and fault_of(program, Tally())
        if fault and not fault_of(program):
            return time.process_time() - begun, seed, program.source
    return seconds, seed, ""


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
        for name, patch in broken():
            seconds, count, source = seconds_to_find(patch, options.seconds)
            missed += not source
            print(
                f"{name:22} {f'found after {count} programs, {seconds:.1f} s' if source else 'NOT FOUND'}",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
