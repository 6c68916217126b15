"""The passes of a compilation in order, and their options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipec.cost.profile import Profile
from pipec.hardware.devices import DeviceModel
from pipec.hardware.topology import Topology
from pipec.ir import NO_SYNC, SyncSpec
from pipec.passes import Pass
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.extract_tail import ExtractTail
from pipec.passes.fuse_cross_entropy import FuseCrossEntropy
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.make_row_sparse_gradients import MakeRowSparseGradients
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.precompute_weights import PrecomputeWeights
from pipec.passes.reuse_memory import ReuseMemory
from pipec.passes.simplify import Simplify
from pipec.passes.split_at_collectives import SplitAtCollectives
from pipec.passes.split_backward import SplitBackward
from pipec.passes.split_operators import SplitOperators
from pipec.passes.untie_gradients import UntieGradients
from pipec.plan.optimizer_cost import OptimizerProperties

NO_OFFLOAD = MarkOffload()


@dataclass(frozen=True)
class CompilerOptions:
    """The target of a compilation, and what its passes may do.

    ``device_model`` describes every device, ``topology`` their links and memory. ``recompute`` is "auto",
    "none" or "full". With ``may_offload``, saved values may be copied to host memory. ``profile`` holds
    measured costs of the training graph that decides the cut. ``sync_spec`` says whether the programs update,
    clip and shard, and ``optimizer`` what its updates cost. ``buffers_on_any_stage`` is False if one process
    has several devices and each buffer is on one of them. With ``between_modules``, no cut is inside of a
    module that has operators of its own. ``recorded`` holds the options of ``compile`` that an artifact
    records.
    """

    device_model: DeviceModel
    topology: Topology
    recompute: str = "auto"
    may_offload: bool = False
    profile: Profile | None = None
    sync_spec: SyncSpec = NO_SYNC
    optimizer: OptimizerProperties | None = None
    buffers_on_any_stage: bool = True
    between_modules: bool = False
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cost_source(self) -> str:
        """The source of predicted seconds, as text."""
        model = f"the device model {self.device_model.name}"
        return f"a profile made on {self.profile.device}, and {model}" if self.profile else model


def make_passes(
    options: CompilerOptions, cut: Pass, recompute: MarkRecompute, offload: MarkOffload = NO_OFFLOAD
) -> list[Pass]:
    """The passes that compile a captured graph. ``cut`` assigns stages to nodes.

    ``recompute`` marks the values to recompute, unless the options recompute everything; ``offload`` marks
    those to copy to host memory.
    """
    return [
        Simplify(),
        MergeSliceGradients(),
        AnnotateCost(options.device_model, options.profile),
        ExtractTail(),
        MakeRowSparseGradients(),
        SplitOperators(len(options.topology.devices)),
        PrecomputeWeights(options.buffers_on_any_stage),
        cut,
        UntieGradients(),
        MakeRowSparseGradients(),  # of tied tables, whose gradients are separate now
        InsertCommunication(),
        MarkRecompute(None) if options.recompute == "full" else recompute,
        offload,
        SplitAtCollectives(),
        SplitBackward(),
        ReuseMemory(),
        FuseCrossEntropy(),
    ]
