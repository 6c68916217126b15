"""What belongs to the whole model, put together of the processes: tensors, norms, optimizer state."""

import functools
import itertools
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.absent_tensors import is_absent, plain_tensors
from pipec.runtime.executions import Executions
from pipec.runtime.optimizers import StateShard
from pipec.runtime.wrappers import refuse_scheduler_of_accelerate, refuse_wrappers
from pipec.torch_compat.run_time import replace_total_norm


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


class WholeModel:
    """Brings together what the processes of a pipeline hold for a script's own optimizer.

    Where a script has one, torch's ``clip_grad_norm_`` and ``get_total_norm`` take the norm of the whole
    model, and the optimizer's ``state_dict`` has the state of all its parameters. Every rank makes the calls.
    """

    def __init__(self, executions: Executions) -> None:
        self._executions, self._tensors = executions, executions.tensors
        self._agreement = executions.agreement
        if self._agreement.is_distributed and executions.steps.updates is None:
            _follow(self)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the whole model, by first name."""
        return self._tensors.names.unique_parameters()

    @torch.no_grad()
    def total_norm(self, call: str, gradients: Iterable[Tensor] | None, norm_type: float) -> Tensor:
        """The norm that torch's ``get_total_norm`` has of these gradients of the unsplit model.

        Each rank passes those that it holds; None: all. A tied parameter counts once. ``call`` is what all
        ranks call.
        """
        parameters = self.parameters
        if self._agreement.is_distributed:
            self._agreement.require_same_call(call, {})
        chosen = None if gradients is None else set(map(id, gradients))
        table = torch.zeros(2, len(parameters), dtype=torch.float64)  # whether there is a gradient, its norm
        norms_by_device: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        with plain_tensors():
            for column, (fqn, parameter) in enumerate(parameters.items()):
                gradient = parameter.grad if self._tensors.is_source(fqn) else None
                if gradient is not None and (chosen is None or id(gradient) in chosen):
                    norm = torch.linalg.vector_norm(gradient, norm_type)
                    norms_by_device[gradient.device][column] = norm
            for found in norms_by_device.values():  # one copy each: the host waits for it
                table[0, [*found]] = 1
                table[1, [*found]] = torch.stack([*found.values()]).to("cpu", torch.float64)
            dtypes = [parameter.dtype.to_real() for parameter in parameters.values()]
        if self._agreement.is_distributed:
            ranks = self._agreement.ranks
            table = torch.stack(ranks.exchange.all_gather(f"calling {call}", table)).sum(0)
        norms = [norm.to(dtype) for there, norm, dtype in zip(*table, dtypes, strict=True) if there]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())

    def num_gradients(self, gradients: Iterable[Tensor]) -> int:
        """How many of these are gradients of parameters."""
        own = {id(each.grad) for each in self.parameters.values() if each.grad is not None}
        return sum(id(each) in own for each in gradients)

    @property
    def is_spread(self) -> bool:
        """Whether some ranks lack some of the parameters."""
        return self._tensors.are_spread

    def gather_optimizer_state(self, optimizer: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        """The state dict of a script's optimizer for the parameters of all ranks; ``own`` is this rank's."""
        names = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        numbered = dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))
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


_followed: "weakref.WeakValueDictionary[int, WholeModel]" = weakref.WeakValueDictionary()
"""The pipelines of several processes whose scripts may have optimizers of their own, in the order made."""

_numbers = itertools.count()

_states: "weakref.WeakKeyDictionary[Optimizer, _WholeState]" = weakref.WeakKeyDictionary()
"""What makes the state of an optimizer whole that has updated parameters of a pipeline."""

_unrelated: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
"""Optimizers of other parameters, each with the number of spread pipelines that there were."""


def _follow(whole: WholeModel) -> None:
    """Let torch's norms and the state of optimizers be those of the whole model from now on."""
    _watch_torch()
    _followed[next(_numbers)] = whole


@functools.cache
def _watch_torch() -> None:
    replace_total_norm(_total_norm)
    register_optimizer_step_pre_hook(_before_update)


def _spread() -> list[WholeModel]:
    """The pipelines of which some ranks lack some parameters."""
    return [whole for _, whole in sorted(_followed.items()) if whole.is_spread]


def _total_norm(
    gradients: Sequence[Tensor], norm_type: float, parameters: Sequence[Tensor] | None
) -> Tensor | None:
    """The norm of gradients of the whole model; None if they are of no pipeline.

    A rank that holds none of the parameters that are clipped takes part, too, as these are of the pipeline.
    One that passes nothing at all takes part for the only pipeline that there is.
    """
    pipelines = _spread()
    if parameters:
        chosen = set(map(id, parameters))
        pipelines = [each for each in pipelines if chosen.intersection(map(id, each.parameters.values()))]
    if gradients:
        pipelines = [each for each in pipelines if each.num_gradients(gradients)]
        if pipelines and pipelines[0].num_gradients(gradients) < len(gradients):
            raise InputError(
                "the norm of gradients of a pipeline and of other tensors was asked for, but this rank has "
                "those of its own stages alone; clip the parameters of each model by a call of its own"
            )
    if len(pipelines) != 1:
        return None
    norm = pipelines[0].total_norm(f"get_total_norm(norm_type={norm_type})", gradients, norm_type)
    return norm.to(gradients[0].device) if gradients else norm


def _before_update(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Let the state of an optimizer of a pipeline's parameters be whole from its first update on."""
    spread = _spread()
    if optimizer in _states or _unrelated.get(optimizer) == len(spread):
        return
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = [each for each in spread if any(id(x) in own for x in each.parameters.values())]
    if not found:
        _unrelated[optimizer] = len(spread)
        return
    refuse_wrappers()
    refuse_scheduler_of_accelerate(optimizer)
    if isinstance(optimizer, LBFGS):
        raise InputError(
            "LBFGS makes one vector of all gradients of the model, but each rank has those of its own stages "
            "alone. Use an optimizer that updates each parameter by itself, or train in one process"
        )
    _states[optimizer] = _WholeState(found, optimizer)


class _WholeState:
    """Makes the state dict of an optimizer that of all ranks, and drops what only other ranks need."""

    def __init__(self, pipelines: Iterable[WholeModel], optimizer: Optimizer) -> None:
        self._pipelines = [weakref.ref(each) for each in pipelines]
        self.is_whole = True
        self._drop_absent(optimizer)
        optimizer.register_state_dict_post_hook(self._gather, prepend=True)  # before those of the script
        optimizer.register_load_state_dict_post_hook(self._drop_absent, prepend=True)

    def _gather(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        for reference in self._pipelines if self.is_whole else ():
            if (whole := reference()) is not None:
                state_dict = whole.gather_optimizer_state(optimizer, state_dict)
        return state_dict

    @staticmethod
    def _drop_absent(optimizer: Optimizer) -> None:
        for parameter in [each for each in optimizer.state if is_absent(each)]:
            del optimizer.state[parameter]


def local_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of a script's optimizer with the state of this rank's parameters alone."""
    state = _states.get(optimizer)
    if state is None:
        return optimizer.state_dict()
    state.is_whole = False
    try:
        return optimizer.state_dict()
    finally:
        state.is_whole = True
