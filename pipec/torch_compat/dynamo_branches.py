"""Branches on the values of tensors: decides for Dynamo which way to trace."""

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
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from pipec.torch_compat import pytree
from pipec.torch_compat.foreign_classes import is_fake
from pipec.torch_compat.lost_effects import MEMORY, refuse_lost_attribute
from pipec.torch_compat.run_time import TorchDispatchMode, schema
from pipec.torch_compat.symbolic_numbers import formula

TRUTH_OPCODES = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")
"""Prefixes of the instructions that read the truth value of the top of the stack."""

Handler = Callable[[Any, Any], None]
"""Dynamo's function for an instruction. The arguments are the instruction translator and the instruction."""

CHECK_METHOD = "_is_all_true"
"""The method that only ``torch._check_tensor_all`` calls."""

COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}


@dataclass(frozen=True)
class Decision:
    """The truth value of a condition. If it ``is_certain``, no call can have the other one."""

    outcome: bool
    is_certain: bool = False


Decide = Callable[[fx.Node, Callable[[str], Any]], Decision | None]
"""Decides a condition, a node of the graph that is being traced; None if that is impossible.

The second argument returns the graph's tensor or module of a name.
"""


@contextlib.contextmanager
def decide_branches(
    decide: Decide, check_branch: Callable[..., Any], require: Callable[..., Any]
) -> Iterator[None]:
    """Let Dynamo take the branches that ``decide`` chooses, and add calls of ``check_branch`` to the graph.

    The arguments of a call are the condition, its truth value and an empty text. The result of ``.item()`` is
    a condition if it is a boolean; if it is a number, comparing it in a branch is, and becomes a comparison
    of tensors. The condition of ``torch._check_tensor_all``, or of an assertion that compares such numbers,
    becomes a call of ``require``, with the condition and an empty text. Dynamo handles other assertions.

    Also let it skip statements that set ``requires_grad`` of what the graph computes, and refuse hooks on
    leaves.
    """
    call_method = TensorVariable.call_method

    def decided(tx: Any, node: fx.Node, condition: fx.Proxy) -> Any:
        example = condition.node.meta.get("example_value")
        if example is None or example.numel() != 1:
            return None
        decision = decide(node, tx.output.nn_modules.__getitem__)
        if decision is None:
            return None
        if not decision.is_certain:
            tx.output.create_proxy("call_function", check_branch, (condition, decision.outcome, ""), {})
        return TensorVariable.build(tx, decision.outcome)

    def required(tx: Any, condition: fx.Proxy) -> Any:
        tx.output.create_proxy("call_function", require, (condition, ""), {})
        return TensorVariable.build(tx, True)

    def truth_value(tx: Any, variable: Any, is_assertion: bool) -> Any:
        if tx.output.current_tracer.parent is not None:
            return None
        proxy: Any = getattr(variable, "proxy", None)
        example = proxy.node.meta.get("example_value") if isinstance(proxy, fx.Proxy) else None
        if isinstance(example, torch.Tensor):
            return None if is_assertion else decided(tx, proxy.node, proxy)
        if not isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        condition = _tensor_condition(tx, proxy.node)
        if condition is None:
            return None
        return required(tx, condition) if is_assertion else decided(tx, proxy.node, condition)

    def deciding(handler: Handler) -> Handler:
        def handle(tx: Any, instruction: Any) -> None:
            is_assertion = tx.next_instruction.opname == "LOAD_ASSERTION_ERROR"
            if (value := truth_value(tx, tx.stack[-1].realize(), is_assertion)) is not None:
                tx.stack[-1] = value
            handler(tx, instruction)

        return handle

    def setting_flag(handler: Handler) -> Handler:
        def handle(tx: Any, instruction: Any) -> None:
            if instruction.argval == "requires_grad" and _sets_flag_of_result(*tx.stack[-2:]):
                result = tx.stack[-1].realize()
                result.proxy.node.meta["example_value"].requires_grad_()
                result.requires_grad = True
                del tx.stack[-2:]
            else:
                handler(tx, instruction)

        return handle

    def reading(handler: Handler) -> Handler:
        def handle(tx: Any, instruction: Any) -> None:
            if MEMORY.fullmatch(instruction.argval) and isinstance(tx.stack[-1].realize(), TensorVariable):
                refuse_lost_attribute(instruction.argval, False, tx.f_code.co_filename, tx.lineno)
            handler(tx, instruction)

        return handle

    def watched_call(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        is_leaf = getattr(self, "source", None) is not None
        refuse_lost_attribute(name, is_leaf, tx.f_code.co_filename, tx.lineno)
        value = None
        if name == "item":
            is_check = self.as_proxy().node.target == CHECK_METHOD and tx.output.current_tracer.parent is None
            value = required(tx, self.as_proxy()) if is_check else None
            if value is None and self.dtype is torch.bool:
                value = truth_value(tx, self, is_assertion=False)
        return call_method(self, tx, name, *args, **kwargs) if value is None else value

    tables = [(each, each.dispatch_table) for each in _translators(InstructionTranslatorBase)]
    wrappers = {
        code: deciding
        for name, code in dis.opmap.items()
        if name.startswith(TRUTH_OPCODES) and "NONE" not in name
    }
    wrappers |= {dis.opmap["LOAD_ATTR"]: reading, dis.opmap["STORE_ATTR"]: setting_flag}
    TensorVariable.call_method = watched_call  # type: ignore[method-assign]
    try:
        for translator, table in tables:
            translator.dispatch_table = [
                wrappers[code](handler) if code in wrappers else handler for code, handler in enumerate(table)
            ]
        yield
    finally:
        for translator, table in tables:
            translator.dispatch_table = table
        TensorVariable.call_method = call_method  # type: ignore[method-assign]


def _sets_flag_of_result(value: Any, changed: Any) -> bool:
    """Whether a statement sets ``requires_grad`` of a tensor that the graph computes.

    Nothing reads its gradient later, so that this changes no gradient of a parameter. Reentrant checkpoints
    need it.
    """
    value, changed = value.realize(), changed.realize()
    proxy: Any = getattr(changed, "proxy", None)
    if not isinstance(proxy, fx.Proxy) or proxy.node.op == "placeholder":
        return False
    is_tensor = isinstance(proxy.node.meta.get("example_value"), torch.Tensor)
    return is_tensor and value.is_python_constant() and value.as_python_constant() is True


def _translators(translator: Any) -> Iterator[Any]:
    """A class of instruction translators and its subclasses. Each has a table of handlers, by opcode."""
    yield translator
    for each in translator.__subclasses__():
        yield from _translators(each)


def _tensor_condition(tx: Any, node: fx.Node) -> fx.Proxy | None:
    """A comparison of tensors in place of a comparison of numbers, of which some come from ``.item()``.

    A number alone is compared with zero. None if the node is no such condition, or if it compares integers
    with floating-point numbers, which tensors would round first.
    """
    is_comparison = node.target in COMPARISONS
    compare, sides = (node.target, node.args) if is_comparison else (operator.ne, (node, 0))
    items = [_item_call(side) for side in sides]
    others = [side for side, item in zip(sides, items, strict=True) if item is None]
    tensors = [item.all_input_nodes[0].meta["example_value"] for item in items if item is not None]
    are_floating = {tensor.is_floating_point() for tensor in tensors}
    if len(are_floating) != 1 or any(tensor.is_complex() for tensor in tensors):
        return None
    number = int | float | torch.SymInt if are_floating == {True} else int | torch.SymInt
    values = [side.meta.get("example_value") if isinstance(side, fx.Node) else side for side in others]
    if not all(isinstance(value, number) and not free_unbacked_symbols(value) for value in values):
        return None
    operands = [side if item is None else _copy(tx, item) for side, item in zip(sides, items, strict=True)]
    return _call(tx, "call_function", compare, *operands)


def _item_call(side: Any) -> fx.Node | None:
    """The call of ``item`` that makes a side of a comparison, or None.

    Dynamo also has such a call for each number among the arguments. Their values are known and guarded.
    """
    if isinstance(side, fx.Node) and side.target in (torch.sym_int, torch.sym_float):
        (inside,) = side.args
        is_real = isinstance(side.meta.get("example_value"), torch.SymFloat)
        same = isinstance(inside, fx.Node) and isinstance(inside.meta.get("example_value"), torch.SymFloat)
        side = inside if same is is_real else None
    is_item = isinstance(side, fx.Node) and (side.op, side.target) == ("call_method", "item")
    return side if is_item and free_unbacked_symbols(side.meta["example_value"]) else None


def _copy(tx: Any, item: fx.Node) -> fx.Node:
    """A copy of the tensor at the call of ``item``, in 64 bits like the Python number."""
    (tensor,) = item.all_input_nodes
    wide = "double" if tensor.meta["example_value"].is_floating_point() else "long"
    with tx.output.graph.inserting_after(item):
        copy = _call(tx, "call_method", "clone", tensor)
    with tx.output.graph.inserting_after(copy.node):
        return _call(tx, "call_method", wide, copy.node).node


def _call(tx: Any, kind: str, target: Any, *args: Any) -> fx.Proxy:
    """Add a call to the graph, with its fake value."""
    tracer = tx.output.current_tracer
    proxies = [tracer.proxy(each) if isinstance(each, fx.Node) else each for each in args]
    proxy: fx.Proxy = tx.output.create_proxy(kind, target, tuple(proxies), {})
    first, *others = (each.meta["example_value"] if isinstance(each, fx.Node) else each for each in args)
    function = target if kind == "call_function" else getattr(type(first), target)
    proxy.node.meta["example_value"] = function(first, *others)
    return proxy


def placeholder_example(placeholder: fx.Node) -> Any:
    """The value with which Dynamo traces an argument of the graph; None for a size."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory that holds its values."""
    if is_fake(type(tensor)) or tensor.is_meta:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def shape_symbols(example: torch.Tensor, value: torch.Tensor) -> dict[sympy.Symbol, int]:
    """The symbols in the shape of a fake tensor, with the sizes that ``value`` has there."""
    pairs = zip(map(formula, example.shape), value.shape, strict=True)
    return {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}


def evaluate_symbolic(value: Any, sizes: Mapping[sympy.Symbol, int]) -> int | float | bool | None:
    """The value of a symbolic number; None if ``value`` is not one, or has symbols without a size."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    result = sympy.sympify(value.node.expr.xreplace(dict(sizes)))
    if result in (sympy.true, sympy.false):
        return bool(result)
    number_type = int if isinstance(value, torch.SymInt) else float
    return number_type(result) if result.is_number else None


class WriteProtection(TorchDispatchMode):
    """Raises for operators that would write to memory at one of these ``addresses``."""

    def __init__(self, addresses: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses = addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(schema(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    if tensor.untyped_storage().data_ptr() in self._addresses:
                        raise RuntimeError(f"{func} would change a parameter")
        return func(*args, **(kwargs or {}))
