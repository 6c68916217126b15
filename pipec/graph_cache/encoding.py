"""Values of a graph as JSON, and back: numbers, formulas, tensors that have no memory, operators, roles.

What JSON has is itself. Anything else is a dict of one entry, whose key says what it is.
"""

import base64
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch import Tensor, fx

from pipec.graph import nodes as roles
from pipec.graph.training_graph import Operator
from pipec.graph_cache.marks import UnfaithfulError, tensor_bytes
from pipec.ir import Phase, Variable
from pipec.ir.axis import BatchAxis
from pipec.torch_compat import Fakes, OpOverload, formula_class, hint_of, is_plain_fake

DATA: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        roles.Parameter,
        roles.Buffer,
        roles.ModelInput,
        roles.LossGradient,
        roles.Share,
        roles.OfBatch,
        roles.Output,
        roles.UpdatedBuffer,
        roles.Gradient,
        Operator,
        Variable,
        BatchAxis,
    )
}
"""Frozen data that stands in graphs, by the name of its class."""

NAMESPACES = ("aten", "prims", "pipec")
"""Whose operators a kept graph may call. Code of others may have decided what was traced."""

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class Encoder:
    """``symbols`` collects the symbols that were met, and ``hints`` the numbers that stood for them."""

    def __init__(self) -> None:
        self.symbols: set[sympy.Symbol] = set()
        self.hints: dict[sympy.Symbol, int] = {}

    def value(self, value: Any) -> Any:
        """Raises UnfaithfulError for what has no form here."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        for name, known, encode in self._forms():
            if isinstance(value, known):
                return {name: encode(value)}
        if DATA.get(kind.__name__) is kind:
            fields = {
                field.name: self.value(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
            return {"data": [kind.__name__, fields]}
        raise UnfaithfulError(f"a {kind.__module__}.{kind.__qualname__} in the graph")

    def _forms(self) -> tuple[tuple[str, Any, Callable[[Any], Any]], ...]:
        return (
            ("node", fx.Node, lambda node: node.name),
            ("tuple", tuple, lambda items: [self.value(item) for item in items]),
            ("dict", dict, lambda items: [[self.value(key), self.value(x)] for key, x in items.items()]),
            ("slice", slice, lambda x: [self.value(each) for each in (x.start, x.stop, x.step)]),
            ("complex", complex, lambda x: [repr(x.real), repr(x.imag)]),
            ("phase", Phase, lambda phase: phase.value),
            ("torch", _CONSTANTS, lambda constant: str(constant).removeprefix("torch.")),
            ("device", torch.device, str),
            ("formula", sympy.Basic, self.formula),
            ("operator", OpOverload, _operator_name),
            ("size", torch.SymInt, lambda size: self._size(size)),
            ("fake", Tensor, self._fake),
            ("getitem", type(operator.getitem), _getitem),
        )

    def formula(self, formula: sympy.Basic) -> Any:
        if isinstance(formula, sympy.Integer):
            return int(formula)
        if isinstance(formula, sympy.Rational):
            return {"Rational": [int(formula.p), int(formula.q)]}
        if isinstance(formula, BooleanAtom):
            return bool(formula)
        if isinstance(formula, sympy.Symbol):
            if formula != symbol(formula.name):
                raise UnfaithfulError(f"the symbol {formula}, which is no size of an argument")
            self.symbols.add(formula)
            return formula.name
        name = type(formula).__name__
        if not formula.args or formula_class(name) is not type(formula):
            raise UnfaithfulError(f"the formula {formula}")
        return {name: [self.formula(part) for part in formula.args]}

    def _size(self, size: torch.SymInt) -> Any:
        formula = size.node.expr
        if isinstance(formula, sympy.Symbol):
            self.hints[formula] = hint_of(size)
        return self.formula(formula)

    def _fake(self, value: Tensor) -> Any:
        if not is_plain_fake(value):
            raise UnfaithfulError(f"a tensor of an unusual kind in the graph: {type(value).__name__}")
        sizes = [[self.value(size) for size in each] for each in (value.shape, value.stride())]
        return [*sizes, self.value(value.dtype), str(value.device)]


class Decoder:
    """Reads what an ``Encoder`` wrote. Equal tensors become one.

    Raises:
        LookupError, TypeError, ValueError: nothing wrote this so.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._fakes = Fakes({symbol(name): size for name, size in sizes.items()})
        self._known: dict[str, Tensor] = {}
        self.nodes: dict[str, fx.Node] = {}

    def value(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self.value(item) for item in written]
        if not isinstance(written, dict):
            return written
        ((kind, what),) = written.items()
        return self._forms[kind](self, what)

    def formula(self, written: Any) -> Any:
        if isinstance(written, bool):
            return sympy.true if written else sympy.false
        if isinstance(written, int):
            return sympy.Integer(written)
        if isinstance(written, str):
            return symbol(written)
        ((name, parts),) = written.items()
        kind = formula_class(name)
        if kind is None:
            raise LookupError(name)
        return kind(*map(self.formula, parts))

    def _fake(self, what: Any) -> Tensor:
        text = repr(what)
        if text not in self._known:
            shape, strides, dtype, device = map(self.value, what)
            self._known[text] = self._fakes.tensor(
                [*map(_formula_of, shape)], [*map(_formula_of, strides)], dtype, torch.device(device)
            )
        return self._known[text]

    def _data(self, what: Any) -> Any:
        name, fields = what
        return DATA[name](**{field: self.value(value) for field, value in fields.items()})

    _forms: Mapping[str, Callable[["Decoder", Any], Any]] = {
        "float": lambda self, what: float(what),
        "node": lambda self, what: self.nodes[what],
        "tuple": lambda self, what: tuple(self.value(what)),
        "dict": lambda self, what: {self.value(key): self.value(value) for key, value in what},
        "slice": lambda self, what: slice(*self.value(what)),
        "complex": lambda self, what: complex(*map(float, what)),
        "phase": lambda self, what: Phase(what),
        "torch": lambda self, what: _torch_constant(what),
        "device": lambda self, what: torch.device(what),
        "formula": lambda self, what: self.formula(what),
        "operator": lambda self, what: _operator(what),
        "size": lambda self, what: self._fakes.size(self.formula(what)),
        "fake": _fake,
        "getitem": lambda self, what: operator.getitem,
        "data": _data,
    }


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a size, as torch makes it."""
    return sympy.Symbol(name, positive=True, integer=True)


def tensor_text(tensor: Tensor) -> Any:
    """A real tensor, with its values."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or not is_plain_fake(tensor):
        raise UnfaithfulError(f"a constant that is a {type(tensor).__name__}")
    data = base64.b64encode(tensor_bytes(tensor)).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.device), data]


def read_tensor(written: Any) -> Tensor:
    dtype, shape, device, data = written
    kind, raw = _torch_constant(dtype), bytearray(base64.b64decode(data, validate=True))
    flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
    return flat.reshape(shape).to(device)


def _formula_of(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _operator_name(target: OpOverload) -> str:
    if target.namespace not in NAMESPACES:
        raise UnfaithfulError(f"the operator {target}, which is not torch's")
    return str(target)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise LookupError(name)
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _getitem(function: Any) -> None:
    if function is not operator.getitem:
        raise UnfaithfulError(f"a call of {function} in the graph")


def _torch_constant(name: str) -> Any:
    constant = getattr(torch, name)
    if not isinstance(constant, _CONSTANTS):
        raise LookupError(name)
    return constant
