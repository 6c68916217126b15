"""Pipelines without a flush, one process per rank over gloo: as in one process, with the same ends."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch, pipec
from pipec.errors import InputError
from tests.pipeline.test_pipedream import *
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def streamed(pipe, given):
    losses = []
    try:
        for loss in pipe.stream(given):
            losses.append(loss)
    except Exception as error:
        print(type(error).__name__, error)
    return losses

def same(pipe, reference, losses, count):
    expected = [reference.step(batch) for batch in batches(count)]
    own = pipe.local_state_dict()
    equal = all(torch.equal(own[name], reference.history[-1][name]) for name in own)
    return losses == expected and equal
"""


def told(tmp_path: Path, body: str, num_ranks: int) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])) + textwrap.dedent(body))
    return run_ranks(script, num_ranks, tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_train_with_delayed_gradients(num_ranks: int, tmp_path: Path) -> None:
    printed = told(
        tmp_path,
        """
        versions = {"pipedream": stashed, "pipedream-vertical-sync": vertical, "pipedream-2bw": double}
        for schedule, version in versions.items():
            torch.manual_seed(rank)
            plain = model()
            pipe = pipeline(size, ADAM, schedule, timeout=240.0)
            plan = pipe.plan
            reference = Delayed(plain, ADAM, stages_of(plan), size, version, losses_in(plan.num_microbatches))
            losses = list(pipe.stream(batches(20)))
            print(schedule, same(pipe, reference, losses, 20))
        """,
        num_ranks,
    )
    expected = ["pipedream True", "pipedream-vertical-sync True", "pipedream-2bw True"]
    assert [each.splitlines() for each in printed] == [expected] * num_ranks


def test_processes_with_replicas_train_with_sums_of_delayed_gradients(tmp_path: Path) -> None:
    """2-1: rounds that are complete and one that is not, a loop that stops, and an evaluation."""
    printed = told(
        tmp_path,
        """
        from tests.pipeline.test_pipedream_replicas import PLANS, reference_of, replicated

        for factory in (SGD, ADAM):
            torch.manual_seed(rank)
            pipe = replicated((2, 1), factory, timeout=240.0)
            reference = reference_of(pipe, factory, (2, 1), model=model(5))
            losses = list(pipe.stream(batches(50)))
            print(same(pipe, reference, losses, 50))
            restart(reference)
            losses = list(pipe.stream(batches(5)))
            expected = [reference.step(batch) for batch in batches(5)]
            reference.finish()
            own = pipe.local_state_dict()
            equal = all(torch.equal(x, reference.history[-1][name]) for name, x in own.items())
            print(losses == expected, equal)
        for number, _ in enumerate(pipe.stream(batches(9))):
            if number == 2:
                break
        x, y = next(batches(1))
        print("evaluates", round(pipe.eval_step(x, target=y).item(), 6))
        print("goes on", len(streamed(pipe, batches(7 - (rank == 1)))))
        """,
        3,
    )
    one, *others = [each.splitlines() for each in printed]
    assert [each == one for each in others] == [True, True]
    assert one[:4] == ["True", "True True"] * 2
    assert one[-1] == "goes on 6"


def test_streams_end_alike_on_all_ranks(tmp_path: Path) -> None:
    """Whatever ends a stream on one rank ends it on all, at the same mini-batch, and training goes on."""
    printed = told(
        tmp_path,
        """
        pipe, plain = pipeline(3, timeout=240.0), model()
        plan = pipe.plan
        reference = Delayed(plain, SGD, stages_of(plan), 3, lambda batch, *_: batch, losses_in(1))

        def failing(count):
            yield from batches(count)
            raise OSError("the disk is full")

        def other(count):
            yield from batches(count)
            yield torch.full((8, 6), float(rank)), torch.zeros(8, dtype=torch.long)

        print("shorter", len(streamed(pipe, batches(9 - (rank == 1)))))
        print("raises", len(streamed(pipe, failing(5) if rank == 2 else batches(9))))
        print("differs", len(streamed(pipe, other(4))))
        print("all raise", len(streamed(pipe, failing(1))))
        for number, _ in enumerate(pipe.stream(batches(9))):
            if number == 3:
                break
        x, y = next(batches(1))
        print("evaluates", round(pipe.eval_step(x, target=y).item(), 6))
        print("goes on", len(streamed(pipe, batches(7))))
        state = pipe.full_state_dict(all_ranks=True)
        print("holds", round(sum(x.double().sum().item() for x in state.values()), 9))
        """,
        3,
    )
    one, *others = [each.splitlines() for each in printed]
    assert [each == one for each in others] == [True, True]
    ends = [line for line in one if line.startswith(("shorter", "raises", "differs", "all raise", "goes on"))]
    assert ends == ["shorter 8", "raises 5", "differs 4", "all raise 1", "goes on 7"]
    assert "  batches: another one on ranks 0, 2; no more on rank 1" in one
    assert "  batches: another one on ranks 0, 1; OSError: the disk is full on rank 2" in one
    assert any(line.startswith("InputError the ranks passed different batches to step") for line in one)
    assert "InputError the iterator of batches raised OSError: the disk is full" in one
