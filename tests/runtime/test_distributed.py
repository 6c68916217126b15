"""Three real processes over gloo, started once: the same bits, and what each sees when one misbehaves."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import handwritten_stages
import pytest
import torch
import torch.distributed as dist
from handwritten_stages import NUM_RANKS, SIZES, make_model, reference_step
from worker_processes import new_store, start_ranks

from pipec.errors import InputError, PipecError, TransportError
from pipec.ir import Instruction, Mode, Op, Plan, Program, Stage
from pipec.runtime import DistributedTransport, Interpreter
from pipec.runtime.step.batch_slice import BatchSlice

pytestmark = pytest.mark.slow

StepResult = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepResult]]:
    """What each scenario of ``handwritten_stages.main`` led to on each rank."""
    directory = tmp_path_factory.mktemp("outcomes")
    run_processes(directory)
    by_rank = [torch.load(directory / f"{rank}.pt") for rank in range(NUM_RANKS)]
    return {name: [outcome[name] for outcome in by_rank] for name in by_rank[0]}


def run_processes(directory: Path) -> None:
    store = new_store()
    processes = start_ranks(handwritten_stages.main, [(directory,)] * NUM_RANKS, directory, store.port)
    try:
        for process in processes:
            process.join(230)
    finally:
        for process in processes:
            process.kill()
    raised = [file.read_text() for file in directory.glob("error_*")]
    assert [process.exitcode for process in processes] == [0, 0, 0], raised
    assert not any(raised), raised


@pytest.mark.parametrize("scenario", ["training", "aftermath"])
def test_steps_have_the_bits_of_autograd(outcomes: dict[str, list[StepResult]], scenario: str) -> None:
    """Every rank has the results; the owner of a parameter, its gradient."""
    model = make_model()
    expected = [reference_step(model, SIZES, step) for step in range(2)]
    for outcome in outcomes[scenario]:
        for found, wanted in zip(outcome["results"], expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for name, owner in {"a": 0, "w": 1, "bias": 1}.items():
        gradients = [outcome["gradients"][name] for outcome in outcomes[scenario]]
        assert torch.equal(gradients.pop(owner), model.parameters[name].grad), name
        assert gradients == [None] * (NUM_RANKS - 1), name
    assert torch.equal(outcomes[scenario][1]["buffers"]["mean"], model.buffers["mean"])


def test_ranks_of_one_host_share_memory_unless_one_of_them_cannot(
    outcomes: dict[str, list[StepResult]],
) -> None:
    shared = {name: [each["shares with"] for each in outcomes[name]] for name in ("training", "aftermath")}
    assert shared == {"training": [[1, 2], [0, 2], [0, 1]], "aftermath": [[1], [0], []]}


def test_a_lent_parameter_arrives_in_the_same_memory_every_step(
    outcomes: dict[str, list[StepResult]],
) -> None:
    addresses = outcomes["training"][2]["lent"]
    assert addresses == [addresses[0]] * 2 * len(SIZES)


def test_the_process_group_survives_the_transports_that_failed(outcomes: dict[str, list[StepResult]]) -> None:
    assert [outcome["sum of ranks"] for outcome in outcomes["aftermath"]] == [3, 3, 3]


def test_a_hung_rank_is_named_after_the_timeout(outcomes: dict[str, list[StepResult]]) -> None:
    hung, waiting, _ = outcomes["hang"]
    assert waiting["type"] == "TransportError"
    assert waiting["text"].startswith("rank 1, stage 1, microbatch 0, wait_recv: ")
    assert "receiving hidden_1 (0 -> 1) of microbatch 0 from rank 0" in waiting["text"]
    assert "another rank failed while this one was" in hung["text"]
    assert "rank 0 is alive, but waits for no other rank" in waiting["text"]


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

    class Broken:
        PARAMETERS = BUFFERS = UPDATED_BUFFERS = INPUTS = ()

        @staticmethod
        def forward(frame: object) -> None:
            alone.star.fail("rank 1: out of memory")
            monkeypatch.setattr(alone._connections, "check", lambda: exec("raise ConnectionError"))
            raise ValueError("garbage")

    plan = Plan(Mode.FORWARD, "gpipe", 1, 1, placement=((0,),), stages=(Stage(0, 0, 0),), links=())
    program = Program(0, [Instruction(Op.FORWARD, 0, 0)])
    rank = Interpreter(program, plan, {0: Broken}, {}, {}, alone, torch.device("cpu"))
    with pytest.raises(
        TransportError, match="another rank failed while this one was computing:\n  rank 1: out"
    ):
        rank.run([{}], BatchSlice([1], 1))


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
