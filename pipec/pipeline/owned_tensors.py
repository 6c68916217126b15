"""The tensors of a model that is compiled: which of them this process keeps, and how all come together."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipec.capture.model_snapshot import ModelSnapshot, SnapshotCache, modules_of, same_objects, tensors_of
from pipec.compiler.compiler import Compiler
from pipec.console import log
from pipec.errors import InputError, PlanError
from pipec.ir import Plan
from pipec.ir.argument_checks import check_arguments
from pipec.pipeline.method_arguments import METHOD_ARGUMENTS
from pipec.runtime.call_guard import exclusive_call
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_differences,
    format_names,
    format_ranks,
)
from pipec.runtime.model_tensors import (
    EmptiedTensors,
    ModelTensors,
    fill_tensors,
    register_tensors,
    restore_tensors,
    unregister_tensors,
)
from pipec.runtime.pipeline_base import owner_ranks, read_only_buffers, tensor_devices
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.stream_training import StreamTraining


class OwnedTensorsModule(StreamTraining):
    """Holds the very tensors of the compiler's model, and follows where the model is given others.

    Under ``torchrun`` it empties those that are needed in other processes alone.
    """

    def __init__(
        self, compiler: Compiler, tensors: ModelTensors, ranks: Ranks, updates: OptimizerUpdates | None = None
    ) -> None:
        super().__init__(ranks, updates=updates)
        self._compiler = compiler
        self._tensors = tensors
        self._emptied = EmptiedTensors()
        self._mutable_buffers: set[str] = set()
        self._needs_placement = False
        self._snapshots = SnapshotCache(compiler.model)
        self._known_tensors = tensors_of(modules_of(compiler.model))
        self._trainable = tensors.requires_grad_flags()
        self.training = compiler.model.training
        register_tensors(self, tensors)

    @exclusive_call
    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Tensor]:
        """A copy of the whole model's state on the CPU, under its own names. Every rank calls this.

        Under ``torchrun`` rank 0 gets it, and the others get an empty dict; with ``all_ranks``, all get it.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        names = [name for name in self._compiler.model.state_dict(keep_vars=True) if name in self._canonical]
        whole = self._gather("full_state_dict", {self._canonical[name] for name in names}, all_ranks)
        return {name: whole[self._canonical[name]] for name in names if whole}

    @exclusive_call
    def gather_into(self, model: nn.Module, all_ranks: bool = False) -> None:
        """Write the whole model's parameters and buffers into ``model``, on rank 0 or on all ranks.

        Every rank calls this. ``model`` is the one that was compiled, or one of the same structure. The one
        that was compiled has its memory until the next step, which empties it again.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        whole = self._gather("gather_into", set(self._tensors.unique()), all_ranks)
        if whole:
            self._needs_placement = True
            fill_tensors(model, {name: whole[first] for name, first in self._canonical.items()})

    @exclusive_call
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole model's state, or that of this rank's stages, at any time and on any rank.

        What belongs to other ranks' stages is passed over, so every rank loads.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        held = self._tensors_by_fqn(every_name=True)
        own = {name: x for name, x in state_dict.items() if name in held or name not in self._canonical}
        if assign:
            self._unshard_parameters()
        with self._unsharded():
            result = super().load_state_dict(own, strict, assign)
        if assign:
            self._adopt_replaced()
        return result

    @exclusive_call
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of this rank's stages, under the model's names.

        Where parameters are kept in shares, they are gathered and copied: every rank then calls this.
        """
        with self._unsharded():
            state = super().state_dict(*args, **kwargs)
            in_shares = self._updates is not None and self._updates.sharded_names
            return {name: x.detach().clone() for name, x in state.items()} if in_shares else state

    def _place_tensors(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and empty those of other processes."""
        unique = self._tensors.unique()
        there, first = tensor_devices(plan, self._ranks.devices), not self._owner_ranks
        if self._ranks.world.is_distributed and (new := there.keys() - self._owner_ranks.keys()):
            known = {fqn: x for fqn, x in unique.items() if first or fqn in new}
            for rank, names in self._ranks.agreement.broadcast_from_rank_0(known).items():
                differed = f"{len(names)} tensors of rank {rank} differed"
                log(f"pipec: {differed}, and start with rank 0's: {format_names(names)}")
        self._replicate_read_only_buffers(plan)
        self._owner_ranks = owner_ranks(plan) | self._owner_ranks
        elsewhere = {fqn for fqn in unique if fqn in self._owner_ranks and not self._is_held(fqn)}
        if any(unique[fqn].numel() for fqn in elsewhere):
            unregister_tensors(self, [fqn for fqn, first in self._canonical.items() if first in elsewhere])
            self._empty(elsewhere)
        if self._updates is not None:
            if not self._needs_placement:
                self._updates.follow_script()
            self._empty(self._updates.sharded_names)
        for fqn, home in there.items():
            tensor = unique.get(fqn)
            if tensor is not None and home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)

    def _replicate_read_only_buffers(self, plan: Plan) -> None:
        """Give buffers that no forward changes to ranks that read them in this plan, and did not before.

        Raises:
            PlanError: a forward changes a buffer that other ranks hold, too.
        """
        if not self._ranks.world.is_distributed:
            return
        found = owner_ranks(plan)
        self._mutable_buffers.update(*(stage.updated_buffers for stage in plan.stages))
        for fqn in self._mutable_buffers & found.keys() & self._owner_ranks.keys():
            if {*self._owner_ranks[fqn]} != {*found[fqn]}:
                raise PlanError(
                    f"forward() changes buffer {fqn} on {format_ranks(found[fqn])}, and another call reads "
                    "it "
                    f"on {format_ranks(self._owner_ranks[fqn])}: the stages were cut for a call that does "
                    "not change it. Make the call that does first, or prepare() it."
                )
        unique = self._tensors.unique()
        fixed = (read_only_buffers(plan) - self._mutable_buffers) & unique.keys() & self._owner_ranks.keys()
        for fqn in sorted(fixed):
            lacking = tuple(rank for rank in found[fqn] if rank not in self._owner_ranks[fqn])
            if lacking:
                self._bring(fqn, unique[fqn], lacking)
            self._owner_ranks[fqn] += lacking

    def _bring(self, fqn: str, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Let these ranks hold a tensor that others hold already."""
        shape = self._emptied.shape(fqn, tensor)
        given = tensor if self._is_source(fqn) else torch.empty(shape, dtype=tensor.dtype)
        found = self._ranks.agreement.broadcast_tensor(
            self._source_rank(fqn), f"taking over {fqn}", given, ranks
        )
        if self._ranks.world.rank in ranks:
            tensor.data = found
            self._emptied.layouts.pop(fqn)
            register_tensors(
                self, self._tensors.select([name for name, first in self._canonical.items() if first == fqn])
            )

    def _empty(self, fqns: Collection[str]) -> None:
        unique = self._tensors.unique()
        self._emptied.empty({fqn: unique[fqn] for fqn in fqns})

    def _gather(self, method: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        """Copies on the CPU of the tensors of all ranks, on rank 0 or on all ranks; elsewhere nothing."""
        if self._ranks.world.is_distributed:
            self._require_same_call(f"{method}(all_ranks={all_ranks})", {})
        with self._unsharded():
            return self._collected(names, all_ranks)

    def _collected(self, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        unique = {fqn: tensor.detach() for fqn, tensor in self._tensors.unique().items() if fqn in names}
        if not self._ranks.world.is_distributed:
            return {fqn: tensor.to("cpu", copy=True) for fqn, tensor in unique.items()}
        readers = range(self._ranks.count) if all_ranks else [0]
        reads, whole = self._ranks.world.rank in readers, {}
        for fqn, tensor in unique.items():
            owner = self._source_rank(fqn)
            shape = self._emptied.shape(fqn, tensor)
            given = tensor if self._is_source(fqn) else torch.empty(shape, dtype=tensor.dtype)
            to = [rank for rank in readers if rank != owner]
            found = self._ranks.agreement.broadcast_tensor(owner, f"gathering {fqn}", given, to)
            if reads:
                whole[fqn] = found.to("cpu", copy=True) if found is given else found
        return whole

    def _replaced_names(self, snapshot: ModelSnapshot) -> list[str]:
        """The names under which the model has other tensors than the pipeline, or has some no longer."""
        if same_objects(snapshot.tensors, self._known_tensors):
            return []
        return self._tensors.names_differing(ModelTensors.of(self._compiler.model))

    def _adopt_model_changes(self, snapshot: ModelSnapshot) -> bool:
        """Hold the tensors that the model has now, where it was given others. Returns whether it was."""
        names = self._replaced_names(snapshot)
        if names:
            model = ModelTensors.of(self._compiler.model)
            model.refuse_shared_memory()
            self._require_optimized(model, names)
            self._unshard_parameters()
            log(
                "pipec: the model has other tensors than before, which are trained now: "
                f"{format_names(names)}"
            )
            unregister_tensors(self, names)
            register_tensors(self, model.select(names))
            for fqn in names:
                self._owner_ranks.pop(fqn, None)
                self._emptied.layouts.pop(fqn, None)
            self._adopt(model)
            self._trainable = model.requires_grad_flags()
        return bool(names)

    def _require_optimized(self, model: ModelTensors, names: Sequence[str]) -> None:
        """Refuse parameters that the optimizer was not made of, and which it would not train."""
        if self._updates is None:
            return
        known, found = self._updates.shapes, model.unique_parameters()
        strange = [
            *(known.keys() ^ found.keys()),
            *(fqn for fqn in known.keys() & found.keys() & set(names) if found[fqn].shape != known[fqn]),
        ]
        if strange:
            raise InputError(
                "the model has other parameters than its optimizer was made of: "
                f"{format_names(sorted(strange))} "
                "came, went or changed in shape; call pipec.compile(...) for the model as it is now"
            )

    def _agree_on_trained(self, every: Sequence[int]) -> bool:
        """Switch requires_grad everywhere if all ranks that hold a parameter have; whether any was switched.

        Raises:
            InputError: some of them have, or only ranks that do not hold it. Every rank raises it.
        """
        if all(found == hash(self._trainable) for found in every):
            return False
        flags = self._ranks.agreement.all_gather_flags(self._tensors.requires_grad_flags())
        trains, every_rank = list[bool](), range(len(flags))
        facts: list[CallDescription] = [{} for _ in flags]
        for fqn, before, *found in zip(self._tensors.parameters, self._trainable, *flags, strict=True):
            owner_ranks = self._owner_ranks.get(self._canonical[fqn], every_rank)
            trains.append(found[owner_ranks[0]])
            if len({found[rank] for rank in (every_rank if trains[-1] == before else owner_ranks)}) > 1:
                for fact, flag in zip(facts, found, strict=True):
                    fact[fqn] = "trained" if flag else "frozen"
        if any(facts):
            raise InputError(
                f"the ranks do not freeze the same parameters:\n{describe_differences(facts)}\nEvery rank "
                "that holds "
                "one sets its requires_grad alike; see that no `if rank == ...` keeps a rank from it"
            )
        self._trainable = tuple(trains)
        self._tensors.set_requires_grad(self._trainable)
        return True

    def _adopt(self, tensors: ModelTensors) -> None:
        """Work on these tensors from now on, which the model and the pipeline have."""
        self._tensors, self._compiler.canonical = tensors, tensors.canonical
        self._known_tensors = tensors_of(modules_of(self._compiler.model))
        self._needs_placement = True
        self._executions.clear()

    def _adopt_replaced(self) -> None:
        """Where tensors were replaced by others, let the names of a tied one and the model have those too."""
        held = self._tensors_by_fqn(every_name=True)
        own = {fqn: held[first] for fqn, first in self._canonical.items() if first in held}
        for module in (self, self._compiler.model):
            restore_tensors(module, own)
        self._adopt(self._tensors.with_replaced(own))

    @exclusive_call
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``half`` and its kin call this. A tensor that ``to`` moves returns to its stage's device."""
        super()._apply(fn, recurse)
        self._emptied.convert(self._tensors.unique(), fn)
        self._adopt_replaced()
        return self

    @property
    def _canonical(self) -> dict[str, str]:
        return self._tensors.canonical

    def _norm_dtypes(self) -> dict[str, torch.dtype]:
        parameters = self._tensors.parameters.items()
        return {fqn: x.dtype.to_real() for fqn, x in parameters if self._canonical[fqn] == fqn}
