"""What a loss that mixes rows costs by schedule: all forwards before the tail, or two forwards.

python benchmarks/tail.py    # a table in Markdown

Both are simulated. "Two forwards" is gradient caching (Gao et al. 2021, "Scaling Deep Contrastive Learning
Batch Size under Memory Limited Setup"): forwards that save nothing, the tail, and then the schedule as it is.
A rank begins its second pass when it has ended its first one: the step takes one forward a microbatch more.
"""

import argparse

from pipec.errors import InputError
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.tail_order import with_forwards_first
from pipec.schedules import SCHEDULES, make_schedule
from pipec.timeline.simulate import SimulationCosts, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    args = parser.parse_args()
    print("| schedule | without a tail | all forwards first | two forwards | in flight | first | two |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in SCHEDULES:
        try:
            schedule = make_schedule(name, args.ranks, args.microbatches)
        except InputError:
            continue
        found, stages_per_rank = [], schedule.num_stages // schedule.num_ranks
        for each in (schedule, with_forwards_first(schedule)):
            links = chain_links(each.num_stages)
            programs = lower(each, bare_plan(each, links))
            costs = SimulationCosts.uniform(
                each.num_stages,
                forward=1 / stages_per_rank,
                backward_input=1 / stages_per_rank,
                backward_weight=1 / stages_per_rank,
                links=links,
            )
            in_flight = max(map(peak_in_flight, programs)) / stages_per_rank
            found.append((simulate(programs, costs).makespan, in_flight))
        (plain, held), (first, all_held) = found
        times = f"{plain:.1f} | {first:.1f} | {plain + args.microbatches:.1f}"
        print(f"| `{name}` | {times} | {held:g} | {all_held:g} | {held:g} |")


if __name__ == "__main__":
    main()
