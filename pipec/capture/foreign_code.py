"""Refuses what a script defines that changes operators of torch in a way that stages would not repeat."""

from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import CaptureError, InputError
from pipec.graph import TrainingGraph, UpdatedBuffer
from pipec.ir.batch_split import leaf_path
from pipec.torch_compat import pytree
from pipec.torch_compat.foreign_classes import active_mode, attributes, changes_operators, is_plain_tensor
from pipec.torch_compat.module_contents import has_global_forward_hooks


def refuse_active_mode() -> None:
    """Raise InputError if the script has entered a mode, or hooks on saved tensors, around a call."""
    if entered := active_mode():
        raise InputError(
            f"{entered} is active around this call, but stages do not run what it adds to operators; leave "
            "it before the call, or enter it inside forward()"
        )


def refuse_unusual_arguments(tree: Any) -> None:
    """Raise InputError for a tensor among the arguments that has more than a traced model would see."""
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, Tensor):
            continue
        path, kind = leaf_path(keys), type(leaf)
        if not is_plain_tensor(leaf):
            raise InputError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, whose class stages would not see; pass "
                "a plain tensor, such as x.as_subclass(torch.Tensor)"
            )
        if leaf.layout is not torch.strided:
            raise InputError(
                f"{path} has layout {leaf.layout}, which no stage can take; pass {path}.to_dense()"
            )
        given = attributes(leaf)
        if given and not kind.__module__.startswith("pipec."):  # a loss explains itself
            raise InputError(
                f"{path} has an attribute {given[0]!r}, which stages would not see; pass it as an "
                "argument of its own, and a tensor without attributes, such as x.view_as(x)"
            )
        if leaf.is_conj() or leaf.is_neg():
            raise InputError(
                f"{path} is a lazy {'conjugate' if leaf.is_conj() else 'negative'}, which stages would not "
                "see; pass x.resolve_conj().resolve_neg()"
            )


def refuse_foreign_model(model: nn.Module) -> None:
    """Raise CaptureError for tensors of a model whose class says what operators compute, and for hooks of
    every module, which would see pipec's own module and run at capture alone."""
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if changes_operators(tensor):
            kind = type(tensor)
            raise CaptureError(
                f"{fqn} is a {kind.__module__}.{kind.__qualname__}, whose class says what operators compute "
                "with it, which a graph would lose; make it a plain tensor, and call in forward() what the "
                "class does"
            )
    if has_global_forward_hooks():
        raise CaptureError(
            "a hook of register_module_forward_hook or register_module_forward_pre_hook is called for every "
            "module, pipec's own among them; register it on modules of the model instead, with "
            "register_forward_hook"
        )


def refuse_shared_constants(model: nn.Module, graph: TrainingGraph) -> None:
    """Raise CaptureError if a graph reads, as a constant, memory of a tensor that training changes."""
    changed = {role.fqn for role in graph.results if isinstance(role, UpdatedBuffer)}
    tensors = (*model.named_parameters(), *model.named_buffers())
    owners = {_memory(x): fqn for fqn, x in tensors if x.requires_grad or fqn in changed}
    owners.pop(None, None)
    for constant in graph.constants.values():
        if owner := owners.get(_memory(constant)):
            raise CaptureError(
                f"forward() reads a tensor of shape {tuple(constant.shape)} that is not registered and "
                f"shares memory with {owner}, which changes. Read {owner} itself, or a view of it that "
                "forward() makes"
            )


def _memory(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none of its own."""
    is_real = is_plain_tensor(tensor) and not tensor.is_meta and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() or None if is_real else None
