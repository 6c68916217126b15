"""A plan for torch's pipelining: the compute orders of one pipeline, and the modules of each stage."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipec.console import notice
from pipec.errors import PlanError
from pipec.ir import Compute, Mode, Payload, Phase, Plan, Program, Schedule, one_rank_per_stage
from pipec.schedules import format_orders

_PHASES = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT})


def orders_csv(plan: Plan, programs: Sequence[Program]) -> str:
    """The compute orders of a plan as the CSV that torch's pipelining loads; of replicas, the first one's.

    Raises:
        PlanError: the orders mean something else without pipec.
    """
    _require_plain_orders(plan)
    if memory := [stage.index for stage in plan.stages if stage.has_recompute or stage.offloaded]:
        notice(
            f"the plan recomputes or offloads values of stages {', '.join(map(str, memory))}, which a file "
            "of orders cannot say: with torch they need torch.utils.checkpoint, or more memory"
        )
    return format_orders(_one_pipeline(plan, programs))


def module_fqns(plan: Plan) -> list[list[str]]:
    """The names of the modules of each stage, as torchtitan's ``module_fqns_per_model_part``.

    Raises:
        PlanError: a cut is inside of a module, or stages share a parameter.
    """
    if inside := [f"stage {x.index} begins in {x.divided_module}" for x in plan.stages if x.divided_module]:
        raise PlanError(
            f"stages of torch are whole modules, but {'; '.join(inside)}. Write orders with `pipec plan -o "
            "order.csv`, which cuts between modules, or pass the modules of your own cut"
        )
    if tied := [value.name for link in plan.links if link.payload is Payload.WEIGHT for value in link.values]:
        raise PlanError(
            f"several stages use {', '.join(tied)}, and torch's pipelining would train a copy on each; do "
            "not tie it, or use fewer stages"
        )
    return [[*stage.whole_modules] for stage in plan.stages]


def _require_plain_orders(plan: Plan) -> None:
    """Raise PlanError if torch's runtime would compute something else in these orders."""
    reasons = {
        "mini-batches overlap in it, and weights have several versions; take a synchronous schedule": (
            plan.sync_spec.stream is not None
        ),
        "the script computes the loss of all rows at once; pass loss_fn": plan.mode is Mode.OUTPUTS,
        "it does not train": not plan.mode.trains,
        "a part of the loss needs the rows of all microbatches": plan.tail_stage is not None,
        "its stages have different numbers of replicas; take one number for all": (
            len({len(ranks) for ranks in plan.placement}) > 1
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise PlanError(f"torch's pipelining cannot run {plan.schedule} as planned: {reason}")


def _one_pipeline(plan: Plan, programs: Sequence[Program]) -> Schedule:
    """The orders of the first replica of each stage, its ranks and microbatches numbered without gaps.

    Halves of a backward that follow each other are one backward, which takes torch less time.
    """
    replicas = len(plan.placement[0])
    firsts = [ranks[0] for ranks in plan.placement]
    by_rank, ranks = {each.rank: each for each in programs}, sorted(set(firsts))
    placement = one_rank_per_stage(map(ranks.index, firsts))
    orders = tuple(_merged([*_computes(by_rank[rank], replicas)]) for rank in ranks)
    return Schedule(plan.schedule, -(-plan.num_microbatches // replicas), placement, orders)


def _computes(program: Program, replicas: int) -> Iterator[Compute]:
    """The computes of a program in order. One that has segments begins with the first."""
    for each in program.instructions:
        if each.op.phase in _PHASES and each.segment <= 0:
            yield Compute(each.op.phase, each.stage, each.microbatch // replicas)


def _merged(order: Sequence[Compute]) -> tuple[Compute, ...]:
    """The order with a backward in place of an input gradient that its weight gradient follows."""
    found = list[Compute]()
    for each in order:
        halves = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        if found and (found[-1].phase, each.phase) == halves and found[-1] == replace(each, phase=halves[0]):
            found[-1] = replace(each, phase=Phase.BACKWARD)
        else:
            found.append(each)
    return tuple(found)
