"""How often to save a training whose devices fail: the useful part of its time, by the interval.

    python benchmarks/goodput.py --devices 10000 --step 20 --save 65 --pause 2 --restart 600

Failures come independently of each other, once in ``mean`` seconds: the intervals between them have an
exponential distribution. After each, the run needs some time to go on, and makes again what it had made since
the last checkpoint. The model, and where its best interval lies, are those of J. W. Young, A first order
approximation to the optimum checkpoint interval (CACM, 1974), and J. T. Daly, A higher order estimate of the
optimum checkpoint interval for restart dumps (FGCS, 2006).
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Between two failures of one device: 419 interruptions that nobody had planned, in 54 days on 16,384 H100.

Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.4.
"""

FAILURES = 20_000
"""Drawn for each interval: the simulated goodput is then within a percent of what is expected."""

BESIDE = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""The intervals that are shown, as parts of the best one."""


@dataclass(frozen=True)
class Failing:
    """A run whose failures come once in ``mean`` seconds.

    A checkpoint is complete ``save`` seconds after it was begun, and training pauses for ``pause`` of them.
    From a failure to the first new step it takes ``restart`` seconds, unless another failure comes meanwhile.
    """

    mean: float
    save: float
    pause: float
    restart: float

    def goodput(self, interval: float) -> float:
        """The useful part of the time, expected (Daly, equation 20, where training pauses for all of a save).

        Of the cycles between two failures those count whose checkpoint was complete.
        """
        cycle, before = self._cycle(interval)
        return interval / self.mean * math.exp(-before / self.mean) / math.expm1(cycle / self.mean)

    def simulated(self, interval: float, num_failures: int, seed: int) -> float:
        """The useful part of the time until so many failures have been drawn."""
        draw, (cycle, before) = random.Random(seed), self._cycle(interval)
        useful = total = 0.0
        for _ in range(num_failures):
            lived = draw.expovariate(1 / self.mean)
            total += lived
            useful += max(0.0, (lived - before) // cycle) * interval
        return useful / total

    def _cycle(self, interval: float) -> tuple[float, float]:
        """Seconds from one complete checkpoint to the next, and from a failure to one cycle before the first.

        A checkpoint is not begun while the one before is still being written.
        """
        cycle = max(interval + self.pause, self.save)
        return cycle, self.restart + interval + self.save - cycle

    def young(self) -> float:
        """The best interval, to the first order."""
        return math.sqrt(2 * self.pause * self.mean)

    def daly(self) -> float:
        """The best interval, to a higher order (equation 37)."""
        if self.pause >= 2 * self.mean:
            return self.mean
        part = math.sqrt(self.pause / (2 * self.mean))
        return self.young() * (1 + part / 3 + part * part / 9) - self.pause

    def best(self) -> float:
        """The interval of the largest goodput."""
        shortest = self.save - self.pause  # below it, a save waits for the one before
        found = _zero(
            lambda x: math.exp((x + self.pause) / self.mean) * (1 - x / self.mean) - 1, 0.0, self.mean
        )
        return max(found, shortest)


def _zero(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls from above 0 to below it is 0."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def lines(run: Failing, num_devices: int, step: float) -> Iterator[str]:
    """A row for each interval, in whole steps of ``step`` seconds, with the best one marked."""
    yield f"{num_devices:,} devices: a failure every {_duration(run.mean)}"
    yield (
        f"a checkpoint takes {_duration(run.save)} and training pauses for {_duration(run.pause)} of it; "
        f"a restart takes {_duration(run.restart)}"
    )
    yield ""
    yield f"{'save every':>12} {'steps':>10} {'goodput':>8} {'simulated':>10}"
    names: dict[int, list[str]] = {max(1, round(part * run.best() / step)): [] for part in BESIDE}
    for name, interval in (("best", run.best()), ("young", run.young()), ("daly", run.daly())):
        names.setdefault(max(1, round(interval / step)), []).append(name)
    for steps in sorted(names):
        interval = steps * step
        simulated = run.simulated(interval, FAILURES, seed=0)
        yield (
            f"{_duration(interval):>12} {steps:>10,} {run.goodput(interval):>8.1%} {simulated:>10.1%}  "
            f"{', '.join(names[steps])}".rstrip()
        )


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, required=True, help="how many the run needs, all of them")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of a step; default: 1")
    parser.add_argument("--save", type=float, required=True, help="seconds until a checkpoint is complete")
    parser.add_argument("--pause", type=float, help="seconds for which a save stops training; default: all")
    parser.add_argument(
        "--restart",
        type=float,
        default=300.0,
        help="seconds from a failure to the first new step; default: 300",
    )
    parser.add_argument(
        "--device-mtbf-hours",
        type=float,
        default=DEVICE_HOURS,
        help="hours between two failures of one device; default: 50,700, those of Llama 3",
    )
    args = parser.parse_args(arguments)
    pause = args.save if args.pause is None else args.pause
    if pause > args.save:
        parser.error(f"--pause {pause:g} is longer than the save of {args.save:g} s; expected a part of it")
    run = Failing(args.device_mtbf_hours * 3600 / args.devices, args.save, pause, args.restart)
    print("\n".join(lines(run, args.devices, args.step)))


if __name__ == "__main__":
    main()
