"""Compiled code that is called directly, against ``torch.compile`` and the source."""

import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipec.runtime.memory import block_cache
from pipec.runtime.memory.block_cache import clear_block_cache
from pipec.runtime.stages import direct_calls, kernels
from pipec.runtime.stages.inductor import split_bias_additions

aot_eager = torch._dynamo.lookup_backend("aot_eager")


def backward(w: list[Tensor], saved: list[Tensor], x: Tensor, b: int) -> Any:
    """One parameter without a gradient, a saved value that nobody reads, and one that is sent as it came."""
    first, _ = w
    kept, _ = saved
    saved.clear()
    ones = torch.ones(3)
    return {"grad_x": x * first * b + ones, "kept": kept}, [kept + 1], (None, (kept * x).sum(0))


def changes(w: list[Tensor], saved: list[Tensor], x: Tensor, b: int) -> Any:
    return x.add_(1), saved[0] + b


def returns_number(w: list[Tensor], saved: list[Tensor], x: Tensor, b: int) -> Any:
    return x + 1, b


def keeps_part(w: list[Tensor], saved: list[Tensor], x: Tensor, b: int) -> Any:
    """A list that is left with something in it is no list that a stage empties."""
    return x + saved.pop()


def affine(w: list[Tensor], saved: list[Tensor], x: Tensor, b: int) -> Any:
    return x * w[0]


def reads_number(w: list[Tensor], saved: list[Any], x: Tensor, b: int) -> Any:
    return x * saved[1]


def arguments(**others: Any) -> list[Any]:
    """The arguments of a call, with lists of their own."""
    torch.manual_seed(3)
    given = {
        "w": [torch.randn(3), torch.randn(2)],
        "saved": [torch.randn(4, 3), torch.randn(1)],
        "x": torch.randn(4, 3),
        "b": 4,
    }
    return [*(given | others).values()]


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own, by which torch.compile knows what it has compiled."""
    code = function.__code__.replace()
    return functools.update_wrapper(types.FunctionType(code, function.__globals__), function)


class Watched(kernels._Compiled):
    """A compiled function that counts its calls through ``torch.compile``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(fresh(function), function.__name__)
        compiled, self.num_guarded = self._compiled, 0

        def counted(*args: Any) -> Any:
            self.num_guarded += 1
            return compiled(*args)

        self._compiled = counted


def require_right(watched: Watched, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Compare a call with the source's, and what is left of lists with what the source leaves."""
    own, source = ([list(x) if isinstance(x, list) else x for x in args] for _ in range(2))
    own[2], source[2] = own[2].clone(), source[2].clone()
    returned, expected = watched(own), function(*source)
    torch.testing.assert_close(returned, expected, rtol=0, atol=0)
    torch.testing.assert_close(own, source, rtol=0, atol=0)
    return returned


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # which remembers the sizes that other tests have changed
    monkeypatch.setattr(direct_calls, "compile_graph", aot_eager)


@torch.no_grad()
def test_later_calls_are_direct(eager: None) -> None:
    watched = Watched(backward)
    for number in range(4):
        args = arguments(x=torch.full((4, 3), float(number)))
        sent, *_ = require_right(watched, backward, args)
        assert sent["kept"] is args[1][0]
    assert watched.num_guarded == 1


@contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


UNLIKE: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = {
    "a number": ({"b": 5}, nullcontext),
    "a dtype": ({"x": torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3)}, nullcontext),
    "the default dtype": ({}, doubles),
    "deterministic algorithms": ({}, deterministic),
    "grad mode": ({}, torch.enable_grad),
    "autocast": ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "one value twice": ({"x": (same := torch.ones(4, 3)), "saved": [same, torch.ones(1)]}, nullcontext),
}
"""What a call may have that the ones before had not."""


@torch.no_grad()
@pytest.mark.parametrize("what", UNLIKE)
def test_an_unlike_call_goes_through_the_guards(eager: None, what: str) -> None:
    others, state = UNLIKE[what]
    watched = Watched(backward)
    for _ in range(2):
        require_right(watched, backward, arguments())
    args = arguments(**others)
    with state():
        require_right(watched, backward, args)
    if what != "one value twice":  # which the code of one without takes as well
        assert watched.num_guarded == 2
    require_right(watched, backward, arguments())


@torch.no_grad()
@pytest.mark.parametrize("function", [changes, returns_number, keeps_part])
def test_what_identity_does_not_tell_is_not_direct(eager: None, function: Callable[..., Any]) -> None:
    watched = Watched(function)
    for _ in range(3):
        require_right(watched, function, arguments())
    assert watched.num_guarded == 3


@torch.no_grad()
def test_a_call_with_one_value_twice_is_not_noted(eager: None) -> None:
    """The code may have been told of one value that it takes in two places."""
    watched, same = Watched(backward), torch.ones(4, 3)
    require_right(watched, backward, arguments(x=same, saved=[same, torch.ones(1)]))
    for number in range(2):
        require_right(watched, backward, arguments(x=torch.full((4, 3), float(number))))


@torch.no_grad()
def test_sizes_that_keep_changing_are_left_to_torch(eager: None) -> None:
    watched = Watched(backward)
    for rows in range(2, 30):
        args = arguments(b=rows, x=torch.ones(rows, 3), saved=[torch.ones(rows, 3), torch.ones(1)])
        require_right(watched, backward, args)
        require_right(watched, backward, args)
    assert watched.num_guarded < 2 * 28  # one of a size is direct although the code has sizes as symbols
    assert len(watched._direct) <= kernels._MAX_RECORDED + 1


@torch.no_grad()
def test_numbers_are_told_apart(eager: None) -> None:
    """Those that are saved, and those that are no sizes."""
    watched, other = Watched(reads_number), Watched(backward)
    for number in (2, 2, 3, 3):
        require_right(watched, reads_number, arguments(saved=[torch.ones(1), number]))
    for scale in (2.0, 2.0, 3.0, 3.0):
        require_right(other, backward, arguments(b=scale))
    assert watched.num_guarded == other.num_guarded == 4


@torch.no_grad()
def test_code_that_fails_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, or once it is called directly: the source runs from then on, and one warning says why."""
    for num_good in (0, 1):
        torch._dynamo.reset()
        left = [None] * num_good

        def fail_later(graph: Any, inputs: Any, left: list[None] = left) -> Callable[..., Any]:
            def code(*given: Tensor) -> Any:
                if not left:
                    raise RuntimeError("no such instruction")
                left.pop()
                return graph(*given)

            return code

        monkeypatch.setattr(direct_calls, "compile_graph", fail_later)
        watched = Watched(backward)
        with warnings.catch_warnings(record=True) as warned:
            for _ in range(3):
                require_right(watched, backward, arguments())
        told = [str(each.message) for each in warned if "no such instruction" in str(each.message)]
        assert len(told) == 1
        assert "torch.compile cannot compile backward, which runs as its source" in told[0]


@pytest.mark.slow
@torch.no_grad()
def test_inductor_looks_at_sizes_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every value taken for large, and so made in memory that former ones have left."""
    monkeypatch.setattr("pipec.runtime.stages.inductor.MMAP_THRESHOLD_BYTES", 1)
    torch._dynamo.reset()
    clear_block_cache()
    watched = Watched(affine)
    for _ in range(2):
        require_right(watched, affine, arguments())
    assert watched.num_guarded == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_right(watched, affine, arguments(x=torch.randn(3, 4).t()))
        assert watched.num_guarded == 2
        for rows in (5, 6, 6, 7, 6):  # which are symbols to the code then
            require_right(watched, affine, arguments(x=torch.randn(rows, 3)))
    assert watched.num_guarded == 6
    assert not watched.has_failed
    assert sorted(block.nbytes // 12 for block in block_cache._cache.blocks) == [4, 5, 6, 7]
    clear_block_cache()


@pytest.mark.parametrize(
    ("dtype", "num_apart"), [(torch.float32, 1), (torch.float64, 1), (torch.bfloat16, 0)]
)
def test_biases_are_added_apart(dtype: torch.dtype, num_apart: int) -> None:
    x, w, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        split_bias_additions(graph)
        graphs.append(graph)
        return graph.forward

    def product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.linear(x, w, bias), w.t()).relu()

    args = [each.to(dtype) for each in (x, w, bias)]
    torch.testing.assert_close(torch.compile(product, backend=note)(*args), product(*args))
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(operator.add) == num_apart
