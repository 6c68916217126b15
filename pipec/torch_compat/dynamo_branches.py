"""Branches on the values of tensors: Dynamo follows one way if it is told which."""

import contextlib
import dis
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")
"""How the instructions begin that ask for the truth value of what is on top of the stack."""

Handler = Callable[[Any, Any], None]
"""What Dynamo does for an instruction, the second argument. The first is what goes through the bytecode."""

CHECKING = "_is_all_true"
"""The method that nothing but ``torch._check_tensor_all`` calls."""

COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}


@dataclass(frozen=True)
class Decision:
    """The truth value of a condition. One that ``is_certain`` can have no other."""

    outcome: bool
    is_certain: bool = False


Decide = Callable[[fx.Node, Callable[[str], Any]], Decision | None]
"""Decides a condition, a node in a graph that is being made; None if that cannot be done.

The second argument finds what the graph holds under a name.
"""


@contextlib.contextmanager
def decide_branches(
    decide: Decide, check_branch: Callable[..., Any], require: Callable[..., Any]
) -> Iterator[None]:
    """Let Dynamo take the branches that ``decide`` tells, and write calls of ``check_branch`` into the graph.

    A call has the condition, its truth value and an empty text. What ``.item()`` takes out of a tensor counts
    as a condition if it is a truth value, and else where a branch compares it with a number: that becomes a
    comparison of tensors. What ``torch._check_tensor_all`` asks, and an assertion that compares such numbers,
    becomes a call of ``require``, with the condition and an empty text. Other assertions stay what Dynamo
    makes of them.
    """
    item = TensorVariable.method_item

    def decided(tx: Any, asked: fx.Node, condition: fx.Proxy) -> Any:
        example = condition.node.meta.get("example_value")
        if example is None or example.numel() != 1:
            return None
        found = decide(asked, tx.output.nn_modules.__getitem__)
        if found is None:
            return None
        if not found.is_certain:
            tx.output.create_proxy("call_function", check_branch, (condition, found.outcome, ""), {})
        return ConstantVariable.create(found.outcome)

    def expected(tx: Any, condition: fx.Proxy) -> Any:
        tx.output.create_proxy("call_function", require, (condition, ""), {})
        return ConstantVariable.create(True)

    def answered(tx: Any, asked: Any, is_assertion: bool) -> Any:
        if tx.output.current_tracer.parent is not None:
            return None
        if isinstance(asked, TensorVariable) and not is_assertion:
            return decided(tx, asked.as_proxy().node, asked.as_proxy())
        if not isinstance(asked, SymNodeVariable):
            return None
        condition = _of_tensors(tx, asked.as_proxy().node)
        if condition is None:
            return None
        return expected(tx, condition) if is_assertion else decided(tx, asked.as_proxy().node, condition)

    def decided_handler(handler: Handler) -> Handler:
        def handle(tx: Any, instruction: Any) -> None:
            is_assertion = tx.next_instruction.opname == "LOAD_ASSERTION_ERROR"
            if (found := answered(tx, tx.stack[-1].realize(), is_assertion)) is not None:
                tx.stack[-1] = found
            handler(tx, instruction)

        return handle

    def decided_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_check = self.as_proxy().node.target == CHECKING and tx.output.current_tracer.parent is None
        found = expected(tx, self.as_proxy()) if is_check else None
        if found is None and self.dtype is torch.bool:
            found = answered(tx, self, is_assertion=False)
        return item(self, tx, *args, **kwargs) if found is None else found

    tables = [(each, each.dispatch_table) for each in _translators(InstructionTranslatorBase)]
    asking = {code for name, code in dis.opmap.items() if name.startswith(ASKING) and "NONE" not in name}
    TensorVariable.method_item = decided_item  # type: ignore[method-assign]
    try:
        for translator, table in tables:
            translator.dispatch_table = [
                decided_handler(handler) if code in asking else handler for code, handler in enumerate(table)
            ]
        yield
    finally:
        for translator, table in tables:
            translator.dispatch_table = table
        TensorVariable.method_item = item  # type: ignore[method-assign]


def _translators(translator: Any) -> Iterator[Any]:
    """A class that goes through bytecode, and its subclasses: each has a table of handlers, by opcode."""
    yield translator
    for each in translator.__subclasses__():
        yield from _translators(each)


def _of_tensors(tx: Any, asked: fx.Node) -> fx.Proxy | None:
    """A comparison of tensors in place of one of numbers, of which ``.item()`` took some out of tensors.

    A number alone is compared with zero. None if it is another question, or one between whole numbers and
    fractions, which tensors round first.
    """
    is_comparison = asked.target in COMPARISONS
    compare, compared = (asked.target, asked.args) if is_comparison else (operator.ne, (asked, 0))
    taken = [_taken_out(side) for side in compared]
    others = [side for side, item in zip(compared, taken, strict=True) if item is None]
    tensors = [item.all_input_nodes[0].meta["example_value"] for item in taken if item is not None]
    kinds = {tensor.is_floating_point() for tensor in tensors}
    if len(kinds) != 1 or any(tensor.is_complex() for tensor in tensors):
        return None
    number = int | float | torch.SymInt if kinds == {True} else int | torch.SymInt
    values = [side.meta.get("example_value") if isinstance(side, fx.Node) else side for side in others]
    if not all(isinstance(value, number) and not free_unbacked_symbols(value) for value in values):
        return None
    sides = [side if item is None else _kept(tx, item) for side, item in zip(compared, taken, strict=True)]
    return _call(tx, "call_function", compare, *sides)


def _taken_out(side: Any) -> fx.Node | None:
    """The call of ``item`` that a side of a comparison is, or None.

    Dynamo also has one for each number that it was given. Of that it knows a value, and guards it.
    """
    if isinstance(side, fx.Node) and side.target in (torch.sym_int, torch.sym_float):
        (inside,) = side.args
        is_real = isinstance(side.meta.get("example_value"), torch.SymFloat)
        same = isinstance(inside, fx.Node) and isinstance(inside.meta.get("example_value"), torch.SymFloat)
        side = inside if same is is_real else None
    is_item = isinstance(side, fx.Node) and (side.op, side.target) == ("call_method", "item")
    return side if is_item and free_unbacked_symbols(side.meta["example_value"]) else None


def _kept(tx: Any, item: fx.Node) -> fx.Proxy:
    """What the tensor was when ``item`` was called, in 64 bits, as which Python has its number."""
    (tensor,) = item.all_input_nodes
    wide = "double" if tensor.meta["example_value"].is_floating_point() else "long"
    with tx.output.graph.inserting_after(item):
        copy = _call(tx, "call_method", "clone", tensor)
    with tx.output.graph.inserting_after(copy.node):
        return _call(tx, "call_method", wide, copy.node)


def _call(tx: Any, kind: str, target: Any, *args: Any) -> fx.Proxy:
    """A call that is added to the graph, with the fake value that it has."""
    tracer = tx.output.current_tracer
    proxies = [tracer.proxy(each) if isinstance(each, fx.Node) else each for each in args]
    proxy = tx.output.create_proxy(kind, target, tuple(proxies), {})
    made: fx.Proxy = wrap_fx_proxy(tx, proxy).as_proxy()
    return made


def placeholder_example(placeholder: fx.Node) -> Any:
    """What Dynamo was given for an argument of a graph that is being made; None for a size."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory with values, all of them."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def shape_symbols(example: torch.Tensor, value: torch.Tensor) -> dict[sympy.Symbol, int]:
    """The symbols in the shape of a fake tensor, with the sizes that ``value`` has there."""
    shape = tuple[Any, ...](example.shape)
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
    pairs = zip(sizes, value.shape, strict=True)
    return {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}


def evaluate_symbolic(value: Any, sizes: Mapping[sympy.Symbol, int]) -> int | float | bool | None:
    """A symbolic number worked out; None if it is none, or depends on others than these ``sizes``."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    found = sympy.sympify(value.node.expr.xreplace(dict(sizes)))
    if found in (sympy.true, sympy.false):
        return bool(found)
    kind = int if isinstance(value, torch.SymInt) else float
    return kind(found) if found.is_number else None


class WriteProtection(TorchDispatchMode):
    """Lets operators fail that would write to memory at one of these ``addresses``."""

    def __init__(self, addresses: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses = addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    if tensor.untyped_storage().data_ptr() in self._addresses:
                        raise RuntimeError(f"{func} would change a parameter")
        return func(*args, **(kwargs or {}))
