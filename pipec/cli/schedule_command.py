"""``pipec schedule``: the timeline of one step, on equal stages or on the costs of a model's plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.drawing import check_output, draw, print_steps
from pipec.cli.flags import Devices, Drawing, Json, Target, compile_flags, parse_replicas
from pipec.cli.output import show_json
from pipec.errors import InputError
from pipec.ir.argument_checks import MOST_MICROBATCHES, MOST_RANKS

if TYPE_CHECKING:
    from pipec.ir import Schedule
    from pipec.schedules import Workload
    from pipec.viz import DrawnStep

CompareSchedule = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Another schedule of the same, to compare on one axis of time."),
]


_MAX_FORWARDS = 2**22
"""Forwards of a step on equal stages. More take minutes, and nobody can look at them."""

_DrawnStep = tuple["DrawnStep", Mapping[str, object]]
"""A step, and what its JSON says besides."""


def schedule_name(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="gpipe, 1f1b, zb-h1, auto, ...; or a .txt file of compute orders."
        ),
    ],
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Ranks of a pipeline; a schedule may cut the share of each into several. Default: 4.",
        ),
    ] = None,
    replicas: Annotated[
        str, typer.Option(help="Ranks that share each of these: 2, or those of each such as 3-2-1.")
    ] = "1",
    microbatches: Annotated[
        int, typer.Option(min=1, max=MOST_MICROBATCHES, help="How many a mini-batch is split into.")
    ] = 8,
    forward: Annotated[float, typer.Option(min=0, help="Time of a microbatch's forward on a rank.")] = 1.0,
    backward_input: Annotated[float, typer.Option(min=0, help="Time of its input gradient.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(min=0, help="Time of its weight gradient.")] = 1.0,
    communication: Annotated[float, typer.Option(min=0, help="Time of a message between ranks.")] = 0.0,
    reduce: Annotated[
        float, typer.Option(min=0, help="Time in which replicas sum the gradients of a stage.")
    ] = 0.0,
    memory_backward: Annotated[
        float, typer.Option(min=0, help="What a microbatch holds on a rank until its input gradient.")
    ] = 1.0,
    memory_weight: Annotated[
        float, typer.Option(min=0, help="What it holds from there until its weight gradient.")
    ] = 1.0,
    memory_limit: Annotated[
        float | None, typer.Option(help="The most that a rank may hold, in --memory-backward's unit.")
    ] = None,
    compare: CompareSchedule = None,
    output: Drawing = None,
    as_json: Json = False,
) -> None:
    """Draw the timeline of a schedule's step on equal stages.

    Where stages have different numbers of replicas, one with twice as many takes twice the time for a
    microbatch.

    JSON keys: schedule, num_microbatches, unit, makespan, span, bubble_rate, peak_in_flight of each rank;
    replicas, the ranks of each stage; waits, for each rank its time busy, waiting, for whose messages and in
    which collectives, idle of its own and after all it does; critical_path, num_events and, if they are at
    most 100,000, events, each with rank, op, stage, microbatch, bucket if it has one, start and end;
    lower_and_verify_seconds. With --compare also compare: the same keys of that
    schedule.
    """
    from pipec.schedules import Workload

    equal_stages = _EqualStages.of(stages, replicas)
    names = _names(name, compare, output, equal_stages.least_events(microbatches))
    if equal_stages.num_stages * microbatches > _MAX_FORWARDS:
        raise InputError(
            f"--stages {equal_stages.num_stages} and --microbatches {microbatches} make "
            f"{equal_stages.num_stages * microbatches} forwards; expected at most {_MAX_FORWARDS}"
        )
    work = Workload.uniform(
        equal_stages.num_stages,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        message=communication,
        memory_backward=memory_backward,
        memory_weight=memory_weight,
        memory_limit=memory_limit,
    )
    _show(
        [_on_equal_stages(each, equal_stages, microbatches, work, reduce) for each in names], output, as_json
    )


@compile_flags()
def schedule_target(
    target: Target,
    devices: Devices = 4,
    *,
    options: Mapping[str, Any],
    compare: CompareSchedule = None,
    output: Drawing = None,
    as_json: Json = False,
) -> None:
    """Draw the timeline of a model's step on the costs of its plan.

    JSON keys: those of a schedule's name, without lower_and_verify_seconds.
    """
    from pipec.cli.target import compile_target
    from pipec.viz import DrawnStep

    def planned(name: str) -> _DrawnStep:
        pipe = compile_target(target, devices, {**options, "schedule": name})
        return replace(DrawnStep.of_plan(pipe.plan, pipe.programs, pipe.simulate()), schedule=name), {}

    _show([planned(name) for name in _names(options["schedule"], compare, output)], output, as_json)


def _names(name: str, compare: str | None, output: Path | None, least_events: int = 0) -> list[str]:
    """The schedules to draw, each of so many events or more.

    Raises InputError, before anything is worked out, if they cannot be drawn.
    """
    check_output(output, least_events if compare is None else 2 * least_events)
    if compare is None:
        return [name]
    if compare == name:
        raise InputError(f"--compare names {name!r} again; expected another schedule")
    if output is not None and output.suffix not in (".html", ".json"):
        raise InputError(
            f"--compare with {output.name}: a {output.suffix} file shows one step; expected .html or .json"
        )
    return [name, compare]


@dataclass(frozen=True)
class _EqualStages:
    """How many stages there are, each for so many ranks: as many for every stage, or those of each."""

    num_stages: int
    replicas: int | tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        return (self.replicas,) * self.num_stages if isinstance(self.replicas, int) else self.replicas

    def least_events(self, num_microbatches: int) -> int:
        """What a timeline has at least: a forward and a backward of what one replica computes."""
        return 2 * self.num_stages * (num_microbatches // max(self.numbers))

    @classmethod
    def of(cls, stages: int | None, text: str) -> "_EqualStages":
        """Read the options. Raises InputError if they contradict each other."""
        replicas = parse_replicas(text)
        if isinstance(replicas, str):
            raise InputError(
                "--replicas auto is searched for the costs of a model; name a TARGET, or a number"
            )
        if isinstance(replicas, int):
            return cls(4 if stages is None else stages, replicas)
        if stages not in (None, len(replicas)):
            raise InputError(f"--replicas {text} is for {len(replicas)} stages, but --stages is {stages}")
        return cls(len(replicas), replicas if len({*replicas}) > 1 else replicas[0])


def _on_equal_stages(
    name: str, equal_stages: _EqualStages, num_microbatches: int, work: "Workload", reduce: float
) -> _DrawnStep:
    """The step of a schedule, or of a file of compute orders."""
    from pipec.schedules.chain_simulation import chain_sync_spec, simulate_schedule
    from pipec.viz import DrawnStep

    schedule, work = _scheduled(name, equal_stages, num_microbatches, work)
    work.check_memory(schedule)
    timeline, seconds = simulate_schedule(schedule, work, chain_sync_spec(schedule.placement, reduce))
    return DrawnStep(name, num_microbatches, timeline), {"lower_and_verify_seconds": seconds}


def _scheduled(
    name: str, equal_stages: _EqualStages, num_microbatches: int, work: "Workload"
) -> tuple["Schedule", "Workload"]:
    """The schedule on all ranks, and what each of its stages takes."""
    from pipec.schedules import ASYNCHRONOUS_SCHEDULES, custom_schedule, make_schedule
    from pipec.schedules.replicated import replicate_schedule, round_robin

    if name in ASYNCHRONOUS_SCHEDULES:
        numbers = equal_stages.numbers
        return ASYNCHRONOUS_SCHEDULES[name].for_microbatches(numbers, num_microbatches), work.scaled(
            _times(numbers)
        )
    if not isinstance(equal_stages.replicas, int):
        if name != "1f1b":
            raise InputError(
                f"schedule {name!r} needs as many replicas of every stage; take 1f1b or pipedream, which run "
                "different numbers round robin"
            )
        return round_robin(num_microbatches, equal_stages.replicas), work.scaled(
            _times(equal_stages.replicas)
        )

    def one(count: int) -> "Schedule":
        if name.endswith(".txt"):
            return custom_schedule(Path(name), equal_stages.num_stages, count)
        return make_schedule(name, equal_stages.num_stages, count, work)

    if equal_stages.replicas == 1:
        return one(num_microbatches), work
    schedule = replicate_schedule(one, num_microbatches, equal_stages.replicas)
    first = tuple((ranks[0] // equal_stages.replicas,) for ranks in schedule.placement)
    return schedule, work.for_placement(first)


def _times(replicas: Sequence[int]) -> list[float]:
    """How many times as long each stage takes as one with the fewest replicas."""
    return [count / min(replicas) for count in replicas]


def _show(shown: Sequence[_DrawnStep], output: Path | None, as_json: bool) -> None:
    steps = [step for step, _ in shown]
    draw(steps, output)
    if as_json:
        first, *others = (_summary(*each) for each in shown)
        show_json(first | ({"compare": others[0]} if others else {}))
    else:
        print_steps(steps, output)


def _summary(step: "DrawnStep", more: Mapping[str, object]) -> dict[str, object]:
    from pipec.timeline.report import timeline_report

    named = {"schedule": step.schedule, "num_microbatches": step.num_microbatches}
    return {**named, **more, **timeline_report(step.timeline)}
