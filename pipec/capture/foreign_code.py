"""Refuses what stages would not repeat: what changes operators of torch, and draws of Python or numpy."""

import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipec.capture.attributes import non_torch_generators
from pipec.errors import CaptureError, InputError
from pipec.graph import TrainingGraph, UpdatedBuffer
from pipec.ir.batch_split import leaf_path
from pipec.torch_compat import pytree
from pipec.torch_compat.compared_values import has_global_forward_hooks
from pipec.torch_compat.foreign_classes import active_mode, attributes, changes_operators, is_plain_tensor


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


_MOMENT = 0.02
"""Seconds in which other threads that draw all the time will have drawn."""


class NonTorchGenerators:
    """The generators of Python and numpy that ``traced`` may use: global ones, and its own."""

    def __init__(self, traced: nn.Module) -> None:
        self._held = non_torch_generators(traced)
        self._all = {"Python's random module": random, "numpy's random module": np.random, **self._held}
        self._before = {name: pickle.dumps(_state(generator)) for name, generator in self._all.items()}

    def refuse_non_torch_draws(self, run: Callable[[], object], suspected: bool) -> None:
        """Raise CaptureError if ``run``, which calls the model, draws from a generator.

        It is called only if a generator moved during capture, if the model holds one, of which capture may
        use a copy, or if it is ``suspected``. A generator that another thread moves meanwhile is passed over.
        """
        if not (suspected or self._held or self._drawn()):
            return
        self._restore()
        time.sleep(_MOMENT)
        of_others = self._drawn()
        run()
        drawn = [name for name in self._drawn() if name not in of_others]
        self._restore()
        if drawn:
            raise CaptureError(
                f"the model draws from {drawn[0]}. A pipeline would repeat in every step what was drawn when "
                "it was captured. Draw with torch, and choose with torch.where: "
                "x = torch.where(torch.rand(()) < p, x, layer(x)). Or draw before the step, and pass a tensor"
            )

    def _drawn(self) -> list[str]:
        """The names of the generators that have moved."""
        return [name for name, x in self._all.items() if pickle.dumps(_state(x)) != self._before[name]]

    def _restore(self) -> None:
        for name, state in self._before.items():
            _set_state(self._all[name], pickle.loads(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)
