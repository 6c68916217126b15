"""What a step costs with each order that its tail allows: all forwards first, or two forwards."""

from pipec.compiler.search import evaluate_within_memory
from pipec.compiler.staged_graph import EvaluatedPlan, StagedGraph
from pipec.ir import TailCost
from pipec.plan.predictions import simulate_plan
from pipec.programs.tail_order import has_two_forwards, without_first_forwards


def tail_costs(evaluated: EvaluatedPlan, base: StagedGraph) -> tuple[TailCost, ...]:
    """The costs of an evaluated plan, and then of the other order on the stages of ``base``, if there is one.

    The other one is what the search has compared: it recomputes or offloads what it must to fit into memory.
    """
    if not evaluated.staged.waits_for_tail:
        return ()
    taken, size = has_two_forwards(evaluated.schedule), evaluated.plan.microbatch_size
    orders = base.orders_for_tail(without_first_forwards(evaluated.schedule))
    others = [order for order in orders if has_two_forwards(order) != taken]
    return tuple(map(_cost, [evaluated, *(evaluate_within_memory(base, order, size) for order in others)]))


def _cost(evaluated: EvaluatedPlan) -> TailCost:
    return TailCost(
        two_forwards=has_two_forwards(evaluated.schedule),
        recomputes=any(stage.has_recompute for stage in evaluated.plan.stages),
        seconds=evaluated.seconds,
        bubble_rate=simulate_plan(evaluated.plan, evaluated.programs).bubble_rate,
        peak_bytes=evaluated.peak_bytes,
        fits=not any(evaluated.excess_bytes),
    )
