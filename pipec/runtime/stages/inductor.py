"""Compiles the functions of stages with inductor."""

import functools
import math
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.ir import MMAP_THRESHOLD_BYTES
from pipec.runtime.memory.block_cache import empty_cached
from pipec.torch_compat.run_time import inductor_code

_CPU = torch.device("cpu")

_aten = torch.ops.aten

_one_at_a_time = threading.Lock()

Code = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs out of a list, which is empty from then on, and frees each when nothing reads it later."""


Fits = Callable[[Sequence[Any]], bool]
"""Whether code is right for inputs of these sizes and strides, which have the types that it was made for."""


def compile_function(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Tensor | int],
    variable_dims: Mapping[int, Collection[int]],
) -> tuple[Code, Sequence[int], Fits]:
    """The code of a function, the positions of the inputs that it takes, and which inputs it fits.

    Numbers, and the ``variable_dims`` of tensors by their position, may have other values in later calls. The
    code is for tensors of these types and sizes otherwise.
    """
    with _one_at_a_time:
        code, taken, names, fits = inductor_code(
            function, inputs, variable_dims, {_aten.addmm.default: split_bias_addition}
        )
    reuse_memory(names)
    return code, taken, fits


def split_bias_addition(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``addmm`` as a product and an addition, so that inductor fuses the addition with its readers.

    On CPUs ``addmm`` first copies the bias to each row, and then adds the product. This took 0.89 of the time
    of a GPT's forward at width 64. It is not done for 16-bit types, where the product would be rounded before
    the sum, nor on GPUs, whose products add biases. The view keeps inductor from making one ``addmm`` again.
    """
    is_split = bias.device.type == "cpu" and bias.dtype in (torch.float32, torch.float64)
    if not is_split or beta != 1 or alpha != 1:
        made: Tensor = NotImplemented
        return made
    return (left.mm(right).unsqueeze(0) + bias).squeeze(0)


def reuse_memory(names: dict[str, Any]) -> None:
    """Make generated code allocate large values from freed memory of earlier ones.

    It allocates uninitialised memory by one of the names of its module::

        buf0 = empty_strided_cpu((256, 32768), (32768, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    """
    empty = names.get("empty_strided_cpu")
    if isinstance(empty, types.BuiltinFunctionType):
        names["empty_strided_cpu"] = functools.partial(_empty, empty)


def _empty(
    empty: Callable[..., Tensor], sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``empty`` for small tensors; large ones come from the block cache."""
    if math.prod(sizes) * dtype.itemsize < MMAP_THRESHOLD_BYTES:
        return empty(sizes, strides, dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return empty_cached([extent], dtype, _CPU).as_strided(sizes, strides)
