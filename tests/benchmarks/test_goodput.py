"""Goodput by the interval between checkpoints: the formula, the simulation, and the best interval."""

import random

import pytest
from goodput import DEVICE_HOURS, FAILURES, Failing, main

RUNS = (
    Failing(mean=3600, save=60, pause=60, restart=300),
    Failing(mean=1000, save=200, pause=5, restart=30),
    Failing(mean=200, save=50, pause=50, restart=100),
)


def lived(run: Failing, interval: float, seed: int) -> float:
    """The useful part of the time, with every restart, interval and save drawn one by one."""
    draw, useful, total, failures = random.Random(seed), 0.0, 0.0, 0
    while failures < FAILURES:
        left, made, complete, now = draw.expovariate(1 / run.mean), 0.0, 0.0, run.restart
        begun: list[tuple[float, float]] = []
        while now < left:
            made, now = made + interval, now + interval
            now = max(now, begun[-1][0] if begun else 0.0)  # the save before is over
            begun.append((now + run.save, made))
            now += run.pause
        complete = max((work for over, work in begun if over <= left), default=0.0)
        useful, total, failures = useful + complete, total + left, failures + 1
    return useful / total


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("interval", [20.0, 150.0, 900.0])
def test_what_is_expected_simulated_and_lived_is_the_same(run: Failing, interval: float) -> None:
    expected = run.goodput(interval)
    assert 0 <= expected < 1
    assert run.simulated(interval, FAILURES, seed=1) == pytest.approx(expected, abs=0.01)
    assert lived(run, interval, seed=2) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("run", RUNS)
def test_no_other_interval_is_better_than_the_best(run: Failing) -> None:
    best = run.best()
    others = [best * part for part in (0.2, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 5.0)]
    assert run.goodput(best) >= max(map(run.goodput, others))
    assert run.goodput(run.daly()) <= run.goodput(best)


def test_the_intervals_of_young_and_daly_are_the_best_where_failures_are_rare() -> None:
    run = Failing(mean=1e6, save=10, pause=10, restart=100)
    assert run.young() == pytest.approx((2 * 10 * 1e6) ** 0.5)
    assert run.young() == pytest.approx(run.best(), rel=0.01)
    assert run.daly() == pytest.approx(run.best(), rel=1e-4)


def test_the_script_has_the_rate_of_a_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 devices of Llama 3 failed 419 times in 54 days."""
    main(["--devices", "16384", "--step", "10", "--save", "60"])
    printed = capsys.readouterr().out
    assert "16,384 devices: a failure every 3.09 h" in printed
    assert "a checkpoint takes 60 s and training pauses for 60 s of it; a restart takes 5 min" in printed
    run = Failing(DEVICE_HOURS * 3600 / 16384, 60, 60, 300)
    steps = round(run.best() / 10)
    (best,) = (line.split() for line in printed.splitlines() if "best" in line)
    assert best[2:4] == [f"{steps}", f"{run.goodput(10 * steps):.1%}"]


def test_a_pause_is_a_part_of_a_save(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--devices", "8", "--save", "5", "--pause", "6"])
    assert "--pause 6 is longer than the save of 5 s" in capsys.readouterr().err
