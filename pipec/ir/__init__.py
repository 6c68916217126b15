"""The data every part of pipec exchanges: frozen, printable, without algorithms and without torch.

Read it in the order in which data flows: the ``values`` of a cut graph and the links that carry them, the
``plan`` that holds stages and links, the ``schedule`` that says who computes what when, the ``program`` of
instructions that each rank executes, ``sync_spec``, what it does besides microbatches, and ``memory``, what a
stage holds meanwhile. ``columns`` holds long runs of cells and instructions as numbers, ``text`` writes
programs and quantities down and reads programs back, ``batch`` says how a mini-batch is split, and
``sharding`` how parameters are divided among replicas. ``stream`` says which versions of weights are used
where mini-batches follow each other without a flush, and ``rounds`` what the programs of these are. ``alike``
says which ranks stand for others that do the same.
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
