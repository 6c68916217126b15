"""The plan of a step: its stages with their costs, the links between them, and the alternatives."""

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
    """The cost of one stage for one microbatch: seconds by phase, FLOPs, and bytes of memory.

    ``update_seconds`` is the time of an update of its parameters, once a step, and ``copy_seconds`` the time
    of the offload of a microbatch, or of its prefetch.
    """

    seconds: Mapping[Phase, float] = field(default_factory=dict)
    flops: float = 0.0
    memory: StageMemory = field(default_factory=StageMemory)
    update_seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tail:
    """What a stage computes once a step, of the rows of all microbatches, because it mixes them.

    It runs after the last forward of the stage and, if it has ``gradients``, before its first backward. It
    reads ``inputs``, which each forward of the stage returns, and returns ``results``, and ``gradients`` of
    some inputs, whose rows the backwards read. ``parameters`` are those that it reads, and
    ``updated_buffers`` those that it replaces. It begins at the call ``location``. ``flops`` and ``seconds``
    are of the whole batch, and so are ``transient_bytes``, the most that it holds beside its inputs. Each
    forward makes ``unsaved_bytes`` for it alone. Its inputs are gathered from the replicas of the stage in
    ``gather_seconds``.
    """

    inputs: tuple[Value, ...]
    gradients: tuple[Value, ...] = ()
    results: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    updated_buffers: tuple[str, ...] = ()
    location: str = ""
    flops: float = 0.0
    seconds: float = 0.0
    gather_seconds: float = 0.0
    transient_bytes: float = 0.0
    unsaved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive forward operators ``first_operator .. last_operator``, and all nodes they caused.

    ``modules`` are the modules of its operators, and ``whole_modules`` the outermost ones of which no other
    stage has an operator. ``divided_module`` names the module inside of which the stage begins, and the
    source line; it is empty if the cut before the stage is between modules.
    ``parameters`` are the FQNs of ``w`` in the generated code, in order; ``borrowed_parameters`` is the
    subset owned by another stage (tied weights). ``updated_buffers`` is the subset of ``buffers`` that the
    forward replaces (BatchNorm statistics). Of these, ``step_buffers`` get the same new value from every
    microbatch: they change once a step, at its end. ``batch_counts`` names the results of the stage's
    function of that name, which runs on the whole mini-batch once a step; ``batch_count_sums`` are those that
    add up over its rows. ``precomputed_phases`` read what is computed once of the weights. ``segments`` has
    the phases that consist of several functions, with the fraction of the phase's seconds that each function
    takes. ``model_collectives`` run between them. The ``tail`` runs once a step. With ``recompute``, a phase
    of its own computes some of the forward again; with ``recomputes_in_backward`` the backward does.
    ``offloaded`` are the positions, among the saved values, of those that wait in host memory for the
    backward.
    """

    index: int
    first_operator: int
    last_operator: int
    modules: tuple[str, ...] = ()
    whole_modules: tuple[str, ...] = ()
    divided_module: str = ""
    parameters: tuple[str, ...] = ()
    borrowed_parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updated_buffers: tuple[str, ...] = ()
    step_buffers: tuple[str, ...] = ()
    batch_counts: tuple[str, ...] = ()
    batch_count_sums: tuple[Value, ...] = ()
    precomputed_phases: tuple[Phase, ...] = ()
    recompute: bool = False
    recomputes_in_backward: bool = False
    offloaded: tuple[int, ...] = ()
    segments: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)
    model_collectives: tuple[ModelCollective, ...] = ()
    tail: Tail | None = None
    cost: StageCost = StageCost()

    @property
    def averaged_buffers(self) -> frozenset[str]:
        """The updated buffers on which replicas have to agree: not those of the tail, which sees all rows."""
        return frozenset(self.updated_buffers).difference(self.tail.updated_buffers if self.tail else ())

    @property
    def has_recompute(self) -> bool:
        """Whether a part of the forward is recomputed."""
        return self.recompute or self.recomputes_in_backward

    def functions(self, phase: Phase) -> tuple[str, ...]:
        """The names of the generated functions that a phase consists of, in the order in which they run."""
        return function_names(phase, len(self.segments.get(phase, (1.0,))))


@dataclass(frozen=True, slots=True)
class TrainedOutput:
    """A result of which the script gives the gradient, for that of ``parameters``.

    Backwards read the rows of their microbatch as ``gradient``.
    """

    name: str
    gradient: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostCost:
    """Time of a rank's host outside stage functions and messages, in which its device is idle.

    It takes ``call_seconds`` for every compute of a program, to fetch arguments, store results and post
    messages, and ``step_seconds`` before the first instruction, to check and compare the arguments of the
    step.
    """

    call_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan for the step that was evaluated, and why it was not chosen.

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
    """The memory and time of the same step with another level of sharding, or with none.

    ``peak_bytes`` is the peak of the rank that needs most. ``collective_seconds`` is the time of all
    reductions of gradients and gatherings of parameters on the rank that spends most on them; some of it
    overlaps computes. ``seconds`` is the predicted time of the step.
    """

    shard: ShardingLevel | None
    peak_bytes: float
    collective_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before code is generated. ``placement`` has the ranks of each stage.

    ``outputs`` names the results in the order of the leaves of the model's output; ``trained_outputs``
    are those of which a script that computes the loss gives gradients; ``summed_outputs`` are those that add
    up over microbatches; ``log_names`` are the names that the loss function gave to those
    after the loss. ``arguments`` names all leaves of ``step``'s arguments; ``inputs`` are the leaves that a
    stage reads, with their rows first, and ``batch_axes`` has the user's batch axes of those that are split.
    ``training`` is the mode in which the model was captured. ``variables`` are the sizes and numbers that may
    change from call to call, and ``planned_sizes`` their values for the prediction of costs. The code is
    valid if they fulfil all ``guards``, such as ``t <= 512``, and equal ``fixed_sizes``. Unless ``repeated``
    is None, it is valid for calls in which these arguments alone are one tensor: pairs of positions.

    ``link_seconds[i]`` is the time of ``links[i]``, ``link_sender_bytes[i]`` the bytes that its sender holds
    for each of its values besides saved ones, ``link_saved_bytes[i]`` the bytes of it that are saved values,
    and ``link_reader_phases[i]`` the last phase of its reader that needs each of them. ``host`` is the time
    of hosts outside stages and links, and ``cost_source`` names the origin of all these seconds: a device
    model, or a profile. ``assumptions`` are sentences about links and memory that were not measured.
    ``parameters`` and ``buffers`` are named by FQN. ``sync_spec`` specifies reductions and updates.
    ``checked`` says how microbatches agreed with the model itself, or why that was not compared.
    ``microbatch_weight`` is the weight of the losses of microbatches, unless the graph contains it: by
    "rows", 1 ("sum"), or the result of a function ("function"). ``alternatives`` are the other plans that
    were evaluated, the fastest first, and ``sharding_costs`` the costs of each level of sharding, if there is
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
    link_sender_bytes: tuple[tuple[float, ...], ...] = ()
    link_saved_bytes: tuple[float, ...] = ()
    link_reader_phases: tuple[tuple[Phase, ...], ...] = ()
    host: HostCost = HostCost()
    cost_source: str = ""
    assumptions: tuple[str, ...] = ()
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    inputs: tuple[InputLeaf, ...] = ()
    outputs: tuple[str, ...] = ()
    trained_outputs: tuple[TrainedOutput, ...] = ()
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
    repeated: tuple[tuple[int, int], ...] | None = None
    sync_spec: SyncSpec = NO_SYNC
    microbatch_weight: str = ""
    checked: str = ""
    alternatives: tuple[Alternative, ...] = ()
    sharding_costs: tuple[ShardingCost, ...] = ()

    def user_value(self, leaf: InputLeaf) -> Value:
        """An input in the shape in which the user passes it."""
        axis = self.batch_axes[leaf.position]
        return replace(leaf.value, shape=axis.restored_shape(leaf.value.shape)) if axis else leaf.value

    def microbatches_on(self, stage: int, rank: int) -> range:
        """The microbatches that one of the ranks of ``stage`` runs."""
        return microbatches_on(self.placement, stage, rank, self.num_microbatches)

    @property
    def has_given_microbatches(self) -> bool:
        """Whether each microbatch is given as a batch of its own, because no argument is split."""
        return bool(self.batch_axes) and not any(self.batch_axes)

    @property
    def tail_stage(self) -> int | None:
        """The stage that has a tail, if any."""
        return next((stage.index for stage in self.stages if stage.tail), None)

    @property
    def sizes(self) -> Sizes:
        """The values of the names in shapes for the prediction of costs."""
        return {"b": self.microbatch_size, **self.planned_sizes}

    @property
    def num_ranks(self) -> int:
        return count_ranks(self.placement)

    @property
    def segments(self) -> SegmentCounts:
        """The number of functions of each phase that consists of several."""
        return {
            (each.index, phase): len(shares)
            for each in self.stages
            for phase, shares in each.segments.items()
        }

    @property
    def recomputing_stages(self) -> frozenset[int]:
        """The stages that replay their forward in a phase of its own."""
        return frozenset(stage.index for stage in self.stages if stage.recompute)

    @property
    def offloading_stages(self) -> frozenset[int]:
        """The stages that offload values to host memory."""
        return frozenset(stage.index for stage in self.stages if stage.offloaded)

    @property
    def model_collectives(self) -> ModelCollectives:
        """The model collectives of the stages that have some."""
        return {stage.index: stage.model_collectives for stage in self.stages if stage.model_collectives}
