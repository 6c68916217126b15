"""Private parts of torch that a rank needs that compiles nothing, operators among them.

None of them loads torch._dynamo.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import FunctionSchema, Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.torch_compat.private_symbols import require


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """The number of references to this memory, from tensors and others; ``storage`` itself is one."""
    return torch._C._storage_Use_Count(storage._cdata)


def memory_id(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, which views share. Fake tensors have one, too.

    The tensors that the function of a ``torch.vmap`` gets have none, and each is taken to be alone.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)


def is_differentiated(tensor: Tensor) -> bool:
    """Whether the backward that runs computes the gradient of a leaf."""
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return bool(torch._C._will_engine_execute_node(node))


def register_buffer(module: nn.Module, name: str, buffer: Tensor, persistent: bool) -> None:
    """As ``nn.Module.register_buffer``, also where the module has another attribute of this name."""
    module._buffers[name] = buffer
    if not persistent:
        module._non_persistent_buffers_set.add(name)


def share_registries(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the very submodules, parameters and buffers of another, also those added later."""
    module._modules = other._modules
    module._parameters, module._buffers = other._parameters, other._buffers
    module._non_persistent_buffers_set = other._non_persistent_buffers_set


class ConvertedModule(nn.Module):
    """A module that says what ``to``, ``half``, ``cuda`` and their kin do to its tensors."""

    def _convert(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Replace each tensor, also those of submodules if ``recurse``, by what ``function`` makes of it."""
        return super()._apply(function, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self._convert(fn, recurse)


def inductor_code(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Tensor | int],
    variable_dims: Mapping[int, Collection[int]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> tuple[Callable[[list[Any]], Any], Sequence[int], dict[str, Any], Callable[[Sequence[Any]], bool]]:
    """What inductor compiles of a function, traced with fake tensors like ``inputs``.

    Numbers, and the ``variable_dims`` of tensors by their position, are symbols; those that are equal now are
    one. All other sizes are constants.

    Returns the code, which takes the inputs at the returned positions out of a list; the names of the Python
    module that inductor generated; and whether the code is right for inputs of other sizes and strides, of
    the same types. What the function writes into its inputs is not written back.
    """
    require("inductor")
    from torch._dynamo.functional_export import _compiling_state_context  # importing these takes seconds
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    fake_mode = FakeTensorMode(shape_env=shapes)

    def fake(tensor: Tensor, symbols: Collection[int]) -> Any:
        kinds = [DimDynamic.DUCK if dim in symbols else DimDynamic.STATIC for dim in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(kinds)
        return fake_mode.from_tensor(_at_start(tensor), symbolic_context=context)

    fakes = [
        fake(torch.empty(each, dtype=torch.uint8, device="meta"), (0,)).size(0)
        if isinstance(each, int)
        else fake(each, variable_dims.get(position, ()))
        for position, each in enumerate(inputs)
    ]
    table = {**select_decomp_table(), **decompositions}
    with torch.no_grad(), _compiling_state_context():
        functional = functionalize(function, remove="mutations")
        has_symbols = any(variable_dims.values()) or any(isinstance(each, int) for each in inputs)
        traced = make_fx(functional, table, tracing_mode="symbolic" if has_symbols else "fake")(*fakes)
    for node in [*traced.graph.nodes]:
        if node.target is torch.ops.aten.copy_.default:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    arguments = traced.graph.find_nodes(op="placeholder")
    taken = [position for position, node in enumerate(arguments) if node.users]
    for node in arguments:
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    with torch.no_grad(), config.patch(size_asserts=True, cpp_wrapper=False):
        code: Any = compile_fx_inner(traced, [fakes[position] for position in taken])
    guards = shapes.produce_guards_expression(fakes, ignore_static=False)
    generated = code.current_callable
    names = getattr(generated, "__func__", generated).__globals__

    def fits(given: Sequence[Any]) -> bool:
        placed = [_at_start(each) if isinstance(each, Tensor) else each for each in given]
        return not guards or shapes.evaluate_guards_expression(guards, placed)

    return code, taken, names, fits


def _at_start(tensor: Tensor) -> Tensor:
    """A tensor of this size at the start of its memory, as a first microbatch is of its batch."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0).data


__all__ = ["OpOverload", "TorchDispatchMode", "is_higher_order", "schema"]


def schema(operator: OpOverload) -> FunctionSchema:
    """The arguments and results of an operator, with their types, names and aliases."""
    return operator._schema


def is_higher_order(target: object) -> bool:
    """Whether what a node calls is an operator with graphs of its own."""
    return getattr(target, "namespace", "") == "higher_order"
