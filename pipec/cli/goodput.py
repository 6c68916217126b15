"""``pipec goodput``: how often to save, on so many devices that fail; plans and timelines tell it, too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pipec.cli.options import CheckpointBandwidth, DeviceHours, Json, Pause, Restart, Saving, Seed
from pipec.cli.output import say, show_json
from pipec.errors import InputError
from pipec.ir.text import format_bytes
from pipec.timeline.goodput import DEVICE_HOURS, Failing

if TYPE_CHECKING:
    from pipec.pipeline import Pipeline

_FAILURES = 20_000
"""Drawn for each interval: the simulated goodput is then within a percent of what is expected."""

_BESIDE = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Other intervals that are shown, as parts of the best one."""

_RESTART = 300.0
"""Seconds from a failure to the first new step, if nothing else is said."""


def goodput(
    devices: Annotated[int, typer.Option(min=1, max=10**9, help="How many the run needs, all of them.")],
    step: Annotated[
        float, typer.Option(min=1e-9, help="Seconds of a step, as `pipec schedule` or `pipec plan` has it.")
    ] = 1.0,
    bytes: Annotated[
        float | None, typer.Option(min=0, help="What a checkpoint holds, for --checkpoint-bandwidth.")
    ] = None,
    bandwidth: CheckpointBandwidth = None,
    save: Annotated[float | None, typer.Option(min=0, help="Seconds until a checkpoint is complete.")] = None,
    pause: Pause = None,
    restart: Restart = None,
    device_hours: DeviceHours = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Tell what part of the time is useful, by the interval between checkpoints, and the best interval.

    All devices stop when one fails. The run goes on after --restart seconds from the last checkpoint that was
    complete. The default rate of failures is that of the Llama 3 report: 419 in 54 days on 16,384 H100.
    `pipec plan` and `pipec schedule TARGET` tell the same of a plan, with --checkpoint-bandwidth.

    JSON keys: mean_seconds between two failures of the run, save, pause and restart; best, young and daly,
    each with interval_seconds, steps, goodput as expected and as simulated; intervals, a list of the same.
    """
    saving = Saving(bandwidth, pause, restart, device_hours)
    told = Goodput.of(devices, step, _save_seconds(save, bytes, bandwidth), saving, seed)
    if as_json:
        show_json(told.facts())
    else:
        say(told.text())


def _save_seconds(save: float | None, num_bytes: float | None, bandwidth: float | None) -> float:
    if save is not None and num_bytes is None and bandwidth is None:
        return save
    if save is None and num_bytes is not None and bandwidth is not None:
        return num_bytes / bandwidth
    raise InputError(
        "what a checkpoint costs is not clear; pass --save, or --bytes and --checkpoint-bandwidth"
    )


def check_saving(saving: Saving) -> None:
    """Raise InputError for options that say how a plan is saved if it is not known how fast that is."""
    if saving.bandwidth is None and saving != Saving():
        raise InputError(
            "--pause, --restart and --device-hours are about checkpoints; pass --checkpoint-bandwidth with "
            "them, the bytes per second that all devices write together"
        )


def of_plan(pipe: "Pipeline", optimizer: str | None, saving: Saving) -> "Goodput | None":
    """What is told of a plan: with its own step, state and number of devices. None if nobody asked."""
    if saving.bandwidth is None:
        return None
    from pipec.cli.target import load_optimizer
    from pipec.plan.memory import checkpoint_bytes
    from pipec.plan.predictions import step_seconds
    from pipec.runtime.optimizers import state_bytes

    factory = load_optimizer(optimizer)
    state = state_bytes(factory, dict(pipe.named_parameters())) if factory else {}
    if state is None:
        raise InputError(
            f"what optimizer {optimizer} keeps of each parameter cannot be told before it has run; leave out "
            "--checkpoint-bandwidth, and pass the --bytes of a checkpoint to `pipec goodput`"
        )
    num_bytes = checkpoint_bytes(pipe.plan) + sum(state.values())
    what = "weights and optimizer state" if factory else "weights alone, as there is no --optimizer"
    save = num_bytes / saving.bandwidth
    held = f"a checkpoint holds {format_bytes(num_bytes)}: {what}"
    return Goodput.of(pipe.plan.num_ranks, step_seconds(pipe.plan, pipe.simulate()), save, saving, held=held)


@dataclass(frozen=True)
class Goodput:
    """What is told of a run on ``devices``, whose steps take ``step`` seconds; ``held`` is said before."""

    run: Failing
    devices: int
    step: float
    seed: int
    held: str

    @classmethod
    def of(
        cls, devices: int, step: float, save: float, saving: Saving, seed: int = 0, held: str = ""
    ) -> "Goodput":
        """Raises InputError if training pauses for longer than a save takes."""
        pause = save if saving.pause is None else saving.pause
        if pause > save:
            raise InputError(
                f"--pause {pause:g} is longer than the save of {save:g} s; expected a part of it"
            )
        restart = _RESTART if saving.restart is None else saving.restart
        mean = (saving.device_hours or DEVICE_HOURS) * 3600 / devices
        return cls(Failing(mean, save, pause, restart), devices, step, seed, held)

    @property
    def _named(self) -> Mapping[str, float]:
        return {"best": self.run.best(), "young": self.run.young(), "daly": self.run.daly()}

    @property
    def _intervals(self) -> list[float]:
        return [part * self.run.best() for part in _BESIDE]

    def facts(self) -> dict[str, object]:
        """For JSON."""
        run = self.run
        return {
            "mean_seconds": run.mean,
            "save": run.save,
            "pause": run.pause,
            "restart": run.restart,
            **{name: self._facts(interval) for name, interval in self._named.items()},
            "intervals": [self._facts(interval) for interval in self._intervals],
        }

    def _facts(self, interval: float) -> dict[str, float]:
        """Of the interval, in whole steps."""
        steps = self._steps(interval)
        taken = steps * self.step
        simulated = self.run.simulated(taken, _FAILURES, self.seed)
        return {
            "interval_seconds": taken,
            "steps": steps,
            "goodput": self.run.goodput(taken),
            "simulated": simulated,
        }

    def _steps(self, interval: float) -> int:
        return max(1, round(interval / self.step))

    def text(self) -> str:
        """A row for each interval, with the best one marked."""
        run, named = self.run, self._named
        lines = [
            f"{self.devices:,} devices: a failure every {_duration(run.mean)}",
            *filter(None, [self.held]),
            f"a checkpoint takes {_duration(run.save)} and training pauses for {_duration(run.pause)} of it; "
            f"a restart takes {_duration(run.restart)}",
            "",
            f"{'save every':>12} {'steps':>10} {'goodput':>8} {'simulated':>10}",
        ]
        for steps in sorted({self._steps(each) for each in (*self._intervals, *named.values())}):
            each = self._facts(steps * self.step)
            names = ", ".join(name for name, interval in named.items() if self._steps(interval) == steps)
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
