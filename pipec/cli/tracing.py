"""``pipec trace``: the measured timeline of a saved artifact's step beside the planned one."""

from collections.abc import Mapping
from typing import Any

from pipec.cli.drawing import check_output
from pipec.cli.flags import Artifact, Drawing, IntHigh, Json, Seed, Steps, compile_flags
from pipec.cli.output import show_json, write_stdout
from pipec.console import is_rank_zero, status

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
        from pipec.drawn_artifacts import draw_artifact
        from pipec.timeline.report import timeline_report
        from pipec.timeline.trace import Trace

    check_output(output)
    pipe, _ = load_with_random_tensors(directory, seed, **options)
    batches = random_batches(pipe.plan, int_high)
    for _ in range(WARMUP):
        pipe.step_with_leaves(next(batches))
    with pipe.trace(Trace()) as made:
        for _ in range(steps):
            pipe.step_with_leaves(next(batches))
    text = draw_artifact(pipe._artifact, made, output if is_rank_zero() else None)
    if as_json:
        show_json({name: timeline_report(timeline) for name, timeline in made.timelines().items()})
    else:
        write_stdout(f"wrote {output}\n" if output is not None else text)
