"""Whether the number of microbatches that the search takes is a fast one: all, predicted and measured.

python benchmarks/search.py [--cases "width 64"] [--rounds 5]

Two ranks of one thread in one process, 1F1B, the models of ``step_time.py``. Steps of all counts take turns,
so that a slow minute of the machine slows all of them. The last column compares with the fastest measured.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from step_time import CASES, RANKS, WARMUP_STEPS, Case

import pipec


def compiled(case: Case, microbatches: int | None) -> pipec.Pipeline:
    tokens, target = case.batch()
    pipe = pipec.compile(case.model(), RANKS, loss_fn=case.loss_fn, microbatches=microbatches)
    return pipe.prepare(tokens, target=target)


def predictions(searched: pipec.Pipeline) -> dict[int, float]:
    """Seconds of a step with each number of microbatches, the one that was taken first."""
    tried = [each for each in searched.plan.alternatives if each.replicas == 1]
    taken = {searched.plan.num_microbatches: searched.simulate().makespan}
    return taken | {each.num_microbatches: each.seconds for each in tried}


def measured(pipes: Mapping[int, pipec.Pipeline], case: Case, rounds: int) -> dict[int, float]:
    """Median seconds of a step of each."""
    tokens, target = case.batch()
    seconds: dict[int, list[float]] = {count: [] for count in pipes}
    for _ in range(WARMUP_STEPS + rounds):
        for count, pipe in pipes.items():
            start = time.perf_counter()
            pipe.step(tokens, target=target)
            seconds[count].append(time.perf_counter() - start)
    return {count: statistics.median(each[WARMUP_STEPS:]) for count, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | microbatches | predicted ms | measured ms | / fastest |")
    print("|---|--:|--:|--:|--:|")
    for name in args.cases:
        searched = compiled(CASES[name], None)
        expected = predictions(searched)
        taken = searched.plan.num_microbatches
        pipes = {count: searched if count == taken else compiled(CASES[name], count) for count in expected}
        found = measured(pipes, CASES[name], args.rounds)
        for count in sorted(expected):
            label = f"{count}, taken" if count == taken else str(count)
            ratio = found[count] / min(found.values())
            print(
                f"| {name} | {label} | {1e3 * expected[count]:.0f} | {1e3 * found[count]:.0f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
