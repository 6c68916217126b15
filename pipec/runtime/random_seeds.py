"""Seeds of random operators. They depend on where and when an operator runs, never on what ran before it.

The seed of a step is the next number of torch's default generator, so that ``torch.manual_seed``,
``get_rng_state`` and ``set_rng_state`` govern what a pipeline draws as they govern eager torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**64 - 1


@dataclass(frozen=True)
class OperatorGenerators:
    """The generators of a microbatch's random operators, one each.

    ``key`` is the step's seed, and the microbatch's number in the batch.
    """

    device: torch.device
    key: tuple[int, int]

    def __call__(self, operator: int) -> torch.Generator:
        """A generator whose stream depends on the key and the operator alone."""
        return torch.Generator(self.device).manual_seed(mix_seed(*self.key, operator))

    def seeds(self, operators: Iterable[int]) -> dict[int, Tensor]:
        """The seeds of operators' generators, which ``random_operators.dropout`` takes in their place."""
        return {each: torch.tensor(_signed(mix_seed(*self.key, each))) for each in operators}


def generator_of_seed(device: torch.device, seed: Tensor) -> torch.Generator:
    """The generator of one of the ``seeds``."""
    return torch.Generator(device).manual_seed(int(seed) & _MASK)


def _signed(bits: int) -> int:
    """The signed number with these 64 bits (two's complement)."""
    return bits - (bits >> 63 << 64)


def mix_seed(*key: int) -> int:
    """64 well-mixed bits of some integers, by SplitMix64 (Steele, Lea and Flood 2014, figure 17)."""
    state = 0
    for number in key:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def peek_seed() -> int:
    """The next number of torch's default generator, which is left as it was.

    Only a step that draws takes the number, by ``advance_default_generator``.
    """
    return _draw(torch.default_generator.clone_state())


def advance_default_generator() -> None:
    """Take the next number of torch's default generator."""
    _draw(torch.default_generator)


def _draw(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
