"""Ranks that fail, differ or are killed: all others end, and name them."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_variants import Variant, captured, compiled, save_with_tensors
from handwritten_stages import (
    STAGES,
    Stage1,
    make_batch,
    make_interpreter,
    make_model,
    whole_batch,
)
from huggingface_models import perceptron
from page_views import embedded
from slow_params import slow_but
from torch import Tensor, nn
from whole_batch_losses import LOSSES, Towers
from worker_processes import PIPEC_TIMEOUT, new_store, pipec_cli, run_ranks, start_ranks, train

import pipec
from pipec import ops
from pipec.errors import InputError, PipecError, TransportError
from pipec.ir import Compute, Instruction, Op, Phase, Schedule, one_rank_per_stage
from pipec.runtime import DistributedTransport
from pipec.runtime.step.linker import Linker

ROOT = Path(__file__).parents[2]


# replicas and hosts


DIFFERENT = {
    "learning rate": "optimizers that differ:",
    "optimizer": "different arguments to pipec.compile:",
    "plan": "microbatches: 2 on rank 0; 4 on rank 1",
    "rows": "rows: 24 on rank 0; 12 on rank 1",
}


@pytest.mark.slow
def test_ranks_that_differ_or_fail_are_told_so(tmp_path: Path) -> None:
    script = ROOT / "tests" / "helpers" / "replica_failure_script.py"
    printed = run_ranks(script, 2, tmp_path, [*DIFFERENT, "collective"])
    for text, last in zip(printed, ("TransportError: ", "ExecutionError: "), strict=True):
        *errors, broken = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)[1:]
        for error, said in zip(errors, DIFFERENT.values(), strict=True):
            assert error.startswith("InputError: ")
            assert said in error
        assert broken.startswith(last)
        assert "ValueError: broken" in broken


def may_make_hosts() -> bool:
    """Whether this user and this kernel can make network namespaces with a link of a given rate."""
    tools = ("ip", "tc", "unshare", "nsenter")
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return False
    pair = "ip link add pipec0 type veth peer name pipec1"
    tried = f"{pair} && tc qdisc add dev pipec0 root tbf rate 1mbit burst 9k latency 9ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_host_that_lost_its_link_is_named() -> None:
    """Nothing says so but its silence."""
    if not may_make_hosts():
        pytest.skip("needs root, iproute2 and network namespaces")
    script = ROOT / "tests" / "helpers" / "lost_host_script.py"
    command = [str(ROOT / "benchmarks" / "link.sh"), "200mbit", sys.executable, str(script)]
    done = subprocess.run(
        ["sh", *command],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANKS_PER_HOST": "1"},
    )
    assert "rank 1: no sign of life for" in done.stdout, done.stdout + done.stderr


# one process


@pytest.fixture
def alone() -> Iterator[DistributedTransport]:
    """The transport of a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedTransport(torch.device("cpu"), timeout=60.0)
    dist.destroy_process_group()


def test_what_rank_0_makes_or_raises_is_everybodys(alone: DistributedTransport) -> None:
    def refuse() -> None:
        raise InputError("the batch is too small")

    assert alone.call_on_rank_0("make", lambda: [1, 2]) == [1, 2]
    with pytest.raises(InputError, match="the batch is too small"):
        alone.call_on_rank_0("refuse", refuse)
    with pytest.raises(PipecError, match="rank 0: ZeroDivisionError: division by zero"):
        alone.call_on_rank_0("divide", lambda: 1 / 0)


def test_an_error_that_an_abort_causes_is_not_taken_for_a_failure_of_this_rank(
    alone: DistributedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are aborted leave garbage, on which the next instruction may fail."""

    class Broken(Stage1):
        @staticmethod
        def forward(frame: object) -> None:
            alone.star.fail("rank 1: out of memory")
            monkeypatch.setattr(alone._connections, "check", lambda: exec("raise ConnectionError"))
            raise ValueError("garbage")

    forwards = [Compute(Phase.FORWARD, stage, 0) for stage in (0, 1, 2)]
    order = (*forwards, *(Compute(Phase.BACKWARD, stage, 0) for stage in (2, 1, 0)))
    schedule = Schedule("by hand", 1, one_rank_per_stage((0, 0, 0)), (order,))
    rank = make_interpreter(schedule, 0, alone, make_model(), {**STAGES, 1: Broken})
    with pytest.raises(TransportError, match="failed while this one was computing:\n  rank 1: out"):
        rank.run(make_batch([4]), whole_batch([4]))


def test_a_connection_that_cannot_be_opened_fails_every_rank(
    alone: DistributedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(alone._connections, "open", refuse)
    with pytest.raises(TransportError, match="the connections of the programs together with all ranks, took"):
        alone.connect([], (), "text")
    assert "making the connections" in str(alone.star.reason())


def test_a_reason_that_comes_a_moment_after_the_connection_was_lost_is_told(
    alone: DistributedTransport,
) -> None:
    """gloo closes the connections of a rank that times out before the rank can say that it did."""
    threading.Timer(0.05, alone.star.fail, ("rank 1: out of time",)).start()
    with pytest.raises(TransportError, match="rank 1: out of time"), alone.error_context("sending"):
        raise ConnectionError


# ranks that load artifacts


def test_a_stage_that_fails_fails_every_rank_with_its_error(tmp_path: Path) -> None:
    model = captured(perceptron)
    artifact = compiled(model, Variant(2, "1f1b", "none"))
    first, last = artifact.sources
    broken = replace(
        artifact, sources=(first, last.replace('frame.pop("saved")', 'frame.pop("saved").sort(0)', 1))
    )
    directory = save_with_tensors(broken, model.model, tmp_path / "artifact")
    errors = train([directory] * 2, model.inputs, tmp_path)
    original = "rank 1, stage 1, microbatch 0, backward: TypeError: sort() takes no positional arguments ("
    assert errors[1].startswith(f"ExecutionError: {original}")
    assert errors[0].startswith("TransportError: rank 0, stage 0, microbatch")
    assert original in errors[0]


def test_ranks_that_load_different_artifacts_refuse_to_run(tmp_path: Path) -> None:
    model = captured(perceptron)
    directories = [
        save_with_tensors(compiled(model, Variant(2, schedule, "none")), model.model, tmp_path / schedule)
        for schedule in ("gpipe", "1f1b")
    ]
    errors = train(directories, model.inputs, tmp_path)
    for error in errors:
        assert error.startswith(
            "TransportError: the ranks do not hold the same plan, programs and stage sources: "
        )


@pytest.mark.slow
def test_every_rank_is_traced_and_rank_zero_tells(tmp_path: Path) -> None:
    """The times of all ranks come together on one axis; the others print nothing and write nothing."""
    model = captured(perceptron)
    artifact = compiled(model, Variant(2, "1f1b", "none"))
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    pages = [tmp_path / f"{rank}.html" for rank in (0, 1)]
    options = ("--trace", "--steps", "2", "--json", "--output")
    traced = [("run", str(directory), *options, str(page)) for page in pages]
    told, silence = pipec_cli(traced, tmp_path)
    assert silence == ""
    facts = json.loads(told)
    assert [len(facts[name]["waits"]) for name in ("planned", "measured")] == [2, 2]
    assert facts["measured"]["num_events"] == facts["planned"]["num_events"]
    assert all(0 < rank["busy"] < facts["measured"]["makespan"] for rank in facts["measured"]["waits"])
    assert [page.exists() for page in pages] == [True, False]
    assert "measured" in str(embedded(pages[0].read_text(encoding="utf-8")))


# ranks that are killed in an instruction for which another rank waits


SGD = functools.partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class Case:
    """A pipeline of two ranks, and a batch for it. ``ops`` are those in which a rank of it is killed."""

    ops: tuple[Op, ...]
    compiled: Callable[[], pipec.Pipeline]
    args: tuple[Tensor, ...]
    target: Tensor | None = None


def mlp(norm: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    norms = [norm(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *norms, *(x for _ in "123" for x in (nn.Tanh(), nn.Linear(8, 8))))


def joined(x: Tensor, y: Tensor) -> Tensor:
    """A loss with a gathering, its gradient, and a sum over replicas."""
    logits = x @ ops.all_gather(x.tanh()).T
    return logits.logsumexp(1).mean() + (x.square().sum(1) * y).sum() / ops.all_reduce(y.sum())


def pipeline_of(model: Callable[[], nn.Module] = mlp, loss_fn: Any = F.cross_entropy, **options: Any) -> Any:
    options = {"microbatches": 4, "timeout": PIPEC_TIMEOUT} | options
    return lambda: pipec.compile(model(), 2, loss_fn=loss_fn, **options)


X, CLASSES = torch.ones(8, 6), torch.arange(8) % 3
PADDED = torch.tensor([0, -100, 1, 2])

CASES = {
    "1f1b": Case(
        (Op.RECV, Op.WAIT_RECV, Op.SEND, Op.FORWARD, Op.BACKWARD, Op.ACCUMULATE, Op.FREE),
        pipeline_of(),
        (X,),
        CLASSES,
    ),
    "sharded": Case(
        (
            *(Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.WAIT_AVERAGE_BUFFERS),
            *(Op.UNSHARD, Op.WAIT_UNSHARD, Op.RESHARD, Op.GRAD_NORM, Op.CHECK, Op.UPDATE),
        ),
        pipeline_of(
            functools.partial(mlp, nn.BatchNorm1d),
            stages=1,
            optimizer=SGD,
            shard="parameters",
            clip_grad_norm=1.0,
            on_nan="skip",
        ),
        (X,),
        CLASSES,
    ),
    "local batch": Case(
        (Op.SUM_COUNTS, Op.WAIT_SUM_COUNTS), pipeline_of(stages=1, batch="local"), (X[:4],), PADDED
    ),
    "tail": Case(
        (Op.GATHER_ROWS, Op.WAIT_GATHER_ROWS, Op.TAIL),
        pipeline_of(lambda: Towers(LOSSES["info_nce"]), None, stages=1, batched={"x": 0, "y": 0}),
        (torch.rand(12, 6), torch.rand(12, 6)),
    ),
    "model collectives": Case(
        (
            *(Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER),
            *(Op.WAIT_ALL_REDUCE, Op.WAIT_ALL_GATHER, Op.WAIT_REDUCE_SCATTER),
        ),
        pipeline_of(functools.partial(mlp, nn.SyncBatchNorm), joined, stages=1, microbatches=2),
        (X,),
        torch.ones(8),
    ),
    "stream": Case(
        (Op.PAUSE, Op.STASH, Op.STAGE_NORM),
        pipeline_of(schedule="pipedream", microbatches=None, optimizer=SGD, clip_grad_norm=1.0),
        (X,),
        CLASSES,
    ),
}
OPS = {op: case for case in CASES.values() for op in case.ops}


@pytest.mark.parametrize("op", slow_but(OPS, Op.FORWARD, Op.REDUCE_GRAD))
def test_a_rank_that_is_killed_in_an_instruction_is_named_by_the_other(op: Op, tmp_path: Path) -> None:
    store = new_store()
    ranks = start_ranks(step_until_killed, [(op,)] * 2, tmp_path, store.port)
    try:
        for process in ranks:
            process.join(200)
        codes = [process.exitcode for process in ranks]
        (said,) = [path.read_text() for path in tmp_path.glob("error_*")]
        assert sorted(codes, key=str) == [-signal.SIGKILL, 0], (codes, said)
        assert said.startswith("TransportError: ")
        assert re.search(rf"rank {codes.index(-signal.SIGKILL)}\b.*(died|ended)", said), said
    finally:
        for process in ranks:
            process.kill()


def step_until_killed(op: Op) -> None:
    """One rank, which steps until it is killed, or ends with the error that it sees."""
    case, rank = OPS[op], int(os.environ["RANK"])
    kwargs = {} if case.target is None else {"target": case.target}
    pipe, armed = case.compiled(), list[bool]()
    wrap_actions(op, armed)
    pipe.step(*case.args, **kwargs)
    programs = pipe.plan.programs
    victim = max(each.rank for each in programs if any(x.op is op for x in each.instructions))
    armed += [True] * (rank == victim)
    while True:
        pipe.step(*case.args, **kwargs)


def wrap_actions(op: Op, armed: list[bool]) -> None:
    """Let a rank that is armed be killed when it comes to an instruction with this op."""
    link = Linker.link

    def linking(self: Linker, instruction: Instruction) -> Callable[[], None]:
        action = link(self, instruction)

        def act() -> None:
            if armed:
                os.kill(os.getpid(), signal.SIGKILL)
            action()

        return act if instruction.op is op else action

    Linker.link = linking  # type: ignore[method-assign]
