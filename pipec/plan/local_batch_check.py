"""Checks that replicas can run a plan with local batches."""

from pipec.errors import InputError
from pipec.ir import Plan


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
