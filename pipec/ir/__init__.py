"""The data every part of pipec exchanges: frozen, printable, without algorithms and without torch.

Read it in the order in which data flows: the ``values`` of a cut graph and the links that carry them, the
``plan`` that holds stages and links, the ``schedule`` that says who computes what when, the ``program`` of
instructions that each rank executes, ``ending``, what it does besides microbatches, and ``memory``, what a
stage holds meanwhile. ``columns`` holds long runs of cells and instructions as numbers, ``text`` writes
programs and quantities down and reads programs back, ``batch`` says how a mini-batch is split, and
``sharding`` how parameters are divided among replicas. ``stream`` says which versions of weights are used
where mini-batches follow each other without a flush, and ``rounds`` what the programs of these are. ``alike``
says which ranks stand for others that do the same.
"""

from pipec.ir.alike import Alike
from pipec.ir.ending import NOTHING_MORE, Bucket, Ending, OnNan, Shard
from pipec.ir.memory import MAPPED_BYTES, PartMemory, RankMemory, StageMemory
from pipec.ir.plan import Alternative, HostCost, Plan, ShardCost, Stage, StageCost
from pipec.ir.program import Instruction, Join, Joins, Kind, Op, Program, Traits
from pipec.ir.schedule import (
    Compute,
    Parts,
    Placement,
    Schedule,
    count_ranks,
    microbatches_on,
    rank_of,
    replicas_of,
    stages_on,
    unreplicated,
)
from pipec.ir.sharding import Piece, Sharding
from pipec.ir.stream import Stream, Versions
from pipec.ir.values import (
    GRADIENT_PHASES,
    Dim,
    Input,
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
