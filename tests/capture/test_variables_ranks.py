"""Lengths and numbers that change from step to step, on ranks that are processes as in one process."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import gc, weakref
import torch, pipec
from torch import nn
from torch.nn import functional as F
from pipec.compiler import compile_cache

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)
        self.register_buffer("causal", torch.ones(32, 32).tril())

    def forward(self, x, temperature=1.0):
        length = x.shape[1]
        hidden = self.causal[:length, :length] @ self.drop(self.first(x)) / temperature
        if length % 2:
            hidden = hidden + 1
        return self.last(hidden)

torch.manual_seed(0)
pipe = pipec.compile(Net(), devices=2, loss_fn=F.mse_loss, microbatches=2, timeout=240.0)

def batch(length, rows=6):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(rows, length, width, generator=generator) for width in (6, 3)]

def step(length, **kwargs):
    x, y = batch(length)
    pipe.zero_grad()
    loss = pipe.step(x, target=y, **kwargs)
    norm = pipe.clip_grad_norm_(1e9)
    print(length, kwargs, float(loss).hex(), f"{float(norm):.6f}", tuple(pipe.plan.planned_sizes.items()))
    print("output", length, pipe(x, **kwargs).shape, float(pipe.eval_step(x, target=y, **kwargs)).hex())
"""


def told(tmp_path: Path, body: str, num_ranks: int) -> list[list[str]]:
    """What each rank prints that runs the script, without what pipec says of compilations."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    printed = run_ranks(script, num_ranks, tmp_path)
    return [[line for line in text.splitlines() if not line.startswith("pipec: ")] for text in printed]


CALLS = """
    for length in (4, 6, 10, 5, 1):
        step(length)
    for length, temperature in ((4, 1.0), (6, 0.5), (8, 0.7)):
        step(length, temperature=temperature)
"""


def test_ranks_take_any_length_and_number_as_one_process_does(tmp_path: Path) -> None:
    alone = told(tmp_path, CALLS, 0)[0]
    assert len(alone) == 16
    assert told(tmp_path, CALLS, 2) == [alone, alone]


def test_ranks_let_go_of_the_same(tmp_path: Path) -> None:
    body = """
        compile_cache.MAX_SIGNATURES, compile_cache.MAX_PROGRAMS = 1, 2
        alive = []
        for length, rows in ((4, 6), (6, 6), (6, 4), (8, 8), (6, 4), (6, 6)):
            x, y = batch(length, rows)
            loss = pipe.step(x, target=y)
            alive.append(weakref.ref(pipe._executions.execution(pipe._artifact)))
            gc.collect()
            left = len(pipe._executions._linked)
            print(float(loss).hex(), [execution() is not None for execution in alive], left)
    """
    ranks = told(tmp_path, body, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][-1].endswith("[False, False, True, False, True, True] 2")


def test_other_lengths_on_some_rank_are_refused(tmp_path: Path) -> None:
    body = """
        import os
        step(4)
        step(6)
        try:
            step(6 + int(os.environ["RANK"]))
        except pipec.InputError as error:
            print(error)
        step(8)
    """
    for printed in told(tmp_path, body, 2):
        text = "\n".join(printed)
        assert "args[0]: float32[6, 6, 6]" in text
        assert "float32[6, 7, 6]" in text
        assert printed[-2].startswith("8 ")
