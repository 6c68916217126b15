"""``pipec schedule``: the timeline of one step on equal stages."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Drawing, Json, parse_replicas
from pipec.cli.output import check_drawing, show_json, write_stdout
from pipec.cli.target import refuse_folder
from pipec.errors import InputError
from pipec.ir.argument_checks import MOST_MICROBATCHES, MOST_RANKS

if TYPE_CHECKING:
    from pipec.ir import Schedule
    from pipec.schedules import Workload
    from pipec.viz import DrawnStep

CompareSchedule = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Another schedule, to compare on one axis of time."),
]
ScheduleName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="gpipe, 1f1b, zb-h1, auto, ...; or a .csv file of compute orders."),
]
Stages = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_RANKS,
        help="Ranks of a pipeline; a schedule may give each several stages. Default: 4.",
    ),
]
Replicas = Annotated[
    str, typer.Option(help="Replicas: 2 for every rank of the pipeline, or for each, such as 3-2-1.")
]
Microbatches = Annotated[
    int, typer.Option(min=1, max=MOST_MICROBATCHES, help="Microbatches of a mini-batch.")
]
MemoryLimit = Annotated[
    float | None, typer.Option(help="Memory limit of a rank, in the unit of --memory-backward.")
]


def _amount(help: str) -> Any:
    """An option that is a time or an amount of memory."""
    return typer.Option(min=0, help=help)


_MAX_FORWARDS = 2**22
"""The most forwards of a step. More take minutes, and cannot be inspected."""


def schedule(
    name: ScheduleName,
    stages: Stages = None,
    replicas: Replicas = "1",
    microbatches: Microbatches = 8,
    forward: Annotated[float, _amount("Time of a microbatch's forward on a rank.")] = 1.0,
    backward_input: Annotated[float, _amount("Time of its input gradient.")] = 1.0,
    backward_weight: Annotated[float, _amount("Time of its weight gradient.")] = 1.0,
    communication: Annotated[float, _amount("Time of a message between ranks.")] = 0.0,
    reduce: Annotated[float, _amount("Time in which replicas sum the gradients of a stage.")] = 0.0,
    memory_backward: Annotated[
        float, _amount("Memory of a microbatch on a rank until its input gradient.")
    ] = 1.0,
    memory_weight: Annotated[float, _amount("Its memory from there until its weight gradient.")] = 1.0,
    memory_limit: MemoryLimit = None,
    compare: CompareSchedule = None,
    output: Drawing = None,
    as_json: Json = False,
) -> None:
    """Draw the step of a schedule on equal stages.

    If stages have different numbers of replicas, a stage with twice as many takes twice as long for a
    microbatch.

    JSON keys: schedule, num_microbatches, unit, makespan, span, bubble_rate, peak_in_flight of each rank;
    replicas, the ranks of each stage; waits, the times of each rank: busy, waiting for each sender and each
    collective, idle for no other rank, idle at the end; critical_path; num_events; events, if there are at
    most 100,000, each with rank, op, stage, microbatch, bucket if it has one, start and end;
    lower_and_verify_seconds. With --compare also compare: the same keys of that schedule.
    """
    from pipec.schedules import Workload
    from pipec.viz import draw_steps, steps_text

    refuse_folder(name)
    if ":" in name and not name.endswith(".csv"):
        raise InputError(f"{name} is a model: pipec plan {name} --devices 4 -o step.html draws its step")
    check_drawing(output)
    numbers = _replicas_of_stages(stages, replicas)
    if len(numbers) * microbatches > _MAX_FORWARDS:
        raise InputError(
            f"--stages {len(numbers)} and --microbatches {microbatches} make "
            f"{len(numbers) * microbatches} forwards; expected at most {_MAX_FORWARDS}"
        )
    if compare == name:
        raise InputError(f"--compare names {name!r} again; expected another schedule")
    if compare is not None and output is not None and output.suffix not in (".html", ".json"):
        raise InputError(
            f"--compare with {output.name}: a {output.suffix} file shows one step; expected .html or .json"
        )
    work = Workload.uniform(
        len(numbers),
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        message=communication,
        memory_backward=memory_backward,
        memory_weight=memory_weight,
        memory_limit=memory_limit,
    )
    names = [name] if compare is None else [name, compare]
    steps = [_on_equal_stages(each, numbers, microbatches, work, reduce) for each in names]

    drawn = [step for step, _ in steps]
    if output is not None:
        draw_steps(output, drawn)
    if as_json:
        first, *others = (_summary(*each) for each in steps)
        show_json(first | ({"compare": others[0]} if others else {}))
    else:
        write_stdout(f"wrote {output}\n" if output is not None else steps_text(drawn))


def _replicas_of_stages(stages: int | None, text: str) -> tuple[int, ...]:
    """Parse ``--stages`` and ``--replicas``. Raises InputError if they contradict each other."""
    replicas = parse_replicas(text)
    if isinstance(replicas, str):
        raise InputError(
            "--replicas auto needs the costs of a model, as pipec plan has; give a number of replicas"
        )
    if isinstance(replicas, int):
        return (replicas,) * (4 if stages is None else stages)
    if stages not in (None, len(replicas)):
        raise InputError(
            f"--replicas {text} is for {len(replicas)} stages, but --stages is {stages}; leave --stages out"
        )
    return replicas


def _on_equal_stages(
    name: str, replicas: tuple[int, ...], num_microbatches: int, work: "Workload", reduce: float
) -> tuple["DrawnStep", float]:
    """The step of a schedule or of a file of compute orders, and the seconds to lower and verify it."""
    from pipec.schedules.chain_simulation import chain_sync_spec, simulate_schedule
    from pipec.viz import DrawnStep

    schedule, work = _schedule_and_work(name, replicas, num_microbatches, work)
    work.check_memory(schedule)
    timeline, seconds = simulate_schedule(schedule, work, chain_sync_spec(schedule.placement, reduce))
    return DrawnStep(name, num_microbatches, timeline), seconds


def _schedule_and_work(
    name: str, replicas: tuple[int, ...], num_microbatches: int, work: "Workload"
) -> tuple["Schedule", "Workload"]:
    """The schedule on all ranks, and the costs of its stages.

    A stage with twice as many replicas as another takes twice as long.
    """
    from pipec.schedules import ASYNCHRONOUS_SCHEDULES, custom_schedule, make_schedule
    from pipec.schedules.custom import ORDERS_SUFFIX
    from pipec.schedules.replicated import replicate_schedule, round_robin

    scaled = work.scaled([count / min(replicas) for count in replicas])
    if name in ASYNCHRONOUS_SCHEDULES:
        return ASYNCHRONOUS_SCHEDULES[name].for_microbatches(replicas, num_microbatches), scaled
    if len({*replicas}) > 1:
        if name != "1f1b":
            raise InputError(
                f"schedule {name!r} needs the same number of replicas for every stage; use 1f1b or "
                "pipedream, which run different numbers round robin"
            )
        return round_robin(num_microbatches, replicas), scaled

    def one_pipeline(count: int) -> "Schedule":
        if name.endswith(ORDERS_SUFFIX):
            return custom_schedule(Path(name), len(replicas), count)
        return make_schedule(name, len(replicas), count, work)

    if replicas[0] == 1:
        return one_pipeline(num_microbatches), work
    schedule = replicate_schedule(one_pipeline, num_microbatches, replicas[0])
    placement = tuple((ranks[0] // replicas[0],) for ranks in schedule.placement)
    return schedule, work.for_placement(placement)


def _summary(step: "DrawnStep", seconds: float) -> dict[str, object]:
    from pipec.timeline.report import timeline_report

    return {
        "schedule": step.schedule,
        "num_microbatches": step.num_microbatches,
        "lower_and_verify_seconds": seconds,
        **timeline_report(step.timeline),
    }
