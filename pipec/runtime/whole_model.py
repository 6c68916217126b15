"""The state of a script's own optimizer, put together of the processes, and what other ranks than 0 get."""

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipec.console import warn
from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.absent_tensors import is_absent
from pipec.runtime.executions import Executions
from pipec.runtime.optimizers import StateShard
from pipec.runtime.wrappers import refuse_scheduler_of_accelerate


class StateOfRank0(OrderedDict[str, Tensor]):
    """What ``state_dict`` returns on other ranks than 0: an empty dict that is not written over rank 0's."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse()

    def items(self) -> Any:
        """As of a dict. ``safetensors``, which would write an empty file, asks for them first."""
        if sys._getframe(1).f_globals.get("__name__") == "safetensors.torch":
            self._refuse()
        return super().items()

    def _refuse(self) -> NoReturn:
        raise InputError(
            "state_dict() is the whole model's on rank 0 alone, and this rank would write an empty one, "
            "maybe over rank 0's: every rank calls state_dict(), and rank 0 saves. To have it on every rank, "
            "call full_state_dict(all_ranks=True)"
        )

    def __deepcopy__(self, memo: object) -> "StateOfRank0":
        return StateOfRank0()


class WholeState:
    """Makes the ``state_dict`` of a script's optimizer that of the whole model, from its first update on.

    Every rank calls it. An optimizer drops the state that only other ranks need.
    """

    def __init__(self, executions: Executions) -> None:
        self._executions, self._tensors = executions, executions.tensors
        if executions.agreement.is_distributed and executions.steps.updates is None:
            if not _followed:
                register_optimizer_step_pre_hook(_before_update)
            _followed.append(weakref.ref(self))

    def has_any(self, optimizer: Optimizer) -> bool:
        """Whether some of the optimizer's parameters are of this pipeline, and only some ranks have them."""
        if not self._tensors.are_spread:
            return False
        own = {id(each) for each in self._tensors.names.parameters.values()}
        return any(id(each) in own for each in _parameters(optimizer))

    def gather(self, optimizer: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """The state dict of a script's optimizer for the parameters of all ranks; ``own`` is this rank's."""
        unique = self._tensors.names.unique_parameters()
        names = {id(parameter): fqn for fqn, parameter in unique.items()}
        numbered = dict(enumerate(_parameters(optimizer)))
        numbers = {names[id(each)]: number for number, each in numbered.items() if id(each) in names}
        shards = [
            StateShard(ParameterShard(fqn, 0, numbered[number].numel()), own["state"][number])
            for fqn, number in numbers.items()
            if self._tensors.is_source(fqn) and number in own["state"]
        ]
        gathered = {
            shard.piece.name: shard.entries
            for rank in self._executions.gather_states(shards)
            for shard in rank
        }
        if unknown := gathered.keys() - numbers.keys():
            raise InputError(
                f"the optimizers of the ranks have other parameters: {min(unknown)} is not in all of them. "
                "Every rank makes its optimizer of all parameters, as of pipe.parameters(), or of the same "
                "ones of the model"
            )
        whole = own["state"] | {numbers[fqn]: entries for fqn, entries in gathered.items()}
        return {**own, "state": dict(sorted(whole.items()))}


_followed = list["weakref.ref[WholeState]"]()
"""Those of pipelines of several processes whose scripts may have optimizers of their own."""

_watched = weakref.WeakSet[Optimizer]()
"""The optimizers whose state is made whole."""

_is_local = ContextVar("is_local", default=False)


_REFUSED = {
    "LBFGS": "makes one vector of all gradients of the model, but each rank has those of its own stages "
    "alone. Use an optimizer that updates each parameter by itself, or train in one process",
    "ZeroRedundancyOptimizer": "divides the updates among ranks, which have other parameters. Leave it out: "
    'pipec.compile(..., replicas=..., optimizer=..., shard="optimizer") shards the state over replicas',
}
"""By the class of an optimizer: why it cannot update a part of the parameters, and what to do."""


def _pipelines(optimizer: Optimizer) -> list[WholeState]:
    found = [each for reference in _followed if (each := reference()) is not None]
    return [each for each in found if each.has_any(optimizer)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _before_update(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if optimizer in _watched or not _pipelines(optimizer):
        return
    refuse_scheduler_of_accelerate(optimizer)
    if why := _REFUSED.get(type(optimizer).__name__):
        raise InputError(f"{type(optimizer).__name__} {why}")
    _watched.add(optimizer)
    if all(each.grad is None for each in _parameters(optimizer)):
        warn(
            "this rank has no gradients, so that torch's clip_grad_norm_ returns 0 on it; "
            "pipe.clip_grad_norm_(max_norm), called on every rank, returns the norm of the whole model"
        )
    if any(type(each.grad) is Tensor and not each.grad.is_sparse for each in _parameters(optimizer)):
        warn(
            "the script has assigned gradients of its own, of which torch's clip_grad_norm_ takes the norm "
            "on each rank alone; clip by pipe.clip_grad_norm_(max_norm), called on every rank"
        )
    _drop_absent(optimizer)
    optimizer.register_state_dict_post_hook(_gather, prepend=True)  # before those of the script
    optimizer.register_load_state_dict_post_hook(_drop_absent, prepend=True)


def _gather(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for each in [] if _is_local.get() else _pipelines(optimizer):
        state_dict = each.gather(optimizer, state_dict)
    return state_dict


def _drop_absent(optimizer: Optimizer) -> None:
    for parameter in [each for each in optimizer.state if is_absent(each)]:
        del optimizer.state[parameter]


@contextlib.contextmanager
def local_state() -> Iterator[None]:
    """Let ``state_dict`` of a script's optimizer have the state of this rank's parameters alone."""
    token = _is_local.set(True)
    try:
        yield
    finally:
        _is_local.reset(token)
