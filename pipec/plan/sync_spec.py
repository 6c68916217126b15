"""Builds the sync spec of a step from a cut graph: its buckets, and what replicas average."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from pipec.errors import InputError
from pipec.graph.phase_functions import StageFunctions
from pipec.hardware.collective_costs import all_reduce_seconds, unshard_seconds
from pipec.hardware.topology import Topology
from pipec.ir import GRADIENT_PHASES, Bucket, Link, Mode, Payload, Placement, ShardingLevel, SyncSpec, Value
from pipec.ir.text_format import value_bytes


def build_sync_spec(
    requested: SyncSpec,
    mode: Mode,
    stages: Sequence[StageFunctions],
    values: Mapping[str, Value],
    links: Sequence[Link],
    placement: Placement,
    topology: Topology,
) -> SyncSpec:
    """The sync spec of a step: what was ``requested``, and what its replicas need.

    ``values`` are the parameters by FQN. Only training reduces and updates. Another call gathers the
    parameters that training has sharded, whose buckets were ``requested``. In training, each stage with
    replicas has buckets for each segment of its backward and each dtype; parameters that are tied to other
    stages have buckets of their own, and so has each with sparse gradients. Where parameters are sharded or
    in host memory, frozen ones are in buckets too.

    Raises:
        InputError: a parameter has sparse gradients, and state is to be sharded or weights are on the host.
    """
    counted = tuple(
        stage.index
        for stage in stages
        if requested.replicas_pass_own_rows and len(placement[stage.index]) > 1 and stage.batch_counts
    )
    if not mode.trains:
        gathers = requested.shard is ShardingLevel.PARAMETERS and bool(requested.buckets)
        sharded = [bucket for bucket in requested.buckets if gathers and not bucket.on_host]
        whole = [stage for stage in stages if not gathers or len(placement[stage.index]) == 1]
        loaded = [each for stage in whole for each in _without_gradients(stage, values, links)]
        return SyncSpec(
            tuple(replace(bucket, trained=False) for bucket in sharded)
            + tuple(loaded if requested.weights_on_host else ()),
            shard=requested.shard if gathers else None,
            weights_on_host=requested.weights_on_host,
            replicas_pass_own_rows=requested.replicas_pass_own_rows,
            count_stages=counted,
        )
    buckets = list[Bucket]()
    for stage in stages:
        own = [*_buckets(stage, _gradients(stage, stages, links), values, links)]
        names = {name for bucket in own for name in bucket.names}
        frozen = [*_without_gradients(stage, values, links, names)]
        if len(ranks := placement[stage.index]) > 1:
            shards = requested.shard is ShardingLevel.PARAMETERS
            own += [replace(x, on_host=False) for x in frozen if shards and not x.is_tied]
            buckets += (with_collective_seconds(x, ranks, topology, requested) for x in own)
        elif requested.weights_on_host:
            buckets += [*(replace(bucket, on_host=True) for bucket in own), *frozen]
    if requested.shard is not None:
        _require_dense(buckets, "shard")
    if requested.weights_on_host:
        _require_dense(buckets, "offload")
    return replace(requested, buckets=tuple(buckets), count_stages=counted)


def _require_dense(buckets: Sequence[Bucket], option: str) -> None:
    """Refuse sparse gradients where slices of gradients are summed, or the host has memory for dense ones."""
    sparse = [bucket for bucket in buckets if bucket.sparse]
    if sparse:
        raise InputError(
            f"{sparse[0].parameters[0].name} has sparse gradients, which {option}=... cannot divide or copy; "
            f"make it with sparse=False, or compile without {option}=..."
        )


def _without_gradients(
    stage: StageFunctions, values: Mapping[str, Value], links: Sequence[Link], trained: Collection[str] = ()
) -> Iterator[Bucket]:
    """Buckets of the parameters that a stage has on the host and makes no gradients of."""
    tied, borrowed = _tied(stage, links)
    groups: dict[tuple[str, bool], list[Value]] = {}
    for fqn in (node.meta["role"].fqn for node in stage.parameters):
        if fqn not in borrowed and fqn not in trained:
            groups.setdefault((values[fqn].dtype, fqn in tied), []).append(values[fqn])
    for (_, is_tied), parameters in groups.items():
        yield Bucket(stage.index, tuple(parameters), is_tied, trained=False, on_host=True)


def _tied(stage: StageFunctions, links: Sequence[Link]) -> tuple[Collection[str], Collection[str]]:
    """The parameters that several stages have, and those of them that this stage borrows."""
    lent = [
        (link.target, value.name) for link in links for value in link.values if link.payload is Payload.WEIGHT
    ]
    return {name for _, name in lent}, {name for target, name in lent if target == stage.index}


def _buckets(
    stage: StageFunctions,
    gradients: Mapping[str, bool],
    values: Mapping[str, Value],
    links: Sequence[Link],
) -> Iterator[Bucket]:
    tied, borrowed = _tied(stage, links)
    completed_by = {
        fqn: function.segment
        for phase in GRADIENT_PHASES
        for function in stage.phase_functions(phase)
        for fqn, _ in function.gradients
    }
    groups: dict[tuple[int, str, bool, str], list[Value]] = {}
    for fqn, is_sparse in gradients.items():
        if fqn not in borrowed:
            key = (completed_by.get(fqn, 0), values[fqn].dtype, fqn in tied, fqn if is_sparse else "")
            groups.setdefault(key, []).append(values[fqn])
    for key, parameters in sorted(groups.items(), key=lambda item: item[0][0]):
        segment, _, is_tied, sparse = key
        yield Bucket(stage.index, tuple(parameters), is_tied, sparse != "", segment=segment)


def _gradients(
    stage: StageFunctions, stages: Sequence[StageFunctions], links: Sequence[Link]
) -> dict[str, bool]:
    """The parameters that get gradients, in the order of the stage, and whether that gradient is sparse.

    A gradient may come from a stage that borrows the parameter alone, as of a weight from which this one
    makes buffers without a gradient.
    """
    returning = [
        stages[x.source] for x in links if x.payload is Payload.WEIGHT_GRADIENT and x.target == stage.index
    ]
    made: dict[str, fx.Node] = {
        fqn: node
        for each in (*returning, stage)
        for function in each.all_functions
        for fqn, node in function.gradients
    }
    names = (node.meta["role"].fqn for node in stage.parameters)
    return {fqn: made[fqn].meta["val"].layout is torch.sparse_coo for fqn in names if fqn in made}


def with_collective_seconds(
    bucket: Bucket, ranks: Sequence[int], topology: Topology, requested: SyncSpec
) -> Bucket:
    """The bucket with its seconds. With sharded state, each replica receives only its shard of the sums."""
    in_transit = [replace(v, dtype=requested.gradient_dtype or v.dtype) for v in bucket.parameters]
    reduced, gathered = (
        sum(value_bytes(v, {}) for v in values) for values in (in_transit, bucket.parameters)
    )
    reduce_seconds = unshard_seconds if requested.shard else all_reduce_seconds
    return replace(
        bucket,
        reduce_seconds=reduce_seconds(topology, ranks, min(reduced, gathered)),
        unshard_seconds=unshard_seconds(topology, ranks, gathered),
    )
