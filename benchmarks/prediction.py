"""Step time as predicted from a profile, and as measured, for the models of ``step_time.py``.

python benchmarks/prediction.py [--cases "width 64"] [--repeats 10]

Two ranks of one thread in one process, 1F1B. The profile runs the model in two copies at a time, since ranks
that share a CPU slow each other down; its times go through the plan and the simulator to a step's makespan.
"""

import argparse
import statistics
import time

import torch
from step_time import CASES, MICROBATCHES, RANKS, WARMUP_STEPS, Case

import pipec

STEPS = 9


def predict_and_measure(case: Case, repeats: int) -> tuple[float, float, float]:
    """Seconds of a step: by the device model, from a profile, and measured."""
    tokens, target = case.batch()
    model = case.model()
    profile = pipec.profile(
        pipec.Example(model, (tokens,), target=target, loss_fn=case.loss_fn),
        microbatch_size=len(tokens) // MICROBATCHES,
        repeats=repeats,
        ranks=RANKS,
    )
    modelled, profiled = (compiled(model, case, each) for each in (None, profile))
    for _ in range(WARMUP_STEPS):
        profiled.zero_grad()
        profiled.step(tokens, target=target)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        profiled.zero_grad()
        profiled.step(tokens, target=target)
        seconds.append(time.perf_counter() - start)
    return modelled.simulate().makespan, profiled.simulate().makespan, statistics.median(seconds)


def compiled(model: torch.nn.Module, case: Case, profile: pipec.Profile | None) -> pipec.Pipeline:
    tokens, target = case.batch()
    pipe = pipec.compile(
        model,
        devices=RANKS,
        loss_fn=case.loss_fn,
        microbatches=MICROBATCHES,
        recompute="none",
        profile=profile,
    )
    return pipe.prepare(tokens, target=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | device model ms | profile ms | measured ms | profile / measured |")
    print("|---|--:|--:|--:|--:|")
    for name in args.cases:
        modelled, profiled, measured = predict_and_measure(CASES[name], args.repeats)
        milliseconds = " | ".join(f"{1e3 * each:.0f}" for each in (modelled, profiled, measured))
        print(f"| {name} | {milliseconds} | {profiled / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
