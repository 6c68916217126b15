"""Whether what the search takes is fast: all that it chooses from, predicted and measured.

python benchmarks/search.py [--cases "width 64"] [--tables microbatches schedules] [--rounds 5]
torchrun --nproc-per-node 2 benchmarks/search.py

Two ranks of one thread, the models of ``step_time.py``. Steps of all ways to run take turns, so that a slow
minute of the machine slows all of them. Numbers of microbatches are compared under 1F1B, as the device model
predicts them; schedules with 8 microbatches, also as a profile of the model predicts them. Ratios of the last
column are to the fastest measured.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from step_time import BATCH, CASES, MICROBATCHES, RANKS, WARMUP_STEPS, Case

import pipec
from pipec.runtime import world

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "auto")


def compiled(case: Case, microbatches: int | None, **options: object) -> pipec.Pipeline:
    inputs, target = case.batch()
    pipe = pipec.compile(case.model(), RANKS, loss_fn=case.loss_fn, microbatches=microbatches, **options)
    return pipe.prepare(inputs, target=target)


def predictions(searched: pipec.Pipeline) -> dict[int, float]:
    """Seconds of a step with each number of microbatches, the one that was taken first."""
    tried = [each for each in searched.plan.alternatives if each.replicas == 1]
    taken = {searched.plan.num_microbatches: searched.simulate().makespan}
    return taken | {each.num_microbatches: each.seconds for each in tried}


def measured(pipes: Mapping[str, pipec.Pipeline], case: Case, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of each."""
    inputs, target = case.batch()
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(WARMUP_STEPS + rounds):
        for name, pipe in pipes.items():
            start = time.perf_counter()
            pipe.step(inputs, target=target)
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(each[WARMUP_STEPS:]) for name, each in seconds.items()}


def microbatches_table(case: Case, rounds: int) -> list[str]:
    searched = compiled(case, None)
    taken, expected = searched.plan.num_microbatches, predictions(searched)
    pipes = {
        f"{count}, taken" if count == taken else str(count): searched
        if count == taken
        else compiled(case, count)
        for count in sorted(expected)
    }
    found = measured(pipes, case, rounds)
    rows = zip(found.items(), sorted(expected.items()), strict=True)
    return [
        "| model | microbatches | predicted ms | measured ms | / fastest |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {case.name} | {name} | {1e3 * seconds:.0f} | {each:.0f} | {each / min(found.values()):.2f} |"
            for (name, each), (_, seconds) in rows
        ),
    ]


def schedules_table(case: Case, rounds: int) -> list[str]:
    """The profile of rank 0 counts. All ranks make theirs at a time, to slow each other as in a step."""
    profile = profiled(case)
    pipes, modelled = {}, {}
    for schedule in SCHEDULES:
        pipes[schedule] = compiled(case, MICROBATCHES, schedule=schedule, recompute="none", profile=profile)
        by_model = compiled(case, MICROBATCHES, schedule=schedule, recompute="none")
        modelled[schedule] = 1e3 * by_model.simulate().makespan
    expected = {name: 1e3 * pipe.simulate().makespan for name, pipe in pipes.items()}
    found = measured(pipes, case, rounds)
    return [
        "| model | schedule | device model ms | profile ms | measured ms | profile / measured | / fastest |",
        "|---|---|--:|--:|--:|--:|--:|",
        *(
            f"| {case.name} | {name} | {modelled[name]:.0f} | {expected[name]:.0f} | {each:.0f} "
            f"| {expected[name] / each:.2f} | {each / min(found.values()):.2f} |"
            for name, each in found.items()
        ),
    ]


def profiled(case: Case) -> pipec.Profile:
    inputs, target = case.batch()
    example = pipec.Example(case.model(), (inputs,), target=target, loss_fn=case.loss_fn)
    copies = 1 if world().distributed else RANKS
    return pipec.profile(example, microbatch_size=BATCH // MICROBATCHES, repeats=10, ranks=copies)


TABLES = {"microbatches": microbatches_table, "schedules": schedules_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for table in args.tables:
        for number, name in enumerate(args.cases):
            lines = TABLES[table](CASES[name], args.rounds)
            if world().rank == 0:
                print("\n".join(lines[2:] if number else lines), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
