"""``pipec schedule``: the timeline of one step, on uniform costs or on those of a model's plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.options import TARGET_HELP, Drawing, Json, Recompute
from pipec.cli.output import show_json
from pipec.errors import InputError

if TYPE_CHECKING:
    from pipec.schedules import Workload
    from pipec.timeline.attribution import Curve
    from pipec.timeline.events import Timeline

_OF_NAME, _OF_TARGET = "Options with a NAME", "Options with a TARGET"


def _of_name(help: str, least: float) -> Any:
    return typer.Option(help=help, min=least, rich_help_panel=_OF_NAME)


def _of_target(help: str, flag: str, least: float | None = None) -> Any:
    return typer.Option(flag, help=help, min=least, rich_help_panel=_OF_TARGET)


def schedule(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|TARGET",
            help=f"gpipe, 1f1b, zb-h1, auto, ...; a .txt file of compute orders; or a model: {TARGET_HELP}",
        ),
    ],
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Default: 8; of a model, the fastest found.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another schedule of the same, to compare on one axis of time."),
    ] = None,
    output: Drawing = None,
    as_json: Json = False,
    stages: Annotated[int, _of_name("Number of ranks; a schedule may cut each's share into several.", 1)] = 4,
    forward: Annotated[float, _of_name("Time of a microbatch's forward on a rank.", 0)] = 1.0,
    backward_input: Annotated[float, _of_name("Time of its input gradient.", 0)] = 1.0,
    backward_weight: Annotated[float, _of_name("Time of its weight gradient.", 0)] = 1.0,
    communication: Annotated[float, _of_name("Time of a message between ranks.", 0)] = 0.0,
    memory_backward: Annotated[
        float, _of_name("What a microbatch holds on a rank until its input gradient.", 0)
    ] = 1.0,
    memory_weight: Annotated[float, _of_name("What it holds from there until its weight gradient.", 0)] = 1.0,
    devices: Annotated[int, _of_target("Number of ranks.", "--devices", 1)] = 4,
    name: Annotated[str, _of_target("Its schedule.", "--schedule")] = "1f1b",
    recompute: Annotated[Recompute, _of_target("What to compute again.", "--recompute")] = Recompute.AUTO,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Of a model, bytes per device, such as 16GiB; of a NAME, in --memory-backward's unit."
        ),
    ] = None,
) -> None:
    """Draw the timeline of one step: of a schedule on equal stages, or of a model on its plan's costs.

    JSON keys: schedule, num_microbatches, unit, makespan, span, bubble_rate, peak_in_flight of each rank;
    waits, for each rank its time busy, waiting, for whose messages, idle of its own and after its last
    compute; critical_path, num_events and, if they are at most 100,000, events, each with rank, op, stage,
    microbatch, start and end. Of a NAME also lower_and_verify_seconds. With --beside also beside: the same
    keys of that schedule.
    """
    is_target = ":" in what
    _refuse(ctx, _OF_NAME if is_target else _OF_TARGET)
    first = name if is_target else what
    _check_output(output, first, beside)
    names = [first] if beside is None else [first, beside]
    if is_target:
        shown = [_of_model(what, devices, each, microbatches, recompute, memory_limit) for each in names]
    else:
        from pipec.schedules import Workload

        work = Workload.uniform(
            stages,
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            message=communication,
            memory_backward=memory_backward,
            memory_weight=memory_weight,
            memory_limit=_number(memory_limit),
        )
        shown = [_of_schedule(each, stages, microbatches or 8, work) for each in names]
    _show(shown, output, as_json)


@dataclass(frozen=True)
class _Step:
    """One step to show, with the bytes each rank holds over time and further facts where they are known."""

    schedule: str
    num_microbatches: int
    timeline: "Timeline"
    memory: Sequence["Curve"] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.schedule}, {self.num_microbatches} microbatches"


def _check_output(output: Path | None, name: str, beside: str | None) -> None:
    """Refuse before anything is worked out a file that cannot be drawn."""
    from pipec.viz import check_suffix

    if beside == name:
        raise InputError(f"--beside names {name!r} again; expected another schedule")
    if output is not None:
        check_suffix(output)
        if beside is not None and output.suffix not in (".html", ".json"):
            raise InputError(
                f"--beside with {output.name}: a {output.suffix} file shows one step; expected .html or .json"
            )


def _of_model(
    target: str,
    devices: int,
    name: str,
    microbatches: int | None,
    recompute: Recompute,
    memory_limit: str | None,
) -> _Step:
    from pipec.cli.target import prepare
    from pipec.plan.predictions import saved_bytes_over_time

    pipe = prepare(target, devices, name, microbatches, recompute, memory_limit)
    timeline = pipe.simulate()
    memory = saved_bytes_over_time(pipe.plan, timeline)
    return _Step(name, pipe.plan.num_microbatches, timeline, memory)


def _of_schedule(name: str, num_ranks: int, num_microbatches: int, work: "Workload") -> _Step:
    """A schedule or a file of compute orders, with the seconds to lower and verify it."""
    from pipec.schedules import custom_schedule, make_schedule
    from pipec.schedules.chain import simulate_schedule

    if name.endswith(".txt"):
        schedule = custom_schedule(Path(name), num_ranks, num_microbatches)
    else:
        schedule = make_schedule(name, num_ranks, num_microbatches, work)
    work.check_fits(schedule)
    timeline, seconds = simulate_schedule(schedule, work)
    return _Step(name, num_microbatches, timeline, facts={"lower_and_verify_seconds": seconds})


def _number(memory_limit: str | None) -> float | None:
    try:
        return None if memory_limit is None else float(memory_limit)
    except ValueError:
        raise InputError(
            f"--memory-limit is {memory_limit!r}; of a schedule's name, expected a number in the unit of "
            "--memory-backward"
        ) from None


def _refuse(ctx: typer.Context, panel: str) -> None:
    """Options that would change nothing are errors: a NAME has no devices, a TARGET has costs of its own."""
    misplaced = [
        param.opts[0]
        for param in ctx.command.params
        if getattr(param, "rich_help_panel", None) == panel
        and getattr(ctx.get_parameter_source(param.name or ""), "name", "DEFAULT") != "DEFAULT"
    ]
    if misplaced:
        kind = "the name of a schedule" if panel == _OF_NAME else "a model such as file.py:factory"
        raise InputError(f"{', '.join(misplaced)} is for {kind}, but the argument is {ctx.params['what']!r}")


def _show(steps: Sequence[_Step], output: Path | None, as_json: bool) -> None:
    from pipec.viz import timeline_text, write_timelines

    first, *others = steps
    if output is not None:
        timelines = {step.schedule: step.timeline for step in steps}
        memory = {step.schedule: step.memory for step in steps if step.memory}
        names = " and ".join(timelines)
        write_timelines(output, timelines, f"{names}, {first.num_microbatches} microbatches", memory)
    if as_json:
        show_json(_facts(first) | ({"beside": _facts(others[0])} if others else {}))
    elif output is None:
        typer.echo("\n".join(timeline_text(step.timeline, step.title) for step in steps), nl=False)
    else:
        typer.echo(f"wrote {output}")


def _facts(step: _Step) -> dict[str, object]:
    from pipec.timeline.facts import timeline_facts

    named = {"schedule": step.schedule, "num_microbatches": step.num_microbatches}
    return {**named, **step.facts, **timeline_facts(step.timeline)}
