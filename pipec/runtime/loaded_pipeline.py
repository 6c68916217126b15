"""A saved artifact, ready to train: no model and no compiler, only the plan, the code and the programs."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipec.artifact.artifact import Artifact
from pipec.artifact.verification import read_verified
from pipec.errors import InputError
from pipec.ir import InputLeaf, Plan, Sizes, SyncSpec, Value
from pipec.ir.argument_checks import (
    DEVICES,
    FLAG,
    KERNELS,
    MICROBATCH_WEIGHT,
    NONE,
    OPTIMIZER,
    SECONDS,
    check_arguments,
    instance,
    number,
)
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.batch_split import (
    leaf_path,
    repeated_tensors,
    require_equal_rows,
    split_sizes,
    variable_values,
)
from pipec.ir.text_format import evaluate_dim, format_value, holds, names_in
from pipec.runtime.absent_tensors import materialized, release_elsewhere
from pipec.runtime.call_guard import LossIterator, exclusive_call
from pipec.runtime.linked_artifacts import LinkedArtifacts
from pipec.runtime.messages.agreement import RankReply
from pipec.runtime.messages.call_description import CallDescription, describe_leaf, format_ranks
from pipec.runtime.model_tensors import ModelTensors, register_tensors
from pipec.runtime.optimizers import Factory
from pipec.runtime.pipeline_base import PipelineBase
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.processes.launch import Devices
from pipec.runtime.random_seeds import advance_default_generator, peek_seed
from pipec.runtime.stages.input_layout import as_contiguous
from pipec.runtime.stages.kernels import require_source
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.microbatch_weight import CUSTOM_WEIGHT, MicrobatchWeight, loss_weights
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.stream_results import BatchResult, StreamBatch
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.runtime.stream.stream_session import CompiledStream
from pipec.runtime.stream_training import OnStarted, StreamTraining, nothing
from pipec.runtime.tensor_owners import owner_ranks, tensor_devices
from pipec.torch_compat import pytree


def load(
    directory: str | Path,
    devices: Devices | None = None,
    timeout: float = 300.0,
    *,
    optimizer: Factory | None = None,
    clip_grad_norm: float | None = None,
    microbatch_weight: MicrobatchWeight | None = None,
    kernels: str = "source",
) -> "LoadedPipeline":
    """Read what ``Pipeline.save`` wrote.

    ``devices`` says how many devices to use, or which; None is one for each rank of the plan. Tensors that
    were not saved are on the meta device until ``to_empty`` and ``load_state_dict`` give them values. An
    artifact holds no function: if ``compile`` was given an ``optimizer``, or a function as
    ``microbatch_weight``, pass it again, or another one. The same holds for ``clip_grad_norm``.
    ``kernels`` is what ``compile`` takes.

    Raises:
        ArtifactError, VerifyError: the directory does not hold an intact artifact of this format, or its
            programs are not one correct step.
        InputError: the devices do not match the ranks of the plan, or the optimizer or the norm is missing
            or not asked for.
    """
    check_arguments(LOAD, locals())
    artifact, tensors = read_verified(Path(directory))
    num_ranks = artifact.plan.num_ranks
    ranks = Ranks(devices if devices is not None else num_ranks, timeout, kernels)
    if ranks.count != num_ranks:
        raise InputError(
            f"the artifact in {directory} is for {num_ranks} ranks, but devices asks for {ranks.count}; "
            f"pass devices={num_ranks}, or compile and save it for {ranks.count}"
        )
    check_sync_spec(artifact.plan.sync_spec, optimizer, clip_grad_norm)
    require_source(kernels, artifact.plan)
    return LoadedPipeline(artifact, tensors, ranks, optimizer, clip_grad_norm, microbatch_weight)


LOAD = {
    "directory": instance("the path of a folder", str, Path),
    "devices": DEVICES | NONE,
    "timeout": SECONDS,
    "optimizer": OPTIMIZER | NONE,
    "clip_grad_norm": number(0, math.inf) | NONE,
    "microbatch_weight": MICROBATCH_WEIGHT | NONE,
    "kernels": KERNELS,
}
"""What each argument of ``load`` must be."""


UnflattenCall = Callable[[list[Any]], tuple[Any, dict[str, Any], Any]]
"""Makes arguments, keyword arguments and the target of their leaves."""


class LoadedPipeline(PipelineBase):
    """An artifact with its tensors under their original names; made by :func:`pipec.load`."""

    def __init__(
        self,
        artifact: Artifact,
        tensors: dict[str, Tensor],
        ranks: Ranks,
        optimizer: Factory | None = None,
        max_norm: float | None = None,
        microbatch_weight: MicrobatchWeight | None = None,
    ) -> None:
        plan = artifact.plan
        made = _tensors_of(plan, tensors, artifact.constants, ranks)
        loss_scale, updates = LossScale() if plan.sync_spec.has_loss_scale else None, None
        if optimizer is not None:
            with materialized(made.unique().values()):
                updates = OptimizerUpdates(optimizer, max_norm, made.parameters, loss_scale)
        if (plan.microbatch_weight == CUSTOM_WEIGHT) != callable(microbatch_weight):
            raise InputError(
                "the artifact was compiled with a function as microbatch_weight; pass that to load"
                if microbatch_weight is None
                else "the artifact was compiled without a function as microbatch_weight, and takes none; "
                "leave it out"
            )
        context = PipelineContext(ranks, updates, artifact)
        context.owners.ranks = owner_ranks(plan)
        super().__init__(context)
        self.training = plan.training
        register_tensors(self, made)
        self._calls = _ArtifactCalls(context, self._linked, microbatch_weight or plan.microbatch_weight)
        self._stream = StreamTraining(self._calls, context)

    @exclusive_call
    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The same as ``Pipeline.step``, for arguments of the shapes that the artifact was compiled for.

        Raises:
            InputError: the arguments have other names, shapes or types. Nothing was sent then.
        """
        return self._calls.stream_step(CallArguments(args, kwargs, target), nothing)

    @exclusive_call
    def step_with_leaves(self, leaves: Sequence[Any]) -> Tensor:
        """As ``step``, for the leaves of its arguments in the order of the plan's ``arguments``."""
        return self._calls.stream_step(_Leaves(tuple(leaves)), nothing)

    def stream_of_leaves(self, batches: Iterable[Sequence[Any]]) -> Iterator[Tensor]:
        """As ``stream``, for the leaves of each batch as ``step_with_leaves`` takes them."""
        arguments = (_Leaves(tuple(leaves)) for leaves in batches)
        return LossIterator(self, self._stream.losses_of(arguments))

    @exclusive_call
    def train(self, mode: bool = True) -> "LoadedPipeline":
        """Accept the mode that the artifact was compiled in.

        Raises:
            InputError: it was made in the other mode, and holds no code for this one.
        """
        check_arguments({"mode": FLAG}, locals())
        if mode != self.plan.training:
            made, call = ("training", "eval") if self.plan.training else ("evaluation", "train")
            raise InputError(
                f"this artifact holds the step of a model in {made} mode, and no other code. Call {call}() "
                "on the pipeline of pipec.compile, then prepare(...) and save(...)"
            )
        return super().train(mode)

    @property
    def plan(self) -> Plan:
        """The plan that was saved."""
        return self._artifact.plan

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: an artifact does not know what a model's checkpoint holds."""
        raise InputError(
            "a loaded artifact has no model, so that nobody knows which of its tensors a checkpoint keeps, "
            "and under which names; save pipe.state_dict() and pipe.optimizer.state_dict(), or train what "
            "pipec.compile returns"
        )

    load_checkpoint = save_checkpoint

    def modules(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: what is changed in modules would change no stage."""
        raise InputError(
            "a loaded artifact has the code of its stages, and no modules of the model to set up or look at: "
            "change the model, and compile and save it again. Parameters are in named_parameters()"
        )

    def apply(self, fn: object) -> NoReturn:
        """Refuse, as ``modules``."""
        self.modules()


class _ArtifactCalls:
    """Makes the steps of an artifact, for arguments of the shapes that it was compiled for."""

    def __init__(self, context: PipelineContext, linked: LinkedArtifacts, weight: MicrobatchWeight) -> None:
        self._context, self._linked, self._weight = context, linked, weight
        self._plan = context.artifact.plan

    @property
    def has_target(self) -> bool:
        return any(path.startswith("target") for path in self._plan.arguments)

    @property
    def may_be_asynchronous(self) -> bool:
        return self._plan.sync_spec.stream is not None

    def compiled_stream(self, arguments: CallArguments) -> CompiledStream | None:
        batch = self._batch_of(arguments)
        seed = self._agreed_seed(batch)
        execution = self._linked.execution(self._context.artifact)

        def split(arguments: CallArguments) -> StreamBatch | None:
            other = self._batch_of(arguments)
            if (other.sizes, other.values) != (batch.sizes, batch.values):
                return None
            return execution.batch(other.leaves, other.batch_slice(self._weight))

        return CompiledStream(execution, seed, split, lambda: True)

    def describe_batch(self, arguments: CallArguments) -> CallDescription:
        return self._description(self._batch_of(arguments))

    def stream_step(self, arguments: CallArguments, on_started: OnStarted) -> Tensor:
        batch, steps = self._batch_of(arguments), self._context.steps
        self._context.drain()
        seed = self._agreed_seed(batch)
        execution, update = self._linked.execution(self._context.artifact), not steps.accumulates
        on_started()
        results = execution.run(batch.leaves, batch.batch_slice(self._weight), seed, steps.recorded, update)
        return self._context.deliver(BatchResult.of(self._plan, results), execution.non_finite)

    def _agreed_seed(self, batch: "_Batch") -> int:
        """The seed of a step or stream, rank 0's, once the ranks have found that they have the same batch."""
        seed, after = peek_seed()
        replies: list[RankReply] = []
        if self._context.is_distributed:
            description = self._description(batch) | self._context.describe_updates()
            replies = self._context.require_same_call("step", description, [seed])
            seed = replies[0].reply_values[0]
        self._context.exit_on_signal(replies)
        if self._context.artifact.has_random_operators:
            advance_default_generator(after)
        return seed

    def _description(self, batch: "_Batch") -> CallDescription:
        return {given.path: describe_leaf(_leaf(given, batch.leaves)) for given in self._plan.inputs}

    def _batch_of(self, arguments: CallArguments) -> "_Batch":
        """The arguments of a call. Raises InputError if they are not those of the artifact."""
        if isinstance(arguments, _Leaves):
            return self._check_call(arguments.args, lambda leaves: (leaves, {}, None))
        kwargs = dict(sorted(arguments.kwargs.items()))
        tree = {"args": arguments.args, "kwargs": kwargs, "target": arguments.target}
        found, structure = pytree.tree_flatten_with_path(tree)
        paths = [leaf_path(keys) for keys, _ in found]
        if paths != list(self._plan.arguments):
            raise InputError(
                f"step was given {_listed(paths)}; this artifact was made for "
                f"{_listed(self._plan.arguments)}. Pass the same, by position or by name as there"
            )
        return self._check_call(
            [leaf for _, leaf in found],
            lambda leaves: tuple(pytree.tree_unflatten(leaves, structure).values()),
        )

    def _check_call(self, leaves: Sequence[Any], unflatten_call: UnflattenCall) -> "_Batch":
        plan = self._plan
        if plan.repeated not in (None, repeated_tensors(leaves)):
            same = [f"{plan.arguments[k]} is {plan.arguments[first]}" for k, first in plan.repeated]
            raise InputError(
                "forward() may ask which of its arguments are one tensor, and this artifact was made for "
                f"calls in which {' and '.join(same) or 'none is another'}. Pass the same, or save one for "
                "each"
            )
        rows = _batch_size(plan, leaves)
        leaves = [_rows_in_front(plan, k, as_contiguous(leaf), rows) for k, leaf in enumerate(leaves)]
        sizes = split_sizes(rows, plan.num_microbatches)
        values = _values(plan, leaves)
        for given in plan.inputs:
            _check(given, leaves, {"b": rows, **values}, plan.batch_axes[given.position])
        distinct = {*sizes} - {0}
        if not plan.dynamic_batch and distinct != {plan.microbatch_size}:
            raise InputError(
                f"this artifact takes microbatches of exactly {plan.microbatch_size} rows, so a batch of "
                f"{plan.microbatch_size * plan.num_microbatches}; the batch has {rows}. "
                "Pass as many, or compile with dynamic=True and save again"
            )
        _check_guards(plan, distinct, values)
        if plan.model_collectives:
            require_equal_rows(sizes)
        return _Batch(leaves, plan.batch_axes, unflatten_call, rows, sizes, values)


class _Leaves(CallArguments):
    """The leaves of all arguments of a call, in the place of positional arguments."""


@dataclass(frozen=True)
class _Batch:
    """The leaves of a call, its rows, the rows of its microbatches, and its other sizes.

    Leaves that are split have their rows in front; ``axes`` say where they are passed.
    """

    leaves: list[Any]
    axes: Sequence[BatchAxis | None]
    unflatten_call: UnflattenCall
    rows: int
    sizes: list[int]
    values: Sizes

    def batch_slice(self, weight: MicrobatchWeight) -> BatchSlice:
        """All of the batch, with what its microbatches weigh."""
        shares = loss_weights(weight, self.leaves, self.unflatten_call, self.axes, self.sizes)
        return BatchSlice(self.sizes, self.rows, custom_loss_weights=shares, values=self.values)


def _tensors_of(
    plan: Plan, saved: Mapping[str, Tensor], constants: Collection[str], ranks: Ranks
) -> ModelTensors:
    """The tensors of the plan, on their devices. Those that were not saved are on meta, or absent."""
    owners, home_of = owner_ranks(plan), tensor_devices(plan, ranks.devices)
    made = {
        value.name: _make(value, saved.get(value.name), home_of[value.name])
        for value in plan.parameters + plan.buffers
        if value.name not in constants
    }
    parameters = {
        v.name: nn.Parameter(made[v.name], made[v.name].is_floating_point()) for v in plan.parameters
    }
    buffers = {v.name: made[v.name] for v in plan.buffers if v.name in made}
    tensors = ModelTensors(parameters, buffers, frozenset(buffers), {fqn: fqn for fqn in made})
    for fqn, tensor in tensors.unique().items():
        if home_of[fqn] is None:
            release_elsewhere(fqn, tensor, f"on {format_ranks(owners[fqn])}")
    return tensors


def check_sync_spec(sync_spec: SyncSpec, optimizer: Factory | None, max_norm: float | None) -> None:
    """Raise InputError unless the given options are those that the artifact's programs need."""
    if sync_spec.updates and not callable(optimizer):
        raise InputError(
            f"the artifact's programs update the weights, but optimizer is {optimizer!r}; pass a function of "
            "(name, parameter) pairs to pipec.load, such as functools.partial(torch.optim.AdamW, lr=1e-3), "
            "or --optimizer AdamW on the command line"
        )
    if optimizer is not None and not sync_spec.updates:
        raise InputError(
            "the artifact's programs end with gradients, for it was compiled without an optimizer; leave out "
            "optimizer and update pipe.parameters() yourself, or compile it with one"
        )
    if sync_spec.clips and not (max_norm is not None and max_norm > 0):
        raise InputError(
            f"the artifact's programs clip gradients, but clip_grad_norm is {max_norm!r}; pass a number "
            "above 0, which may be another than that it was compiled with"
        )
    if max_norm is not None and not sync_spec.clips:
        raise InputError(
            f"clip_grad_norm is {max_norm!r}, but the artifact's programs do not clip, for it was compiled "
            "without clip_grad_norm=...; leave it out, or compile it with one"
        )


def _make(value: Value, saved: Tensor | None, device: torch.device | None) -> Tensor:
    if saved is not None and device is not None:
        return saved.to(device)
    return torch.empty([int(d) for d in value.shape], dtype=getattr(torch, value.dtype), device="meta")


def _batch_size(plan: Plan, leaves: Sequence[Any]) -> int:
    """The rows of the first argument that is split along the batch, and shows how many there are."""
    positions = [*(given.position for given in plan.inputs), *range(len(plan.batch_axes))]
    for position in positions:
        leaf = leaves[position] if position < len(leaves) else None
        axis = plan.batch_axes[position]
        if axis is None or not isinstance(leaf, Tensor) or leaf.ndim <= axis.dim:
            continue
        rows: int | None = axis.rows(leaf.shape)
        if rows is not None:
            return rows
    raise InputError(f"the arguments hold no batch; expected {_expected(plan)}")


def _expected(plan: Plan) -> str:
    """The arguments that an artifact reads, as its user passes them."""
    return ", ".join(f"{each.path} ({format_value(plan.user_value(each))})" for each in plan.inputs)


def _rows_in_front(plan: Plan, position: int, leaf: Any, rows: int) -> Any:
    """A leaf that is split with its rows as dimension 0. None stands for one that nothing reads."""
    axis = plan.batch_axes[position] if position < len(plan.batch_axes) else None
    if axis is None or axis.is_leading or leaf is None:
        return leaf
    if not isinstance(leaf, Tensor) or not axis.fits(leaf.shape, rows):
        found = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        raise InputError(
            f"{plan.arguments[position]} is {found}; expected {rows} rows, as the batch has, in dimension "
            f"{axis.dim}, and so {_expected(plan)}"
        )
    return axis.rows_first(leaf, rows).contiguous()


def _values(plan: Plan, leaves: Sequence[Any]) -> Sizes:
    """The size or number of each variable. Raises InputError if an argument lacks it, or two disagree."""
    found: dict[str, int | float] = {}
    for variable in plan.variables:
        leaf = leaves[variable.position] if variable.position < len(leaves) else None
        expected = type(plan.planned_sizes[variable.name])
        if variable.dim is None and type(leaf) is not expected:
            raise InputError(f"{variable.path} is {leaf!r}; expected a number of type {expected.__name__}")
        if variable.dim is not None and not (isinstance(leaf, Tensor) and leaf.ndim > variable.dim):
            raise InputError(f"{variable.path} has no {variable.size}, which is {variable.name}")
        value = variable_values([variable], leaves)[variable.name]
        if found.setdefault(variable.name, value) != value:
            raise InputError(
                f"{variable.what} is {value}, but {variable.name} is "
                f"{found[variable.name]} in other arguments; pass equal ones, for which the artifact was made"
            )
    return found


def _check_guards(plan: Plan, rows: Iterable[int], values: Sizes) -> None:
    """Raise InputError where the code of the artifact is not right for these sizes and numbers."""
    conditions = [*(f"{name} == {fixed}" for name, fixed in plan.fixed_sizes.items()), *plan.guards]
    for sizes in ({"b": each, **values} for each in {*rows}):
        for condition in conditions:
            if not holds(condition, sizes):
                read = [name for name in sizes if name in names_in(condition)]
                found = " and ".join(f"{name} = {sizes[name]}" for name in read)
                named = {"b": "the rows of a microbatch", **{each.name: each.what for each in plan.variables}}
                what = ", ".join(named[name] for name in read)
                raise InputError(
                    f"this artifact is right where {condition}, but the arguments have {found}: {what}; "
                    "save one that was compiled for such arguments"
                )


def _check(given: InputLeaf, leaves: Sequence[Any], sizes: Sizes, axis: BatchAxis | None) -> None:
    """Raise InputError unless the argument has the dtype and the shape that the plan says."""
    leaf, as_passed = _leaf(given, leaves), tuple if axis is None or axis.is_leading else axis.restored_shape
    shape = tuple(evaluate_dim(dim, sizes) for dim in given.value.shape)
    dtype = getattr(torch, given.value.dtype)
    if not (isinstance(leaf, Tensor) and leaf.dtype == dtype and leaf.shape == shape):
        found = f"{leaf.dtype} of shape {as_passed(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        raise InputError(f"{given.path} is {found}; expected {dtype} of shape {as_passed(shape)}")


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(paths) or "nothing"


def _leaf(given: InputLeaf, leaves: Sequence[Any]) -> Any:
    return leaves[given.position] if given.position < len(leaves) else None
