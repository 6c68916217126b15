"""What a step does besides its microbatches: replicas sum gradients, and the optimizer updates weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipec.ir.stream import Stream
from pipec.ir.values import Value


class ShardingLevel(StrEnum):
    """What each replica of a stage keeps only its share of (ZeRO: Rajbhandari et al., 2020, levels 1 to 3).

    Each level has what the level before it has, and more.
    """

    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class NonFiniteAction(StrEnum):
    """What becomes of a step whose loss is NaN, or some gradient of which is not finite."""

    RAISE = "raise"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Trained parameters of ``stage``, of one dtype, whose gradients its replicas sum together.

    If it ``is_tied``, other stages borrow its parameters: their gradients are summed when all ranks have
    computed everything, and they are not sharded. The gradients of others are complete when ``segment`` of
    the last backward, or of its weight half, is over; a backward that is one function has segment 0 alone. A
    parameter with ``sparse`` gradients is alone in its bucket. The ranks are on ``num_hosts`` hosts, equally
    many after one another on each, and what they exchange goes through a host's link once. ``reduce_seconds``
    is how long it takes to sum the gradients over the replicas, ``unshard_seconds`` to gather the parameters
    from the shards of the replicas. A shard has ``shard_bytes`` and all of them ``unsharded_bytes``;
    gradients take ``in_transit_bytes`` besides while they are in transit.
    """

    stage: int
    parameters: tuple[Value, ...]
    is_tied: bool = False
    sparse: bool = False
    num_hosts: int = 1
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
    """What the programs of a step do after their microbatches: reduce, clip, update, unshard. By default
    nothing.

    ``buckets`` are of stages with several replicas. The replicas of the stages in ``buffer_sync_stages``
    agree on the buffers that their forwards changed. If the program ``updates``, the optimizer is a part of
    it; if it ``clips``, the norm of all gradients is known before. ``shard`` is what replicas shard.
    Gradients travel between replicas in ``gradient_dtype``, torch's name of it, or in their own if it is "".
    With a ``stream``, steps follow each other without a flush: each stage then updates, and clips, by itself.
    ``on_nan`` is what happens if losses or gradients are not finite; nothing checks that if it is None. If
    the program ``has_loss_scale``, backwards start from a multiple of the loss, and a step whose gradients
    overflow is skipped. The optimizer's state waits in host memory between updates if it is
    ``state_on_host``.
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

    @property
    def may_skip_step(self) -> bool:
        """Whether nothing comes of some steps, which is for the gradients of all ranks to decide."""
        return self.on_nan is not None or self.has_loss_scale

    @property
    def has_grad_norm(self) -> bool:
        """Whether all ranks learn of the gradients of all others before anything comes of them."""
        return (self.clips or self.may_skip_step) and self.stream is None

    @property
    def defers_gradients(self) -> bool:
        """Whether gradients are added to ``.grad`` only when those of all ranks are known to be finite."""
        return self.on_nan is not None and not self.updates

    def reduces_every_round(self, bucket: Bucket) -> bool:
        """Whether gradients are summed after each round, a microbatch of each replica, or at the end."""
        return self.shard in (ShardingLevel.GRADIENTS, ShardingLevel.PARAMETERS) and not bucket.is_tied

    def reshards_after_use(self, bucket: Bucket) -> bool:
        """Whether the parameters of a bucket are gathered when they are needed, and not once at the end."""
        return self.shard is ShardingLevel.PARAMETERS and not bucket.is_tied

    def buckets_of(self, stage: int) -> Sequence[int]:
        """The numbers of the buckets of a stage."""
        return [number for number, bucket in enumerate(self.buckets) if bucket.stage == stage]

    def reduced_parameters(self, stage: int) -> tuple[str, ...]:
        """The parameters of a stage whose gradients its replicas sum."""
        return tuple(name for bucket in self.buckets if bucket.stage == stage for name in bucket.names)


NO_SYNC = SyncSpec()
"""The sync spec of a step that does nothing after its microbatches."""
