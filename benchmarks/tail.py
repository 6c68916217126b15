"""What a loss that mixes rows costs by schedule: all forwards run before the tail.

python benchmarks/tail.py    # a table in Markdown

The programs of each are lowered, verified and simulated. The tail itself takes no time here.
"""

import argparse
from dataclasses import replace

from pipec.errors import InputError
from pipec.ir import Plan, Schedule, Tail, Value
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.tail_order import ordered_for_tail
from pipec.programs.verify import verify
from pipec.schedules import SCHEDULES, make_schedule
from pipec.timeline.simulate import SimulationCosts, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    args = parser.parse_args()
    print("| schedule | without a tail | all forwards first | in flight | forwards first |")
    print("|---|--:|--:|--:|--:|")
    for name in SCHEDULES:
        try:
            schedule = make_schedule(name, args.ranks, args.microbatches)
        except InputError:
            continue
        found = [
            _simulated(schedule, _plan(schedule)),
            _simulated(schedule, _plan(schedule, has_tail=True)),
        ]
        cells = (*(f"{time:.1f}" for time, _ in found), *(f"{in_flight:g}" for _, in_flight in found))
        print(f"| `{name}` | {' | '.join(cells)} |")


def _plan(schedule: Schedule, has_tail: bool = False) -> Plan:
    """The plan of a chain of stages whose last one may have a tail."""
    plan = bare_plan(schedule, chain_links(schedule.num_stages))
    stages = [*plan.stages]
    rows = (Value("rows", "float32", ("b", 1)),)
    stages[-1] = replace(stages[-1], tail=Tail(rows, rows) if has_tail else None)
    return replace(plan, stages=tuple(stages))


def _simulated(schedule: Schedule, plan: Plan) -> tuple[float, float]:
    """The step in units of a forward of a rank, and the microbatches in flight."""
    num_chunks = len(plan.stages) // plan.num_ranks
    programs = lower(ordered_for_tail(schedule, plan), plan)
    verify(plan, programs)
    one = 1 / num_chunks
    costs = SimulationCosts.uniform(
        len(plan.stages), forward=one, backward_input=one, backward_weight=one, links=plan.links
    )
    return simulate(programs, costs).makespan, max(map(peak_in_flight, programs)) / num_chunks


if __name__ == "__main__":
    main()
