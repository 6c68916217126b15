"""Whether microbatches make what the batch would: what is refused if not, and what the user is told."""

from torch import nn

from pipec.errors import InputError, MixedRowsError
from pipec.graph import BatchFindings, TrainingGraph, UpdatedBuffer, is_collective
from pipec.ir import Payload, Placement, Plan

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Their statistics are of each microbatch, as of each batch in eager torch: docs/replicas.md says so."""


def has_model_collectives(graph: TrainingGraph) -> bool:
    """Whether replicas make some values together."""
    return any(map(is_collective, graph.nodes))


def require_full_rounds(graph: TrainingGraph, placement: Placement, num_microbatches: int) -> None:
    """Raise InputError unless replicas that are joined have as many microbatches."""
    uneven = [ranks for ranks in placement if num_microbatches % len(ranks)]
    if uneven and has_model_collectives(graph):
        raise InputError(
            f"the model joins the replicas of a stage, of which each must have as many microbatches, but "
            f"{len(uneven[0])} share {num_microbatches}; pass a multiple of {len(uneven[0])} as microbatches"
        )


def several_rounds_warning(graph: TrainingGraph, replicas: object, num_microbatches: int) -> str:
    """What to tell if the model joins several rounds in a step, and not the whole batch."""
    if not graph.first_collective or num_microbatches == replicas:
        return ""
    return (
        f"{graph.first_collective} reduces rounds of {replicas} of the {num_microbatches} microbatches, not "
        "the whole batch; a step is one round without microbatches=..."
    )


def require_independent_rows(findings: BatchFindings, num_microbatches: int) -> None:
    """Raise MixedRowsError if rows of the batch in different microbatches depend on one another."""
    if findings.mixed_rows:
        raise MixedRowsError(
            f"the loss of the batch is not made by its {num_microbatches} microbatches, for rows depend on "
            f"other rows:\n  {findings.mixed_rows}\n"
            "Compute it with microbatches=1. Or let each row be computed by itself, and reduce with sums and "
            'means over rows; say in batched={"x": 1}, by the name of the argument, if the batch is another '
            "dimension than the first; draw random permutations outside, and pass them as rows that are "
            "permuted already; join the rows of replicas with pipec.ops.all_gather. "
            'microbatch_weight="rows" takes the mean over microbatches, each computed by itself, on purpose'
        )
    if findings.output:
        raise MixedRowsError(
            "the model or loss_fn returns a value of all rows together, which those of "
            f"{num_microbatches} microbatches do not make:\n  {findings.output}\n"
            "Return it for each row, or compile with microbatches=1"
        )


def batch_warnings(findings: BatchFindings) -> list[str]:
    """What is to be said of a model whose batch is split, since it is not proved right."""
    found = []
    if findings.unproven:
        found.append(
            "the losses of microbatches are averaged, each weighted by its rows, but nothing proves that "
            f"this is the loss of the batch: {findings.unproven}. Say how they add up with "
            "microbatch_weight=..., or reduce with sums and means over rows"
        )
    found += [
        f"{place}: nothing proves that {op} computes each row by itself; it is checked when the first step "
        "runs, with a row replaced"
        for place, op in dict.fromkeys((each.location, each.op) for each in findings.assumed)
    ]
    found += [
        f"{place}: each microbatch draws numbers of its own there, where the unsplit model draws them once "
        "for all rows; draw them outside, and pass them as an argument, to have the same for all"
        for place in findings.unordered_random
    ]
    if findings.num_batch_norms:
        found.append(
            f"{findings.num_batch_norms} batch norms take their statistics of each microbatch, not of the "
            "whole batch, "
            "so that losses differ from those of the unsplit model; in eval() mode, or with GroupNorm or "
            "LayerNorm, they do not"
        )
    return found


def single_row_warning(graph: TrainingGraph, batch_size: int) -> str:
    """What to tell if eager torch would squeeze the dimension of rows of a batch of one row."""
    if not graph.squeezed_at or batch_size != 1:
        return ""
    return (
        "the batch has one row, whose dimension eager torch would squeeze, and pipec keeps as in every other "
        f"batch{graph.squeezed_at}\nName the dimensions to squeeze, as in x.squeeze(-1)."
    )


def changed_buffer_warning(graph: TrainingGraph, model: nn.Module, num_microbatches: int) -> str:
    """What to tell if a forward changes buffers that are no statistics of torch's norms."""
    changed = [result.fqn for result in graph.results if isinstance(result, UpdatedBuffer)]
    owners = {fqn: model.get_submodule(fqn.rpartition(".")[0]) for fqn in changed}
    names = [fqn for fqn, owner in owners.items() if not isinstance(owner, _NORMS)]
    if not names or num_microbatches == 1:
        return ""
    return (
        f"forward() changes {', '.join(names)}: once for each of the {num_microbatches} microbatches of a "
        "step, where eager torch changes it once. Replicas each change their own, and go on with the mean, "
        "or of whole numbers with the sum of the changes. Pass microbatches=1 to change it once, or change "
        "it between steps, in the training loop"
    )


def refuse_tied_weights(plan: Plan) -> None:
    """Refuse weights that several stages use, of which each would have another version."""
    for link in plan.links:
        if link.payload is Payload.WEIGHT:
            name, stages = link.values[0].name, f"{link.source} and {link.target}"
            raise InputError(
                f"{name} is tied: stages {stages} use it, and without a flush they would use different "
                "versions of it. Take a schedule with a flush, such as schedule='1f1b'; or give each use a "
                "parameter of its own before you compile"
            )


def refuse_replica_state(plan: Plan, graph: TrainingGraph) -> None:
    """Refuse what replicas make together in a forward, of which each runs another one at a time."""
    if has_model_collectives(graph) and any(len(ranks) > 1 for ranks in plan.placement):
        raise InputError(
            "the model joins the replicas of a stage, which without a flush work on other mini-batches; take "
            "a schedule with a flush, such as schedule='1f1b', or replicas=1"
        )
    for stage in plan.sync_spec.buffer_sync_stages:
        name, count = plan.stages[stage].updated_buffers[0], len(plan.placement[stage])
        raise InputError(
            f"forwards of stage {stage} change the buffer {name}, of which its {count} replicas would have "
            "different ones without a flush. Take a schedule with a flush, such as schedule='1f1b', or one "
            "replica of the stage; or call eval() on the layer, or give it no such buffer "
            "(track_running_stats=False)"
        )
