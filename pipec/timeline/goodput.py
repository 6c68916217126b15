"""What part of the time a run that fails and goes on is useful, by how often it saves.

Failures come independently of each other, once in ``mean`` seconds: the intervals between them have an
exponential distribution. After each, the run needs some time to go on, and makes again what it had made since
the last checkpoint. The model, and where its best interval lies, are those of J. W. Young, A first order
approximation to the optimum checkpoint interval (CACM, 1974), and J. T. Daly, A higher order estimate of the
optimum checkpoint interval for restart dumps (FGCS, 2006).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Between two failures of one device: 419 interruptions that nobody had planned, in 54 days on 16,384 H100.

Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.4.
"""


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
