"""The data every part of pipec exchanges: frozen, printable, without algorithms and without torch.

Read it in the order in which data flows: the ``values`` of a cut graph and the links that carry them, the
``plan`` that holds stages and links, the ``schedule`` that says who computes what when, the ``program`` of
instructions that each rank executes, the ``sync_spec`` of what a step does after its microbatches, and
``memory_figures``, what a stage holds. ``columns`` holds long runs of computes and instructions as numbers,
``text_format`` writes programs and quantities down and reads programs back, ``batch_axis`` and
``batch_split`` say how a mini-batch is split, and ``sharding`` how parameters are divided among replicas.
``stream`` says which versions of weights asynchronous schedules use, and ``periodic_program`` how their
programs repeat. ``representative_ranks`` says which ranks stand for others that do the same.
"""

from pipec.ir.memory_figures import MMAP_THRESHOLD_BYTES, RankMemory, SegmentMemory, StageMemory
from pipec.ir.plan import Alternative, HostCost, Plan, ShardingCost, Stage, StageCost
from pipec.ir.program import Instruction, ModelCollective, ModelCollectives, Op, OpKind, OpTraits, Program
from pipec.ir.representative_ranks import RepresentativeRanks
from pipec.ir.schedule import (
    Compute,
    Placement,
    Schedule,
    SegmentCounts,
    count_ranks,
    microbatches_on,
    one_rank_per_stage,
    rank_of,
    replica_counts,
    stages_on,
)
from pipec.ir.sharding import ParameterShard, Sharding
from pipec.ir.stream import Stream, VersionPolicy
from pipec.ir.sync_spec import NO_SYNC, Bucket, NonFiniteAction, ShardingLevel, SyncSpec
from pipec.ir.values import (
    GRADIENT_PHASES,
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
