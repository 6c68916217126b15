"""Builds the sync spec of a step from a cut graph: its buckets, and what replicas average."""

from collections.abc import Iterator, Mapping, Sequence
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
    stages have buckets of their own, and so has each with sparse gradients.

    Raises:
        InputError: state is to be sharded of a parameter that has sparse gradients and several replicas.
    """
    counted = tuple(
        stage.index
        for stage in stages
        if requested.replicas_pass_own_rows and len(placement[stage.index]) > 1 and stage.batch_counts
    )
    if not mode.trains:
        gathers = requested.shard is ShardingLevel.PARAMETERS and bool(requested.buckets)
        return SyncSpec(
            requested.buckets if gathers else (),
            shard=requested.shard if gathers else None,
            replicas_pass_own_rows=requested.replicas_pass_own_rows,
            count_stages=counted,
        )
    buckets = tuple(
        with_collective_seconds(bucket, placement[stage.index], topology, requested)
        for stage in stages
        if len(placement[stage.index]) > 1
        for bucket in _buckets(stage, _gradients(stage, stages, links), values, links)
    )
    if requested.shard is not None:
        _require_dense(buckets)
    return replace(requested, buckets=buckets, count_stages=counted)


def _require_dense(buckets: Sequence[Bucket]) -> None:
    """Refuse to shard sparse gradients: shards sum slices of gradients, and a sparse one has none."""
    sparse = [bucket for bucket in buckets if bucket.sparse]
    if sparse:
        raise InputError(
            f"{sparse[0].parameters[0].name} has sparse gradients, which replicas cannot keep shares of; "
            "make it with sparse=False, or compile without shard=..."
        )


def _buckets(
    stage: StageFunctions,
    gradients: Mapping[str, bool],
    values: Mapping[str, Value],
    links: Sequence[Link],
) -> Iterator[Bucket]:
    tied = {v.name for link in links if link.payload is Payload.WEIGHT for v in link.values}
    borrowed = {
        v.name
        for link in links
        if link.payload is Payload.WEIGHT and link.target == stage.index
        for v in link.values
    }
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
