"""Steps that end with the optimizer's update, one process per rank over gloo: what they do, keep and say."""

import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, os, sys
sys.path.insert(0, {tests!r})
import torch, pipec
from unsplit_reference import relative_error
from optimizer_reference import *
rank = int(os.environ["RANK"])
"""


def told(tmp_path: Path, body: str, num_ranks: int) -> list[str]:
    """What each rank prints that runs the script."""
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[2])
    script.write_text(SCRIPT.format(tests=tests) + textwrap.dedent(body))
    return run_ranks(script, num_ranks, tmp_path)


def test_processes_train_as_the_plain_script_does(tmp_path: Path) -> None:
    """Every optimizer and level of sharding; losses are compared, which the last step's weights decide."""
    printed = told(
        tmp_path,
        """
        CASES = [("adamw", None, 0.5), ("adamw", "optimizer", None), ("sgd", "gradients", 0.5)]
        CASES += [("adafactor", "parameters", 0.5), ("muon", "parameters", None)]
        for name, shard, clip in CASES:
            pipe, plain = pair(name, 5, clip, shard=shard, timeout=240.0, devices=4, replicas=2)
            worst = 0.0
            for batch in batches(20):
                worst = max(worst, relative_error(pipe.step(**batch), plain.step(batch)))
            print(name, shard, clip, "same" if worst < SAME else f"differs by {worst:.1e}")
        """,
        num_ranks=4,
    )
    expected = [
        "adamw None 0.5 same",
        "adamw optimizer None same",
        "sgd gradients 0.5 same",
        "adafactor parameters 0.5 same",
        "muon parameters None same",
    ]
    assert [each.splitlines() for each in printed] == [expected] * 4


@pytest.mark.parametrize("shard", [None, "gradients", "parameters"])
def test_the_state_of_all_processes_is_that_of_the_plain_script(shard: str | None, tmp_path: Path) -> None:
    """Checkpoints, evaluation, and going on from a checkpoint."""
    printed = told(
        tmp_path,
        f"""
        pipe, plain = pair("adamw", 4, 0.5, shard={shard!r}, devices=2, stages=1, timeout=240.0)
        every = list(batches(8))
        for batch in every[:3]:
            pipe.step(**batch)
            plain.step(batch)

        def same(what, found):
            expected = plain.model.state_dict()
            ok = found.keys() == expected.keys()
            ok = ok and all(relative_error(found[k], expected[k]) < SAME for k in expected)
            print(what, "same" if ok else "differs")

        same("full_state_dict", pipe.full_state_dict(all_ranks=True))
        other = model(1)
        pipe.gather_into(other, all_ranks=True)
        same("gather_into", other.state_dict())
        with torch.no_grad():
            expected = plain.model(**every[3])
        for name, call in (("eval_step", pipe.eval_step), ("call", pipe)):
            print(name, "same" if relative_error(call(**every[3]), expected) < SAME else "differs")
        state = copy.deepcopy(pipe.optimizer.state_dict())
        for number, entries in plain.optimizers[0].state_dict()["state"].items():
            for key, value in entries.items():
                assert relative_error(state["state"][number][key].double(), value.double()) < SAME
        weights = copy.deepcopy(plain.model.state_dict())
        pipe.step(**every[4])
        pipe.load_state_dict(weights)
        pipe.optimizer.load_state_dict(state)
        for batch in every[5:]:
            loss, theirs = pipe.step(**batch), plain.step(batch)
        print("resumed", "same" if relative_error(loss, theirs) < SAME else "differs")
        """,
        2,
    )
    names = ("full_state_dict", "gather_into", "eval_step", "call", "resumed")
    assert [each.splitlines() for each in printed] == [[f"{name} same" for name in names]] * 2


def test_processes_follow_what_a_script_changes_between_steps(tmp_path: Path) -> None:
    """Each replica has a share of the parameters that a step uses, and all of those that it leaves out."""
    first, second = told(
        tmp_path,
        """
        from torch import nn
        from tests.pipeline.test_tasks_in_turn import Pair

        def refused():
            try:
                pair.pipe.step(pair.batch, True)
            except pipec.InputError as error:
                print(str(error).splitlines()[0][:44], *str(error).splitlines()[1:2])

        pair = Pair(devices=2, stages=1, shard="parameters", timeout=240.0)
        weight = pair.own.a[0].weight
        for task in (True, False, True):
            pair.step(task)
        print({name[0]: steps for name, steps in pair.steps_of_state().items()})
        for task in (True, False):
            pair.step(task, update=not task)
        pair.step(True, update=False)
        for model in (pair.own, pair.plain):
            model.zero_grad(set_to_none=False)
        pair.step(True, update=False)
        for model in (pair.own, pair.plain):
            model.a.zero_grad()
        pair.step(True)
        whole = torch.randn(8, 8, dtype=torch.float64)
        for model in (pair.own, pair.plain):
            model.a[0].weight.data = whole.clone()
        pair.step(True, update=False)
        pair.pipe.gather_into(pair.own, all_ranks=True)
        pair.step(True)
        weight.data = torch.ones(63, dtype=torch.float64)
        refused()
        for model in (pair.own, pair.plain):
            model.a[0].weight.data = whole.clone()
        weight.requires_grad_(rank == 0)
        refused()
        weight.requires_grad_(True)
        pair.step(True)
        print("same")
        """,
        num_ranks=2,
    )
    lines = [[each for each in one.splitlines() if not each.startswith("pipec: ")] for one in (first, second)]
    assert lines[0] == lines[1]
    assert lines[0] == [
        "{'t': 3.0, 'a': 2.0, 'b': 1.0}",
        "the model fails on these arguments   at test_tasks_in_turn.py:32: "
        "return (self.a if task else self.b)(self.trunk(x)).square().mean()",
        "the ranks do not freeze the same parameters:   frozen parameters: 'none' on rank 0; "
        "'a.0.weight' on rank 1",
        "same",
    ]
