"""Replicas that were each given their own part of a batch train as plain PyTorch does on the whole one."""

import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker_processes import run_lines

import pipec
from pipec.compiler.batch_equivalence import check_local_batch
from tests.pipeline.test_ranks import SCRIPT

OWN = """
from constant_batch import constant_front_ends
from unsplit_reference import Plain, relative_error
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

def double(seed=0):
    return model(seed).double()

def local(net, loss_fn=F.cross_entropy, **options):
    options = {"devices": size, "replicas": 2, "microbatches": 4, "batch": "local"} | options
    return compiled(net, loss_fn, **options)

generator = torch.Generator().manual_seed(1)

def batch(rows):
    "Inputs, and targets of which every third is padding."
    x = torch.randn(rows, 6, generator=generator).double()
    y = torch.randint(0, 3, (rows,), generator=generator)
    y[::3] = -100
    return x, y

def part(pipe, rows, x):
    "What this rank passes of x, of which replica k has rows[k]."
    return x.split(list(rows))[pipe.replica]

def error(pipe, plain):
    "The largest relative error of a tensor of the whole model."
    state = pipe.full_state_dict(all_ranks=True)
    return max(relative_error(state[name], x) for name, x in plain.state_dict().items())
"""


Told = Callable[[int], Callable[[str], list[list[str]]]]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """``told(4)(body)`` gives the lines of each of four ranks."""
    return lambda num_ranks: lambda body: run_lines(SCRIPT + OWN + textwrap.dedent(body), num_ranks, tmp_path)


CASES = {
    2: [("1f1b", None, None), ("gpipe", "optimizer", 0.5), ("1f1b", "gradients", 0.5)],
    4: [("1f1b", None, 0.5), ("zb-h1", "parameters", None)],
}
"""By the number of ranks: a schedule, what is sharded, and the norm that gradients are clipped to."""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", CASES)
def test_replicas_whose_data_end_early_train_as_plain_pytorch_does(num_ranks: int, told: Told) -> None:
    """Four epochs of three batches on one replica and five on the other, of all numbers of rows."""
    cases = CASES[num_ranks]
    printed = told(num_ranks)(f"""
        ROWS = [(5, 3), (1, 6), (4, 4), (7, 0), (2, 0)]
        for schedule, shard, clip in {cases}:
            pipe = local(double(rank), optimizer=ADAMW, schedule=schedule, shard=shard, clip_grad_norm=clip)
            plain = Plain(double(), ADAMW, clip, F.cross_entropy)
            rates = torch.optim.lr_scheduler.ExponentialLR
            schedulers = [rates(each.optimizer, 0.9) for each in (pipe, plain)]
            worst, joined = 0.0, 0
            for epoch in range(4):
                ends = False
                for rows in ROWS if epoch % 2 else [each[::-1] for each in ROWS]:
                    x, y = batch(sum(rows))
                    expected = plain.step(x, target=y)
                    schedulers[1].step()
                    ends = ends or not rows[pipe.replica]
                    if not ends:
                        loss = pipe.step(part(pipe, rows, x), target=part(pipe, rows, y))
                        schedulers[0].step()
                        worst = max(worst, relative_error(loss, expected))
                joined += pipe.join(schedulers[0].step)
            worst = max(worst, error(pipe, plain.model))
            print(schedule, shard, joined, "same" if worst < 1e-9 else worst)
            print([x.sum().item().hex() for x in pipe.full_state_dict(all_ranks=True).values()])
        """)
    assert printed[0][::2] == [f"{schedule} {shard} 4 same" for schedule, shard, _ in cases]
    assert printed == [printed[0]] * num_ranks


@pytest.mark.slow
def test_draws_are_those_of_the_microbatch_whoever_runs_it(told: Told) -> None:
    """Replica k has microbatches k, k + 2, ...: as in one process whose batch has the rows in that order."""
    printed = told(2)("""
        x, y = batch(8)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
        whole = local(copy.deepcopy(net), batch="same")
        pipe = local(net)
        own = [2 * microbatch + row for microbatch in (pipe.replica, pipe.replica + 2) for row in (0, 1)]
        losses = []
        for each, rows in ((whole, list(range(8))), (pipe, own)):
            torch.manual_seed(5 + rank)
            losses.append(each.step(x[rows], target=y[rows]))
        print(relative_error(*losses) < 1e-12)
        """)
    assert printed == [["True"]] * 2


@pytest.mark.slow
def test_a_rank_that_never_has_data_trains_all_the_same(told: Told) -> None:
    """Rank 0, which compiles for all, joins before any step; sparse gradients and accumulated ones sum up."""
    printed = told(2)("""
        def net():
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
        words, y = torch.randint(0, 9, (5, 2), generator=generator), torch.tensor([0, 1, 2, 1, 1])
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        pipe, plain = local(net(), optimizer=sgd), net()
        for rows in (slice(0, 3), slice(0, 5)):
            F.cross_entropy(plain(words[rows]), y[rows]).backward()
        sgd(plain.parameters()).step()
        if rank:
            with pipe.accumulate():
                pipe.step(words[:3], target=y[:3])
            pipe.step(words, target=y)
            print(pipe.eval_step(words, target=y).shape)
        print(pipe.join())
        print(error(pipe, plain) < 1e-12)
        """)
    assert printed == [["2", "True"], ["torch.Size([])", "0", "True"]]


@pytest.mark.slow
def test_statistics_are_those_of_replicas_with_rows(told: Told) -> None:
    """BatchNorm's after a step of two replicas, and after one of the first alone, which the second joins."""
    printed = told(2)("""
        def net():
            torch.manual_seed(0)
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        def after(x, sizes, before):
            plain = net()
            plain.load_state_dict(before)
            for rows in x.split(sizes):
                plain[0](rows)
            return plain.state_dict()
        def same(expected):
            found = pipe.full_state_dict(all_ranks=True)
            names = "0.running_mean", "0.running_var", "0.num_batches_tracked"
            print(max(relative_error(found[name], expected[name]) for name in names) < 1e-12)
        (x, y), start = batch(10), net().state_dict()
        pipe = local(net(), optimizer=ADAMW)
        rows = (6, 4)
        pipe.step(part(pipe, rows, x), target=part(pipe, rows, y.clamp(min=0)))
        parts = [after(x[:6], [3, 3], start), after(x[6:], [2, 2], start)]
        agreed = {name: (parts[0][name] + parts[1][name]) / 2 for name in start}
        agreed["0.num_batches_tracked"] = torch.tensor(1)
        same(agreed)
        if rank == 0:
            pipe.step(x, target=y.clamp(min=0))
        pipe.join()
        same(after(x, [5, 5], agreed) | {"0.num_batches_tracked": torch.tensor(2)})
        """)
    assert printed == [["True", "True"]] * 2


@pytest.mark.slow
def test_parts_that_do_not_fit_are_refused_on_every_rank(told: Told) -> None:
    printed = told(4)("""
        x, y = batch(8)
        pipe = local(double())
        step = lambda x, y: attempt(lambda: pipe.step(x, target=y))
        step(x[:4] + rank, y[:4])
        step(x[: 4 - rank // 2], y[: 4 - rank // 2])
        step(x.float() if rank == 1 else x, y)
        step(x[:, :5].contiguous() if rank == 1 else x, y)
        step(x[:0], y[:0])
        attempt(lambda: pipe.step(x, target=y) if rank != 3 else pipe.join())
        attempt(lambda: pipe.step(x, target=y) if rank % 2 else pipe.join())
        attempt(lambda: pipe.full_state_dict() if rank % 2 else pipe.join())
        print(float(pipe.step(x, target=y)) > 0)
        """)
    assert printed == [printed[0]] * 4
    rows = r"rows of float64\[6\] on ranks 0, 2, 3; rows of "
    expected = (
        r"the ranks of replica 0 passed different parts of the batch: rank 2 has other.*rank=pipe\.replica"
        r".*the ranks of replica 0 passed different parts of the batch: rank 2 has other.*rank=pipe\.replica"
        rf".*{rows}float32\[6\] on rank 1\n.*but for their rows.*{rows}float64\[5\] on rank 1\n"
        r".*no replica passed any rows.*the ranks of replica 1 passed different parts of the batch"
        r".*InputError: some ranks have joined, but a step without"
        r".*the ranks do not make the same calls:\n  call: join, after 0 steps on ranks 0, .*\nTrue$"
    )
    assert re.search(expected, "\n".join(printed[0]), re.DOTALL), printed[0]


@pytest.mark.slow
def test_what_replicas_cannot_do_with_parts_is_refused_on_every_rank(told: Told) -> None:
    """An optimizer that a scheduler changed on one rank; counts that are no sums; sizes that need graphs."""
    printed = told(2)("""
        x, y = batch(8)
        pipe = local(double(), optimizer=ADAMW)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        def train():
            for _ in range(2):
                pipe.step(x, target=y)
                scheduler.step()
        attempt(train if rank else pipe.join)
        def largest(output, target):
            return (output.square().mean(1) * target).sum() / target.max()
        attempt(lambda: local(double(), largest).step(x, target=y.abs().double()))
        def relative(output, target):
            weights = target / target.sum()
            return (output.square().mean(1) * weights).sum() / (weights * weights).sum()
        attempt(lambda: local(double(), relative).step(x, target=y.abs().double()))
        front_ends = pipec.capture.tracer.FRONT_ENDS
        pipec.capture.tracer.FRONT_ENDS = constant_front_ends()
        fixed = local(double())
        attempt(lambda: fixed.step(x[: 8 - rank], target=y[: 8 - rank]))
        print(float(fixed.step(x, target=y)) > 0)
        pipec.capture.tracer.FRONT_ENDS = front_ends
        attempt(lambda: local(double(), batch=["local", "same"][rank]))
        weighted = local(double(), nn.CrossEntropyLoss(torch.ones(3).double()))
        y[-1] = 3 * rank
        attempt(lambda: weighted.step(x, target=y))
        """)
    first, reason = "\n".join(printed[0]).split("TransportError: ")
    second, failed = "\n".join(printed[1]).split("ExecutionError: ")
    assert first == second
    assert failed.startswith("rank 1, stage 0, sum_counts: RuntimeError: index 3 is out of bounds")
    assert failed.splitlines()[0] in reason
    expected = (
        r"^InputError: the ranks come to step with optimizers that differ:\n.*pipe.join\(scheduler.step\)"
        r".*which is no sum over its rows.*which is no sum over its rows"
        r".*cannot take microbatches of 3 and 4 rows: the model makes a constant.*\nTrue\n"
        r".*batch: 'local' on rank 0; 'same' on rank 1"
    )
    assert re.search(expected, first, re.DOTALL), first


mse = nn.functional.mse_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "auto"}, "replicas is 'auto'; batch=\"local\" needs one number"),
        ({"replicas": (3, 1)}, r"replicas is \(3, 1\); batch=\"local\" needs one number"),
        ({"replicas": 2, "microbatches": 3}, "microbatches is 3; .* so pass a multiple of 2"),
        ({"replicas": 2, "microbatch_weight": mse}, 'microbatch_weight is a function, which batch="local"'),
    ],
)
def test_arguments_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pipec.InputError, match=message):
        pipec.compile(nn.Linear(2, 2), 4, **{"loss_fn": mse, "batch": "local", **options})


def test_one_process_passes_the_whole_batch() -> None:
    pipe = pipec.compile(nn.Linear(2, 2), 2, stages=1, loss_fn=mse, batch="local", microbatches=2)
    assert (pipe.replica, pipe.num_replicas) == (0, 1)
    x, plain = torch.randn(4, 2), nn.Linear(2, 2)
    plain.load_state_dict(pipe.state_dict())
    assert torch.allclose(pipe.step(x, target=x), mse(plain(x), x))
    assert pipe.join() == 0
    check_local_batch(pipe.plan, 2)
    with pytest.raises(pipec.InputError, match=r"stage 0 on ranks \(1, 0\), which are not one rank of"):
        check_local_batch(replace(pipe.plan, placement=((1, 0),)), 2)
    with pytest.raises(pipec.InputError, match="3 microbatches are no multiple of 2 replicas"):
        check_local_batch(replace(pipe.plan, num_microbatches=3), 2)
    pipe = pipec.compile(nn.Linear(2, 2), 2, stages=1, loss_fn=mse)
    with pytest.raises(pipec.InputError, match="the pipeline has batch='same'; pass batch=\"local\""):
        pipe.join()
