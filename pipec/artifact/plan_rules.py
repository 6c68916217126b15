"""The rules for a plan that was read from a file, checked before the plan is used.

Plans of pipec obey them; a plan that was written or edited by others may not, and the readers of a plan rely
on them. ``RULES`` lists one function per rule, which yields the faults that it finds. A rule may rely on the
rules before it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipec.errors import ArtifactError
from pipec.ir import OpKind, Plan, Value
from pipec.ir.text_format import evaluate_dim, format_link, format_value, holds


def check_plan(plan: Plan, path: Path) -> None:
    """Raise ArtifactError if the plan in the file ``path`` breaks a rule."""
    for rule in RULES:
        for fault in rule(plan):
            raise ArtifactError(f"{path}: {fault}. Save the pipeline again.")


def check_tensors(plan: Plan, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Raise ArtifactError unless the tensors of the folder have the types and shapes of the plan."""
    for value in plan.parameters + plan.buffers:
        tensor = tensors.get(value.name)
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (_dtype(value), value.shape):
            found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ArtifactError(f"{directory}: the plan has {format_value(value)}, but the tensor is {found}")


def _stages_and_ranks(plan: Plan) -> Iterator[str]:
    indices = [stage.index for stage in plan.stages]
    if not indices or indices != list(range(len(indices))):
        yield f"its stages are numbered {indices[:9]}, expected 0, 1, 2 and so on"
    if len(plan.placement) != len(indices):
        yield f"it places {len(plan.placement)} stages, but has {len(indices)}"
    ranks = {rank for replicas in plan.placement for rank in replicas}
    if not all(plan.placement) or ranks != {*range(len(ranks))}:
        yield f"it places stages on ranks {sorted(ranks)[:9]}, expected 0, 1, 2 and so on, each with a stage"


def _sizes(plan: Plan) -> Iterator[str]:
    for name in ("num_microbatches", "microbatch_size"):
        number = getattr(plan, name)
        if not 1 <= number <= _MAX_COUNT:
            yield f"its {name} is {number}, expected 1 to {_MAX_COUNT}"
    if plan.link_seconds and len(plan.link_seconds) != len(plan.links):
        yield f"it has the seconds of {len(plan.link_seconds)} links, but {len(plan.links)} links"


_MAX_COUNT = 2**20
"""With more, the tables of a plan alone would take minutes and gigabytes."""


def _segments(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for phase, shares in stage.segments.items():
            if not 2 <= len(shares) <= _MAX_COUNT or not all(0 <= share <= 1 for share in shares):
                yield f"stage {stage.index} has shares {shares} for segments of {phase}, expected 0 to 1 each"


def _model_collectives(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        for collective in stage.model_collectives:
            what = f"stage {stage.index}: the model collective {collective.value.name!r}"
            num_segments, traits = len(stage.segments.get(collective.phase, (1.0,))), collective.op.traits
            if traits.kind is not OpKind.COLLECTIVE or not traits.per_microbatch:
                yield f"{what} is a {collective.op}, which models cannot contain"
            if not 0 < collective.segment < num_segments:
                at = f"before segment {collective.segment} of {collective.phase}"
                yield f"{what} is {at}, of {num_segments} segments"
        yield from _duplicates(
            (collective.value.name for collective in stage.model_collectives),
            f"the model collectives of stage {stage.index}",
        )


def _tails(plan: Plan) -> Iterator[str]:
    found = [(stage, stage.tail) for stage in plan.stages if stage.tail]
    if len(found) > 1:
        yield f"stages {', '.join(str(stage.index) for stage, _ in found)} have tails, expected one at most"
    for stage, tail in found:
        where = f"the tail of stage {stage.index}"
        yield from _unknown_names(tail.parameters, stage.parameters, f"{where} reads", "its parameters")
        yield from _unknown_names(tail.updated_buffers, stage.buffers, f"{where} changes", "its buffers")
        yield from _duplicates(
            (value.name for value in tail.inputs + tail.gradients), f"the values of {where}"
        )
        if not tail.inputs or not all(value.shape for value in tail.inputs + tail.gradients):
            yield f"{where} has inputs or gradients without rows"


def _offloads(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        if list(stage.offloaded) != sorted({*stage.offloaded}) or min(stage.offloaded, default=0) < 0:
            yield f"stage {stage.index} offloads {stage.offloaded}, expected ascending positions from 0"


def _values(plan: Plan) -> Iterator[str]:
    for value in plan.parameters + plan.buffers:
        if not all(isinstance(size, int) and 0 <= size < 2**63 for size in value.shape):
            yield f"{value.name!r} has shape {value.shape}, expected numbers from 0"
    messages = [value for link in plan.links for value in link.values]
    messages += [collective.value for stage in plan.stages for collective in stage.model_collectives]
    messages += [value for stage in plan.stages for value in stage.batch_count_sums]
    tails = [stage.tail for stage in plan.stages if stage.tail]
    messages += [value for tail in tails for value in tail.inputs + tail.gradients]
    sizes = {"b": 1, **plan.planned_sizes}
    for value in [*plan.parameters, *plan.buffers, *messages, *(entry.value for entry in plan.inputs)]:
        if not isinstance(_dtype(value), torch.dtype):
            yield f"{value.name!r} has dtype {value.dtype!r}, which torch does not have"
        try:
            negative = any(evaluate_dim(size, sizes) < 0 for size in value.shape)
        except ArtifactError as error:
            yield f"{value.name!r}: {error}"
        else:
            if negative:
                yield f"{value.name!r} has shape {value.shape}, expected numbers from 0"


def _tensors(plan: Plan) -> Iterator[str]:
    """Each tensor of a stage is in the plan, and each tensor of the plan has a stage that owns it."""
    owned: dict[str, list[str]] = {"parameters": [], "buffers": []}
    for stage in plan.stages:
        where = f"stage {stage.index}"
        yield from _duplicates(stage.parameters + stage.buffers, f"the tensors of {where}")
        yield from _unknown_names(
            stage.borrowed_parameters, stage.parameters, f"{where} borrows", "its parameters"
        )
        yield from _unknown_names(stage.updated_buffers, stage.buffers, f"{where} changes", "its buffers")
        yield from _unknown_names(
            stage.step_buffers, stage.updated_buffers, f"{where} changes once", "the buffers it changes"
        )
        owned["parameters"] += [fqn for fqn in stage.parameters if fqn not in stage.borrowed_parameters]
        owned["buffers"] += stage.buffers
        yield from _unknown_names(
            stage.borrowed_parameters, _names(plan.parameters), f"{where} borrows", "the plan's"
        )
    for table, values in (("parameters", plan.parameters), ("buffers", plan.buffers)):
        yield from _duplicates(_names(values), f"its {table}")
        yield from _unknown_names(owned[table], _names(values), "a stage has", f"the plan's {table}")
        yield from _unknown_names(_names(values), owned[table], "the plan has", f"the {table} of any stage")


def _links(plan: Plan) -> Iterator[str]:
    stages = range(len(plan.stages))
    for link in plan.links:
        targets = (-1,) if link.payload.is_result else stages
        if link.source not in stages or link.target not in targets:
            yield f"{format_link(link)} leads from or to a stage that does not exist"
    yield from _duplicates(map(format_link, plan.links), "its links")
    produced = [value.name for link in plan.links if link.payload.is_result for value in link.values]
    yield from _unknown_names(plan.outputs, produced, "it returns", "what its stages send as results")


def _arguments(plan: Plan) -> Iterator[str]:
    yield from _duplicates(plan.arguments, "its arguments")
    yield from _duplicates((entry.value.name for entry in plan.inputs), "its inputs")
    if len(plan.batch_axes) != len(plan.arguments):
        yield f"it has {len(plan.batch_axes)} batch axes for {len(plan.arguments)} arguments"
        return
    for path, axis in zip(plan.arguments, plan.batch_axes, strict=True):
        if axis and (min(axis.dim, axis.outer, axis.inner) < 0 or axis.outer == axis.inner == 0):
            yield f"argument {path!r} has the batch axis {axis}, which is not a dimension"
    for position, first in plan.repeated or ():
        if not 0 <= first < position < len(plan.arguments):
            yield f"it repeats argument {first} as argument {position}, of {len(plan.arguments)} arguments"
    for entry in plan.inputs:
        if not 0 <= entry.position < len(plan.arguments) or plan.arguments[entry.position] != entry.path:
            yield f"input {entry.path!r} is not argument {entry.position}"
            continue
        axis = plan.batch_axes[entry.position]
        if entry.batched != (axis is not None):
            yield f"input {entry.path!r} and its argument disagree on whether they are split along the batch"
        if axis and len(entry.value.shape) <= axis.dim + axis.num_merged:
            yield f"input {entry.path!r} is split along the batch, but lacks the dimension for it"


def _variables(plan: Plan) -> Iterator[str]:
    arguments = dict(enumerate(plan.arguments))
    for variable in plan.variables:
        if arguments.get(variable.position) != variable.path:
            yield f"variable {variable.name!r} does not belong to argument {variable.position}"
        if variable.name in ("b", "device") or not variable.name.isidentifier():
            yield f"it names a variable {variable.name!r}, which is reserved or not an identifier"
    names = {variable.name for variable in plan.variables}
    yield from _unknown_names(names, plan.planned_sizes, "it has a variable", "the planned sizes")
    yield from _unknown_names(plan.planned_sizes, names, "it plans for a size", "the names of its variables")
    yield from _unknown_names(plan.fixed_sizes, names, "it fixes", "the names of its variables")
    for guard in plan.guards:
        try:
            holds(guard, plan.sizes)
        except ArtifactError as error:
            yield str(error)


def _sync_spec(plan: Plan) -> Iterator[str]:
    stages = range(len(plan.stages))
    sync_spec, buckets = plan.sync_spec, [bucket.stage for bucket in plan.sync_spec.buckets]
    for stage in (*sync_spec.count_stages, *sync_spec.buffer_sync_stages, *buckets):
        if stage not in stages:
            yield f"its sync spec names stage {stage}, which does not exist"
    for bucket in plan.sync_spec.buckets:
        own = plan.stages[bucket.stage].parameters if bucket.stage in stages else ()
        yield from _unknown_names(
            bucket.names, own, f"a bucket of stage {bucket.stage} has", "its parameters"
        )


Rule = Callable[[Plan], Iterator[str]]

RULES: tuple[Rule, ...] = (
    *(_stages_and_ranks, _sizes, _segments, _model_collectives, _tails, _offloads, _values, _tensors, _links),
    *(_arguments, _variables, _sync_spec),
)


def _names(values: Iterable[Value]) -> list[str]:
    return [value.name for value in values]


def _duplicates(names: Iterable[str], what: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} have {name!r} {count} times"


def _unknown_names(names: Iterable[str], known: Iterable[str], who: str, among: str) -> Iterator[str]:
    allowed = {*known}
    for name in names:
        if name not in allowed:
            yield f"{who} {name!r}, which is not among {among}"


def _dtype(value: Value) -> object:
    return getattr(torch, value.dtype, None)
