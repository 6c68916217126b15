"""The data that all parts of pipec exchange: frozen, printable, without algorithms and without torch.

Read it in the order in which data flows: the ``values`` of a cut graph and the links that carry them, the
``plan`` with stages and links, the ``schedule`` of computes on each rank, the ``program`` of instructions
that each rank executes, the ``sync_spec`` of reductions and updates after the microbatches, and
``memory_figures``, the memory of a stage. ``columns`` stores long sequences of computes and instructions as
numbers, ``text_format`` formats programs and quantities and parses programs, ``batch_axis`` and
``batch_split`` define how a mini-batch is split, and ``sharding`` how parameters are divided among replicas.
``stream`` defines the weight versions of asynchronous schedules, and ``periodic_program`` how their programs
repeat. ``step_parts`` takes a step apart into its microbatches and its update.
"""

from pipec.ir.memory_figures import MMAP_THRESHOLD_BYTES, RankMemory, SegmentMemory, StageMemory
from pipec.ir.plan import Alternative, HostCost, Plan, ShardingCost, Stage, StageCost, Tail, TrainedOutput
from pipec.ir.program import (
    WAIT_OF,
    Instruction,
    ModelCollective,
    ModelCollectives,
    Op,
    OpKind,
    OpTraits,
    Program,
)
from pipec.ir.schedule import (
    Compute,
    Placement,
    RepresentativeRanks,
    Schedule,
    SegmentCounts,
    count_ranks,
    microbatches_on,
    one_rank_per_stage,
    rank_of,
    replica_counts,
    result_ranks,
    stages_on,
)
from pipec.ir.sharding import ParameterShard, Sharding
from pipec.ir.step_parts import plan_part, program_part
from pipec.ir.stream import Stream, VersionPolicy
from pipec.ir.sync_spec import NO_SYNC, Bucket, NonFiniteAction, ShardingLevel, StepPart, SyncSpec
from pipec.ir.values import (
    GRADIENT_PHASES,
    SCHEDULED_PHASES,
    Dim,
    InputLeaf,
    Link,
    Mode,
    Payload,
    Phase,
    Precision,
    Sizes,
    Value,
    Variable,
    function_names,
)
