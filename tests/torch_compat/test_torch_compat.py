"""Every private name of torch that ``torch_compat`` uses is there, and does what is relied upon."""

import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod

from pipec.torch_compat.compared_values import ABSENT, evaluate
from pipec.torch_compat.dynamo_front_end import capture_with_dynamo
from pipec.torch_compat.module_state import dry_run, quiet_logging, replace_with_fake_tensors, restore_module
from pipec.torch_compat.operator_patches import (
    cached_size_arithmetic,
)
from pipec.torch_compat.symbolic_numbers import python_expression


class Reads(nn.Module):
    """It has a plain attribute, one of the class, and an item."""

    kind = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.options = 1.0, {"power": 1}


def test_an_expression_of_dynamos_is_evaluated_in_every_process() -> None:
    """Whatever the name of a module is, it is a string in an expression."""
    module = nn.ModuleDict({"model": Reads()})
    odd = "__import__('os')|1"
    module["model"].add_module(odd, nn.Dropout(0.25))
    for source, value in {
        "L['self'].model.scale": 1.0,
        f"L['self']._modules['model']._modules[{odd!r}].p": 0.25,
        "dict(type(L['self'].model).__mro__[0].__dict__)['kind']": 3,
        "list(dict.keys(L['self'].model.options))[0]": "power",
        "G['__import_os_dot_path'].sep": "/",
        "G['os'].sep": ABSENT,
        "L['x']": ABSENT,
        "no expression": ABSENT,
    }.items():
        assert evaluate(source, module) == value


def test_capture_leaves_dynamos_cache_to_the_user() -> None:
    """What the user compiled is neither forgotten nor used, so nothing needs a reset between captures."""
    compilations: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    for _ in range(2 * torch._dynamo.config.recompile_limit):
        other = torch.zeros(4, 4)
        capture_with_dynamo(model, (other,), [(other, 0)])
    compiled(x)
    assert len(compilations) == 1


B = sympy.Symbol("b", integer=True, positive=True)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (128 * B, lambda b: 128 * b),
        (B**2 + 1, lambda b: b**2 + 1),
        (5 * FloorDiv(B + 1, 2), lambda b: (b + 1) // 2 * 5),
        (Mod(B, 5), lambda b: b % 5),
        (sympy.Min(B, 6), lambda b: min(b, 6)),
        (sympy.Max(2, B), lambda b: max(2, b)),
    ],
    ids=lambda value: str(value) if isinstance(value, sympy.Basic) else "",
)
def test_an_expression_of_sizes_prints_as_python(
    expression: sympy.Expr, expected: Callable[[int], int]
) -> None:
    code = compile(python_expression(expression), "expression", "eval")
    for size in (1, 4, 7, 12):
        assert eval(code, {"b": size}) == expected(size)


class Warned(nn.Linear):
    """A compiled function and a warning, of which neither stops a capture."""

    compiled = staticmethod(torch.compile(torch.sin))

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("a layer is deprecated", DeprecationWarning, stacklevel=2)
        return self.compiled(super().forward(x)).sum()


def test_dynamo_passes_over_warnings_and_a_dry_run_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sin" in capture_with_dynamo(Warned(4, 2), (torch.zeros(3, 4),), ()).module.code
    compiled = list[fx.GraphModule]()
    made = torch.compile(torch.sin, backend=compiled.append)
    monkeypatch.setattr(Warned, "compiled", staticmethod(made))
    assert dry_run(Warned(4, 2), (torch.zeros(3, 4),)).error is None
    assert not compiled


def test_quiet_spares_loggers_that_the_user_turned_up() -> None:
    dynamo, other = logging.getLogger("torch._dynamo"), logging.getLogger("torch.fx")
    before = dynamo.level, other.level
    dynamo.setLevel(logging.DEBUG)
    try:
        with quiet_logging():
            assert dynamo.isEnabledFor(logging.WARNING)
            assert not other.isEnabledFor(logging.CRITICAL)
        assert (dynamo.level, other.level) == (logging.DEBUG, before[1])
    finally:
        dynamo.setLevel(before[0])


class Caching(nn.Module):
    """Keeps what it computes in every way there is, and notes that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.kept: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.called, self.last, self.holder = True, x, types.SimpleNamespace(x=x)
        self.kept.append(x)
        self.by_name["x"] = x
        return self.layer(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dry_run_keeps_what_holds_no_tensors(device: str) -> None:
    module = Caching().to(device)
    parameters = dict(module.named_parameters())
    with restore_module(module):
        replace_with_fake_tensors(module, torch.device("cpu"))
        found = dry_run(module, (torch.zeros(3, 4),))
        assert (found.error, found.failed, found.changed) == (None, False, True)
        assert module.called
        assert not hasattr(module, "last")
        assert not hasattr(module, "holder")
        assert (module.kept, module.by_name) == ([], {})
        assert not dry_run(module, (torch.zeros(3, 4),)).changed
    assert not hasattr(module, "called")
    assert dict(module.named_parameters()) == parameters
    assert device == "meta" or module.count == 0


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * int(x.sum())


class Numpy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy()))


@pytest.mark.parametrize(
    ("kind", "width", "failed"), [(Counted, 4, False), (Counted, 5, True), (Numpy, 4, False)]
)
def test_a_dry_run_tells_a_model_that_fails_from_one_that_needs_values_or_memory(
    kind: type[nn.Linear], width: int, failed: bool
) -> None:
    found = dry_run(kind(4, 4), (torch.zeros(3, width),))
    assert found.error is not None
    assert (found.failed, found.changed) == (failed, False)


def test_arithmetic_of_equal_sizes_makes_one_result() -> None:
    before, env = dict(vars(SymNode)), ShapeEnv(duck_shape=False)
    fake: Any = FakeTensorMode(shape_env=env).from_tensor(torch.empty(6, 7, 6), source=ConstantSource("x"))
    first, second, last = fake.shape
    with cached_size_arithmetic():
        assert (first * second).node is (first * second).node
        assert str(first * second + 1) == str(second * first + 1)
        assert str(first + 1) != str(last + 1), "sizes that are equal in this call alone"
        assert str(first + 1) != str(first + 2)
        assert isinstance(first // 2 < second, torch.SymBool)
        assert isinstance(first / 1, torch.SymFloat), "not the size that 1 makes of it as a whole number"
        size = env.create_unbacked_symint()
        assert (size * 2).node is not (size * 2).node, "a size that values tell is left out"
        assert first == last  # a guard, which makes one symbol of both
        assert str(first + 1) == str(last + 1)
        assert first == 6
        assert (last + 1).node.maybe_as_int() == 7
    assert dict(vars(SymNode)) == before
