"""Checkpoints in one process: training goes on as if it had never stopped, and whatever is wrong is said."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from resuming import LAYOUTS, Run, start

STOP, END = 5, 10
SAME = 1e-9
"""Relative: other layouts sum in another order, in double precision."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Run, Path, list[float]]]:
    """By layout a run that has saved after 5 steps, where, and its next 5 losses."""
    found = {}
    for layout in LAYOUTS:
        run, path = start(layout), tmp_path_factory.mktemp("checkpoints") / "saved"
        run.train(0, STOP)
        run.save(path, extra={"layout": layout, "seen": (1, 2.0)})
        found[layout] = run, path, run.train(STOP, END)
    return found


@pytest.mark.parametrize("resumed", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_training_goes_on_in_any_layout(
    stopped: Mapping[str, tuple[Run, Path, list[float]]], saved: str, resumed: str
) -> None:
    (_, path, expected), (run, _, _) = stopped[saved], stopped[resumed]
    torch.manual_seed(99)
    assert run.load(path) == {"layout": saved, "seen": (1, 2.0)}
    assert run.pipe.num_steps == STOP
    losses = run.train(STOP, END)
    if saved == resumed:
        assert losses == expected
    assert losses == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize("layout", ["2 stages", "2 replicas, shard=optimizer", "2 stages, own optimizer"])
def test_a_new_run_goes_on_with_the_same_bits(
    stopped: Mapping[str, tuple[Run, Path, list[float]]], layout: str
) -> None:
    _, path, _ = stopped[layout]
    never_stopped = start(layout).train(0, END)
    run = start(layout, seed=7)
    run.load(path)
    assert run.train(STOP, END) == never_stopped[STOP:]
