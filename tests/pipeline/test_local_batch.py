"""Replicas that were each given their own part of a batch train as plain PyTorch does on the whole one."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec
from pipec.compiler.batch_equivalence import check_local_batch
from pipec.ir.batch_split import replica_microbatch_sizes

DOCS = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")

SCRIPT = """
import copy, functools, os, sys
sys.path.insert(0, {tests!r})
import torch, pipec
from torch import nn
from constant_batch import constant_front_ends
from unsplit_reference import relative_error
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
cross_entropy = nn.functional.cross_entropy

def model(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()

def compiled(net, loss_fn=cross_entropy, replicas=2, **options):
    options = {{"microbatches": 4, "batch": "local", "timeout": 240.0}} | options
    return pipec.compile(net, size, replicas=replicas, loss_fn=loss_fn, **options)

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

def attempt(call):
    try:
        call()
    except pipec.PipecError as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""


def told(tmp_path: Path, body: str, num_ranks: int) -> list[str]:
    """What each rank prints that runs the script, without what pipec tells of its progress."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])) + textwrap.dedent(body))
    printed = run_ranks(script, num_ranks, tmp_path)
    return [re.sub(r"^pipec: .*\n", "", each, flags=re.MULTILINE) for each in printed]


CASES = {
    2: [
        ("1f1b", None, None),
        ("gpipe", "optimizer", 0.5),
        ("1f1b", "gradients", 0.5),
        ("1f1b", "parameters", 0.5),
    ],
    4: [("1f1b", None, 0.5), ("zb-h1", "parameters", None)],
}
"""By the number of ranks: a schedule, what is sharded, and the norm that gradients are clipped to."""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", CASES)
def test_replicas_whose_data_end_early_train_as_plain_pytorch_does(num_ranks: int, tmp_path: Path) -> None:
    """Four epochs of three batches on one replica and five on the other, of all numbers of rows."""
    cases = CASES[num_ranks]
    printed = told(
        tmp_path,
        f"""
        ROWS = [(5, 3), (1, 6), (4, 4), (7, 0), (2, 0)]
        for schedule, shard, clip in {cases}:
            pipe = compiled(model(rank), optimizer=ADAMW, schedule=schedule, shard=shard, clip_grad_norm=clip)
            plain = model()
            optimizer = ADAMW(plain.parameters())
            optimizers = pipe.optimizer, optimizer
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
            worst, joined = 0.0, 0
            for epoch in range(4):
                ends = False
                for rows in ROWS if epoch % 2 else [each[::-1] for each in ROWS]:
                    x, y = batch(sum(rows))
                    expected = cross_entropy(plain(x), y)
                    optimizer.zero_grad()
                    expected.backward()
                    nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
                    optimizer.step()
                    schedulers[1].step()
                    ends = ends or not rows[pipe.replica]
                    if not ends:
                        loss = pipe.step(part(pipe, rows, x), target=part(pipe, rows, y))
                        schedulers[0].step()
                        worst = max(worst, relative_error(loss, expected.detach()))
                joined += pipe.join(schedulers[0].step)
            state = pipe.full_state_dict(all_ranks=True)
            worst = max(relative_error(state[name], p) for name, p in plain.state_dict().items())
            print(schedule, shard, joined, "same" if worst < 1e-9 else f"differs by {{worst:.1e}}")
            print(sorted((name, x.sum().item().hex()) for name, x in state.items()))
        """,
        num_ranks,
    )
    lines = [each.splitlines() for each in printed]
    expected = [f"{schedule} {shard} 4 same" for schedule, shard, _ in cases]
    assert [each[::2] for each in lines] == [expected] * num_ranks
    assert all(each[1::2] == lines[0][1::2] for each in lines)


@pytest.mark.slow
def test_the_loop_of_the_docs_trains_on_what_all_replicas_sample(tmp_path: Path) -> None:
    """Of 13 rows each epoch has a last batch of fewer; the sampler gives one of them to both replicas."""
    (loop,) = re.findall('```python\n(pipe = .*?batch="local".*?)```', DOCS, re.DOTALL)
    printed = told(
        tmp_path,
        """
        import torch.nn.functional as F
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        model, plain = model(), model()
        data = TensorDataset(*batch(13))
        LOOP
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        samplers = [DistributedSampler(data, num_replicas=2, rank=k) for k in range(2)]
        for epoch in range(3):
            for each in samplers:
                each.set_epoch(epoch)
            for parts in zip(*(DataLoader(data, batch_size=4, sampler=each) for each in samplers)):
                x, target = (torch.cat(each) for each in zip(*parts))
                optimizer.zero_grad()
                expected = F.cross_entropy(plain(x), target)
                expected.backward()
                optimizer.step()
        state = pipe.full_state_dict(all_ranks=True)
        print(max(relative_error(state[name], p) for name, p in plain.state_dict().items()) < 1e-12)
        print(relative_error(loss, expected.detach()) < 1e-12)
        """.replace("LOOP", textwrap.indent(loop, 8 * " ").strip()),
        2,
    )
    assert printed == ["True\n" * 2] * 2


@pytest.mark.slow
def test_draws_are_those_of_the_microbatch_whoever_runs_it(tmp_path: Path) -> None:
    """Replica k has microbatches k, k + 2, ...: as in one process whose batch has the rows in that order."""
    printed = told(
        tmp_path,
        """
        x, y = batch(8)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
        whole = compiled(copy.deepcopy(net), batch="same")
        pipe = compiled(net)
        own = [2 * microbatch + row for microbatch in (pipe.replica, pipe.replica + 2) for row in (0, 1)]
        losses = []
        for each, rows in ((whole, list(range(8))), (pipe, own)):
            torch.manual_seed(5 + rank)
            losses.append(each.step(x[rows], target=y[rows]))
        print(relative_error(*losses) < 1e-12)
        """,
        2,
    )
    assert printed == ["True\n"] * 2


@pytest.mark.slow
def test_a_rank_that_never_has_data_trains_all_the_same(tmp_path: Path) -> None:
    """Rank 0, which compiles for all, joins before any step; sparse gradients and accumulated ones sum up."""
    printed = told(
        tmp_path,
        """
        def net():
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
        words, y = torch.randint(0, 9, (5, 2), generator=generator), torch.tensor([0, 1, 2, 1, 1])
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        pipe, plain = compiled(net(), optimizer=sgd), net()
        for rows in (slice(0, 3), slice(0, 5)):
            cross_entropy(plain(words[rows]), y[rows]).backward()
        sgd(plain.parameters()).step()
        if rank:
            with pipe.accumulate():
                pipe.step(words[:3], target=y[:3])
            pipe.step(words, target=y)
            print(pipe.eval_step(words, target=y).shape)
        print(pipe.join())
        state = pipe.full_state_dict(all_ranks=True)
        print(max(relative_error(state[name], p) for name, p in plain.state_dict().items()) < 1e-12)
        """,
        2,
    )
    assert printed == ["2\nTrue\n", "torch.Size([])\n0\nTrue\n"]


@pytest.mark.slow
def test_statistics_are_those_of_replicas_with_rows(tmp_path: Path) -> None:
    """BatchNorm's after a step of two replicas, and after one of the first alone, which the second joins."""
    printed = told(
        tmp_path,
        """
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
        pipe = compiled(net(), optimizer=ADAMW)
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
        """,
        2,
    )
    assert printed == ["True\n" * 2] * 2


@pytest.mark.slow
def test_parts_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    printed = told(
        tmp_path,
        """
        x, y = batch(8)
        pipe = compiled(model())
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
        """,
        4,
    )
    assert printed == [printed[0]] * 4
    _, values, rows, kind, width, nothing, alone, outside, state = printed[0].split("InputError: ")
    assert state.endswith("\nTrue\n")
    for text in (values, rows):
        assert text.startswith("the ranks of replica 0 passed different parts of the batch: rank 2 has other")
        assert "rank=pipe.replica" in text
    assert "args[0]: rows of float64[6] on ranks 0, 2, 3; rows of float32[6] on rank 1\n" in kind
    assert "but for their rows" in kind
    assert "args[0]: rows of float64[6] on ranks 0, 2, 3; rows of float64[5] on rank 1\n" in width
    assert nothing.startswith("no replica passed any rows")
    assert alone.startswith("the ranks of replica 1 passed different parts of the batch")
    assert outside.startswith("some ranks have joined, but a step without them needs pipec.compile(..., opt")
    assert state.startswith("the ranks do not make the same calls:\n  call: join, after 0 steps on ranks 0, ")


@pytest.mark.slow
def test_what_replicas_cannot_do_with_parts_is_refused_on_every_rank(tmp_path: Path) -> None:
    """An optimizer that a scheduler changed on one rank; counts that are no sums; sizes that need graphs."""
    printed = told(
        tmp_path,
        """
        x, y = batch(8)
        pipe = compiled(model(), optimizer=ADAMW)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        def train():
            for _ in range(2):
                pipe.step(x, target=y)
                scheduler.step()
        attempt(train if rank else pipe.join)
        def largest(output, target):
            return (output.square().mean(1) * target).sum() / target.max()
        attempt(lambda: compiled(model(), largest).step(x, target=y.abs().double()))
        def relative(output, target):
            weights = target / target.sum()
            return (output.square().mean(1) * weights).sum() / (weights * weights).sum()
        attempt(lambda: compiled(model(), relative).step(x, target=y.abs().double()))
        front_ends = pipec.capture.tracer.FRONT_ENDS
        pipec.capture.tracer.FRONT_ENDS = constant_front_ends()
        fixed = compiled(model())
        attempt(lambda: fixed.step(x[: 8 - rank], target=y[: 8 - rank]))
        print(float(fixed.step(x, target=y)) > 0)
        pipec.capture.tracer.FRONT_ENDS = front_ends
        attempt(lambda: compiled(model(), batch=["local", "same"][rank]))
        weighted = compiled(model(), nn.CrossEntropyLoss(torch.ones(3).double()))
        y[-1] = 3 * rank
        attempt(lambda: weighted.step(x, target=y))
        """,
        2,
    )
    first, reason = printed[0].split("TransportError: ")
    second, failed = printed[1].split("ExecutionError: ")
    assert first == second
    assert failed.startswith("rank 1, stage 0, sum_counts: RuntimeError: index 3 is out of bounds")
    assert failed.splitlines()[0] in reason
    rate, largest, relative, fixed, some = first.split("InputError: ")[1:]
    assert rate.startswith("the ranks come to step with optimizers that differ:\n")
    assert "pipe.join(scheduler.step)" in rate
    assert "which is no sum over its rows" in largest
    assert "which is no sum over its rows" in relative
    assert "cannot take microbatches of 3 and 4 rows: the model makes a constant" in fixed
    assert fixed.endswith("\nTrue\n")
    assert "batch: 'local' on rank 0; 'same' on rank 1" in some


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "auto"}, "replicas is 'auto'; batch=\"local\" needs one number"),
        ({"replicas": (3, 1)}, r"replicas is \(3, 1\); batch=\"local\" needs one number"),
        ({"replicas": 2, "microbatches": 3}, "microbatches is 3; .* so pass a multiple of 2"),
        ({"replicas": 2, "microbatch_weight": mse}, 'microbatch_weight is a function, which batch="local"'),
        ({"batch": "part"}, "batch is 'part'; expected one of 'same', 'rank0', 'local'"),
    ],
)
def test_arguments_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pipec.InputError, match=message):
        pipec.compile(nn.Linear(2, 2), 4, **{"loss_fn": mse, "batch": "local", **options})


def test_one_process_passes_the_whole_batch() -> None:
    pipe = pipec.compile(nn.Linear(2, 2), 2, stages=1, loss_fn=mse, batch="local", microbatches=2)
    assert (pipe.replica, pipe.num_replicas) == (0, 1)
    x = torch.randn(4, 2)
    plain = nn.Linear(2, 2)
    plain.load_state_dict(pipe.state_dict())
    assert torch.allclose(pipe.step(x, target=x), mse(plain(x), x))
    assert pipe.join() == 0


def test_a_plan_that_contradicts_the_replicas_is_refused() -> None:
    x = torch.randn(4, 2)
    pipe = pipec.compile(nn.Linear(2, 2), 2, stages=1, loss_fn=mse, batch="local", microbatches=2)
    plan = pipe.prepare(x, target=x).plan
    check_local_batch(plan, 2)
    with pytest.raises(pipec.InputError, match=r"stage 0 on ranks \(1, 0\), which are not one rank of"):
        check_local_batch(replace(plan, placement=((1, 0),)), 2)
    with pytest.raises(pipec.InputError, match="3 microbatches are no multiple of 2 replicas"):
        check_local_batch(replace(plan, num_microbatches=3), 2)


def test_join_needs_parts() -> None:
    pipe = pipec.compile(nn.Linear(2, 2), 2, stages=1, loss_fn=mse)
    with pytest.raises(pipec.InputError, match="the pipeline has batch='same'; pass batch=\"local\""):
        pipe.join()


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        ([5, 3], 4, [3, 2, 2, 1]),
        ([1, 6], 4, [1, 3, 0, 3]),
        ([0, 2], 2, [0, 2]),
        ([4, 4, 4], 6, [2] * 6),
        ([7], 3, [3, 2, 2]),
    ],
)
def test_each_replica_splits_its_own_rows(rows: Sequence[int], count: int, sizes: list[int]) -> None:
    assert replica_microbatch_sizes(rows, count) == sizes
