"""Errors and warnings where microbatches are not, or may not be, equivalent to the whole batch."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.errors import InputError, MixedRowsError
from pipec.graph import BatchFindings, TrainingGraph, UpdatedBuffer
from pipec.graph.size_text import format_size
from pipec.ir import Payload, Placement, Plan
from pipec.ir.text_format import names_in
from pipec.ops import COLLECTIVES

log = logging.getLogger("pipec")

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Norms with statistics of each microbatch, as of each batch in eager torch (docs/replicas.md)."""


def require_full_rounds(graph: TrainingGraph, placement: Placement, num_microbatches: int) -> None:
    """Raise InputError unless replicas with model collectives have equally many microbatches."""
    uneven = [ranks for ranks in placement if num_microbatches % len(ranks)]
    if uneven and graph.first_collective:
        raise InputError(
            "the model has collectives between the replicas of a stage, which need equally many "
            f"microbatches each, but {len(uneven[0])} replicas share {num_microbatches}; pass a multiple of "
            f"{len(uneven[0])} as microbatches"
        )


def check_given_microbatches(graph: TrainingGraph, call: ModelCall) -> None:
    """Raise InputError if given microbatches have to be joined, whose sizes may differ."""
    collective = next((node for node in graph.nodes if node.target in COLLECTIVES), None)
    if call.given and collective is not None:
        raise InputError(
            f"{graph.operators[collective.meta['operator']].module or 'the model'} has a collective between "
            "the replicas of a stage, and given microbatches are batches of their own. Pass a batch to be "
            "split, or leave the collective out: nn.BatchNorm in place of nn.SyncBatchNorm"
        )
    results = [node.meta["val"] for _, node in graph.returned] if len(call.given) > 1 else []
    if any(value.ndim or not value.is_floating_point() for value in results):
        raise InputError(
            "loss_fn returns logs that are no floating-point numbers, and given microbatches may have any "
            "sizes: return means or sums, of which step returns the mean over microbatches"
        )


def several_rounds_warning(graph: TrainingGraph, replicas: object, num_microbatches: int) -> str:
    """The warning that model collectives reduce each round of microbatches, not the whole batch."""
    if not graph.first_collective or num_microbatches == replicas:
        return ""
    return (
        f"{graph.first_collective} reduces rounds of {replicas} of the {num_microbatches} microbatches, not "
        "the whole batch; a step is one round without microbatches=..."
    )


def require_independent_rows(
    findings: BatchFindings, num_microbatches: int, options: Mapping[str, Any]
) -> None:
    """Raise MixedRowsError if rows in different microbatches depend on one another.

    Its remedies are those that the ``options`` of the pipeline do not have already.
    """
    as_one = "microbatches=1" if options["replicas"] == 1 else "microbatches=1 and no replicas"
    if findings.mixed_rows:
        remedies = [
            f"compute the batch as one, with {as_one}",
            "compute each row by itself, and reduce with sums and means over rows",
            'name the dimension of the batch, as in batched={"x": 1}, if it is not the first'
            if options.get("batched") is None
            else "see that batched names the dimension of the batch, and arguments that are needed whole",
            "draw random permutations outside, and pass the permuted rows",
            "gather the rows of replicas with pipec.ops.all_gather",
        ]
        weight = (
            ". If the mean over microbatches, each computed by itself, is what you want, pass "
            'microbatch_weight="rows"'
        )
        raise MixedRowsError(
            f"the loss of the batch cannot be computed from its {num_microbatches} microbatches, because "
            f"rows depend on other rows:\n  {findings.mixed_rows}\nRemedies: {'; '.join(remedies)}"
            + weight
            * (not options.get("microbatch_weight"))
        )
    if findings.output:
        raise MixedRowsError(
            "the model or loss_fn returns a value of all rows together, which cannot be computed from "
            f"{num_microbatches} microbatches:\n  {findings.output}\n"
            f"Return it for each row, or compile with {as_one}"
        )


def require_rows_for_norms(findings: BatchFindings, sizes: Sequence[int]) -> None:
    """Raise InputError if a batch norm would take its statistics of a single value per channel."""
    if findings.has_norm_over_rows_alone and 1 in sizes:
        raise InputError(
            "a batch norm in training mode takes its statistics of each microbatch, and needs more than one "
            f"value per channel, but of {sum(sizes)} rows in {len(sizes)} microbatches, some have one row; "
            "pass more rows or fewer microbatches, call eval() on the layer, or leave out a short batch, "
            "as drop_last=True does"
        )


def require_concatenable_outputs(graph: TrainingGraph) -> None:
    """Raise InputError if it is unknown how the results of microbatches are concatenated."""
    if all(axis is None or axis.is_leading for axis in graph.axes):
        return
    outputs = ((role, node.meta["val"]) for role, node in graph.returned)
    if any(role.axis is None and _may_have_rows_elsewhere(graph, value.shape) for role, value in outputs):
        raise InputError(
            "the model or loss_fn returns tensors, and nothing shows where their rows are: an argument has "
            "them elsewhere than in dimension 0, and the number of rows is a constant in what was captured; "
            "pass the batch as dimension 0"
        )


def _may_have_rows_elsewhere(graph: TrainingGraph, shape: Sequence[Any]) -> bool:
    """Whether an unanalysed result may have its rows in any dimension, or merged with another one."""
    if graph.batch is None:
        return bool(shape)
    sizes = [format_size(size, graph.symbols) for size in shape]
    return any("b" in names_in(size) and size != "b" for size in sizes)


def require_independent_graphs(plan: Plan, sizes: Sequence[int]) -> None:
    """Raise InputError if microbatches of several graphs need a count over the mini-batch, or all its rows.

    ``plan`` is that of one of the graphs, and ``sizes`` are the rows of all microbatches.
    """
    if any(stage.batch_counts or stage.tail for stage in plan.stages):
        what = "all rows" if any(stage.tail for stage in plan.stages) else "a count over the rows"
        raise InputError(
            f"the loss needs {what} of the mini-batch, but its {len(sizes)} microbatches of "
            f"{max(sizes)} and {min(sizes)} rows are compiled apart, because the model makes a constant of "
            f"the batch. Pass a batch that {len(sizes)} microbatches divide, as drop_last=True does"
        )


def batch_warnings(findings: BatchFindings, is_checked: bool) -> list[str]:
    """The warnings about a model whose batch is split: what differs, and what is not proved.

    If a run has shown that microbatches make up the batch, what is not proved is no warning.
    """
    warnings = []
    if is_checked:
        for each in filter(None, (findings.unproven, *findings.assumed)):
            log.info("a check agrees with the model, but nothing proves it: %s", each)
    elif findings.unproven:
        warnings.append(
            "the losses of microbatches are averaged, each weighted by its rows, but nothing proves that "
            f"this is the loss of the batch: {findings.unproven}. Say how they add up with "
            "microbatch_weight=..., or reduce with sums and means over rows"
        )
    warnings += [f"nothing proves that {each}" for each in findings.assumed if not is_checked]
    warnings += [
        f"{place}: each microbatch draws its own random numbers here, where the unsplit model draws them "
        "once for all rows; to use the same for all, draw them outside and pass them as an argument"
        for place in findings.unordered_random
    ]
    if findings.num_batch_norms:
        warnings.append(
            f"batch norms ({findings.num_batch_norms} of them) take their statistics of each microbatch, not "
            "of the whole batch, so that losses differ from those of the unsplit model; in eval() mode, or "
            "with GroupNorm or LayerNorm, they do not"
        )
    return warnings


def single_row_warning(graph: TrainingGraph, batch_size: int) -> str:
    """The warning that eager torch would squeeze the row dimension of a batch of one row."""
    if not graph.squeezed_at or batch_size != 1:
        return ""
    return (
        "the batch has one row: eager torch would squeeze this dimension, pipec keeps it as in every other "
        f"batch{graph.squeezed_at}\nName the dimensions to squeeze, as in x.squeeze(-1)."
    )


def changed_buffer_warning(
    graph: TrainingGraph, model: nn.Module, num_microbatches: int, replicas: object
) -> str:
    """The warning that a forward changes buffers other than the statistics of torch's norms.

    Given microbatches change them one after the other, as batches do, if there are no ``replicas``.
    """
    changed = {result.fqn for result in graph.results if isinstance(result, UpdatedBuffer)}
    changed -= graph.step_buffers
    owners = {fqn: model.get_submodule(fqn.rpartition(".")[0]) for fqn in sorted(changed)}
    names = [fqn for fqn, owner in owners.items() if not isinstance(owner, _NORMS)]
    if not names or num_microbatches == 1 or (graph.has_given_microbatches and replicas == 1):
        return ""
    if graph.has_given_microbatches:
        return (
            f"forward() changes {', '.join(names)}: each replica changes its own copy, with the microbatches "
            "that it takes, and the copies are then averaged, where a loop changes one buffer in turn. Leave "
            "replicas out, or change it between steps, in the training loop"
        )
    return (
        f"forward() changes {', '.join(names)}: once for each of the {num_microbatches} microbatches of a "
        "step, where eager torch changes it once. Each replica changes its own copy; the copies are then "
        "averaged, or for integers their changes are summed. Pass microbatches=1 to change it once, or "
        "change it between steps, in the training loop"
    )


def refuse_tied_weights(plan: Plan) -> None:
    """Refuse weights tied across stages: under an asynchronous schedule their versions would differ."""
    for link in plan.links:
        if link.payload is Payload.WEIGHT:
            name, stages = link.values[0].name, f"{link.source} and {link.target}"
            raise InputError(
                f"{name} is tied: stages {stages} use it, and under an asynchronous schedule they would use "
                "different versions of it. Pass a synchronous schedule, such as schedule='1f1b'; or give "
                "each use its own parameter before you compile"
            )


def refuse_replica_state(plan: Plan, graph: TrainingGraph) -> None:
    """Refuse model collectives and buffer updates of replicas that work on different mini-batches."""
    if graph.first_collective and any(len(ranks) > 1 for ranks in plan.placement):
        raise InputError(
            "the model has collectives between the replicas of a stage, which work on different mini-batches "
            "under an asynchronous schedule; pass a synchronous one, such as schedule='1f1b', or replicas=1"
        )
    for stage, ranks in enumerate(plan.placement):
        if len(ranks) == 1 or not plan.stages[stage].updated_buffers:
            continue
        name, count = plan.stages[stage].updated_buffers[0], len(ranks)
        raise InputError(
            f"forwards of stage {stage} change the buffer {name}; under an asynchronous schedule, the copies "
            f"of its {count} replicas would differ. Pass a synchronous schedule, such as schedule='1f1b', or "
            "one replica of the stage; or call eval() on the layer, or make it without this buffer "
            "(track_running_stats=False)"
        )


def check_local_batch(plan: Plan, num_replicas: int) -> None:
    """Raise InputError unless replicas are whole pipelines that need no rows of each other.

    Rank q is to be in pipeline q modulo ``num_replicas``, which every rank knows before there is a plan.
    """
    for stage, ranks in enumerate(plan.placement):
        if [rank % num_replicas for rank in ranks] != list(range(num_replicas)):
            raise InputError(
                f"the plan has stage {stage} on ranks {ranks}, which are not one rank of each of "
                f'{num_replicas} pipelines; with batch="local" every stage has as many replicas, in turn. '
                "Pass a schedule of one pipeline, and replicas=..."
            )
    if plan.num_microbatches % num_replicas:
        raise InputError(
            f"{plan.num_microbatches} microbatches are no multiple of {num_replicas} replicas, each of which "
            'splits its own part with batch="local"; pass a multiple as microbatches'
        )
    for part in plan.stages:
        sums = {value.name for value in part.batch_count_sums}
        if others := [name for name in part.batch_counts if name not in sums]:
            raise InputError(
                f"the loss needs {others[0]} of the whole batch (see batch_counts in the code of stage "
                f"{part.index}), which is no sum over its rows, so that replicas cannot add up what it is of "
                'their parts. Pass it to step as an argument, or compile without batch="local"'
            )
