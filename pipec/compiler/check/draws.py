"""Random operators that draw nothing, so that two runs can be compared.

Each returns what does not depend on how many rows there are: dropout keeps everything, uniform numbers are
all the same, and a permutation is in reverse order. Numbers drawn below a bound are the largest possible
ones, so that a bound that follows from the number of rows shows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.torch_compat.run_time import TorchDispatchMode, schema


class FixedDraws(TorchDispatchMode):
    """Inside a ``with``, random operators return fixed numbers.

    ``unknown`` has the names of those that drew after all, because no rule here knows them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a random operator returns."""
        named = {argument.name: argument.default_value for argument in schema(func).arguments}
        named |= dict(zip(named, args, strict=False)) | dict(kwargs)
        if "dropout_p" in named:
            return func(**{**named, "dropout_p": 0.0})
        name = schema(func).name.removeprefix("aten::").strip("_")
        if name in _RESULTS:
            return _RESULTS[name](named)
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}  # that of the model stays as it is
        drawn = func(*args, **kwargs)  # of which the shape, the type and the memory are right
        if name in _NUMBERS:
            return drawn.copy_(torch.as_tensor(_NUMBERS[name](named)))
        self.unknown.append(str(func))
        return drawn


def _bernoulli(named: dict[str, Any]) -> Any:
    """What a coin shows that is heads with probability ``p``, or with that of each element."""
    p = named["self"] if named.get("p") is None else named["p"]
    return p >= 0.5 if isinstance(p, Tensor) else p > 0


def _largest(named: dict[str, Any]) -> int:
    high = named["high"] if named.get("high") is not None else named.get("to")
    return 1 if high is None else int(high) - 1


def _uniform(named: dict[str, Any]) -> float:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return float(low + (high - low) * 0.37)


def _normal(named: dict[str, Any]) -> Any:
    return named.get("mean", 0.0) + named.get("std", 1.0) * 0.61


_NUMBERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _largest),
    "exponential": lambda named: 0.61 / named.get("lambd", 1.0),
    "geometric": lambda named: 1,
    "log_normal": lambda named: 2.0,
    "cauchy": lambda named: named.get("median", 0.0) + 0.61,
    "poisson": lambda named: named["self"].round(),
}
"""The number, or the number of each element, that an operator draws."""


def _dropout(named: dict[str, Any]) -> Any:
    x, p = named["input"], named["p"]
    mask = torch.ones_like(x, dtype=torch.bool)
    if named["train"] is False or p == 0:
        return x.clone(), mask
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(mask)
    return x / (1 - p), mask


def _permutation(named: dict[str, Any]) -> Tensor:
    kind: dict[str, Any] = {"dtype": torch.int64}
    kind |= {key: x for key, x in named.items() if isinstance(x, torch.dtype | torch.device)}
    permutation: Tensor = torch.arange(named["n"] - 1, -1, -1, **kind)
    return permutation


def _most_likely(named: dict[str, Any]) -> Tensor:
    weights: Tensor = named["self"]
    count: int = named["num_samples"]
    if count <= weights.shape[-1]:
        return weights.topk(count, dim=-1).indices
    return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count).clone()


_RESULTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "randperm": _permutation,
    "multinomial": _most_likely,
}
"""What operators return that draw something else than numbers."""
