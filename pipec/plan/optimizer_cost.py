"""The memory and seconds of updates on each rank: optimizer state, and shards of replicas.

What replicas hold of a stage with P bytes of gradients, G of parameters and S of state, as they run it:

============ ================ =========================== =======
``shard``    weights          sums of gradients           state
============ ================ =========================== =======
None         G                P                           S
optimizer    G                P, then P / r               S / r
gradients    G                P in each round, and 2 P/r  S / r
parameters   G / r, and G     P in each round, and 2 P/r  S / r
             while it is used
============ ================ =========================== =======

A step that reduces once holds sums as under ``optimizer``. The gradients of one microbatch are whole in every
case, and count as transient. The 2 P / r are the sums of
earlier rounds and the shard of the round that is in transit. In transit a sum takes memory of its own: a copy
of the gradients, and what arrives of them. ``programs/rank_memory.py`` says from when to when. Without
sharding gradients are added up in the memory that travels, which replicas keep from step to step; where they
travel as another dtype, it has memory of its own.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from pipec.hardware.devices import DeviceModel
from pipec.ir import (
    Bucket,
    Plan,
    Sharding,
    ShardingLevel,
    Stage,
    StageMemory,
    SyncSpec,
    VersionPolicy,
    replica_counts,
)
from pipec.ir.sharding import shard_evenly, shard_whole_tensors
from pipec.ir.text_format import value_bytes


@dataclass(frozen=True)
class OptimizerProperties:
    """The costs of an optimizer: ``state_bytes`` of each whole parameter, or None if unknown.

    The parameters in ``elementwise`` may be updated in parts. For each byte of a parameter an update takes
    ``scratch`` bytes while it runs: for all of them ``all_at_once``, or for one after the other.
    """

    state_bytes: Mapping[str, int] | None
    elementwise: Set[str]
    scratch: float = 0.0
    all_at_once: bool = False

    def scratch_bytes(self, sizes: Sequence[float]) -> float:
        """The temporary bytes of an update of parameters of these sizes."""
        return self.scratch * (sum(sizes) if self.all_at_once else max(sizes, default=0))


@dataclass(frozen=True)
class _ShardBytes:
    """Bytes of one bucket: of all replicas together, and the most of one of them."""

    whole: int
    padded: int
    own: int
    state: int


def with_update_costs(plan: Plan, optimizer: OptimizerProperties, device: DeviceModel) -> Plan:
    """The plan with the memory and the seconds of its updates.

    An update reads parameters, gradients and state, and writes parameters and state; what is made of them
    alone, which is half as large where it is a cast, is made again. State that waits on the host is copied to
    the device for it, and back. Without a flush, a stage also keeps what it trains in versions that are still
    read.
    """
    state = optimizer.state_bytes or {}
    shards = {
        number: _shard_bytes(bucket, len(plan.placement[bucket.stage]), state, optimizer.elementwise)
        for number, bucket in enumerate(plan.sync_spec.buckets if plan.sync_spec.shard else ())
        if not bucket.on_host
    }
    buckets = list(plan.sync_spec.buckets)
    for number, share in shards.items():
        received = share.padded - share.own if device.name == "cpu" else 0  # beside what gloo sends
        buckets[number] = replace(
            buckets[number],
            shard_bytes=share.own,
            unsharded_bytes=share.padded,
            in_transit_bytes=share.padded + received,
        )
    plan = replace(plan, sync_spec=replace(plan.sync_spec, buckets=tuple(buckets)))
    return replace(
        plan, stages=tuple(_updated(plan, stage, shards, optimizer, device) for stage in plan.stages)
    )


def with_training_state(plan: Plan, training: SyncSpec, optimizer: OptimizerProperties) -> Plan:
    """The plan of an evaluation, with the optimizer's state that ``training`` keeps meanwhile.

    Sharded parameters are gathered stage by stage, or held whole beside their shards.
    """
    sizes = {value.name: value_bytes(value, {}) for value in plan.parameters}

    def beside(stage: Stage) -> Stage:
        own = [name for name in stage.parameters if name not in stage.borrowed_parameters]
        share = 1 / len(plan.placement[stage.index]) if training.shard else 1.0
        state = share * sum((optimizer.state_bytes or {}).get(name, 0) for name in own)
        memory = stage.cost.memory
        buckets = [plan.sync_spec.buckets[number] for number in plan.sync_spec.buckets_of(stage.index)]
        if sharded := [x for x in buckets if plan.sync_spec.reshards_after_use(x) and not x.on_host]:
            whole = sum(sizes[name] for each in sharded for name in each.names if name in stage.parameters)
            memory = _with_shards(training, memory, whole, sum(x.shard_bytes for x in sharded))
        elif training.shard is ShardingLevel.PARAMETERS and share < 1:
            memory = _with_shards(training, memory, 0, share * sum(sizes[name] for name in own))
        on_host = state if training.state_on_host or training.weights_on_host else 0.0
        memory = replace(memory, state=state - on_host, host=memory.host + on_host)
        return replace(stage, cost=replace(stage.cost, memory=memory))

    return replace(plan, stages=tuple(map(beside, plan.stages)))


def _shard_bytes(
    bucket: Bucket, num_replicas: int, state: Mapping[str, int], elementwise: Set[str]
) -> _ShardBytes:
    sizes = {value.name: value_bytes(value, {}) for value in bucket.parameters}
    item = value_bytes(replace(bucket.parameters[0], shape=()), {})
    divide = shard_evenly if elementwise >= sizes.keys() else shard_whole_tensors
    sharding = divide({name: size // item for name, size in sizes.items()}, num_replicas)
    width = sharding.width * item
    return _ShardBytes(
        sum(sizes.values()),
        width * num_replicas,
        width,
        max(_state_of(sharding, replica, state) for replica in range(num_replicas)),
    )


def _state_of(sharding: Sharding, replica: int, state: Mapping[str, int]) -> int:
    sizes = dict(zip(sharding.names, sharding.sizes, strict=True))
    return sum(
        -(-state.get(piece.name, 0) * piece.size // max(sizes[piece.name], 1))
        for piece in sharding.shards_of(replica)
    )


def _updated(
    plan: Plan,
    stage: Stage,
    shards: Mapping[int, _ShardBytes],
    optimizer: OptimizerProperties,
    device: DeviceModel,
) -> Stage:
    memory, sync_spec, state = stage.cost.memory, plan.sync_spec, optimizer.state_bytes or {}
    own_buckets = sync_spec.buckets_of(stage.index)
    divided = {number: shards[number] for number in own_buckets if number in shards}
    parts = {name: share.own for number, share in divided.items() for name in sync_spec.buckets[number].names}
    sizes = {value.name: value_bytes(value, {}) for value in plan.parameters}
    borrowed = sum(sizes[name] for name in stage.borrowed_parameters)
    whole = [name for name in stage.parameters if name not in {*parts, *stage.borrowed_parameters}]
    in_host_memory = sync_spec.host_parameters(stage.index)
    updated = {name: sizes[name] for name in whole}
    updated |= {name: min(sizes[name], own) for name, own in parts.items()}
    for number, share in divided.items():
        memory = _divided(sync_spec, sync_spec.buckets[number], share, memory)
    if not (sync_spec.shard or sync_spec.weights_on_host):
        travels: float = sum(_travelling_bytes(plan, number) for number in own_buckets)
        if sync_spec.stream and sync_spec.stream.versions is VersionPolicy.DOUBLE and own_buckets:
            travels += memory.gradients  # while these travel, those of the next mini-batch are added up
        memory = replace(memory, gradients=memory.gradients + travels)
    own_state = sum(state.get(name, 0) for name in whole) + sum(share.state for share in divided.values())
    away = sum(share.whole - share.own for n, share in divided.items() if sync_spec.buckets[n].trained)
    trained = stage.cost.memory.gradients - borrowed - away
    moved, on_host = 3 * max(trained, 0) + 2 * own_state, 0.0
    seconds = (moved + 3 * memory.precomputed) / device.memory_bytes_per_second
    scratch = optimizer.scratch_bytes([size for name, size in updated.items() if name not in in_host_memory])
    if sync_spec.weights_on_host:
        seconds = moved / device.host_memory_bytes_per_second
        kept = [n for n in divided if not sync_spec.reshards_after_use(sync_spec.buckets[n])]
        on_device = sum(divided[n].state for n in kept)
        on_host, own_state = own_state - on_device, on_device
    elif sync_spec.state_on_host:
        seconds += 2 * own_state / device.host_link.bytes_per_second
        on_host, own_state, scratch = own_state, 0, scratch + own_state
    replicas = replica_counts(plan.placement)
    behind = sync_spec.stream.max_live_versions(stage.index, replicas) - 1 if sync_spec.stream else 0
    versions = behind * max(trained, 0)
    memory = replace(
        memory,
        state=own_state,
        versions=versions,
        precomputed=(1 + behind) * memory.precomputed,
        update=scratch,
        host=memory.host + on_host,
    )
    cost = replace(stage.cost, memory=memory, update_seconds=seconds)
    return replace(stage, cost=cost)


def _travelling_bytes(plan: Plan, bucket: int) -> int:
    """The bytes of a send buffer for a bucket, if its gradients are not sent from where they are summed."""
    values, dtype = plan.sync_spec.buckets[bucket].parameters, plan.sync_spec.gradient_dtype
    as_they_are = sum(value_bytes(value, {}) for value in values)
    as_they_travel = sum(value_bytes(replace(v, dtype=dtype or v.dtype), {}) for v in values)
    return as_they_travel if as_they_travel < as_they_are else 0


def _divided(sync_spec: SyncSpec, bucket: Bucket, share: _ShardBytes, memory: StageMemory) -> StageMemory:
    """The bytes of a bucket's shard on one replica."""
    sums = share.own * (2 if sync_spec.reduces_every_round(bucket) else 1)
    in_transit = bucket.in_transit_bytes + sums if bucket.trained else 0.0
    if sync_spec.reshards_after_use(bucket):
        memory = _with_shards(sync_spec, memory, share.whole, share.own)
        in_transit += share.padded
    else:
        memory = replace(memory, weights=memory.weights + share.padded - share.whole)
    return replace(memory, in_transit=memory.in_transit + in_transit)


def _with_shards(sync_spec: SyncSpec, memory: StageMemory, whole: float, own: float) -> StageMemory:
    """The memory with ``own`` bytes of shards, on the device or the host, in place of ``whole`` weights."""
    memory = replace(memory, weights=memory.weights - whole)
    if sync_spec.weights_on_host:
        return replace(memory, host=memory.host + own)
    return replace(memory, weights=memory.weights + own)
