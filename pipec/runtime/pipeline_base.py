"""The base of compiled and loaded pipelines: tensors, and the artifacts linked to them."""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import Plan, Program
from pipec.ir.argument_checks import FUNCTION, NUMBER, check_arguments, instance
from pipec.runtime.call_guard import CallGuard, exclusive_call
from pipec.runtime.messages.agreement import CallRole, RankReply
from pipec.runtime.messages.call_description import CallDescription, describe_differences, format_ranks
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.model_tensors import UninitializedTensors
from pipec.runtime.optimizers import PipelineOptimizer, StateShard
from pipec.runtime.signal_handling import SignalHandling
from pipec.runtime.step.execution import Execution, Ranks
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.stream_results import BatchResult
from pipec.runtime.step.timestamps import RecordedStep
from pipec.runtime.step_counter import StepCounter
from pipec.runtime.stream.stream_execution import StreamExecution
from pipec.runtime.stream.stream_session import StreamSession


class PipelineBase(nn.Module):
    """Runs artifacts on the tensors that it holds under the model's own names.

    ``logs`` has by name what the loss function of the last step returned besides the loss, for the batch.

    A subclass registers the tensors, and sets ``_trained`` to the artifact that ``step`` runs.
    ``_batch_mismatch_advice`` is its advice to ranks that passed different batches.
    """

    _batch_mismatch_advice = (
        "Every rank passes the same whole mini-batch, which pipec splits into microbatches. Leave out what "
        "gives each rank a part or an order of its own, such as a DistributedSampler or a seed by rank; or "
        'pass batch="rank0" to pipec.compile, and every rank uses rank 0\'s, or batch="local", and replicas '
        "pass their own parts. If the batches should be the same, one rank made a call that others did not"
    )

    def __init__(
        self, ranks: Ranks, trained: Artifact | None = None, updates: OptimizerUpdates | None = None
    ) -> None:
        super().__init__()
        self._call_guard = CallGuard()
        self._ranks = ranks
        self._updates = updates
        if updates is not None:
            updates.optimizer.before_state_access = self.drain  # before its state is read or replaced
        self._accumulates = False
        self.logs: dict[str, Tensor] = {}
        self._trained = trained
        self._steps = StepCounter(updates)
        self._signals = SignalHandling(ranks.world.is_distributed)
        self._process = os.getpid()
        self._executions: dict[Artifact, Execution | StreamExecution] = {}
        self._recorded: list[RecordedStep] | None = None
        self._stream_session: StreamSession | None = None
        self._undelivered: Sequence[BatchResult] = ()
        self._owner_ranks: dict[str, tuple[int, ...]] = owner_ranks(trained.plan) if trained else {}
        self._warned = False
        self._uninitialized = UninitializedTensors()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            self._warn_if_clipping(sys._getframe(1).f_globals.get("__name__", ""))
            yield parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, in less time."""
        if not set_to_none:
            return super().zero_grad(set_to_none)
        modules: list[nn.Module] = [self]
        for module in modules:
            modules += filter(None, module._modules.values())
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None

    @exclusive_call
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        It does what ``torch.nn.utils.clip_grad_norm_`` does to the unsplit model, wherever the parameters
        are; a tied parameter counts once. Every rank calls it. Returns the norm before.
        """
        check_arguments(METHODS, locals())
        if self._updates is not None:
            raise InputError(
                "pipe.step(...) has made the update already, for the pipeline was compiled with "
                "optimizer=...; pass clip_grad_norm=... to pipec.compile"
            )
        if self._ranks.world.is_distributed:
            self._require_same_call(f"clip_grad_norm_({max_norm}, {norm_type})", {})
        own = dict(self.named_parameters())
        kinds = self._norm_dtypes()
        table = torch.zeros(2, len(kinds), dtype=torch.float64)  # whether there is a gradient, and its norm
        for column, fqn in enumerate(kinds):
            gradient = own[fqn].grad if fqn in own and self._is_source(fqn) else None
            if gradient is not None:
                norm = torch.linalg.vector_norm(gradient, norm_type)
                table[:, column] = torch.stack([torch.ones_like(norm), norm])
        if self._ranks.world.is_distributed:
            tables = self._ranks.agreement.all_gather("calling clip_grad_norm_", table)
            table = torch.stack(tables).sum(0)
        norms = [norm.to(kind) for there, norm, kind in zip(*table, kinds.values(), strict=True) if there]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        torch.nn.utils.clip_grads_with_norm_(list(own.values()), max_norm, total)
        return total

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer of the whole model, for LR schedulers and checkpoints; ``step`` makes its updates."""
        if self._updates is None:
            raise InputError(
                "the pipeline has no optimizer of its own; pass optimizer=... to pipec.compile, such as "
                "functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        return self._updates.optimizer

    @exclusive_call
    def drain(self) -> None:
        """Complete the mini-batches that a stream has begun, so that all stages have made the same updates.

        Every rank calls it. Their losses are the next that the stream yields. Whatever reads or replaces
        parameters through the pipeline drains it before. With a schedule that flushes there is nothing to do.
        """
        stream_session, self._stream_session = self._stream_session, None
        if stream_session is not None:
            self._undelivered = stream_session.drain(self.optimizer.hyperparameters())

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let the steps that are made inside a ``with`` add up gradients, for the next update to use."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because a loss or gradient was not finite.

        See ``on_nan`` and ``precision="fp16-mixed"``.
        """
        return self._steps.num_skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step: 1 unless ``precision="fp16-mixed"``.

        Neither losses nor gradients show it.
        """
        scaled = self._updates.loss_scale if self._updates else None
        return scaled.scale if scaled else 1.0

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank when all end because one was sent SIGTERM or SIGINT.

        All ranks have made the same steps then, and whatever they did together they can still do, such as
        saving a checkpoint. Afterwards every rank raises KeyboardInterrupt, or for SIGTERM SystemExit with
        status 143. Under ``torchrun`` a signal is noted from the first step on, whatever the rank does, and
        all ranks follow it before the next step, mini-batch or evaluation that they make. In one process
        that holds for SIGTERM once this has been called; Ctrl-C raises at once.
        """
        check_arguments(METHODS, locals())
        self._signals.before_stop(call)

    def _stop(self, asked: Sequence[int]) -> None:
        """End on all ranks, if one of them was sent one of these signals."""
        if any(asked):
            self.drain()
            self._signals.exit(asked, self._steps.num_steps)

    @property
    def programs(self) -> Sequence[Program]:
        """The program of each rank; it prints as text, one instruction a line."""
        return self._artifact.programs

    def source(self, stage: int) -> str:
        """The generated Python of a stage."""
        check_arguments(METHODS, locals())
        sources = self._artifact.sources
        if not 0 <= stage < len(sources):
            raise InputError(f"there is no stage {stage}: the pipeline has stages 0 to {len(sources) - 1}")
        return sources[stage]

    @contextlib.contextmanager
    def record(self) -> Iterator[list[RecordedStep]]:
        """Note when every instruction runs, in the steps that are made inside a ``with``.

        The list is filled when the ``with`` ends. It then has the times of every rank, so all ranks record,
        or none.
        """
        steps: list[RecordedStep] = []
        self._recorded = []
        try:
            yield steps
            recorded = self._recorded
        finally:
            self._recorded = None
        steps += self._ranks.gathered(recorded)

    @property
    def _artifact(self) -> Artifact:
        if self._trained is None:
            raise InputError(
                "the pipeline is not compiled yet: call step(...), or prepare(...) with the arguments of step"
            )
        return self._trained

    def _execution(self, artifact: Artifact) -> Execution | StreamExecution:
        """The artifact linked to the tensors, made at the first call."""
        self._refuse_fork()
        if artifact not in self._executions:
            self._refuse_meta()
            self._uninitialized.refuse(self._tensors_by_fqn(), artifact.plan)
        updates = self._bound_updates(artifact.plan)
        if artifact not in self._executions:
            tensors = self._tensors_by_fqn()
            kind = StreamExecution if artifact.programs[0].period else Execution
            self._executions[artifact] = kind(artifact, tensors, tensors, self._ranks, updates)
        return self._executions[artifact]

    def _update_facts(self) -> CallDescription:
        """The part of the optimizer's settings that must be equal on all ranks."""
        if self._updates is None:
            return {}
        return {"accumulates": str(self._accumulates), **self._updates.optimizer.call_description()}

    def _refuse_meta(self) -> None:
        if meta := [fqn for fqn, tensor in self._tensors_by_fqn().items() if tensor.is_meta]:
            raise InputError(
                f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and hold no values. "
                "Call to_empty(device=...) and then load_state_dict(...) on the pipeline; or save the "
                "artifact with tensors=True"
            )

    def _bound_updates(self, plan: Plan) -> OptimizerUpdates | None:
        """The optimizer, with what it updates where the plan says so.

        Artifacts that were linked while parameters were divided in another way are linked again.
        """
        if not plan.sync_spec.updates:
            return None
        if self._updates is None:
            raise InputError("the program updates its weights, and so needs an optimizer: pass optimizer=...")
        if not self._updates.is_bound_to(plan):
            self._unshard_parameters()
            self._executions.clear()
            devices, is_distributed = self._ranks.devices, self._ranks.world.is_distributed
            own = dict(self.named_parameters())
            self._updates.bind(plan, own, devices, is_distributed, self._gather_states, self._owner_ranks)
            self._empty(self._updates.sharded_names)
            self._updates.mark_gradients()
        return self._updates

    def _unshard_parameters(self) -> None:
        """Let parameters that are sharded be whole, before they are divided in another way."""
        self.drain()
        if self._updates is not None:
            self._updates.release(self._group_of)

    @contextlib.contextmanager
    def _unsharded(self) -> Iterator[None]:
        """Let parameters be consistent, and whole, inside a ``with``. Every rank does so together."""
        self.drain()
        if self._updates is None:
            yield
        else:
            with self._updates.gathered(self._group_of):
                yield

    def _group_of(self, rank: int, stage: int) -> CollectiveGroup:
        assert self._trained is not None, "parameters are divided as a program says"
        return self._ranks.transport(rank).group(self._trained.plan.placement[stage])

    def _empty(self, fqns: Collection[str]) -> None:
        """Give back the memory of parameters that are sharded."""
        own = dict(self.named_parameters())
        for fqn in fqns:
            own[fqn].data = own[fqn].new_empty(0)

    def _gather_states(self, own: list[StateShard]) -> list[list[StateShard]]:
        """Every process's part of the optimizer's state, on every process."""
        if not self._ranks.world.is_distributed:
            return [own]
        self._require_same_call("optimizer.state_dict", {})
        leaves, structure = pytree.tree_flatten([(part.piece, part.entries) for part in own])
        found = []
        for rank in range(self._ranks.count):
            activity = "gathering the optimizer's state"
            theirs, shape = self._ranks.agreement.broadcast_pytree(rank, activity, leaves, structure)
            found.append([StateShard(*part) for part in pytree.tree_unflatten(theirs, shape)])
        return found

    def _norm_dtypes(self) -> dict[str, torch.dtype]:
        """The type of the norm of each parameter of the whole model, in the model's order."""
        return {value.name: getattr(torch, value.dtype) for value in self._artifact.plan.parameters}

    def _is_source(self, fqn: str) -> bool:
        """Whether this process is the first that holds a tensor, which then sends it.

        Rank 0 does for tensors that no stage uses.
        """
        return not self._ranks.world.is_distributed or self._source_rank(fqn) == self._ranks.world.rank

    def _source_rank(self, fqn: str) -> int:
        return self._owner_ranks.get(fqn, (0,))[0]

    def _is_held(self, fqn: str) -> bool:
        """Whether this process has a tensor: all do that run a stage that owns it."""
        return not self._ranks.world.is_distributed or self._ranks.world.rank in self._owner_ranks.get(
            fqn, (0,)
        )

    def _require_same_call(
        self,
        kind: str,
        call_description: CallDescription,
        reply_values: Sequence[int] = (),
        call_role: CallRole = CallRole.REQUIRED,
    ) -> list[RankReply]:
        """Check that every rank makes this call, and with the same arguments. Returns the reply of each.

        Raises InputError if they do not, or if this process cannot reach the others.
        """
        self._refuse_fork()
        call = f"{kind}, after {self._steps.num_steps} steps"
        call_description = {"call": call, **call_description}
        mismatch_message = functools.partial(_refusal, remedy=self._batch_mismatch_advice)
        return self._ranks.agreement.require_same_call(
            f"calling {call}", call_description, mismatch_message, reply_values, call_role
        )

    def _refuse_fork(self) -> None:
        """A forked process has neither the threads nor the connections that run the ranks."""
        if os.getpid() != self._process:
            raise InputError(
                "this process is a fork of the one that made the pipeline, and has none of its threads and "
                "connections; call pipec.compile in the process that trains"
            )

    def __reduce__(self) -> Any:
        raise InputError(
            "a pipeline cannot be pickled, nor a loaded one copied: it holds threads and connections. Save "
            "state_dict(), or full_state_dict() under torchrun; or write and load an artifact once more"
        )

    def _warn_if_clipping(self, reader: str) -> None:
        """Warn if torch's function, which knows this process's gradients alone, asks for the parameters."""
        if self._ranks.world.is_distributed and not self._warned and reader == "torch.nn.utils.clip_grad":
            self._warned = True
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...) clips by the norm of this rank's "
                "stages alone; call pipe.clip_grad_norm_(...), which takes the norm of the whole model",
                stacklevel=4,
            )

    def _tensors_by_fqn(self, every_name: bool = False) -> dict[str, Tensor]:
        """The tensors that this process holds, under their first names, or with all names of tied ones."""
        once = not every_name
        return {
            **dict(self.named_parameters(remove_duplicate=once)),
            **dict(self.named_buffers(remove_duplicate=once)),
        }

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give the tensors on the meta device memory on ``device``. Others keep their values, and move there.

        A step refuses tensors that have been given no values by then.
        """
        on_meta = [fqn for fqn, tensor in self._tensors_by_fqn().items() if tensor.is_meta]
        self._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device), recurse)
        self._uninitialized.mark({fqn: x for fqn, x in self._tensors_by_fqn().items() if fqn in on_meta})
        return self

    @exclusive_call
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``to_empty`` and its kin call this. It may replace tensors, so artifacts are linked again."""
        self._unshard_parameters()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._executions.clear()
        return self


METHODS = {
    "call": FUNCTION,
    "max_norm": NUMBER,
    "norm_type": NUMBER,
    "stage": instance("the number of a stage", int),
}
"""What the arguments of the methods must be."""


def _refusal(every: Sequence[CallDescription], remedy: str) -> str:
    """What is wrong if the ranks describe a call so. ``remedy`` is for batches that differ."""
    kind = every[0]["call"].partition(",")[0]
    if len({call_description["call"] for call_description in every}) > 1:
        calls = [{"call": call_description["call"]} for call_description in every]
        return (
            f"the ranks do not make the same calls:\n{describe_differences(calls)}\nEvery rank calls the "
            "methods "
            "of the pipeline in the same order; see that no `if rank == ...` or shorter loop keeps one away"
        )
    if any("batches" in call_description for call_description in every):
        left = [{"batches": call_description.get("batches", "another one")} for call_description in every]
        return (
            f"the ranks' streams do not have the same batches:\n{describe_differences(left)}\nEvery rank "
            "iterates over the same batches, and as many; leave out what gives each rank a part, such as a "
            "DistributedSampler"
        )
    if failed := [rank for rank, call_description in enumerate(every) if "refused" in call_description]:
        return f"{kind} cannot use the arguments of {format_ranks(failed)}:\n{every[failed[0]]['refused']}"
    own = [
        {name: fact for name, fact in call_description.items() if _is_of_optimizer(name)}
        for call_description in every
    ]
    if any(call_description != own[0] for call_description in own):
        return (
            f"the ranks come to {kind} with optimizers that differ:\n{describe_differences(own)}\nEvery rank "
            "makes "
            "the same changes to pipe.optimizer, and the same schedulers step on all of them; where ranks "
            "join, pipe.join(scheduler.step) does so"
        )
    return f"the ranks passed different batches to {kind}:\n{describe_differences(every)}\n{remedy}"


def _is_of_optimizer(name: str) -> bool:
    return name == "accumulates" or name.endswith(" of the optimizer")


def owner_ranks(plan: Plan) -> dict[str, tuple[int, ...]]:
    """By FQN, the ranks that hold a tensor: those of the first stage that has it and does not borrow it.

    A buffer that no forward changes is held by the ranks of every stage that reads it.
    """
    found: dict[str, tuple[int, ...]] = {}
    fixed = read_only_buffers(plan)
    for stage in plan.stages:
        ranks = plan.placement[stage.index]
        for fqn in stage.parameters + stage.buffers:
            if fqn not in stage.borrowed_parameters:
                before = found.setdefault(fqn, ranks)
                found[fqn] = tuple(dict.fromkeys(before + ranks)) if fqn in fixed else before
    return found


def read_only_buffers(plan: Plan) -> set[str]:
    """The buffers that stages read and that none changes."""
    read = {fqn for stage in plan.stages for fqn in stage.buffers}
    return read.difference(*(stage.updated_buffers for stage in plan.stages))


def tensor_devices(plan: Plan, devices: Mapping[int, torch.device]) -> dict[str, torch.device | None]:
    """By FQN, the device of each tensor of the model.

    ``devices`` has the ranks of this process; a tensor that lives in another process has no device here.
    """
    return {
        fqn: next((devices[rank] for rank in ranks if rank in devices), None)
        for fqn, ranks in owner_ranks(plan).items()
    }
