"""Random operators that draw nothing, so that two runs can be compared.

Each returns what does not depend on how many rows there are: dropout keeps everything, uniform numbers are
all the same, and a permutation is in reverse order. Numbers drawn below a bound are the largest possible
ones, so that a bound that follows from the number of rows shows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.torch_compat.operators import TorchDispatchMode, schema

_UNIFORM, _NORMAL = 0.37, 0.61

_aten = torch.ops.aten


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
        rule = _RULES.get(schema(func).name.removeprefix("aten::").strip("_"))
        if rule is None:
            self.unknown.append(str(func))
            return func(*args, **kwargs)
        return rule(func, named)


def _filled(value: Callable[[dict[str, Any]], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    """The rule of an operator that makes, or fills, a tensor whose elements are all one number."""

    def rule(func: Any, named: dict[str, Any]) -> Any:
        number = value(named)
        if schema(func).is_mutable:
            target: Any = named.get("out", named.get("self"))
            return target.copy_(number) if isinstance(number, Tensor) else target.fill_(number)
        like = named.get("self", named.get("mean"))
        if not isinstance(like, Tensor):
            like = named.get("std")
        kind = _kind(named)
        if isinstance(like, Tensor):
            return (torch.zeros_like(like, **kind) + number).to(kind.get("dtype", like.dtype))
        kind.setdefault("dtype", torch.int64 if schema(func).name.startswith("aten::randint") else None)
        return torch.zeros(named["size"], **kind).add_(number)

    return rule


def _kind(named: dict[str, Any]) -> dict[str, Any]:
    """The dtype and the device that a call names. A schema has numbers for default dtypes."""
    return {key: x for key, x in named.items() if isinstance(x, torch.dtype | torch.device)}


def _bernoulli(named: dict[str, Any]) -> Any:
    """What a coin shows that is heads with probability ``p``, or of each element's own."""
    p = named.get("p")
    if p is None:
        return (named["self"] >= 0.5).to(named["self"].dtype)
    return (p >= 0.5).to(p.dtype) if isinstance(p, Tensor) else float(p > 0)


def _largest(named: dict[str, Any]) -> int:
    high = named["high"] if named.get("high") is not None else named.get("to")
    return 1 if high is None else int(high) - 1


def _uniform(named: dict[str, Any]) -> float:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return float(low + (high - low) * _UNIFORM)


def _normal(named: dict[str, Any]) -> Any:
    return named.get("mean", 0.0) + named.get("std", 1.0) * _NORMAL


def _dropout(func: Any, named: dict[str, Any]) -> Any:
    x, p = named["input"], named["p"]
    mask = torch.ones_like(x, dtype=torch.bool)
    if named["train"] is False or p == 0:
        return x.clone(), mask
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(mask)
    return x / (1 - p), mask


def _permutation(func: Any, named: dict[str, Any]) -> Tensor:
    return torch.arange(named["n"] - 1, -1, -1, **{"dtype": torch.int64, **_kind(named)})


def _most_likely(func: Any, named: dict[str, Any]) -> Tensor:
    weights: Tensor = named["self"]
    count: int = named["num_samples"]
    if count <= weights.shape[-1]:
        return weights.topk(count, dim=-1).indices
    return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count).clone()


_RULES: Mapping[str, Callable[[Any, dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "bernoulli": _filled(_bernoulli),
    "rand": _filled(lambda named: _UNIFORM),
    "rand_like": _filled(lambda named: _UNIFORM),
    "uniform": _filled(_uniform),
    "randn": _filled(lambda named: _NORMAL),
    "randn_like": _filled(lambda named: _NORMAL),
    "normal": _filled(_normal),
    "normal_functional": _filled(_normal),
    "randint": _filled(_largest),
    "randint_like": _filled(_largest),
    "random": _filled(_largest),
    "exponential": _filled(lambda named: _NORMAL / named.get("lambd", 1.0)),
    "geometric": _filled(lambda named: 1),
    "log_normal": _filled(lambda named: 2.0),
    "cauchy": _filled(lambda named: named.get("median", 0.0) + _NORMAL),
    "poisson": _filled(lambda named: named["self"].round()),
    "randperm": _permutation,
    "multinomial": _most_likely,
}
