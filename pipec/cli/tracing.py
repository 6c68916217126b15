"""``pipec trace``: the measured timeline of a saved artifact's step beside the planned one."""

from collections.abc import Mapping
from typing import Any

from pipec.cli.drawing import check_output, draw, print_steps
from pipec.cli.flags import Artifact, Drawing, IntHigh, Json, Seed, Steps, compile_flags
from pipec.cli.output import show_json, status

WARMUP = 2
"""Steps that run before recording begins, because the first ones allocate memory."""


@compile_flags("optimizer", "clip_grad_norm")
def trace(
    directory: Artifact,
    output: Drawing = None,
    steps: Steps = 5,
    seed: Seed = 0,
    int_high: IntHigh = 2,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Record steps of a saved artifact on random inputs, and draw the planned and the measured step.

    The command runs in one process, or in one for each rank: torchrun --nproc-per-node 4 -m pipec trace DIR.

    JSON keys: planned and measured, each with unit, makespan, span, bubble_rate, peak_in_flight, replicas,
    waits, critical_path, num_events and events, as of pipec schedule.
    """
    with status("loading torch"):
        from pipec.cli.artifact_inputs import load_with_random_tensors, random_batches
        from pipec.plan.predictions import simulate_plan
        from pipec.timeline.report import timeline_report
        from pipec.timeline.trace import Trace, measured_timeline
        from pipec.viz import DrawnStep

    check_output(output)
    pipe, _ = load_with_random_tensors(directory, seed, **options)
    batches = random_batches(pipe.plan, int_high)
    for _ in range(WARMUP):
        pipe.step_with_leaves(next(batches))
    with pipe.record() as recorded:
        for _ in range(steps):
            pipe.step_with_leaves(next(batches))
    measured = [measured_timeline(step.programs, step.timestamps, pipe.plan.sync_spec) for step in recorded]
    timelines = Trace(simulate_plan(pipe.plan, pipe.programs), measured).timelines()
    drawn_steps = [
        DrawnStep.of_plan(pipe.plan, pipe.programs, timeline, name) for name, timeline in timelines.items()
    ]
    draw(drawn_steps, output)
    if as_json:
        show_json({name: timeline_report(timeline) for name, timeline in timelines.items()})
    else:
        print_steps(drawn_steps, output)
