"""Programs without end are saved, checked, run, simulated and drawn like those of a step."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from delayed_gradients import double
from page_views import embedded

import pipec
from pipec.cli.artifact_inputs import load_with_random_tensors, random_batches
from pipec.errors import InfeasibleError, InputError
from pipec.plan.predictions import plan_memory
from pipec.timeline.curves import rank_memory_over_time
from pipec.viz import DrawnStep, page_html
from tests.cli.test_cli import pipec_cli, pipec_json
from tests.pipeline.test_pipedream import ADAM, SGD, batches, delayed, pipeline

TARGET = f"{Path(__file__).parents[1] / 'helpers' / 'cli_models.py'}:mlp"
MOMENTUM = f"{Path(__file__).parents[1] / 'helpers' / 'cli_models.py'}:momentum"


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_saved_artifact_trains_on(schedule: str, tmp_path: Path) -> None:
    pipe = pipeline(3, ADAM, schedule)
    version = {"pipedream-2bw": double}.get(schedule)
    reference = delayed(pipe, ADAM, version) if version else delayed(pipe, ADAM)
    pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved", optimizer=ADAM)
    assert loaded.programs == pipe.programs
    assert list(loaded.stream(batches(8))) == [reference.step(batch) for batch in batches(8)]
    own = dict(loaded.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in reference.history[-1].items())
    with pytest.raises(InputError, match=r"step was given kwargs\['x'\], target"):
        list(loaded.stream([{"x": torch.zeros(8, 6), "target": torch.zeros(8)}]))


def test_the_command_line_draws_several_periods(tmp_path: Path) -> None:
    text = pipec_cli("schedule", "pipedream", "--stages", 4, "--microbatches", 12).stdout
    assert "steady state: a mini-batch every 3 units, bubble 0.0%" in text
    row = next(line for line in text.splitlines() if line.startswith("rank 2 "))
    cells = re.findall(r"[FB]\d+v\d+", row)
    assert " ".join(cells[:8]) == "F0v0 F1v0 B0v0 F2v1 B1v0 F3v2 B2v1 F4v3"
    pipec_cli("schedule", "pipedream", "--stages", 4, "--microbatches", 12, "-o", tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert all(f">{cell}<" in drawn or f">{cell[1:]}<" in drawn for cell in cells if len(cell) == 4)
    facts = pipec_json("schedule", "pipedream-2bw", "--stages", 2, "--microbatches", 12)
    assert facts["steady"] == {"time": pytest.approx(6), "bubble_rate": pytest.approx(0)}
    events = facts["events"]
    assert isinstance(events, list)
    assert events[0]["version"] == 0


@pytest.mark.slow
def test_the_command_line_runs_a_model_without_a_flush(tmp_path: Path) -> None:
    options = ("--devices", 2, "--schedule", "pipedream", "--optimizer", MOMENTUM)
    assert "a mini-batch every" in pipec_cli("plan", TARGET, *options).stdout
    pipec_cli("plan", TARGET, *options, "-o", tmp_path / "saved")
    assert "is a valid artifact: 2 stages, 2 ranks" in pipec_cli("check", tmp_path / "saved").stdout
    facts = pipec_json("run", tmp_path / "saved", "--optimizer", MOMENTUM, "--steps", 5)
    pipes = [load_with_random_tensors(tmp_path / "saved", 0, MOMENTUM)[0] for _ in range(2)]
    given = list(islice(random_batches(pipes[0].plan, 2), 5))
    streamed = list(pipes[0].stream_of_leaves(given))
    drained = [loss for each in given for loss in pipes[1].stream_of_leaves([each])]
    assert streamed != drained
    assert facts["losses"] == [loss.item() for loss in streamed]
    failed = pipec_cli("plan", TARGET, "--devices", 2, "--schedule", "pipedream", status=2)
    assert "makes the updates itself; pass optimizer=" in failed.stderr


def test_the_plan_and_its_pictures_are_of_a_stream() -> None:
    pipe = pipeline(3)
    assert "a mini-batch every" in str(pipe.plan)
    timeline = pipe.simulate()
    text = pipe.visualize()
    assert "pipedream, 10 microbatches" in text
    (step,) = embedded(page_html([DrawnStep("pipedream", 10, timeline)]))["timelines"]
    assert step["computes"]["version"][:3] == [0, 0, 0]
    curves = rank_memory_over_time(pipe.plan, pipe.programs, timeline)
    highest = [curve.total.amounts.max() for curve in curves]
    assert highest == pytest.approx([need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)])


def test_the_cut_makes_room_for_versions() -> None:
    """On the fastest cut stashed versions need more memory than 1F1B does; the planner finds another one."""
    fastest, flushed = of_schedule("pipedream"), of_schedule("1f1b")
    limit = int(most_needed(fastest)) * 4 // 5
    assert most_needed(flushed) <= limit
    assert "versions" in str(fastest.memory())
    fitting = of_schedule("pipedream", limit)
    assert most_needed(fitting) <= limit
    assert fitting.plan.stages[0].last_operator < fastest.plan.stages[0].last_operator
    with pytest.raises(InfeasibleError, match="nothing that was tried fits"):
        of_schedule("pipedream", limit * 4 // 5)


def of_schedule(schedule: str, limit: int | None = None) -> pipec.Pipeline:
    return pipeline(2, SGD, schedule, memory_limit=limit, microbatches=1, recompute="none")


def most_needed(pipe: pipec.Pipeline) -> float:
    return max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs))
