"""Checkpoints of processes over gloo: into and out of any layout, and what fails on one rank fails on all."""

import json
import textwrap
from pathlib import Path

import pytest
from resuming import start
from workers import run_ranks

pytestmark = pytest.mark.slow

SAME = 1e-9

SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch, pipec
from resuming import *
rank, here = int(os.environ["RANK"]), Path({here!r})
"""


def told(tmp_path: Path, body: str, num_ranks: int = 2) -> list[str]:
    """What each rank prints that runs the script."""
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, here=str(tmp_path)) + textwrap.dedent(body))
    return run_ranks(script, num_ranks, tmp_path)


def test_processes_go_on_from_one_and_one_from_processes(tmp_path: Path) -> None:
    """Every layout loads what one process saved, and what every other one saved."""
    alone = start("2 stages")
    alone.train(0, 3)
    alone.save(tmp_path / "alone")
    expected = alone.train(3, 8)
    printed = told(
        tmp_path,
        """
        layouts = [layout for layout in LAYOUTS if layout not in ("1 stage", "2 stages, zb-h1")]
        losses, runs = {}, {}
        for layout in layouts:
            run = runs[layout] = start(layout, seed=7 + rank, timeout=30.0)
            run.load(here / "alone")
            losses[layout] = run.train(3, 6)
            run.save(here / layout)
            losses[layout] += run.train(6, 8)
        for layout, run in runs.items():
            for saved in layouts:
                run.load(here / saved)
                losses[f"{saved} -> {layout}"] = run.train(6, 8)
        print(json.dumps(losses))
        """,
    )
    first, second = (json.loads(each.splitlines()[-1]) for each in printed)
    assert first == second
    for name, losses in first.items():
        assert losses == pytest.approx(expected[-len(losses) :], rel=SAME), name
        there, _, here = name.partition(" -> ")
        assert there != here or losses == first[here][-2:]
    for layout in ("2 stages", "2 replicas, shard=parameters", "2 replicas, own optimizer"):
        alone = start("2 stages, own optimizer" if "own" in layout else "1 stage", seed=5)
        alone.load(tmp_path / layout)
        assert alone.pipe.num_steps == 6
        assert alone.train(6, 8) == pytest.approx(expected[-2:], rel=SAME)
