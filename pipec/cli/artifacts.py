"""``pipec check`` and ``pipec run``, which need a saved artifact and no compiler."""

import time
from collections.abc import Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Artifact, IntHigh, Json, Seed, Steps, compile_flags
from pipec.cli.output import show_json
from pipec.console import log, status
from pipec.ir.text_format import format_seconds

if TYPE_CHECKING:
    from pipec.ir import Plan


def check(directory: Artifact, as_json: Json = False) -> None:
    """Verify a saved artifact without running it: checksums, programs, and the code of every stage.

    JSON keys: stages, ranks, instructions.
    """
    with status("loading torch"):
        from pipec.artifact.artifact import read_artifact

    artifact, _ = read_artifact(directory)
    stages, ranks = len(artifact.sources), len(artifact.programs)
    instructions = sum(len(program.instructions) for program in artifact.programs)
    if as_json:
        show_json({"stages": stages, "ranks": ranks, "instructions": instructions})
    else:
        typer.echo(
            f"{directory} is valid: {stages} stages, {ranks} ranks, {instructions} instructions verified"
        )


@compile_flags("optimizer", "clip_grad_norm", "kernels")
def run(
    directory: Artifact,
    steps: Steps = 1,
    inputs: Annotated[
        Path | None,
        typer.Option(help="A safetensors file with one mini-batch, under the names in the generated code."),
    ] = None,
    seed: Seed = 0,
    int_high: IntHigh = 2,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Run a saved artifact: each step is the forward and backward of a mini-batch, and the update if any.

    An artifact that was compiled with an optimizer needs --optimizer, and --clip-grad-norm if it clips.

    Mini-batches follow each other as in ``pipe.stream``: with an asynchronous schedule they overlap.

    The command runs in one process, or in one for each rank: torchrun --nproc-per-node 4 -m pipec run DIR.
    Without --inputs, inputs are random, and so are parameters that were not saved. Random floats are normal,
    with standard deviation 0.02 for parameters; buffers are ones. An artifact does not have the size of an
    embedding table: choose --int-high within it.

    JSON keys: losses, one a step; seconds, from each loss to the next; random_tensors, the number of tensors
    that were not saved.
    """
    with status("loading torch"):
        from pipec.cli.artifact_inputs import load_with_random_tensors, random_batches, read_batch

    pipe, num_random = load_with_random_tensors(directory, seed, **options)
    batches = repeat(read_batch(pipe.plan, inputs)) if inputs else random_batches(pipe.plan, int_high)
    if not as_json:
        log(_heading(pipe.plan, num_random, inputs, seed))
    losses, seconds, started = [], [], time.perf_counter()
    for step, loss in enumerate(pipe.stream_of_leaves(islice(batches, steps))):
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        started += seconds[-1]
        if not as_json:
            log(f"step {step:4}  loss {losses[-1]:.6f}  {format_seconds(seconds[-1])}")
    if as_json:
        show_json({"losses": losses, "seconds": seconds, "random_tensors": num_random})


def _heading(plan: "Plan", num_random: int, inputs: Path | None, seed: int) -> str:
    tensors = f"{num_random} tensors were not saved and are random" if num_random else "saved tensors"
    batch = f"inputs from {inputs}" if inputs else "random inputs"
    return (
        f"{plan.schedule}, {plan.num_microbatches} microbatches of {plan.microbatch_size} "
        f"on {plan.num_ranks} ranks; {tensors}; {batch}; seed {seed}"
    )
