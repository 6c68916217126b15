"""The plan of a step: its stages with their costs, the links between them, and what else was considered."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipec.ir.batch_axis import BatchAxis
from pipec.ir.memory_figures import StageMemory
from pipec.ir.program import ModelCollective, ModelCollectives
from pipec.ir.schedule import Placement, SegmentCounts, count_ranks, microbatches_on
from pipec.ir.sync_spec import NO_SYNC, ShardingLevel, SyncSpec
from pipec.ir.values import InputLeaf, Link, Mode, Phase, Sizes, Value, Variable, function_names


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage takes for one microbatch: seconds by phase, FLOPs, and bytes of memory.

    ``update_seconds`` is what an update of its parameters takes, once a step, and ``copy_seconds`` what a
    microbatch's offload takes, or its prefetch.
    """

    seconds: Mapping[Phase, float] = field(default_factory=dict)
    flops: float = 0.0
    memory: StageMemory = field(default_factory=StageMemory)
    update_seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive forward operators ``first_operator .. last_operator`` and everything they caused.

    ``parameters`` are the FQNs of ``w`` in the generated code, in order; ``borrowed_parameters`` is the
    subset owned by another stage (tied weights). ``updated_buffers`` is the subset of ``buffers`` that the
    forward replaces (BatchNorm statistics). ``batch_counts`` names what the stage's function of that name
    computes of the whole mini-batch, once a step; ``batch_count_sums`` are those that add up over its rows.
    ``segments`` has the phases that consist of several functions, with the fraction of the phase's seconds
    that each of them takes. ``model_collectives`` run between them. With ``recompute`` a phase computes some
    of the forward again; with ``recomputes_in_backward`` the backward does. ``offloaded`` are the positions,
    in what its forward saves, of the values that wait in host memory for the backward.
    """

    index: int
    first_operator: int
    last_operator: int
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    borrowed_parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updated_buffers: tuple[str, ...] = ()
    batch_counts: tuple[str, ...] = ()
    batch_count_sums: tuple[Value, ...] = ()
    recompute: bool = False
    recomputes_in_backward: bool = False
    offloaded: tuple[int, ...] = ()
    segments: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)
    model_collectives: tuple[ModelCollective, ...] = ()
    cost: StageCost = StageCost()

    @property
    def has_recompute(self) -> bool:
        """Whether a part of the forward is computed again."""
        return self.recompute or self.recomputes_in_backward

    def functions(self, phase: Phase) -> tuple[str, ...]:
        """The names of the generated functions that a phase consists of, in the order in which they run."""
        return function_names(phase, len(self.segments.get(phase, (1.0,))))


@dataclass(frozen=True, slots=True)
class HostCost:
    """What a rank's host takes besides stage functions and messages, in which its device has nothing to do.

    That is ``call_seconds`` for every compute of a program, to fetch arguments, keep what comes of it and
    post its messages, and ``step_seconds`` before the first instruction, to check and compare what the step
    was given.
    """

    call_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the step that was considered, and why it was not taken.

    ``replicas[k]`` is the number of ranks of stage k, which take the ``num_microbatches`` in turn.
    ``seconds`` is the predicted time of the step. ``peak_bytes`` is the predicted peak memory of the rank
    that needs most.
    """

    schedule: str
    replicas: tuple[int, ...]
    num_microbatches: int
    seconds: float
    peak_bytes: float
    rejection_reason: str

    @property
    def num_stages(self) -> int:
        return len(self.replicas)


@dataclass(frozen=True, slots=True)
class ShardingCost:
    """The same step with another level of sharding, or with none: what it would hold and take.

    ``peak_bytes`` are those of the rank that needs most. ``collective_seconds`` are how long sums of
    gradients and gatherings of parameters take together on the rank that spends most on them; some of that
    overlaps computes. ``seconds`` is the predicted time of the step.
    """

    shard: ShardingLevel | None
    peak_bytes: float
    collective_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before code is generated. ``placement`` says which rank runs each stage.

    ``outputs`` names the results in the order of the leaves of what the model returns; ``summed_outputs`` are
    those that add up over microbatches; ``log_names`` are the names that the loss function gave to those
    after the loss; ``arguments`` names all leaves of ``step``'s arguments, of which ``inputs`` are those that
    a stage reads, with their rows in front, and ``batch_axes`` says where the user has the rows of those that
    are split; ``training`` is the mode that the model was captured in. ``variables`` are the sizes and
    numbers that may be others in each call, and ``planned_sizes`` what they are where costs are predicted.
    The code is valid if they fulfil all ``guards``, such as ``t <= 512``, and equal ``fixed_sizes``.
    ``link_seconds[i]`` is how long ``links[i]`` takes, ``link_sender_bytes[i]`` what its sender holds for it
    besides what it saves, ``link_saved_bytes[i]`` what it saves of it, and ``link_reader_phases[i]`` the last
    phase of its reader that needs it. ``host`` is what hosts take besides stages and links, and
    ``cost_source`` says where all these seconds come from: a device model, or a profile. ``parameters`` and
    ``buffers`` are named by FQN. ``sync_spec`` is what the step does after its microbatches.
    ``microbatch_weight`` says how much the losses of microbatches count, if the graph does not: by "rows", as
    they are ("sum"), or as a function says ("function"). ``alternatives`` are the other plans that were
    evaluated, the fastest first, and ``sharding_costs`` the costs of each level of sharding, if there is
    something to shard.
    """

    mode: Mode
    schedule: str
    num_microbatches: int
    microbatch_size: int
    placement: Placement
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    link_seconds: tuple[float, ...] = ()
    link_sender_bytes: tuple[float, ...] = ()
    link_saved_bytes: tuple[float, ...] = ()
    link_reader_phases: tuple[Phase, ...] = ()
    host: HostCost = HostCost()
    cost_source: str = ""
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    inputs: tuple[InputLeaf, ...] = ()
    outputs: tuple[str, ...] = ()
    summed_outputs: tuple[str, ...] = ()
    log_names: tuple[str, ...] = ()
    dynamic_batch: bool = True
    arguments: tuple[str, ...] = ()
    batch_axes: tuple[BatchAxis | None, ...] = ()
    training: bool = True
    variables: tuple[Variable, ...] = ()
    planned_sizes: Sizes = field(default_factory=dict)
    fixed_sizes: Sizes = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    sync_spec: SyncSpec = NO_SYNC
    microbatch_weight: str = ""
    alternatives: tuple[Alternative, ...] = ()
    sharding_costs: tuple[ShardingCost, ...] = ()

    def user_value(self, given: InputLeaf) -> Value:
        """An input in the shape in which the user passes it."""
        axis = self.batch_axes[given.position]
        return replace(given.value, shape=axis.restored_shape(given.value.shape)) if axis else given.value

    def microbatches_on(self, stage: int, rank: int) -> range:
        """The microbatches that one of the ranks of ``stage`` runs."""
        return microbatches_on(self.placement, stage, rank, self.num_microbatches)

    @property
    def sizes(self) -> Sizes:
        """What the names in shapes stand for where costs are predicted."""
        return {"b": self.microbatch_size, **self.planned_sizes}

    @property
    def num_ranks(self) -> int:
        return count_ranks(self.placement)

    @property
    def segments(self) -> SegmentCounts:
        """How many functions the phases consist of that are not one function."""
        return {
            (each.index, phase): len(shares)
            for each in self.stages
            for phase, shares in each.segments.items()
        }

    @property
    def offloading_stages(self) -> frozenset[int]:
        """The stages that let values wait in host memory."""
        return frozenset(stage.index for stage in self.stages if stage.offloaded)

    @property
    def model_collectives(self) -> ModelCollectives:
        """What the replicas of stages join, where they join anything."""
        return {stage.index: stage.model_collectives for stage in self.stages if stage.model_collectives}
