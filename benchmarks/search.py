"""Whether what the search takes is fast: all that it chooses from, predicted and measured.

python benchmarks/search.py [--cases "width 64"] [--tables microbatches schedules] [--rounds 4]
torchrun --nproc-per-node 2 benchmarks/search.py

Two ranks of one thread, the models of ``step_time.py``. All ways to run take turns, some steps each, so that
a slow minute of the machine slows all of them; the first step of a turn is not counted, for the others before
it have emptied the caches of its code and parameters. Numbers of microbatches are compared under 1F1B, as the
device model predicts them; schedules with 8 microbatches, as the table of devices, what was measured of this
machine and a profile of the model predict them.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from step_time import BATCH, CASES, MICROBATCHES, RANKS, Case

import pipec
from pipec.compiler.calibration_cache import cached_calibration
from pipec.hardware.devices import DEVICES, DeviceModel
from pipec.runtime import world

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")

STEPS_IN_TURN = 4
"""Of one way to run, before the next one's turn. The first of them is not counted."""


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
    """Median milliseconds of a step of each, among steps of its own: what ran before leaves cold caches."""
    inputs, target = case.batch()
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(1 + rounds):
        for name, pipe in pipes.items():
            for _ in range(STEPS_IN_TURN):
                start = time.perf_counter()
                pipe.zero_grad()
                pipe.step(inputs, target=target)
                seconds[name].append(time.perf_counter() - start)
    counted = range(STEPS_IN_TURN, (1 + rounds) * STEPS_IN_TURN)
    return {
        name: 1e3 * statistics.median(each[number] for number in counted if number % STEPS_IN_TURN)
        for name, each in seconds.items()
    }


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
    """Named schedules are cut and predicted by the profile of rank 0, all ranks making theirs at a time.

    Each is also predicted by the table of devices, and by what was measured of this machine, as ``auto`` goes
    by without a profile. The last columns compare with 1F1B, which is cut by the profile.
    """
    profile, machine = profiled(case), cached_calibration()
    options: dict[str, dict[str, object]] = {
        **{name: {"schedule": name, "profile": profile} for name in SCHEDULES},
        "auto": {"schedule": "auto"},
        "auto, with the profile": {"schedule": "auto", "profile": profile},
    }
    pipes = {name: compiled(case, MICROBATCHES, recompute="none", **how) for name, how in options.items()}
    by_profile = {
        name: 1e3 * pipe.simulate().makespan for name, pipe in pipes.items() if "profile" in options[name]
    }
    by_machine, by_table = (
        {
            name: 1e3
            * compiled(case, MICROBATCHES, recompute="none", schedule=name, device_model=model)
            .simulate()
            .makespan
            for name in (*SCHEDULES, "auto")
        }
        for model in (machine, DEVICES["cpu"])
    )
    found = measured(pipes, case, rounds)
    rows = [_row(case, name, by_table, by_machine, by_profile, found) for name in pipes]
    return [
        f"{case.name}: {described(machine)}; the profile is of {profile.device}",
        "| model | schedule | table ms | machine ms | profile ms | measured ms | machine / measured "
        "| profile / measured | machine, of 1F1B | profile, of 1F1B | measured, of 1F1B |",
        "|---|---|" + "--:|" * 9,
        *rows,
    ]


def _row(case: Case, name: str, *columns: Mapping[str, float]) -> str:
    """Milliseconds by table, machine, profile and clock; the last two over the clock, three over 1F1B's."""
    *_, by_machine, by_profile, found = columns
    cells = [f"{column[name]:.0f}" if name in column else "" for column in columns]
    cells += [f"{each[name] / found[name]:.2f}" if name in each else "" for each in (by_machine, by_profile)]
    cells += [f"{each[name] / each['1f1b']:.2f}" if name in each else "" for each in columns[1:]]
    return f"| {case.name} | {name} | {' | '.join(cells)} |"


def described(model: DeviceModel) -> str:
    """What was measured of the machine."""
    rate = model.flops_per_second["float32"]
    return (
        f"{1e-9 * rate:.0f} GFLOP/s of products, "
        f"{1e-9 * rate * model.attention_efficiency:.0f} of attention, "
        f"{1e-9 * model.other_flops_per_second:.0f} of the rest, {1e-9 * model.memory_bytes_per_second:.1f} "
        f"GB/s, {1e6 * model.launch_seconds:.1f} us a launch"
    )


def profiled(case: Case) -> pipec.Profile:
    inputs, target = case.batch()
    example = pipec.Example(case.model(), (inputs,), target=target, loss_fn=case.loss_fn)
    copies = 1 if world().is_distributed else RANKS
    return pipec.profile(example, microbatch_size=BATCH // MICROBATCHES, repeats=10, ranks=copies)


TABLES = {"microbatches": microbatches_table, "schedules": schedules_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for table in args.tables:
        for name in args.cases:
            lines = TABLES[table](CASES[name], args.rounds)
            if world().rank == 0:
                print("\n".join(lines), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
