"""Recorded steps: every instruction has its times, and they obey the program."""

import functools
from itertools import pairwise
from math import nan
from pathlib import Path

import pytest
import torch
from page_views import embedded
from torch import nn

import pipec
from pipec.drawn_artifacts import trace_steps
from pipec.errors import InputError
from pipec.ir import Op, StepPart
from pipec.pipeline import Pipeline

X, Y = torch.randn(8, 16), torch.randn(8, 4)


def compiled(**options: object) -> Pipeline:
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    loss_fn = nn.functional.mse_loss
    return pipec.compile(nn.Sequential(*layers), devices=2, microbatches=4, loss_fn=loss_fn, **options)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"shard": "parameters"}])
def test_collectives_and_updates_have_their_times(options: dict[str, object]) -> None:
    """Two replicas of one stage: a sum is found over by the update that needs it, or at the end."""
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    choice = {"optimizer": adam, **options} if options else {}
    pipe = compiled(stages=1, **choice)
    with pipe.trace() as trace:
        pipe.step(X, target=Y)
    timeline = trace.steps[0]
    timed = [(p.rank, i) for p in pipe.programs for i in p.instructions if i.op.traits.timed]
    assert [(event.rank, event.instruction) for event in timeline.events] == timed
    assert timeline.sync_spec == pipe.plan.sync_spec
    for rank in range(2):
        own = [event for event in timeline.events if event.rank == rank]
        assert all(one.end <= other.start for one, other in pairwise(e for e in own if e.is_blocking))
        sums = [event for event in own if event.instruction.op is Op.REDUCE_GRAD]
        met = max(event.start for event in timeline.events if event.instruction == sums[-1].instruction)
        assert sums[-1].end > met
        updates = [event for event in own if event.instruction.op is Op.UPDATE]
        assert len(updates) == bool(options)
        assert all(event.end <= update.start for update in updates for event in sums)
        norms = [event for event in own if event.instruction.op is Op.GRAD_NORM]
        assert all(sums[-1].end <= norm.start < norm.end <= updates[0].start for norm in norms)


def test_every_nth_step_is_recorded_with_the_update_that_follows_and_what_was_special() -> None:
    torch.manual_seed(0)
    pipe = compiled(on_nan="skip", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    pipe.step(X, target=Y)
    with pipe.trace(every=3) as run:
        for number in range(1, 6):
            pipe.step(X * (nan if number == 3 else 1), target=Y)
        with pipe.trace() as inner:
            pipe.step(X, target=Y)
        for number in range(7, 12):
            with pipe.accumulate():
                pipe.step(X, target=Y)
            if number in (8, 9, 11):
                pipe.optimizer.step()
    whole, accumulate, *_, update = StepPart
    assert run.numbers == [1, 4, 7, 8, 10, 11]
    assert [step.sync_spec.part for step in run.steps] == [whole, whole, *[accumulate, update] * 2]
    assert run.notes == {3: "skipped"}
    assert run.median_step() in run.steps[:2]
    assert (inner.numbers, len(inner.steps)) == ([6], 1)
    counts = [sum(event.instruction.op is Op.UPDATE for event in step.events) for step in run.steps]
    assert counts == [2, 2, 0, 2, 0, 2]


@pytest.mark.usefixtures("constant_batch")
def test_the_measured_step_is_one_of_the_plan_beside_it() -> None:
    """Batches of another size have another plan, where sizes do not vary."""
    pipe = compiled()
    with pipe.trace() as run:
        for rows in (4, 4, 4, 8):
            pipe.step(X[:rows], target=Y[:rows])
    assert run.of_other_plans == {0, 1, 2}
    assert run.notes[0] == "compiled"
    assert run.median_step() is run.steps[3]
    with pipe.trace() as run:
        pipe.step(X[:7], target=Y[:7])  # microbatches of 2 rows, and one of 1
    assert (run.numbers, run.of_other_plans) == ([4, 4], {0})
    pipe.step(X[:4], target=Y[:4])
    with pipe.trace() as run:
        pipe.step(X, target=Y)
        pipe.step(X, target=Y)
        with pytest.raises(InputError):
            pipe.step(X)
        pipe.step(X[:4], target=Y[:4])
    del run.steps[2], run.numbers[2]
    steps = trace_steps(pipe._artifact, run)
    assert [step.name for step in steps[:2]] == ["planned", "measured, of another plan"]
    assert [step.note for step in steps[2:]] == ["another plan"] * 2


def test_planned_and_measured_are_drawn_together(tmp_path: Path) -> None:
    pipe = compiled()
    with pipe.trace() as trace:
        pipe.step(X, target=Y)
    for suffix in (".html", ".json", ".svg", ".txt"):
        path = tmp_path / "drawn" / f"step{suffix}"
        shown = pipe.visualize(path, trace)
        assert "planned: 1f1b, 4 microbatches" in shown
        assert "measured: 1f1b, 4 microbatches" in shown
        drawn = path.read_text()
        drawn = str(embedded(drawn)) if suffix == ".html" else drawn
        assert ("planned" in drawn) is (suffix in (".html", ".json"))
        assert len(drawn) > 100
