"""The executions of a saved artifact: no model and no compiler, only the plan, the code and the programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipec.artifact.artifact import Artifact, CompiledArtifact
from pipec.errors import InputError
from pipec.ir import InputLeaf, Mode, Plan, Sizes
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.batch_split import (
    leaf_path,
    repeated_tensors,
    require_equal_rows,
    split_sizes,
    variable_values,
)
from pipec.ir.text_format import evaluate_dim, format_value, holds, names_in
from pipec.runtime.call_agreement import CallAgreement
from pipec.runtime.executions import STEP, Call, CallRequest, Executions
from pipec.runtime.messages.call_description import CallDescription, describe_leaf
from pipec.runtime.random_seeds import peek_seed
from pipec.runtime.stages.input_layout import as_contiguous
from pipec.runtime.step.microbatch_weight import MicrobatchWeight
from pipec.runtime.step_state import StepState
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.runtime.tensors import Tensors, owner_ranks
from pipec.torch_compat import pytree

UnflattenCall = Callable[[list[Any]], tuple[Any, dict[str, Any], Any]]
"""Makes arguments, keyword arguments and the target of their leaves."""


class Leaves(CallArguments):
    """The leaves of all arguments of a call, in the place of positional arguments."""


class GivenExecutions(Executions):
    """Runs the artifacts of a folder, for arguments of the shapes that they were compiled for."""

    def __init__(
        self,
        tensors: Tensors,
        agreement: CallAgreement,
        steps: StepState,
        artifacts: Mapping[Mode, Artifact],
        microbatch_weight: MicrobatchWeight | None,
    ) -> None:
        self._given = {mode: CompiledArtifact.of(each) for mode, each in artifacts.items()}
        self.trained = artifacts[Mode.TRAIN]
        weight = microbatch_weight or self.trained.plan.microbatch_weight
        super().__init__(tensors, agreement, steps, weight)
        self.trained, self._training = artifacts[Mode.TRAIN], artifacts[Mode.TRAIN].plan.training
        self.has_target = any(path.startswith("target") for path in self.trained.plan.arguments)
        owners = [owner_ranks(each.plan) for each in artifacts.values()]
        tensors.owner_ranks = {
            fqn: tuple(dict.fromkeys(rank for own in owners for rank in own.get(fqn, ())))
            for fqn in dict.fromkeys(name for own in owners for name in own)
        }

    def saved(self) -> dict[Mode, CompiledArtifact]:
        return self._given

    @property
    def training(self) -> bool:
        return self._training

    def set_mode(self, training: bool) -> None:
        if training not in {each.artifact.plan.training for each in self._given.values()}:
            made, call = ("evaluation", "train") if training else ("training", "eval")
            raise InputError(
                f"this artifact holds the step of a model in {made} mode, and no other code. Call {call}() "
                "on the pipeline of pipec.compile, then prepare(...) or eval_step(...), and save(...)"
            )
        self._training = training

    def _chosen(self, request: CallRequest) -> CompiledArtifact:
        """What runs a call. Raises InputError if it was not saved, or for the other mode of the model."""
        given = self._given.get(request.mode)
        plan = None if given is None else given.artifact.plan
        if given is None or (request.outputs and plan and len(plan.outputs) == 1 + len(plan.log_names)):
            raise InputError(
                f"{request.name} was called, but this artifact holds no code for it; call that, or "
                f"prepare(...) for a step, on the pipeline of pipec.compile, and then save(...)"
            )
        if given.artifact.plan.training != self._training:
            made, now = (
                ("training", "evaluation") if given.artifact.plan.training else ("evaluation", "training")
            )
            raise InputError(
                f"{request.name} was called in {now} mode, but the artifact holds its code for {made} mode; "
                f"call {'train' if given.artifact.plan.training else 'eval'}() before"
            )
        return given

    def agree(self, request: CallRequest, arguments: CallArguments) -> Call:
        """The call that all ranks make. Raises InputError if the arguments are not those of the artifact."""
        call = self._checked(request, arguments)
        self.drain()
        if not self.agreement.is_distributed:
            self.agreement.exit_on_signal(self.drain)
            return call
        description = self._described(call)
        if request.mode is Mode.TRAIN:
            description |= self.agreement.describe_updates()
        answer = self.agreement.require_same_call(request.name, description, lambda _: call.seed)
        self.agreement.exit_on_signal(self.drain, answer)
        return replace(call, seed=answer.value)

    def matching(self, first: Call, arguments: CallArguments) -> Call | None:
        call = self._checked(STEP, arguments)
        is_equal = (call.groups, call.values) == (first.groups, first.values)
        return replace(call, seed=first.seed) if is_equal else None

    def describe_batch(self, arguments: CallArguments) -> CallDescription:
        return self._described(self._checked(STEP, arguments))

    def _described(self, call: Call) -> CallDescription:
        return {
            given.path: describe_leaf(_leaf(given, call.leaves)) for given in call.first.artifact.plan.inputs
        }

    def _checked(self, request: CallRequest, arguments: CallArguments) -> Call:
        """The call. Raises InputError if the arguments are not those of the artifact."""
        given = self._chosen(request)
        if isinstance(arguments, Leaves):
            return self._check_call(request, given, arguments.args, lambda leaves: (leaves, {}, None))
        kwargs = dict(sorted(arguments.kwargs.items()))
        tree = {"args": arguments.args, "kwargs": kwargs, "target": arguments.target}
        found, structure = pytree.tree_flatten_with_path(tree)
        paths = [leaf_path(keys) for keys, _ in found]
        expected = given.artifact.plan.arguments
        if paths != list(expected):
            raise InputError(
                f"{request.method} was given {_listed(paths)}; this artifact was made for "
                f"{_listed(expected)}. Pass the same, by position or by name as there"
            )
        return self._check_call(
            request,
            given,
            [leaf for _, leaf in found],
            lambda leaves: tuple(pytree.tree_unflatten(leaves, structure).values()),
        )

    def _check_call(
        self,
        request: CallRequest,
        given: CompiledArtifact,
        leaves: Sequence[Any],
        unflatten_call: UnflattenCall,
    ) -> Call:
        plan = given.artifact.plan
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
        for leaf in plan.inputs:
            _check(leaf, leaves, {"b": rows, **values}, plan.batch_axes[leaf.position])
        distinct = {*sizes} - {0}
        if not plan.dynamic_batch and distinct != {plan.microbatch_size}:
            raise InputError(
                f"this artifact takes microbatches of exactly {plan.microbatch_size} rows, so a batch of "
                f"{plan.microbatch_size * plan.num_microbatches}; the batch has {rows}. "
                "Pass as many: the model makes a constant of the batch"
            )
        _check_guards(plan, distinct, values)
        if plan.model_collectives:
            require_equal_rows(sizes)
        groups = [(given, sizes)]
        return Call(request, leaves, unflatten_call, plan.batch_axes, rows, values, groups, *peek_seed())


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
