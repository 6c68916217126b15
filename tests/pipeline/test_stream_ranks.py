"""Streams with one process per rank over gloo: the same losses everywhere, and the same errors."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
from functools import partial
sys.path.insert(0, {tests!r})
import torch, pipec
from pipec.errors import InputError
from optimizer_reference import batches, model
rank = int(os.environ["RANK"])
pipe = pipec.compile(model(), 2, microbatches=2, optimizer=partial(torch.optim.AdamW, lr=0.01), timeout=240.0)

def streamed(given):
    losses = []
    try:
        for loss in pipe.stream(given):
            losses.append(round(loss.item(), 9))
    except InputError as error:
        print(error)
    return losses
"""


def told(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])) + textwrap.dedent(body))
    return run_ranks(script, 2, tmp_path)


def test_streams_end_alike_on_all_ranks(tmp_path: Path) -> None:
    """Iterators that agree, end early on one rank, raise on one rank; training goes on after each."""
    one, other = told(
        tmp_path,
        """
        def failing():
            yield from batches(1)
            raise OSError("the disk is full")

        print("agree", streamed(batches(3)))
        print("shorter", len(streamed(batches(3 - rank))))
        print("raises", len(streamed(failing() if rank else batches(3))))
        print("all raise", len(streamed(failing())))
        print("goes on", len(streamed(batches(2))))
        """,
    )
    assert one == other
    lines = one.splitlines()
    assert lines[0].startswith("agree [")
    assert lines[0].count(",") == 2
    assert "  batches: another one on rank 0; no more on rank 1" in lines
    assert "  batches: another one on rank 0; OSError: the disk is full on rank 1" in lines
    assert "the iterator of batches raised OSError: the disk is full" in lines
    ends = [line for line in lines if line.startswith(("shorter", "raises", "all raise", "goes on"))]
    assert ends == ["shorter 2", "raises 1", "all raise 1", "goes on 2"]
