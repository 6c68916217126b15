"""Ranks that fail, differ, hang or are lost, whichever it is and whenever: all others end, and name them."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_variants import captured, compiled, save_with_tensors
from equality_rows import Row, batch_of, piped
from huggingface_models import perceptron
from instruction_hooks import before_each
from page_views import embedded
from slow_params import slow_but
from torch import Tensor
from worker_processes import free_port, new_store, run_lines, start_ranks, train

from pipec import ops
from pipec.errors import InputError, PipecError, TransportError
from pipec.ir import Op
from pipec.runtime import DistributedTransport
from pipec.runtime.processes import rendezvous
from pipec.runtime.step.linker import Linker
from pipec.runtime.step.ranks import Ranks

ROOT = Path(__file__).parents[2]


# hosts


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

    def fail(*_: object) -> None:
        alone.star.fail("rank 1: out of memory")
        monkeypatch.setattr(alone._connections, "check", lambda: exec("raise ConnectionError"))
        raise ValueError("garbage")

    monkeypatch.setattr(Linker, "link", before_each(fail))
    monkeypatch.setattr(Ranks, "transport", lambda ranks, rank: alone)
    with pytest.raises(TransportError, match="failed while this one was computing:\n  rank 1: out"):
        piped(Row(layout="1")).step(*batch_of(Row(), 0, 8))


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
    artifact = compiled(model, 2, "1f1b")
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
        save_with_tensors(compiled(model, 2, schedule), model.model, tmp_path / schedule)
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
    artifact = compiled(model, 2, "1f1b")
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    pages = [tmp_path / f"{rank}.html" for rank in (0, 1)]
    words = ["run", str(directory), "--trace", "--steps", "2", "--json", "--output"]
    script = f"""
import os
from pipec.cli import app
app([*{words}, {list(map(str, pages))}[int(os.environ["RANK"])]], standalone_mode=False)
"""
    told, silence = run_lines(script, 2, tmp_path)
    assert silence == []
    facts = json.loads("".join(told))
    assert [len(facts[name]["waits"]) for name in ("planned", "measured")] == [2, 2]
    assert facts["measured"]["num_events"] == facts["planned"]["num_events"]
    assert all(0 < rank["busy"] < facts["measured"]["makespan"] for rank in facts["measured"]["waits"])
    assert [page.exists() for page in pages] == [True, False]
    assert "measured" in str(embedded(pages[0].read_text(encoding="utf-8")))


# ranks that are killed in an instruction for which another rank waits


def joined(x: Tensor, y: Tensor) -> Tensor:
    """A loss with a gathering, its gradient, and a sum over replicas."""
    logits, weights = x @ ops.all_gather(x.tanh()).T, y.to(x)
    return logits.logsumexp(1).mean() + (x.square().sum(1) * weights).sum() / ops.all_reduce(weights.sum())


CASES: dict[tuple[Op, ...], tuple[Row, dict[str, Any]]] = {
    (Op.RECV, Op.WAIT_RECV, Op.SEND, Op.FORWARD, Op.BACKWARD, Op.ACCUMULATE, Op.FREE): (
        Row(schedule="1f1b"),
        {},
    ),
    (
        *(Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD, Op.AVERAGE_BUFFERS, Op.WAIT_AVERAGE_BUFFERS),
        *(Op.UNSHARD, Op.WAIT_UNSHARD, Op.RESHARD, Op.GRAD_NORM, Op.CHECK, Op.UPDATE),
    ): (Row(model="norms", layout="1x2", update="clipped", shard="parameters"), {}),
    (Op.SUM_COUNTS, Op.WAIT_SUM_COUNTS): (Row(loss="ignored", layout="1x2", batch="local"), {}),
    (Op.GATHER_ROWS, Op.WAIT_GATHER_ROWS, Op.TAIL): (Row(loss="mixing", layout="1x2"), {}),
    (
        *(Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER),
        *(Op.WAIT_ALL_REDUCE, Op.WAIT_ALL_GATHER, Op.WAIT_REDUCE_SCATTER),
    ): (Row(layout="1x2"), {"loss_fn": joined}),
    (Op.PAUSE, Op.STASH, Op.STAGE_NORM): (
        Row(schedule="pipedream-2bw", update="sgd"),
        {"clip_grad_norm": 1.0},
    ),
}
"""Trainings of two ranks, and the options that are changed, by the ops in which a rank is killed."""

OPS = {op: training for own, training in CASES.items() for op in own}


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
    (row, changed), armed = OPS[op], list[bool]()
    Linker.link = before_each(  # type: ignore[method-assign]
        lambda _, instruction: lose("killed") if armed and instruction.op is op else None
    )
    script = piped(row, **changed)
    script.step(*batch_of(row, 0, 8))
    programs = script.pipe.plan.programs
    victim = max(each.rank for each in programs if any(x.op is op for x in each.instructions))
    armed += [True] * (int(os.environ["RANK"]) == victim)
    while True:
        script.step(*batch_of(row, 0, 8))


# ranks that are lost from the rendezvous on


NUM_RANKS = 3
SAID = {
    "killed": "died|ended",
    "stopped": "is stopped|no sign of life|did not connect",
    "hangs": "is alive, but waits for no other rank",
}
PHASES = {
    "rendezvous": ("killed", "stopped"),
    "compilation": ("killed", "stopped"),
    "steady state": ("killed", "stopped"),
    "step": ("hangs",),
}


def lose(how: str) -> None:
    """Kill or stop this process, or let this thread hang."""
    if how == "hangs":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_whichever_rank_is_lost_the_others_end_and_name_it(phase: str, tmp_path: Path) -> None:
    ranks = {}
    for how, victim in itertools.product(PHASES[phase], range(NUM_RANKS)):
        scratch = tmp_path / f"{how}_{victim}"
        scratch.mkdir()
        given = [(phase, how, victim)] * NUM_RANKS
        ranks[how, victim] = start_ranks(step_until_lost, given, scratch, free_port())
    try:
        for (how, victim), rank in itertools.product(ranks, range(NUM_RANKS)):
            if rank != victim:
                ranks[how, victim][rank].join(300)
                assert ranks[how, victim][rank].exitcode == 0, (how, victim, rank)
                said = (tmp_path / f"{how}_{victim}" / f"error_{rank}").read_text()
                assert said.startswith("TransportError: "), said
                assert re.search(rf"rank {victim}\b.*({SAID[how]})", said), (how, rank, said)
    finally:
        for process in itertools.chain(*ranks.values()):
            process.kill()


def step_until_lost(phase: str, how: str, victim: int) -> None:
    """One rank, without a store of ``torchrun``, from the rendezvous to many steps."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    rank, connect, begun = int(os.environ["RANK"]), rendezvous.connect, list[int]()

    def reach(reached: str) -> None:
        if (reached, rank) == (phase, victim):
            lose(how)

    def connect_unless_lost(*given: Any) -> bytes:
        reach("rendezvous")
        return connect(*given)

    def compile_slowly() -> None:
        """Without an end where ranks are lost meanwhile."""
        time.sleep(0.5)
        reach("compilation")
        if phase == "compilation":
            threading.Event().wait()

    rendezvous.connect = connect_unless_lost
    Linker.link = before_each(lambda *_: reach("step") if len(begun) > 5 else None)  # type: ignore[method-assign]
    transport = DistributedTransport(torch.device("cpu"), 60.0)
    if rank > 0:
        threading.Timer(0.5, reach, ("compilation",)).start()
    transport.call_on_rank_0("compile", compile_slowly)
    row = Row(layout="3", schedule="1f1b")
    script = piped(row, timeout=60.0)
    for step in itertools.count():
        begun.append(step)
        script.step(*batch_of(row, step, 8))
        if step == 5:
            reach("steady state")
