"""The passes of a compilation, top to bottom, and the options they are made with."""

from dataclasses import dataclass

from pipec.cost.profile import Profile
from pipec.hardware.devices import DeviceModel
from pipec.hardware.topology import Topology
from pipec.ir import NOTHING_MORE, Ending
from pipec.passes import Pass
from pipec.passes.add_products import AddProducts
from pipec.passes.add_rows import AddRows
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.call_linear import CallLinear
from pipec.passes.divide_phases import DividePhases
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.join_cross_entropy import JoinCrossEntropy
from pipec.passes.join_slices import JoinSlices
from pipec.passes.mark_offload import MarkOffload
from pipec.passes.mark_recompute import MarkRecompute
from pipec.passes.permute_parts import PermuteParts
from pipec.passes.prepare_weights import PrepareWeights
from pipec.passes.reuse_memory import ReuseMemory
from pipec.passes.simplify import Simplify
from pipec.passes.split_backward import SplitBackward
from pipec.passes.take_apart import TakeApart
from pipec.passes.untie_gradients import UntieGradients
from pipec.plan.updates import OptimizerFacts

NOTHING_AWAY = MarkOffload()


@dataclass(frozen=True)
class CompilerOptions:
    """What code is generated for.

    ``device_model`` describes every device, ``topology`` how they are joined and what each of them holds.
    ``recompute`` is "auto", "none" or "full". If it ``offloads``, saved values may wait in host memory.
    ``profile`` is of the training graph that decides the cut. ``ending`` says whether the programs update,
    clip and shard, and ``optimizer`` what is known of the optimizer that does. ``buffers_anywhere`` says
    whether any stage may hold a buffer; where one process has several devices, it has each buffer on one.
    With ``fast_gradients``, products are added to sums of gradients as they are made, and the gradient of
    cross entropy is made of probabilities.
    """

    device_model: DeviceModel
    topology: Topology
    recompute: str = "auto"
    offloads: bool = False
    profile: Profile | None = None
    ending: Ending = NOTHING_MORE
    optimizer: OptimizerFacts | None = None
    buffers_anywhere: bool = True
    fast_gradients: bool = False

    @property
    def costs(self) -> str:
        """What the seconds of plans are those of."""
        model = f"the device model {self.device_model.name}"
        return f"a profile made on {self.profile.device}, and {model}" if self.profile else model


def passes(
    options: CompilerOptions, cut: Pass, recompute: MarkRecompute, offload: MarkOffload = NOTHING_AWAY
) -> list[Pass]:
    """The compilation of a captured graph. ``cut`` is the pass that gives nodes their stages.

    ``recompute`` marks what is computed again, unless the options say that everything is, and ``offload``
    what waits in host memory.
    """
    return [
        Simplify(),
        JoinSlices(),
        PermuteParts(),
        AnnotateCost(options.device_model, options.profile),
        AddRows(),
        TakeApart(len(options.topology.devices)),
        PrepareWeights(options.buffers_anywhere),
        cut,
        UntieGradients(),
        AddRows(),  # of tied tables, whose gradients are apart now
        *([AddProducts()] if options.fast_gradients else []),
        InsertCommunication(options.topology.slowest_link),
        MarkRecompute(None) if options.recompute == "full" else recompute,
        offload,
        DividePhases(),
        SplitBackward(),
        ReuseMemory(),
        CallLinear(),
        JoinCrossEntropy(exact=not options.fast_gradients),
    ]
