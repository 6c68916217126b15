"""``pipec check`` and ``pipec run``, which take a folder and need no compiler."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.checkpoints import check_checkpoint
from pipec.cli.flags import Drawing, IntHigh, Json, Seed, Steps, compile_flags
from pipec.cli.output import check_drawing, show_json, write_stdout
from pipec.console import log
from pipec.errors import InputError
from pipec.ir.text_format import format_seconds

if TYPE_CHECKING:
    from pipec.cli.artifact_inputs import Leaves
    from pipec.ir import Plan
    from pipec.pipeline import Pipeline

WARMUP = 2
"""Steps that run before recording begins, because the first ones allocate memory."""


def check(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="An artifact, a checkpoint, or the folder of a run.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Say what a folder holds, and check every file of it. None of its code is run.

    Of an artifact, the checksums, the programs and the code of every stage are checked; of a checkpoint, the
    checksums of all files.

    JSON keys of an artifact: kind, stages, ranks, instructions. Of a checkpoint: kind, num_steps, weights and
    optimizer (tensors and bytes of each), groups, schedulers, ranks, position (mini-batches of a stream, by
    part of the data), has_extra.
    """
    if not (folder / "plan.json").exists():
        check_checkpoint(max(folder.glob("step-*"), default=folder), as_json)
        return
    from pipec.artifact.artifact import read_artifact

    artifact, _ = read_artifact(folder)
    stages, ranks = len(artifact.sources), len(artifact.programs)
    instructions = sum(len(program.instructions) for program in artifact.programs)
    if as_json:
        show_json({"kind": "artifact", "stages": stages, "ranks": ranks, "instructions": instructions})
    else:
        typer.echo(
            f"{folder} is a valid artifact: {stages} stages, {ranks} ranks, {instructions} instructions"
        )


@compile_flags("optimizer", "clip_grad_norm", "kernels")
def run(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="What Pipeline.save or `pipec plan -o` wrote.",
        ),
    ],
    steps: Steps = 1,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record the steps, and show the planned and the measured one.")
    ] = False,
    output: Drawing = None,
    seed: Seed = 0,
    int_high: IntHigh = 2,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Run steps of a saved artifact on random inputs.

    An artifact that was compiled with an optimizer needs --optimizer, and --clip-grad-norm if it clips.
    Mini-batches follow each other as in ``pipe.stream``: with an asynchronous schedule they overlap.

    The command runs in one process, or in one for each rank: torchrun --nproc-per-node 4 -m pipec run FOLDER.
    Parameters that were not saved are random, too. Random floats are normal, with standard deviation 0.02 for
    parameters; buffers are ones. An artifact does not have the size of an embedding table: choose --int-high
    within it.

    With --trace, two steps warm up before the steps that are recorded.

    JSON keys: losses, one a step; seconds, from each loss to the next; random_tensors, the number of tensors
    that were not saved. With --trace: planned and measured, each as of pipec schedule.
    """
    from pipec.cli.artifact_inputs import load_with_random_tensors, random_batches

    if output is not None and not trace:
        raise InputError("-o draws the steps that --trace records; give --trace, too")
    check_drawing(output)
    pipe, num_random = load_with_random_tensors(folder, seed, **options)
    batches = random_batches(pipe.plan, int_high)
    if trace:
        _trace(pipe, batches, steps, output, as_json)
        return
    if not as_json:
        log(_heading(pipe.plan, num_random, seed))
    losses, seconds, started = [], [], time.perf_counter()
    for step, loss in enumerate(pipe.stream_of_leaves(islice(batches, steps))):
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        started += seconds[-1]
        if not as_json:
            log(f"step {step:4}  loss {losses[-1]:.6f}  {format_seconds(seconds[-1])}")
    if as_json:
        show_json({"losses": losses, "seconds": seconds, "random_tensors": num_random})


def _trace(
    pipe: "Pipeline", batches: Iterator["Leaves"], steps: int, output: Path | None, as_json: bool
) -> None:
    from pipec.timeline.report import timeline_report

    for _ in pipe.stream_of_leaves(islice(batches, WARMUP)):
        pass
    with pipe.trace() as recorded:
        for _ in pipe.stream_of_leaves(islice(batches, steps)):
            pass
    text = pipe.visualize(output, recorded)
    if as_json:
        show_json({name: timeline_report(timeline) for name, timeline in recorded.timelines().items()})
    else:
        write_stdout(f"wrote {output}\n" if output is not None else text)


def _heading(plan: "Plan", num_random: int, seed: int) -> str:
    tensors = f"{num_random} tensors were not saved and are random" if num_random else "saved tensors"
    return (
        f"{plan.schedule}, {plan.num_microbatches} microbatches of {plan.microbatch_size} "
        f"on {plan.num_ranks} ranks; {tensors}; random inputs; seed {seed}"
    )
