"""Branches on the values of tensors: Dynamo follows one way if it is told which."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")
"""How the instructions begin that ask for the truth value of what is on top of the stack."""

CHECKING = "_is_all_true"
"""The method that nothing but ``torch._check_tensor_all`` calls."""


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
def branches_decided(
    decide: Decide, assume: Callable[..., Any], expect: Callable[..., Any]
) -> Iterator[None]:
    """Let Dynamo take the branches that ``decide`` tells, and write calls of ``assume`` into the graph.

    A call has the condition, its truth value and an empty text. What ``.item()`` takes out of a tensor counts
    as a condition only if it is a truth value. What ``torch._check_tensor_all`` asks becomes a call of
    ``expect``, with the condition and an empty text. Other assertions stay what Dynamo makes of them.
    """
    step, item = InstructionTranslatorBase.step, TensorVariable.method_item

    def decided(tx: Any, value: Any) -> Any:
        if not isinstance(value, TensorVariable) or tx.output.current_tracer.parent is not None:
            return None
        node = value.as_proxy().node
        example = node.meta.get("example_value")
        if example is None or example.numel() != 1:
            return None
        found = decide(node, tx.output.nn_modules.__getitem__)
        if found is None:
            return None
        if not found.is_certain:
            arguments = value.as_proxy(), found.outcome, ""
            tx.output.create_proxy("call_function", assume, arguments, {})
        return ConstantVariable.create(found.outcome)

    def decided_step(tx: Any) -> bool:
        at = tx.instruction_pointer
        if at is not None and tx.stack and tx.instructions[at].opname.startswith(ASKING):
            is_assertion = tx.instructions[at + 1].opname == "LOAD_ASSERTION_ERROR"
            if not is_assertion and (found := decided(tx, tx.stack[-1].realize())) is not None:
                tx.stack[-1] = found
        return step(tx)

    def decided_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if self.as_proxy().node.target == CHECKING and tx.output.current_tracer.parent is None:
            tx.output.create_proxy("call_function", expect, (self.as_proxy(), ""), {})
            return ConstantVariable.create(True)
        found = decided(tx, self) if self.dtype is torch.bool else None
        return item(self, tx, *args, **kwargs) if found is None else found

    InstructionTranslatorBase.step = decided_step  # type: ignore[method-assign,assignment]
    TensorVariable.method_item = decided_item  # type: ignore[method-assign]
    try:
        yield
    finally:
        InstructionTranslatorBase.step = step  # type: ignore[method-assign]
        TensorVariable.method_item = item  # type: ignore[method-assign]


def example_of(placeholder: fx.Node) -> Any:
    """What Dynamo was given for an argument of a graph that is being made; None for a size."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory with values, all of them."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def symbols_of(example: torch.Tensor, value: torch.Tensor) -> dict[sympy.Symbol, int]:
    """The symbols in the shape of a fake tensor, with the sizes that ``value`` has there."""
    shape = tuple[Any, ...](example.shape)
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
    pairs = zip(sizes, value.shape, strict=True)
    return {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}


def size_in(value: Any, sizes: Mapping[sympy.Symbol, int]) -> int | float | bool | None:
    """A symbolic number worked out; None if it is none, or depends on others than these ``sizes``."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    found = sympy.sympify(value.node.expr.xreplace(dict(sizes)))
    if found in (sympy.true, sympy.false):
        return bool(found)
    kind = int if isinstance(value, torch.SymInt) else float
    return kind(found) if found.is_number else None


class MemoryKept(TorchDispatchMode):
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
