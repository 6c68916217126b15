"""The tensors of a compiled model: which of them this process keeps, and how they are gathered."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from pipec.checkpoint import PretrainedWeights
from pipec.checkpoint.all_ranks import call_on_all_ranks
from pipec.compiler.compiler import Compiler
from pipec.console import notice
from pipec.errors import CheckpointError, InputError, PlanError
from pipec.graph import ModelSnapshot, same_objects
from pipec.ir import Plan
from pipec.runtime.absent_tensors import hold, is_absent, is_unread, release_elsewhere, release_sharded
from pipec.runtime.linked_artifacts import LinkedArtifacts
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_differences,
    format_names,
    format_ranks,
    sampled_digest,
)
from pipec.runtime.model_tensors import ModelTensors, restore_tensors
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.tensor_owners import owner_ranks, read_only_buffers, tensor_devices


class OwnedTensors:
    """The tensors of the compiler's model.

    It follows where the model is given others. Under ``torchrun`` it frees the memory of tensors that only
    other processes need.
    """

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        context: PipelineContext,
        linked: LinkedArtifacts,
        weights: PretrainedWeights | None = None,
    ) -> None:
        self._compiler, self.tensors = compiler, tensors
        self._context, self._ranks, self._linked = context, context.ranks, linked
        self._owners = context.owners
        self.weights = weights
        self.require_values = linked.require_values
        self._mutable_buffers: set[str] = set()
        self.needs_placement = False
        self._snapshot = ModelSnapshot(compiler.model)
        self._known_tensors = self._snapshot.tensors
        self._trainable = tensors.requires_grad_flags()

    @property
    def canonical(self) -> dict[str, str]:
        """The first name of each tensor, by each of its names."""
        return self.tensors.canonical

    @property
    def trainable(self) -> tuple[bool, ...]:
        """The requires_grad flag of each parameter, on which the ranks agreed last."""
        return self._trainable

    def snapshot(self) -> ModelSnapshot:
        """The model as it is now."""
        self._snapshot = self._snapshot.current()
        return self._snapshot

    def copy_to(self, other: "OwnedTensors") -> None:
        """Let ``other``, which owns a copy of the model, know what this one knows of its tensors."""
        marked = self._linked.uninitialized.marked
        other._linked.uninitialized.marked = {
            fqn: (tensor, tensor._version) for fqn, tensor in other.tensors.unique().items() if fqn in marked
        }
        other._owners.ranks = dict(self._owners.ranks)
        other._mutable_buffers = set(self._mutable_buffers)

    def place(self, plan: Plan) -> None:
        """Move each tensor to the device of the stage that owns it, and release those of other processes."""
        unique = self.tensors.unique()
        there, first = tensor_devices(plan, self._ranks.devices), not self._owners.ranks
        if first and self._context.is_distributed:
            self._refuse_tensors_elsewhere(owner_ranks(plan))
        if self._context.is_distributed and (new := there.keys() - self._owners.ranks.keys()):
            converted = self._keep_owners(sorted(new & unique.keys())) if not first else set[str]()
            known = {
                fqn: x for fqn, x in unique.items() if (first or fqn in new - converted) and not is_unread(x)
            }
            for rank, names in self._ranks.agreement.broadcast_from_rank_0(known, owner_ranks(plan)).items():
                differed = f"{len(names)} tensors of rank {rank} differed"
                notice(f"{differed}, and start with rank 0's: {format_names(names)}")
        self._replicate_read_only_buffers(plan)
        self._owners.ranks = owner_ranks(plan) | self._owners.ranks
        for fqn in filter(self._owners.is_elsewhere, unique):
            release_elsewhere(fqn, unique[fqn], f"on {format_ranks(self._owners.ranks[fqn])}")
        if self.weights is not None:
            self._read_weights(self.weights, there)
        if self._context.updates is not None:
            if not self.needs_placement:
                self._context.updates.follow_script()
            for fqn in self._context.updates.sharded_names:
                release_sharded(fqn, cast(nn.Parameter, unique[fqn]))
        for fqn, home in there.items():
            tensor = unique.get(fqn)
            if tensor is None or is_absent(tensor):
                continue
            if home is not None and tensor.device != home and not tensor.is_meta:
                tensor.data = tensor.data.to(home)

    def _refuse_tensors_elsewhere(self, needed: Mapping[str, Sequence[int]]) -> None:
        """Refuse tensors that another pipeline has left on other ranks than this one needs, on all ranks."""
        unique = {fqn: x for fqn, x in self.tensors.unique().items() if not is_unread(x)}
        every = self._ranks.agreement.all_gather_flags([is_absent(x) for x in unique.values()])
        for fqn, *absent in zip(unique, *every, strict=True):
            if any(absent[rank] for rank in needed.get(fqn, ())):
                held = tuple(rank for rank, gone in enumerate(absent) if not gone)
                raise InputError(
                    f"{fqn} belongs to another pipeline, too, whose stages have it on "
                    f"{format_ranks(held)}, but the stages of this one need it on "
                    f"{format_ranks(needed[fqn])}. Make one pipeline of both: of a module that has the two "
                    "models, and whose forward is told by an argument which one to call; all its calls run "
                    "on the same stages"
                )

    def _read_weights(self, weights: PretrainedWeights, devices: Mapping[str, torch.device | None]) -> None:
        """Read the tensors of this process that are in files still. All processes do so together."""
        unread = {fqn: x for fqn, x in self.tensors.unique().items() if is_unread(x)}
        stored = {fqn: name for name, fqn in self.canonical.items() if fqn in unread and weights.has(name)}
        names = {name: fqn for fqn, name in stored.items()}
        cpu = torch.device("cpu")
        homes = {name: devices.get(fqn) or cpu for name, fqn in names.items()}

        def read() -> dict[str, str]:
            digests = {}
            for name, values in weights.read(homes):
                tensor = unread[names[name]]
                hold(tensor, values.to(tensor.dtype))  # the script may have called pipe.to(dtype)
                digests[names[name]] = sampled_digest(values)
            return digests

        found: dict[str, str] = {}
        for rank, digests in enumerate(call_on_all_ranks(self._ranks, f"reading {weights.name}", read)):
            for fqn, digest in digests.items():
                if found.setdefault(fqn, digest) != digest:
                    raise CheckpointError(
                        f"{weights.name}: rank {rank} has read other values of {fqn} than a rank before it; "
                        "let every rank see the same files"
                    )

    def _keep_owners(self, names: Sequence[str]) -> set[str]:
        """Those of these new tensors that are absent on some ranks: the others own them still.

        The model has converted them itself, as ``model.double()`` does with buffers.
        """
        unique = self.tensors.unique()
        every = self._ranks.agreement.all_gather_flags([is_absent(unique[fqn]) for fqn in names])
        owners = {
            fqn: tuple(rank for rank, gone in enumerate(absent) if not gone)
            for fqn, *absent in zip(names, *every, strict=True)
            if any(absent)
        }
        self._owners.ranks |= owners
        return {*owners}

    def _replicate_read_only_buffers(self, plan: Plan) -> None:
        """Give buffers that no forward changes to ranks that read them in this plan, and did not before.

        Raises:
            PlanError: a forward changes a buffer that other ranks hold, too.
        """
        if not self._context.is_distributed:
            return
        found = owner_ranks(plan)
        self._mutable_buffers.update(*(stage.updated_buffers for stage in plan.stages))
        for fqn in self._mutable_buffers & found.keys() & self._owners.ranks.keys():
            if {*self._owners.ranks[fqn]} != {*found[fqn]}:
                raise PlanError(
                    f"forward() changes buffer {fqn} on {format_ranks(found[fqn])}, and another call reads "
                    "it "
                    f"on {format_ranks(self._owners.ranks[fqn])}: the stages were cut for a call that does "
                    "not change it. Make the call that does first, or prepare() it."
                )
        unique = self.tensors.unique()
        fixed = (read_only_buffers(plan) - self._mutable_buffers) & unique.keys() & self._owners.ranks.keys()
        for fqn in sorted(fixed):
            lacking = tuple(rank for rank in found[fqn] if rank not in self._owners.ranks[fqn])
            if lacking:
                self._receive_buffer(fqn, unique[fqn], lacking)
            self._owners.ranks[fqn] += lacking

    def _receive_buffer(self, fqn: str, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Send a buffer from the rank that holds it to ``ranks``, which hold it from now on."""
        found = self._owners.broadcast(f"taking over {fqn}", fqn, tensor, self._ranks.agreement, ranks)
        if self._ranks.world.rank in ranks:
            hold(tensor, found)

    def replaced_names(self, snapshot: ModelSnapshot) -> list[str]:
        """The names whose tensors the model has replaced, added or removed."""
        if same_objects(snapshot.tensors, self._known_tensors):
            return []
        return self.tensors.names_differing(ModelTensors.of(self._compiler.model))

    def adopt_model_changes(self, snapshot: ModelSnapshot) -> bool:
        """Take over tensors that the model was given. Returns whether there are any."""
        names = self.replaced_names(snapshot)
        if names:
            model = ModelTensors.of(self._compiler.model)
            model.refuse_shared_memory()
            self._require_optimized(model, names)
            self._linked.unshard()
            notice(f"the model has other tensors than before, which are trained now: {format_names(names)}")
            for fqn in names:
                self._owners.ranks.pop(fqn, None)
            self._adopt(model)
            self._trainable = model.requires_grad_flags()
        return bool(names)

    def _require_optimized(self, model: ModelTensors, names: Sequence[str]) -> None:
        """Raise InputError for parameters that the optimizer does not have, and would not train."""
        if self._context.updates is None:
            return
        known, found = self._context.updates.shapes, model.unique_parameters()
        unknown = [
            *(known.keys() ^ found.keys()),
            *(fqn for fqn in known.keys() & found.keys() & set(names) if found[fqn].shape != known[fqn]),
        ]
        if unknown:
            raise InputError(
                "the model has other parameters than its optimizer was made of: "
                f"{format_names(sorted(unknown))} "
                "came, went or changed in shape; call pipec.compile(...) for the model as it is now"
            )

    def agree_on_trained(self, every: Sequence[int]) -> bool:
        """Follow changes of requires_grad on all ranks that hold the parameter. Returns whether any changed.

        Args:
            every: the hash of each rank's flags.

        Raises:
            InputError: only some of these ranks changed it, or only ranks that do not hold the parameter.
                Every rank raises it.
        """
        if all(each == hash(self._trainable) for each in every):
            return False
        flags = self._ranks.agreement.all_gather_flags(self.tensors.requires_grad_flags())
        trains, every_rank = list[bool](), range(len(flags))
        differing: list[CallDescription] = [{} for _ in flags]
        for fqn, before, *found in zip(self.tensors.parameters, self._trainable, *flags, strict=True):
            owner_ranks = self._owners.ranks.get(self.canonical[fqn], every_rank)
            trains.append(found[owner_ranks[0]])
            if len({found[rank] for rank in (every_rank if trains[-1] == before else owner_ranks)}) > 1:
                for own, flag in zip(differing, found, strict=True):
                    own[fqn] = "trained" if flag else "frozen"
        if any(differing):
            raise InputError(
                f"the ranks do not freeze the same parameters:\n{describe_differences(differing)}\n"
                "Every rank that holds one sets its requires_grad alike; see that no `if rank == ...` keeps "
                "a rank from it"
            )
        self._trainable = tuple(trains)
        self.tensors.set_requires_grad(self._trainable)
        return True

    def _adopt(self, tensors: ModelTensors) -> None:
        """Own these tensors from now on, which are those of the model."""
        self.tensors, self._compiler.canonical = tensors, tensors.canonical
        self._known_tensors = self.snapshot().tensors
        self.needs_placement = True
        self._linked.clear()

    def adopt_replaced(self) -> None:
        """Give tensors that were replaced in the module to the model too, and to all names of tied ones."""
        registered = self._linked.all_tensors(every_name=True)
        own = {fqn: registered[first] for fqn, first in self.canonical.items()}
        restore_tensors(self._compiler.model, own)
        self._adopt(self.tensors.with_replaced(own))
