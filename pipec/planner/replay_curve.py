"""What a stage replays for how many bytes, at different prices of memory."""

import functools
import math
from dataclasses import dataclass

from pipec.planner.recompute import GAP, ReplayProgram, Stage, saved_values


@functools.lru_cache(maxsize=16)
def curve(stage: Stage, most: int) -> tuple[frozenset[int], ...]:
    """What to replay at up to ``most`` prices of a saved byte: the corners of the curve of seconds and bytes.

    It begins with nothing and ends with what saves least. No choice has both fewer seconds and fewer bytes
    than a point on a line between neighbours.
    """
    program = ReplayProgram((stage,), ())
    ends = _Corner.of(stage, program.at_price(0.0)), _Corner.of(stage, program.at_price(math.inf))
    corners, pairs = dict.fromkeys(ends), [ends]
    while pairs and len(corners) < most:
        pairs.sort(key=_area)
        low, high = pairs.pop()
        if low.saved > high.saved and high.seconds > low.seconds:
            price = (high.seconds - low.seconds) / (low.saved - high.saved)
            between = _Corner.of(stage, program.at_price(price))
            if between.seconds + price * between.saved < (low.seconds + price * low.saved) * (1 - GAP):
                corners[between] = None
                pairs += [(low, between), (between, high)]
    return tuple(corner.replayed for corner in sorted(corners, key=lambda each: -each.saved))


@dataclass(frozen=True, slots=True)
class _Corner:
    """A choice with its seconds and the bytes that it saves."""

    replayed: frozenset[int]
    seconds: float
    saved: float

    @classmethod
    def of(cls, stage: Stage, replayed: frozenset[int]) -> "_Corner":
        seconds = sum(stage[v].seconds for v in sorted(replayed))
        return cls(replayed, seconds, sum(stage[v].num_bytes for v in saved_values(stage, replayed)))


def _area(pair: tuple[_Corner, _Corner]) -> float:
    """How much there may be between two neighbours."""
    low, high = pair
    return (low.saved - high.saved) * (high.seconds - low.seconds)
