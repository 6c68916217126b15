"""The sync spec of a step: how replicas reduce gradients, and how the optimizer updates weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipec.ir.stream import Stream
from pipec.ir.values import Value


class ShardingLevel(StrEnum):
    """The data of which each replica has only its shard (ZeRO: Rajbhandari et al., 2020, levels 1 to 3).

    Each level includes the previous one.
    """

    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class StepPart(StrEnum):
    """What a program runs of a step; see ``pipec.ir.step_parts``."""

    WHOLE = "whole"
    ACCUMULATE = "accumulate"
    FORWARDS = "forwards"
    BACKWARDS = "backwards"
    UPDATE = "update"


class NonFiniteAction(StrEnum):
    """The reaction to a step whose loss is NaN, or with a gradient that is not finite."""

    RAISE = "raise"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of ``stage``, of one dtype, that are brought to its devices, or reduced, together.

    The replicas of the stage sum their gradients. If it is ``on_host``, the parameters are in host memory:
    a rank without replicas loads them for use, and stores the sums of its gradients there. A bucket that is
    not ``trained`` has no gradients that an update uses: in an evaluation, or if its parameters are frozen.

    If it ``is_tied``, other stages borrow its parameters: their gradients are summed after the last computes
    of all ranks, and they are not sharded. Other gradients are complete after ``segment`` of the last
    backward, or of its weight half; a backward that is one function only has segment 0. A parameter with
    ``sparse`` gradients is alone in its bucket. ``reduce_seconds`` is the time to sum the gradients over the
    replicas, or to store them; ``unshard_seconds`` the time to gather the parameters from the shards, or to
    load them. A shard has ``shard_bytes`` and all of them ``unsharded_bytes``; gradients in transit take
    another ``in_transit_bytes``.
    """

    stage: int
    parameters: tuple[Value, ...]
    is_tied: bool = False
    sparse: bool = False
    trained: bool = True
    on_host: bool = False
    reduce_seconds: float = 0.0
    unshard_seconds: float = 0.0
    segment: int = 0
    shard_bytes: float = 0.0
    unsharded_bytes: float = 0.0
    in_transit_bytes: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.parameters)


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """The end of a step, after its microbatches: reduce, clip, update, unshard. By default nothing.

    An evaluation only gathers parameters that are sharded, or loads those that are on the host.

    If ``replicas_pass_own_rows`` of a batch, those of ``count_stages`` sum their batch counts first.
    ``buckets`` belong to stages with several replicas, or to all if ``weights_on_host``: there replicas have
    only shards of what is in host memory, and every parameter is in a bucket. The replicas of the
    stages in ``buffer_sync_stages`` average the buffers that their forwards changed. If the program
    ``updates``, it runs the optimizer; if it ``clips``, it computes the norm of all gradients before.
    ``shard`` is the data that replicas shard. Gradients are sent between replicas in ``gradient_dtype``, a
    torch name, or in their own dtype if it is "". With a ``stream``, steps are asynchronous: each stage then
    updates, and clips, by itself. ``on_nan`` is the reaction to losses or gradients that are not finite; None
    checks nothing. If the program ``has_loss_scale``, backwards start from a multiple of the loss, and a step
    whose gradients overflow is skipped. With ``state_on_host``, the optimizer state is in host memory between
    updates; with ``weights_on_host``, parameters, gradients and state are there, and updates run there. If
    replicas shard gradients and the step ``reduces_once``, each holds whole sums until the last round, as
    memory allows it. ``part`` is the part of the step that the program runs: all of it, the microbatches or
    the update.
    """

    buckets: tuple[Bucket, ...] = ()
    buffer_sync_stages: tuple[int, ...] = ()
    updates: bool = False
    clips: bool = False
    shard: ShardingLevel | None = None
    gradient_dtype: str = ""
    stream: Stream | None = None
    on_nan: NonFiniteAction | None = None
    has_loss_scale: bool = False
    state_on_host: bool = False
    weights_on_host: bool = False
    reduces_once: bool = False
    replicas_pass_own_rows: bool = False
    count_stages: tuple[int, ...] = ()
    part: StepPart = StepPart.WHOLE

    @property
    def runs_update(self) -> bool:
        """Whether weights are updated in this part of the step."""
        return self.updates and self.part in (StepPart.WHOLE, StepPart.UPDATE)

    @property
    def runs_microbatches(self) -> bool:
        """Whether microbatches run in this part of the step, and their gradients are reduced."""
        return self.part is not StepPart.UPDATE

    @property
    def shards_gradients(self) -> bool:
        """Whether replicas keep shards of the gradients from round to round, unless the step reduces once."""
        return self.shard in (ShardingLevel.GRADIENTS, ShardingLevel.PARAMETERS)

    @property
    def may_skip_step(self) -> bool:
        """Whether some steps make no update, depending on the gradients of all ranks."""
        return self.on_nan is not None or self.has_loss_scale

    @property
    def has_grad_norm(self) -> bool:
        """Whether all ranks exchange the norm of their gradients before updates."""
        clips = self.clips and self.part in (StepPart.WHOLE, StepPart.UPDATE)
        return (clips or self.may_skip_step) and self.stream is None

    @property
    def defers_gradients(self) -> bool:
        """Whether gradients are added to ``.grad`` only after those of all ranks were found to be finite."""
        return self.on_nan is not None and not self.updates

    def reduces_every_round(self, bucket: Bucket) -> bool:
        """Whether gradients are summed after each round, a microbatch of each replica, or at the end."""
        once = self.reduces_once or bucket.is_tied or self.is_in_host_memory(bucket)
        return self.shards_gradients and not once

    def reshards_after_use(self, bucket: Bucket) -> bool:
        """Whether the parameters of a bucket are gathered or loaded for each use, and not once at the end."""
        return bucket.on_host or (self.shard is ShardingLevel.PARAMETERS and not bucket.is_tied)

    def is_in_host_memory(self, bucket: Bucket) -> bool:
        """Whether the parameters of a bucket, or the shards of them, are in host memory between uses."""
        return self.weights_on_host and self.reshards_after_use(bucket)

    def buckets_of(self, stage: int) -> Sequence[int]:
        """The numbers of the buckets of a stage."""
        return [number for number, bucket in enumerate(self.buckets) if bucket.stage == stage]

    def reduced_parameters(self, stage: int) -> tuple[str, ...]:
        """The parameters of a stage whose gradients its replicas sum, or it stores on the host."""
        trained = (bucket for bucket in self.buckets if bucket.stage == stage and bucket.trained)
        return tuple(name for bucket in trained for name in bucket.names)

    def host_parameters(self, stage: int) -> tuple[str, ...]:
        """The parameters of a stage that are in host memory, whole or in shards."""
        own = (bucket for bucket in self.buckets if bucket.stage == stage and self.is_in_host_memory(bucket))
        return tuple(name for bucket in own for name in bucket.names)


NO_SYNC = SyncSpec()
"""The sync spec of a step that does nothing after its microbatches."""
