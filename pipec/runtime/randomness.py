"""Seeds of random operators. They depend on where and when an operator runs, never on what ran before it."""

import torch

_MASK = 2**64 - 1


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator whose stream depends on ``key`` alone, such as (seed, step, microbatch, operator)."""
    return torch.Generator(device).manual_seed(mix(*key))


def mix(*key: int) -> int:
    """64 well-mixed bits of some integers, by SplitMix64 (Steele, Lea and Flood 2014, figure 17)."""
    state = 0
    for number in key:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
