"""Under which name a captured graph is kept: a mark of all that can be told before the model is captured."""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipec.capture.attributes import HeldTensor, readable_values
from pipec.capture.call import Call
from pipec.capture.look import modules_of, tensors_of
from pipec.capture.step import Step
from pipec.graph_cache import files
from pipec.graph_cache.marks import UnfaithfulError, class_mark, digest, name_of, tensor_mark, value_mark
from pipec.torch_compat import (
    global_hooks,
    has_gradient_hook,
    modes_around,
    module_hooks,
    patched_functions,
    pytree,
    switches,
)

ENVIRONMENT = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_",
    "DNNL_",
    "HF_",
    "MKL_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
)
"""How the names of environment variables begin that torch and models read."""

OF_EVERY_RUN = ("TORCHELASTIC_", "TORCHINDUCTOR_")
"""Of those, the ones that say how a process was started, or how kernels are made."""

OF_THIS_PROCESS = ("._original_object_hash",)
"""Attributes that differ from run to run whatever a model is: transformers keeps Python's hash of a dict."""


def key_of(
    step: Step, call: Call, device: torch.device, options: Mapping[str, Any], modules: set[str]
) -> str:
    """The name of a capture with these options, where these modules had been imported before.

    Raises:
        UnfaithfulError: something that may decide the capture cannot be compared in another process.
    """
    _refuse_modes_and_hooks(step)
    parts = {
        "pipec": _pipec(),
        "versions": _versions(),
        "python": value_mark(list(sys.flags)),
        "environment": value_mark(_environment()),
        "torch": value_mark([switches(device), patched_functions()]),
        "files": value_mark(files.digests(modules)),
        "modules": digest(_modules(step)),
        "tensors": digest(_tensors(step)),
        "values": digest(_values(step)),
        "call": digest(_call(call)),
        "options": value_mark({**options, "device": device}),
    }
    return digest(f"{name} {part}" for name, part in parts.items())


@functools.cache
def _pipec() -> str:
    return files.pipec_digest()


@functools.cache
def _versions() -> str:
    return value_mark(files.versions())


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT) and not name.startswith(OF_EVERY_RUN)
    }


def _refuse_modes_and_hooks(step: Step) -> None:
    """Refuse what code outside of the model's own does to every call."""
    if modes := modes_around():
        raise UnfaithfulError(f"{name_of(type(modes[0]))} is active around the call")
    if global_hooks():
        raise UnfaithfulError("a hook of every module")
    for path, module in step.named_modules():
        if module_hooks(module):
            raise UnfaithfulError(f"a hook of {path or 'the model'}")


def _modules(step: Step) -> Iterator[str]:
    for module in modules_of(step):
        children = [name for name, child in module._modules.items() if child is not None]
        yield f"{class_mark(type(module))} {module.training} {children}"
    yield repr([name for name, _ in step.named_modules(remove_duplicate=False)])


def _tensors(step: Step) -> Iterator[str]:
    tensors = tensors_of(modules_of(step))
    first: dict[int, int] = {}
    storages: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        if type(tensor) not in (Tensor, nn.Parameter) or has_gradient_hook(tensor):
            raise UnfaithfulError(f"a parameter or buffer that is a {name_of(type(tensor))}, or has a hook")
        storage = tensor.untyped_storage()._cdata if not tensor.is_meta else id(tensor)
        shared = first.setdefault(id(tensor), position), storages.setdefault(storage, position)
        yield f"{_kind(tensor)} {tensor.storage_offset()} {shared}"
    yield repr([name for name, _ in step.named_parameters(remove_duplicate=False)])
    yield repr([name for name, _ in step.named_buffers(remove_duplicate=False)])


def _kind(tensor: Tensor) -> str:
    kind = f"{name_of(type(tensor))} {tensor.dtype} {tensor.layout} {tuple(tensor.shape)} {tensor.device}"
    return f"{kind} {tensor.stride()} {tensor.requires_grad} {tensor.is_conj()} {tensor.is_neg()}"


def _values(step: Step) -> Iterator[str]:
    for path, value in sorted(readable_values(step).items()):
        if not path.endswith(OF_THIS_PROCESS):
            yield f"{path} {_read(value)}"


def _read(value: Any) -> str:
    if isinstance(value, HeldTensor):
        return tensor_mark(value.tensor)
    return value_mark(value)


def _call(call: Call) -> Iterator[str]:
    yield str(pytree.tree_structure(call.tree))
    yield value_mark([sorted(call.unsure.items()), [*map(repr, call.axes)]])
    for path, leaf in zip(call.paths, call.leaves, strict=True):
        yield f"{path} {_kind(leaf) if isinstance(leaf, Tensor) else value_mark(leaf)}"
