"""Step times as predicted and as measured, for each schedule and the models of ``step_time.py``.

    torchrun --nproc-per-node 2 benchmarks/prediction.py
    python benchmarks/prediction.py --cases "width 64" --schedules 1f1b --rounds 1

Two ranks of one thread and 8 microbatches. Each schedule is predicted by the table of devices, by what was
measured of this machine, and by a profile of the model, in as many copies at a time as ranks share the
processor. All schedules take turns of four steps. The first of a turn does not count: it finds empty caches.
The last columns compare with 1F1B.
"""

import argparse
import functools
from collections.abc import Iterator, Sequence

import torch
from common import medians, row, table
from step_time import BATCH, CASES, MICROBATCHES, RANKS, Case
from torch import Tensor

import pipec
from pipec.hardware.devices import DEVICES
from pipec.runtime import world

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")


def compiled(case: Case, schedule: str, **costs: object) -> pipec.Pipeline:
    inputs, target = case.batch()
    pipe = pipec.compile(
        case.model(),
        RANKS,
        loss_fn=case.loss_fn,
        schedule=schedule,
        microbatches=MICROBATCHES,
        recompute="none",
        **costs,  # type: ignore[arg-type]
    )
    return pipe.prepare(inputs, target=target)


def profiled(case: Case, repeats: int) -> pipec.Profile:
    inputs, target = case.batch()
    example = pipec.Example(case.model(), (inputs,), target=target, loss_fn=case.loss_fn)
    copies = 1 if world().is_distributed else RANKS
    return pipec.profile(example, microbatch_size=BATCH // MICROBATCHES, repeats=repeats, ranks=copies)


def lines(name: str, schedules: Sequence[str], rounds: int, repeats: int) -> Iterator[str]:
    case = CASES[name]
    inputs, target = case.batch()
    costs: dict[str, dict[str, object]] = {
        "table": {"costs": DEVICES["cpu"]},
        "machine": {"costs": pipec.calibrate("cpu")},
        "profile": {"costs": profiled(case, repeats)},
    }
    pipes = {
        schedule: {source: compiled(case, schedule, **given) for source, given in costs.items()}
        for schedule in schedules
    }

    def step(pipe: pipec.Pipeline) -> Tensor:
        pipe.zero_grad()
        return pipe.step(inputs, target=target)

    steps = {schedule: functools.partial(step, made["profile"]) for schedule, made in pipes.items()}
    measured = medians(steps, rounds, in_turn=4)
    columns = {
        source: {schedule: made[source].simulate().makespan for schedule, made in pipes.items()}
        for source in costs
    }
    columns["measured"] = measured
    for schedule in schedules:
        cells = [f"{1e3 * column[schedule]:.0f}" for column in columns.values()]
        ratios = [
            f"{column[schedule] / column['1f1b']:.3f}" if "1f1b" in column else ""
            for column in columns.values()
        ]
        yield row(name, schedule, *cells, *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10, help="of the profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sources = ("table", "machine", "profile", "measured")
    headings = (*(f"{each} ms" for each in sources), *(f"{each}, of 1F1B" for each in sources))
    shown = [*table("model", "schedule", *headings, numbers_from=2)]
    for name in args.cases:
        shown += lines(name, args.schedules, args.rounds, args.repeats)
    if world().rank == 0:
        print("\n".join(shown))


if __name__ == "__main__":
    main()
