"""``pipec goodput``: how often to save, on so many devices that fail."""

from typing import Annotated

import typer

from pipec.cli.options import Json, Seed
from pipec.cli.output import say, show_json
from pipec.errors import InputError
from pipec.timeline.goodput import DEVICE_HOURS, Failing

_FAILURES = 20_000
"""Drawn for each interval: the simulated goodput is then within a percent of what is expected."""

_BESIDE = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Other intervals that are shown, as parts of the best one."""


def goodput(
    devices: Annotated[int, typer.Option(min=1, max=10**9, help="How many the run needs, all of them.")],
    step: Annotated[
        float, typer.Option(min=1e-9, help="Seconds of a step, as `pipec schedule` or `pipec plan` has it.")
    ] = 1.0,
    bytes: Annotated[
        float | None, typer.Option(min=0, help="What a checkpoint holds; with --bandwidth, for --save.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1, help="Bytes per second that all devices write together.")
    ] = None,
    save: Annotated[float | None, typer.Option(min=0, help="Seconds until a checkpoint is complete.")] = None,
    pause: Annotated[
        float | None, typer.Option(min=0, help="For how many of them training pauses. Default: all.")
    ] = None,
    restart: Annotated[
        float, typer.Option(min=0, help="Seconds from a failure to the first new step.")
    ] = 300.0,
    device_hours: Annotated[
        float,
        typer.Option(min=1e-3, help="Hours between two failures of one device. Default: those of Llama 3."),
    ] = DEVICE_HOURS,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Tell what part of the time is useful, by the interval between checkpoints, and the best interval.

    All devices stop when one fails. The run goes on after --restart seconds from the last checkpoint that was
    complete. The default rate of failures is that of the Llama 3 report: 419 in 54 days on 16,384 H100.

    JSON keys: mean_seconds between two failures of the run, save, pause and restart; best, young and daly,
    each with interval_seconds, steps, goodput as expected and as simulated; intervals, a list of the same.
    """
    save = _save_seconds(save, bytes, bandwidth)
    pause = save if pause is None else pause
    if pause > save:
        raise InputError(f"--pause {pause:g} is longer than the save of {save:g} s; expected a part of it")
    run = Failing(device_hours * 3600 / devices, save, pause, restart)
    named = {"best": run.best(), "young": run.young(), "daly": run.daly()}
    intervals = [part * run.best() for part in _BESIDE]
    if as_json:
        shown = {name: _facts(run, interval, step, seed) for name, interval in named.items()}
        listed = [_facts(run, interval, step, seed) for interval in intervals]
        facts = {"mean_seconds": run.mean, "save": save, "pause": pause, "restart": restart}
        show_json({**facts, **shown, "intervals": listed})
        return
    say(_text(run, devices, step, seed, named, intervals))


def _save_seconds(save: float | None, num_bytes: float | None, bandwidth: float | None) -> float:
    if save is not None and num_bytes is None and bandwidth is None:
        return save
    if save is None and num_bytes is not None and bandwidth is not None:
        return num_bytes / bandwidth
    raise InputError("what a checkpoint costs is not clear; pass --save, or --bytes and --bandwidth")


def _facts(run: Failing, interval: float, step: float, seed: int) -> dict[str, float]:
    """Of the interval, in whole steps."""
    steps = _steps(interval, step)
    taken = steps * step
    simulated = run.simulated(taken, _FAILURES, seed)
    return {
        "interval_seconds": taken,
        "steps": steps,
        "goodput": run.goodput(taken),
        "simulated": simulated,
    }


def _steps(interval: float, step: float) -> int:
    return max(1, round(interval / step))


def _text(
    run: Failing, devices: int, step: float, seed: int, named: dict[str, float], intervals: list[float]
) -> str:
    lines = [
        f"{devices:,} devices: a failure every {_duration(run.mean)}",
        f"a checkpoint takes {_duration(run.save)} and training pauses for {_duration(run.pause)} of it; "
        f"a restart takes {_duration(run.restart)}",
        "",
        f"{'save every':>12} {'steps':>10} {'goodput':>8} {'simulated':>10}",
    ]
    for steps in sorted({_steps(each, step) for each in (*intervals, *named.values())}):
        each = _facts(run, steps * step, step, seed)
        names = ", ".join(name for name, interval in named.items() if _steps(interval, step) == steps)
        lines.append(
            f"{_duration(each['interval_seconds']):>12} {steps:>10,} {each['goodput']:>8.1%} "
            f"{each['simulated']:>10.1%}  {names}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
