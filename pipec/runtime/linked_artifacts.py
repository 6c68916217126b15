"""The artifacts of a pipeline, linked to its tensors, and the optimizer bound to the parameters."""

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import cast

from torch import Tensor, nn

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import Plan
from pipec.runtime.absent_tensors import refuse_unread, release_sharded
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.model_tensors import UninitializedTensors
from pipec.runtime.optimizers import StateShard
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.torch_compat import pytree


class LinkedArtifacts:
    """Links an artifact at its first call, and again after tensors were replaced or sharded in another way.

    The tensors are those of ``module`` that no other process holds. ``uninitialized`` has those to which
    nothing was written yet.
    """

    def __init__(self, module: nn.Module, context: PipelineContext) -> None:
        self._module = cast(nn.Module, weakref.proxy(module))  # the module owns this object
        self._context = context
        self._executions: dict[tuple[Artifact, bool], Execution] = {}
        self.uninitialized = UninitializedTensors()

    def execution(self, artifact: Artifact) -> Execution:
        """The artifact linked to the tensors.

        Raises:
            InputError: a tensor has no values; or the artifact updates weights, and there is no optimizer.
        """
        self._context.refuse_fork()
        if not self._is_linked(artifact):
            tensors = self.tensors()
            _refuse_meta(tensors)
            self.uninitialized.refuse(tensors, artifact.plan)
        updates = self._bound_updates(artifact.plan)
        key = artifact, updates is not None
        if key not in self._executions:
            tensors = self.tensors()
            self._executions[key] = Execution(artifact, tensors, tensors, self._context.ranks, updates)
        return self._executions[key]

    def _is_linked(self, artifact: Artifact) -> bool:
        return any((artifact, updates) in self._executions for updates in (False, True))

    def tensors(self, every_name: bool = False) -> dict[str, Tensor]:
        """The tensors of this process under their first names, or under all names of tied ones."""
        is_elsewhere = self._context.owners.is_elsewhere
        own = {fqn: x for fqn, x in self.all_tensors().items() if not is_elsewhere(fqn)}
        if not every_name:
            return own
        ids = set(map(id, own.values()))
        return {fqn: x for fqn, x in self.all_tensors(every_name=True).items() if id(x) in ids}

    def all_tensors(self, every_name: bool = False) -> dict[str, Tensor]:
        """The same with those that are absent."""
        once = not every_name
        return {
            **dict(self._module.named_parameters(remove_duplicate=once)),
            **dict(self._module.named_buffers(remove_duplicate=once)),
        }

    def require_values(self) -> None:
        """Raise InputError if values are in files still, which is so on all ranks or on none."""
        for tensor in self.all_tensors().values():
            refuse_unread(tensor)

    def keep(self, artifacts: Collection[Artifact]) -> None:
        """Unlink all other artifacts."""
        self._executions = {key: x for key, x in self._executions.items() if key[0] in artifacts}

    def clear(self) -> None:
        """Unlink all artifacts, because the tensors are replaced."""
        self._executions.clear()

    def unshard(self) -> None:
        """Gather sharded parameters, before they are sharded in another way or replaced."""
        self._context.drain()
        if self._context.updates is not None:
            self._context.updates.release(self._group_of)

    @contextlib.contextmanager
    def unsharded(self, plans: Sequence[Plan] = ()) -> Iterator[None]:
        """Gather sharded parameters inside a ``with``, unless the programs of ``plans`` do so.

        All ranks do so together.
        """
        self._context.drain()
        updates = self._context.updates
        if updates is None or (plans and all(map(updates.has_sharded, plans))):
            yield
        else:
            with updates.gathered(self._group_of):
                yield

    def _bound_updates(self, plan: Plan) -> OptimizerUpdates | None:
        """The optimizer, bound to the parameters as the plan shards them; None if it needs none."""
        updates, context = self._context.updates, self._context
        if not plan.sync_spec.updates:
            gathers = plan.sync_spec.only_gathers and updates is not None and updates.has_sharded(plan)
            return updates if gathers else None
        if updates is None:
            raise InputError("the program updates its weights, and so needs an optimizer: pass optimizer=...")
        if not updates.is_bound_to(plan):
            self.unshard()
            self._executions.clear()
            own = dict(self._module.named_parameters())
            devices, owners = context.ranks.devices, context.owners.ranks
            updates.bind(plan, own, devices, context.is_distributed, self.gather_states, owners)
            for fqn in updates.sharded_names:
                release_sharded(fqn, own[fqn])
            updates.mark_gradients()
        return updates

    def _group_of(self, rank: int, stage: int) -> CollectiveGroup:
        placement = self._context.artifact.plan.placement
        return self._context.ranks.transport(rank).group(placement[stage])

    def gather_states(self, own: list[StateShard]) -> list[list[StateShard]]:
        """The shards of the optimizer's state of every process, on every process."""
        context = self._context
        if not context.is_distributed:
            return [own]
        context.require_same_call("optimizer.state_dict", {})
        leaves, structure = pytree.tree_flatten([(shard.piece, shard.entries) for shard in own])
        gathered = []
        for rank in range(context.ranks.count):
            activity = "gathering the optimizer's state"
            theirs, shape = context.ranks.agreement.broadcast_pytree(rank, activity, leaves, structure)
            gathered.append([StateShard(*shard) for shard in pytree.tree_unflatten(theirs, shape)])
        return gathered


def _refuse_meta(tensors: dict[str, Tensor]) -> None:
    if meta := [fqn for fqn, tensor in tensors.items() if tensor.is_meta]:
        raise InputError(
            f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and hold no values. "
            "Call to_empty(device=...) and then load_state_dict(...) on the pipeline; or save the "
            "artifact with tensors=True"
        )
