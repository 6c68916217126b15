"""What ranks pass to ``compile`` and ``step`` is compared; clipping and state are the whole model's."""

import re
import textwrap
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
import torch, pipec
from torch import nn
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.randn(8, 3)

def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def mse(output, target):
    return nn.functional.mse_loss(output, target)

def compiled(net, loss_fn=mse, **options):
    options = {"devices": 2, "microbatches": 2, "timeout": 20.0} | options
    return pipec.compile(net, loss_fn=loss_fn, **options)

def attempt(call):
    try:
        call()
    except pipec.PipecError as error:
        print(f"{type(error).__name__}: {error}")
"""


def told(tmp_path: Path, body: str, num_ranks: int = 2) -> list[str]:
    """What each rank prints that runs the script; with ``num_ranks`` 0, what one process prints for all."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + textwrap.dedent(body))
    return run_ranks(script, num_ranks, tmp_path)


def test_other_batches_are_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    """Rank 1 passes other values, then other rows, another type and another structure; then all is well."""
    first, second = told(
        tmp_path,
        """
        net = model()
        pipe = compiled(net)
        pipe.step(x, target=y)
        pipe.zero_grad()
        before = {name: x.clone() for name, x in pipe.local_state_dict().items()}
        attempt(lambda: pipe.step(x + rank, target=y))
        attempt(lambda: pipe.step(x[: 8 - 4 * rank], target=y[: 8 - 4 * rank]))
        attempt(lambda: pipe.step(x.double() if rank else x, target=y))
        attempt(lambda: pipe.step(x, **({} if rank else {"target": y})))
        attempt(lambda: pipe.step(x, target=y) if rank else pipe.eval_step(x, target=y))
        assert all(p.grad is None for p in pipe.parameters())
        assert all(torch.equal(x, before[name]) for name, x in pipe.local_state_dict().items())
        print("loss", float(pipe.step(x, target=y)) > 0)
        """,
    )
    assert first == second
    values, rows, kind, refused, call, fine = first.split("InputError: ")[1:5] + first.split("InputError: ")[
        5
    ].split("loss ")
    assert values.startswith("the ranks passed different batches to step:\n  args[0]: float32[8, 6], values ")
    assert " on rank 0; float32[8, 6], values " in values
    assert 'batch="rank0" uses what rank 0 passes and drops the rest' in values
    assert "DistributedSampler(num_replicas=pipe.num_replicas" in values
    assert "target" not in values
    assert "  rows: 8 on rank 0; 4 on rank 1\n" in rows
    assert "float64[8, 6]" in kind
    assert refused.startswith("step cannot use the arguments of rank 1:\ntarget is missing")
    assert call.startswith(
        "the ranks do not make the same calls:\n  call: eval_step, after 1 steps on rank 0"
    )
    assert fine.strip() == "True"


WAITING = """
import logging, time
reported = []
handler = logging.Handler()
handler.emit = lambda record: reported.append(record.getMessage())
logging.getLogger("pipec").addHandler(handler)
pipe = compiled(model(), timeout=10.0)

def save():
    time.sleep(15)

def train(fails):
    for i in range(3):
        pipe.step(x, target=y)
        if rank == 1 and i == 1:
            if fails:
                raise OSError("the disk is full")
            save()
"""


ON_TWO_HOSTS = """
import pipec.runtime.messages.shared_memory
pipec.runtime.messages.shared_memory._host = lambda: ""  # as on hosts, which share no memory
"""


@pytest.mark.parametrize("hosts", ["", ON_TWO_HOSTS], ids=["one_host", "two_hosts"])
def test_a_rank_that_saves_is_named_and_waited_for_beyond_the_timeout(tmp_path: Path, hosts: str) -> None:
    body = hosts + WAITING + "train(fails=False)\nprint(pipe.num_steps)\nprint(*reported, sep='\\n')"
    first, second = told(tmp_path, body)
    assert first.startswith("3\n")
    assert second.startswith("3\n")
    assert "rank 1 has not arrived: it is alive and elsewhere in its script, at script.py:" in first
    assert re.search(r"at script\.py:\d+ in save, and its last wait was ", first)


@pytest.mark.parametrize(("hosts", "num_ranks"), [("", 2), (ON_TWO_HOSTS, 3)], ids=["one_host", "two_hosts"])
def test_a_rank_that_saves_between_losses_of_a_stream_is_waited_for(
    tmp_path: Path, hosts: str, num_ranks: int
) -> None:
    """Of three, rank 0 waits for rank 1, which waits for rank 2 itself."""
    body = """
    import functools, time
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    ranks = int(os.environ["WORLD_SIZE"])
    options = {"devices": ranks, "microbatches": 4, "optimizer": sgd, "timeout": 10.0}
    pipe = compiled(model(), schedule="pipedream-2bw", **options)
    for number, loss in enumerate(pipe.stream(((x,), y) for _ in range(6))):
        if rank == ranks - 1 and number == 2:
            time.sleep(15)
    print(number, pipe.num_steps)
    """
    expected = ["5 6\n"] * num_ranks
    assert told(tmp_path, hosts + textwrap.dedent(body), num_ranks) == expected


def test_a_rank_that_caught_an_exception_out_of_its_loop_is_waited_for(tmp_path: Path) -> None:
    """It may evaluate, and make the other ranks' next call. They say where it is."""
    body = """
    if rank == 1:
        try:
            train(fails=True)
        except OSError:
            time.sleep(15)
        pipe.step(x, target=y)
    else:
        train(fails=False)
    print(pipe.num_steps)
    print(*reported, sep="\\n")
    """
    first, second = told(tmp_path, WAITING + textwrap.dedent(body))
    assert first.startswith("3\n")
    assert second == "3\n\n"
    assert re.search(r"rank 1 has not arrived: .* at script\.py:\d+ in <module>, and its last wait", first)


def test_a_step_on_one_rank_only_is_named(tmp_path: Path) -> None:
    first, second = told(
        tmp_path,
        """
        import time
        pipe = compiled(model(), timeout=10.0)
        pipe.step(x, target=y)
        if rank == 0:
            attempt(lambda: pipe.step(x, target=y))
        else:
            time.sleep(15)
        """,
    )
    assert "another rank failed while this one was calling step, after 1 steps, together with rank 1" in first
    assert "rank 1: its script ended, or freed its pipeline, before this call" in first
    assert second == ""


def test_rank_0s_batch_is_sent_to_all(tmp_path: Path) -> None:
    """Others pass other values, or nothing."""
    body = """
    pipe = compiled(model(), batch="rank0")
    for step in range(2):
        loss = pipe.step(x + rank, target=y) if step == 0 or rank == 0 else pipe.step()
        print(float(loss).hex())
    print(float(pipe(x + rank).sum()).hex())
    """
    first, second = told(tmp_path, body)
    assert [first] == told(tmp_path, body, 0)
    assert first == second


def test_other_arguments_of_compile_are_named(tmp_path: Path) -> None:
    first, second = told(
        tmp_path,
        """
        losses = [mse, lambda output, target: (output - target).abs().mean()]
        attempt(lambda: compiled(model(), microbatches=2 + rank, schedule=["1f1b", "gpipe"][rank]))
        attempt(lambda: compiled(model(), losses[rank]))
        attempt(lambda: compiled(model(), recompute=["full", "none"][rank], memory_limit=f"{rank + 1}GB"))
        attempt(lambda: compiled(nn.Linear(6, 3 + rank)))
        device = torch.device("cuda", rank)
        compiled(model(), lambda output, target: (output - target).to(device).square().mean())
        """,
    )
    assert first == second
    counts, loss, memory, net = first.split("InputError: ")[1:]
    assert (
        "the ranks passed different arguments to pipec.compile:\n  schedule: '1f1b' on rank 0; 'gpipe'"
        in counts
    )
    assert "  microbatches: 2 on rank 0; 3 on rank 1" in counts
    assert "  loss_fn: <function mse> on rank 0; <function <lambda>> on rank 1" in loss
    assert "recompute: 'full' on rank 0; 'none' on rank 1\n  memory_limit: '1GB' on rank 0; '2GB'" in memory
    assert "  weight: float32[3, 6], trained on rank 0; float32[4, 6], trained on rank 1" in net


def test_a_loss_function_that_reads_other_values_is_rank_0s_until_it_is_refused(tmp_path: Path) -> None:
    """Functions of one name may compute something else on each rank."""
    body = """
    pipe = compiled(model(), lambda output, target: (output - target).abs().pow(2 + rank).mean())
    print(abs(pipe.step(x, target=y) - (model()(x) - y).square().mean()).item() < 1e-6)
    attempt(lambda: pipe.step(x, target=y))
    """
    first, second = told(tmp_path, body)
    assert first == second
    assert first.startswith("True\n")
    assert "changed values: none on rank 0; __main__.rank changed from 0 to 1 on rank 1" in first


def test_weights_start_as_rank_0s_and_a_line_says_so(tmp_path: Path) -> None:
    """Rank 0 looks at all of them, rank 1 at those that it keeps."""
    body = """
    from pipec.runtime.messages import exchange
    digested, describe_leaf = [], exchange.describe_leaf
    exchange.describe_leaf = lambda tensor: digested.append(tensor) or describe_leaf(tensor)
    pipe = compiled(model(rank))
    for step in range(2):
        print(float(pipe.step(x, target=y)).hex())
    print({name: p.sum().item() for name, p in sorted(pipe.full_state_dict().items())})
    print(len(digested), sum(p.numel() > 0 for p in pipe.local_state_dict().values()))
    """
    first, second = told(tmp_path, body)
    line, *rest, counted = first.splitlines()
    num_kept = int(second.split()[-1])
    assert line.startswith(f"pipec: {num_kept} tensors of rank 1 differed, and start with rank 0's: ")
    assert counted.split()[0] == "6"
    assert second.split()[-2] == str(num_kept)
    assert 0 < num_kept < 6
    (alone,) = told(tmp_path, body, 0)
    assert rest == alone.splitlines()[:-1]


def test_clipping_is_by_the_norm_of_the_whole_model(tmp_path: Path) -> None:
    """The bits of torch's own clipping of the unsplit model, with one process and with two."""
    body = """
    pipe, plain = compiled(model()), model()
    for norm_type in (2.0, 1.0, float("inf")):
        pipe.zero_grad()
        plain.zero_grad()
        pipe.step(x, target=y)
        for rows in (slice(0, 4), slice(4, 8)):
            (0.5 * mse(plain(x[rows]), y[rows])).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert torch.equal(pipe.clip_grad_norm_(0.1, norm_type), expected)
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        assert all(torch.equal(gradients[name], plain.get_parameter(name).grad) for name in gradients)
    print(len(gradients))
    attempt(lambda: pipe.clip_grad_norm_(0.1 + rank))
    """
    assert told(tmp_path, body, 0) == ["6\n"]
    first, second = (text.split("\n", 1) for text in told(tmp_path, body))
    assert int(first[0]) + int(second[0]) == 6
    assert first[1] == second[1]
    assert "call: clip_grad_norm_(0.1, 2.0), after 3 steps on rank 0; clip_grad_norm_(1.1, 2.0)" in first[1]


def test_an_artifact_has_the_tensors_of_both_ranks_which_compare_their_batches(tmp_path: Path) -> None:
    """One process loads it and has the loss that they have next; two compare what they pass."""
    body = f"""
    pipe = compiled(model())
    pipe.step(x, target=y)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    pipe.save({str(tmp_path / "artifact")!r}, tensors=True)
    print(float(pipe.step(x, target=y)).hex())
    """
    expected = told(tmp_path, body)
    loaded = f"""
    pipe = pipec.load({str(tmp_path / "artifact")!r}, timeout=240.0)
    attempt(lambda: pipe.step(x + rank, target=y))
    pipe.zero_grad()
    print(float(pipe.step(x, target=y)).hex())
    """
    assert told(tmp_path, loaded, 0)[0].splitlines()[-1:] * 2 == [each.strip() for each in expected]
    first, second = told(tmp_path, loaded)
    assert first == second
    refused, loss = first.rsplit("\n", 2)[:2]
    assert refused.startswith(
        "InputError: the ranks passed different batches to step:\n  args[0]: float32[8, 6]"
    )
    assert loss == expected[0].strip()


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_model_on_meta_gets_memory_and_stays_the_model_that_is_trained(
    num_ranks: int, tmp_path: Path
) -> None:
    body = """
    with torch.device("meta"):
        net = model()
    pipe = compiled(net).prepare(x, target=y)
    pipe.to_empty(device="cpu")
    pipe.load_state_dict(model().state_dict())
    assert [*map(id, pipe.parameters())] == [*map(id, net.parameters())]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(3):
        losses.append(float(pipe.step(x, target=y)))
        optimizer.step()
        optimizer.zero_grad()
    print(losses == sorted(set(losses), reverse=True))
    """
    assert set(told(tmp_path, body, num_ranks)) == {"True\n"}


def test_a_buffer_may_be_read_on_several_ranks_and_in_evaluation_on_others(tmp_path: Path) -> None:
    body = """
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x, goal):
            for number, layer in enumerate(self.layers):
                x = layer(x).tanh()
                if number == 3 or not self.training:
                    x = x * self.scale
            return mse(x, goal)

    torch.manual_seed(0)
    net, inputs = Scaled(), torch.randn(8, 8)
    pipe = compiled(net, None)
    losses = [pipe.step(inputs, goal=inputs)]
    losses.append(pipe.eval().eval_step(inputs, goal=inputs))
    everywhere = compiled(Scaled().eval(), None)
    losses.append(everywhere.step(inputs, goal=inputs))
    everywhere.load_state_dict({"scale": torch.ones(8)}, strict=False)
    losses.append(everywhere.step(inputs, goal=inputs))
    print(*(loss.item() for loss in losses), *everywhere.full_state_dict(all_ranks=True)["scale"].tolist())
    """
    (alone,), ranks = told(tmp_path, body, 0), told(tmp_path, body)
    assert ranks == [alone, alone]


def test_nothing_travels_on_the_users_own_group(tmp_path: Path) -> None:
    """A script may be in the middle of a collective there."""
    texts = told(
        tmp_path,
        """
        import functools
        import torch.distributed as dist

        def refused(name, real, *args, group=None, **options):
            assert group is not None, name
            return real(*args, group=group, **options)

        dist.init_process_group("gloo")
        for name in ("broadcast", "all_reduce", "all_gather", "barrier", "send", "recv", "isend", "irecv"):
            setattr(dist, name, functools.partial(refused, name, getattr(dist, name)))
        pipe = compiled(nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)))
        pipe.step(x, target=y)
        pipe.eval().eval_step(x, target=y)
        print("done")
        """,
    )
    assert texts == ["done\n"] * 2


def test_rank_0_gets_the_state_of_the_whole_model_and_each_rank_has_its_part(tmp_path: Path) -> None:
    body = f"""
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(*model())
            self[1].register_buffer("passing", torch.ones(()), persistent=False)
            self[3].register_buffer("kept", torch.ones(()))
        def forward(self, x):
            return super().forward(x * self[1].passing) * self[3].kept

    pipe, plain = compiled(Net()), Net()
    pipe.step(x, target=y)
    whole, own, every = pipe.state_dict(), pipe.local_state_dict(), plain.state_dict()
    assert whole.keys() == (set() if rank else every.keys())
    assert all(torch.equal(value, every[name]) for name, value in (whole | own).items())
    print(*own)
    prefixed = {{"other": 1}}
    pipe.state_dict(destination=prefixed, prefix="pipe.")
    names = [f"pipe.{{name}}" for name in every]
    assert sorted(prefixed) == sorted(["other", *names])  # on rank 1 some are absent, which nobody can write
    pipe.load_state_dict({{name: 2 * value for name, value in whole.items()}})  # rank 0's, on every rank
    doubled = pipe.local_state_dict()
    assert all(torch.equal(value, 2 * every[name]) for name, value in doubled.items())
    attempt(lambda: pipe.load_state_dict({{name: value.view(-1)[:1] for name, value in whole.items()}}))
    try:
        pipe.load_state_dict({{"strange": torch.ones(()), **whole}} if whole else whole)
    except RuntimeError as error:
        print(error.args[0].splitlines()[-1])
    pipe.load_state_dict(pipe.state_dict())
    assert all(torch.equal(value, doubled[name]) for name, value in pipe.local_state_dict().items())
    pipe.load_state_dict(every)
    pipe.load_state_dict(own)
    copy = Net()
    copy[0].weight.data.zero_()
    pipe.gather_into(copy, all_ranks=True)
    assert all(torch.equal(value, every[name]) for name, value in copy.state_dict().items())
    other = nn.ModuleDict({{"pipe": pipe}}).state_dict()
    assert sorted(other) == sorted(names)
    pipe.save({str(tmp_path / "artifact")!r}, tensors=True)
    loaded = pipec.load({str(tmp_path / "artifact")!r}, timeout=240.0)
    whole = loaded.state_dict()
    assert whole.keys() == (set() if rank else every.keys())
    assert all(torch.equal(value, every[name]) for name, value in whole.items())
    assert loaded.local_state_dict().keys() == own.keys()
    """
    first, second = told(tmp_path, body)
    names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    for lines in (first.splitlines(), second.splitlines()):
        assert "0.weight is [1] in the state and [8, 6] in the model; load the state of a" in lines[1]
        assert lines[2].strip() == 'Unexpected key(s) in state_dict: "strange".'
    parts = first.splitlines()[0].split() + second.splitlines()[0].split()
    assert sorted(parts) == sorted([*names, "3.kept"])


def test_where_every_rank_holds_the_model_none_waits_for_others(tmp_path: Path) -> None:
    """Replicas of one stage: what a script of data parallelism does on rank 0 alone is right."""
    body = """
    net, plain = model(), model()
    pipe = pipec.compile(net, devices=2, stages=1, loss_fn=mse, microbatches=2, timeout=240.0)
    pipe.step(x, target=y)
    mse(plain(x), y).backward()
    gradients = [each.grad for each in net.parameters()]
    norm = torch.stack([each.norm() for each in gradients]).norm()
    made, expected = torch.optim.Adam(net.parameters()), torch.optim.Adam(plain.parameters())
    if rank == 0:
        found = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        assert torch.allclose(found, norm) and torch.allclose(found, torch.nn.utils.get_total_norm(
            [each.grad for each in plain.parameters()]))
    made.step()
    expected.step()
    if rank == 0:
        assert made.state_dict()["state"].keys() == expected.state_dict()["state"].keys()
        assert pipe.state_dict().keys() == plain.state_dict().keys()
    net(x)
    print("right", float(pipe.step(x, target=y)) > 0)
    """
    assert [each.splitlines()[-1] for each in told(tmp_path, body)] == ["right True"] * 2


def test_other_ranks_load_nothing_that_captures(tmp_path: Path) -> None:
    """Nor does what rank 0 sends: programs, the structure of outputs, and values that code has read."""
    first, second = told(
        tmp_path,
        """
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
        pipe = compiled(net)
        pipe.step(x, target=y)
        net[1].p = 0.2
        pipe.step(x, target=y)
        pipe.eval()(x)
        capturing = "pipec.torch_compat.dynamo_front_end", "pipec.compiler.compile"
        print([name for name in capturing if name in sys.modules])
        """,
    )
    assert first.splitlines()[-1] == "['pipec.torch_compat.dynamo_front_end', 'pipec.compiler.compile']"
    assert second.splitlines()[-1] == "[]"
