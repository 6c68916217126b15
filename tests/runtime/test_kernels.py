"""Stages whose functions torch compiles, against the same ones as their source."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, decomposition

import pipec
from pipec.runtime.memory import block_cache
from pipec.runtime.memory.block_cache import clear_block_cache
from pipec.runtime.stages import kernels
from zoo.layers import Apply

pytestmark = pytest.mark.slow

ROWS = [12, 12, 7]


def make_model() -> nn.Module:
    """It draws by ``native_dropout`` and by another operator."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)]
    return nn.Sequential(*layers, nn.Dropout(0.1), Apply(lambda x: x * torch.bernoulli(x.sigmoid())))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(kernels: str, rows: list[int], devices: int = 2) -> tuple[list[Tensor], nn.Module]:
    """The losses of steps of so many rows each; gradients add up over all of them."""
    model = make_model()
    pipe = pipec.compile(model, devices=devices, loss_fn=mean_square, microbatches=3, kernels=kernels)
    torch.manual_seed(1)
    batches = [(torch.randn(count, 8), torch.randn(count, 1)) for count in rows]
    return [pipe.step(x, target=target) for x, target in batches], model


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let another backend compile what is traced. Operators then keep the source's bits."""
    monkeypatch.setattr(compile_fx, "compile_fx_inner", backend)
    monkeypatch.setattr(decomposition, "select_decomp_table", dict)
    monkeypatch.setattr(kernels, "split_bias_addition", lambda *args, **named: NotImplemented)


def run_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return as_code(lambda given: graph(*given))


def as_code(call: Callable[[list[Any]], Any]) -> Any:
    """What inductor returns for code that it has generated."""

    class Code:
        current_callable = staticmethod(call)
        __call__ = staticmethod(call)

    return Code()


def refuse(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise RuntimeError("there is no C++ compiler\nand more lines")


@pytest.fixture(scope="module")
def expected() -> tuple[list[Tensor], nn.Module]:
    return train("source", ROWS)


def test_compiled_functions_have_the_bits_of_their_source_where_their_kernels_have(
    monkeypatch: pytest.MonkeyPatch,
    expected: tuple[list[Tensor], nn.Module],
    recwarn: pytest.WarningsRecorder,
) -> None:
    use_backend(monkeypatch, run_graph)
    losses, compiled = train("inductor", ROWS)
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    for own, other in zip(compiled.parameters(), expected[1].parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    for own, other in zip(compiled.buffers(), expected[1].buffers(), strict=True):
        assert torch.equal(own, other)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


def test_what_cannot_be_compiled_runs_as_its_source_and_says_why(
    monkeypatch: pytest.MonkeyPatch, expected: tuple[list[Tensor], nn.Module]
) -> None:
    use_backend(monkeypatch, refuse)
    with pytest.warns(UserWarning, match="inductor cannot compile") as warned:
        losses, _ = train("inductor", ROWS)
    assert torch.equal(torch.stack(losses), torch.stack(expected[0]))
    told = [text for text in (str(each.message) for each in warned) if "inductor cannot" in text]
    named = Counter(text.split(",")[0].split("cannot compile ")[1] for text in told)
    assert named.keys() == {
        f"{phase} of stage_{stage}" for phase in ("forward", "backward") for stage in (0, 1)
    }
    assert {*named.values()} == {2}  # once in the steps of equal microbatches, and once in the others
    assert all("there is no C++ compiler" in text and "\n" not in text for text in told)


def test_inductor(recwarn: pytest.WarningsRecorder) -> None:
    own, other = ([*train(kernels, [6], devices=1)] for kernels in ("inductor", "source"))
    torch.testing.assert_close(own[0], other[0])
    torch.testing.assert_close(own[1][0].weight.grad, other[1][0].weight.grad)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


def backward(frame: dict[str, Any]) -> Any:
    b = frame["b"]
    (first,) = frame["w"]
    kept, number = frame.pop("saved")
    return {"grad_x": kept * first * b}, (None, kept * number)


def a_frame(**others: Any) -> dict[str, Any]:
    given = {"b": 4, "w": [torch.linspace(0, 1, 3)], "saved": [torch.ones(4, 3), 2], "other": 5}
    return given | others


def assert_runs(compiled: kernels.CompiledFunction, **given: Any) -> None:
    """A call has the results of the source, and takes out of its frame what the source takes."""
    frame, expected = a_frame(**given), backward(a_frame(**given))
    torch.testing.assert_close(compiled(frame), expected, rtol=0, atol=0)
    assert frame.keys() == {"b", "w", "other"}


def sizes(*pairs: tuple[int, Any]) -> list[dict[str, Any]]:
    """Calls with so many rows, and this number."""
    return [{"b": rows, "saved": [torch.ones(rows, 3), number]} for rows, number in pairs]


CALLS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "types and orders of memory": (
        [
            {},
            {"saved": [torch.ones(4, 3), 2.5]},
            {"saved": [torch.ones(4, 3, dtype=torch.float64), 2]},
            {"saved": [torch.ones(3, 4).t(), 2]},
        ]
        * 2,
        4,
    ),
    "sizes": (sizes((4, 2), (5, 2), (9, 2), (5, 2), (2, 2), (70, 2)), 2),
    "one row, which is broadcast": (sizes((4, 2), (5, 2), (9, 2), (1, 2)), 3),
    "numbers": (sizes((4, 2), (5, 2), (6, 3), (7, 4), (8, 9)), 3),
    "sizes that were equal at first": (sizes((4, 4), (5, 5), (6, 6), (7, 8), (9, 9), (3, 2)), 3),
    "rows anywhere in a batch": (
        [{"b": rows, "saved": [torch.rand(20, 3)[rows : 2 * rows], 2]} for rows in (4, 5, 6, 7)],
        2,
    ),
    "always another number": ([{"saved": [torch.ones(4, 3), number / 2]} for number in range(2, 9)], 5),
    "sizes without symbols": (sizes((4, 2), (5, 2), (6, 2), (5, 2)), 3),
    "sizes by inductor": (sizes((4, 2), (5, 2), (17, 2), (3, 2)), 2),
}
"""Calls that differ in these, and how often the function is compiled for them."""


def refuse_symbols(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    if any(isinstance(each, torch.SymInt) for each in inputs):
        raise NotImplementedError("symbols")
    return run_graph(graph, inputs)


BACKENDS = {"sizes without symbols": refuse_symbols, "sizes by inductor": None}


@torch.no_grad()
@pytest.mark.parametrize("kind", CALLS)
def test_what_differs_between_calls_is_compiled_again_or_is_a_symbol(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What needs code of its own too often runs as source."""
    monkeypatch.setattr(kernels, "MAX_COMPILED", 5)
    if backend := BACKENDS.get(kind, run_graph):
        use_backend(monkeypatch, backend)
    compiled = kernels.CompiledFunction(backward, "backward")
    calls, expected = CALLS[kind]
    for given in calls:
        assert_runs(compiled, **given)
    assert compiled._num_compiled == expected


@torch.no_grad()
def test_nothing_but_compiled_code_holds_saved_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees each when its last reader has run."""
    alive: list[bool] = []

    def frees(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def code(given: list[Tensor]) -> Any:
            saved, returned = [weakref.ref(x) for x in given if len(x) == 4], graph(*given)
            given.clear()
            alive.extend(each() is not None for each in saved)
            return returned

        return as_code(code)

    use_backend(monkeypatch, frees)
    compiled = kernels.CompiledFunction(backward, "backward")
    for _ in range(2):
        compiled(a_frame())
    assert alive == [False, False]


@torch.no_grad()
def test_too_little_memory_is_no_reason_to_run_as_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there the next time. The frame is as before if compiling failed."""
    causes = iter([True, False])

    def short(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if next(causes):
            raise RuntimeError("a backend failed") from torch.OutOfMemoryError("no memory")
        return run_graph(graph, inputs)

    use_backend(monkeypatch, short)
    compiled, frame = kernels.CompiledFunction(backward, "backward"), a_frame()
    with pytest.raises(RuntimeError, match="a backend failed"):
        compiled(frame)
    torch.testing.assert_close(compiled(frame), backward(a_frame()))
    assert list(compiled._found.values()) != [None]


@torch.no_grad()
def test_large_values_of_compiled_code_reuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every value taken for large."""
    monkeypatch.setattr(kernels, "MMAP_THRESHOLD_BYTES", 1)
    clear_block_cache()
    compiled = kernels.CompiledFunction(backward, "backward")
    for _ in range(2):
        torch.testing.assert_close(compiled(a_frame()), backward(a_frame()))
    assert len(block_cache._cache.blocks) == 2
    clear_block_cache()
