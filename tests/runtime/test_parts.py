"""The parts of the runtime: gradient sums, results, random streams, the in-process transport, launching."""

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipec.errors import InputError, VerifyError
from pipec.ir import Instruction, Link, Op, Payload, Value
from pipec.ir.sharding import shard_evenly
from pipec.runtime import InProcessTransport, World, resolve_devices
from pipec.runtime.call_agreement import mismatch_message
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.distributed_transport import require_own_gpus
from pipec.runtime.processes.launch import default_num_ranks
from pipec.runtime.processes.worker import Worker
from pipec.runtime.random_operators import call_with_generator, dropout
from pipec.runtime.random_seeds import OperatorGenerators, mix_seed
from pipec.runtime.stages.flat_bucket import ShardedBucket
from pipec.runtime.stages.gradients import GradientAccumulator
from pipec.runtime.stages.input_layout import as_contiguous
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.step_results import check_mergeable, merge

CPU = torch.device("cpu")


# what holds tensors


@pytest.mark.parametrize("keeps", [False, True], ids=["gathered before use", "kept"])
def test_a_shard_has_its_elements_of_each_parameter(keeps: bool) -> None:
    """Also of values that a script assigns, if they fit."""
    first, last = nn.Parameter(torch.arange(200.0)), nn.Parameter(torch.ones(40))
    sharding = shard_evenly({"first": 200, "last": 40}, 2)
    bucket = ShardedBucket(sharding, 1, {"first": first, "last": last}, "", keeps, CPU)
    for offset in (0, 7):
        if offset:
            first.data = torch.arange(200.0) + offset
            assert bucket.follow_script() == keeps
        found = {piece.name: tensor.tolist() for piece, tensor in bucket.owned().items()}
        assert found == {"first": [offset + each for each in range(192, 200)], "last": [1.0] * 40}
    first.data = torch.ones(3)
    with pytest.raises(InputError, match="first have 200 elements"):
        bucket.follow_script()


def test_generated_code_gets_tensors_without_gaps() -> None:
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for already_dense in (torch.zeros(2, 3), images, torch.zeros(()), "text", 3):
        assert as_contiguous(already_dense) is already_dense
    for gap in (torch.arange(6).view(2, 3)[:, :-1], torch.zeros(2, 3).t(), images[:, 1:]):
        assert as_contiguous(gap).is_contiguous()
        assert torch.equal(as_contiguous(gap), gap)


# gradients


def sum_of(parameters: Sequence[Tensor], *microbatches: list[Tensor | None]) -> None:
    total = GradientAccumulator(parameters, ())
    total.begin_step()
    for gradients in microbatches:
        total.kept = gradients
        total.accumulate()


def test_first_gradient_is_kept_without_a_copy_even_behind_views() -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    with torch.no_grad():
        gradients = [torch.ones(3, 2).mm(torch.ones(2, 4)).t().t()]
    address = gradients[0].data_ptr()
    sum_of([weight], gradients)
    assert weight.grad.data_ptr() == address


def test_a_gradient_that_is_shared_or_laid_out_otherwise_is_copied() -> None:
    held = torch.ones(2, 3)
    cases: dict[str, Callable[[], Tensor]] = {
        "held elsewhere": lambda: held,
        "a view of what is held": lambda: held.view(2, 3),
        "the start of a larger tensor": lambda: torch.ones(9, 3)[:2],
        "expanded": lambda: torch.ones(1).expand(2, 3),
        "another layout": lambda: torch.ones(3, 2).t(),
    }
    for name, make_gradient in cases.items():
        weight = nn.Parameter(torch.zeros(2, 3))
        sum_of([weight], [make_gradient()], [make_gradient()])
        assert torch.equal(weight.grad, 2 * torch.ones(2, 3)), name
        assert weight.grad.stride() == weight.stride(), name
        assert weight.grad.untyped_storage().nbytes() == 2 * 3 * 4, name
    assert torch.equal(held, torch.ones(2, 3))


def test_one_tensor_as_the_gradient_of_two_parameters() -> None:
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    gradient = torch.ones(3)
    both = [gradient, gradient]
    del gradient
    sum_of([first, second], both, [torch.ones(3), None])
    assert first.grad.tolist() == [2, 2, 2]
    assert second.grad.tolist() == [1, 1, 1]


def test_gradients_add_to_what_earlier_steps_left_in_place() -> None:
    weight = nn.Parameter(torch.zeros(2))
    before = weight.grad = torch.tensor([1.0, 2.0])
    sum_of([weight], [torch.ones(2)])
    assert weight.grad is before
    assert before.tolist() == [2, 3]


# results


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2), st.integers(1, 3))
def test_parts_with_a_batch_dimension_join_to_the_whole(sizes: list[int], dim: int, factor: int) -> None:
    shape: list[int | str] = [2, 3, 4]
    shape[dim] = "b" if factor == 1 else f"{factor}*b"
    whole_shape = [2, 3, 4]
    whole_shape[dim] = factor * sum(sizes)
    whole = torch.randn(whole_shape)
    parts = whole.split([factor * size for size in sizes], dim)
    assert torch.equal(merge(Value("y", "float32", tuple(shape)), parts, sizes, {"b": sum(sizes)}), whole)


def test_results_that_cannot_stand_for_the_batch_are_refused() -> None:
    count = Value("count", "int64", ())
    assert merge(count, [torch.tensor(2), torch.tensor(2)], [0.5, 0.5], {"b": 2}).item() == 2
    with pytest.raises(InputError, match=r"count: .* differs between microbatches.*return it per sample"):
        merge(count, [torch.tensor(2), torch.tensor(3)], [0.5, 0.5], {"b": 2})
    padded = Value("padded", "float32", ("b + 1",))
    with pytest.raises(InputError, match=r"padded: .* has size 4 .* but 3 for the whole batch"):
        merge(padded, [torch.zeros(2), torch.zeros(2)], [0.5, 0.5], {"b": 2})
    with pytest.raises(VerifyError, match=r"similarity: .* has the batch in more than one dimension"):
        check_mergeable(Value("similarity", "float32", ("b", "b")))


# randomness


def test_draws_depend_on_their_generator_alone_and_leave_the_default_one_as_it_was() -> None:
    x = torch.ones(50)
    draws: list[Callable[[torch.Generator], Tensor]] = [
        lambda own: dropout(x, 0.5, own)[0],
        lambda own: call_with_generator(own, torch.bernoulli, x / 2),
    ]
    for make in draws:
        first = make(OperatorGenerators(CPU, (0, 0))(1))
        torch.rand(1)
        before = torch.get_rng_state()
        assert torch.equal(make(OperatorGenerators(CPU, (0, 0))(1)), first)
        assert not torch.equal(make(OperatorGenerators(CPU, (0, 0))(2)), first)
        with pytest.raises(RuntimeError, match="p_in >= 0"):
            call_with_generator(OperatorGenerators(CPU, (0, 0))(1), torch.bernoulli, -x)
        assert torch.equal(torch.get_rng_state(), before)


def test_dropout_scales_what_its_mask_keeps() -> None:
    x = torch.linspace(1, 2, 50)
    for p in (0.0, 0.3, 1.0):
        output, mask = dropout(x, p, OperatorGenerators(CPU, (0, 0))(1))
        assert torch.equal(output, torch.where(mask, x * (1 / (1 - p)) if p < 1 else x, 0.0))
        assert mask.all() if p == 0 else mask.any() == (p < 1)


def test_a_stream_depends_on_its_key_alone() -> None:
    first, _, again = (OperatorGenerators(CPU, (0, 1))(operator) for operator in (2, 3, 2))
    assert torch.equal(torch.rand(9, generator=first), torch.rand(9, generator=again))
    assert f"{mix_seed(1, 2):x}" == "bcd9dbb49673066b"  # streams stay what they are from version to version


# the in-process transport


def test_ranks_divide_the_threads_and_leave_the_callers_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert InProcessTransport([CPU] * 2).run([torch.get_num_threads] * 2) == [2, 2]
        assert InProcessTransport([CPU] * 8).run([torch.get_num_threads] * 8) == [1] * 8
        assert torch.get_num_threads() == 4
        with ThreadPoolExecutor() as another:
            assert another.submit(torch.get_num_threads).result() == 4
    finally:
        torch.set_num_threads(before)


def test_the_kth_message_is_for_the_kth_receive_whichever_is_awaited_first() -> None:
    mailbox = InProcessTransport([CPU, CPU]).mailbox(tag=0, source=0, target=1)
    for number in range(3):
        mailbox.send([torch.tensor(number)], {})
    assert [int(mailbox.wait(number)[0]) for number in (2, 0, 1)] == [2, 0, 1]


def make_waiting_rank(ranks: InProcessTransport) -> Callable[[], object]:
    """What rank 0 does to wait for a message that rank 1 never sends."""
    link = Link(1, 0, Payload.ACTIVATION, (Value("x", "float32", ("b",)),))
    return ranks.endpoint(0).receiver(Instruction(Op.RECV, 0, 0, link, peer=1, slot=0), tag=7).wait


def fail(error: BaseException) -> None:
    raise error


def test_an_error_and_ctrl_c_stop_ranks_that_wait_and_the_first_is_raised() -> None:
    ranks, error = InProcessTransport([CPU, CPU]), ValueError("first")
    for _ in range(2):
        with pytest.raises(ValueError, match="first") as caught:
            ranks.run([make_waiting_rank(ranks), lambda: fail(error)])
        assert caught.value is error
        assert ranks.run([lambda: 1, lambda: 2]) == [1, 2]
        with pytest.raises(KeyboardInterrupt):
            ranks.run([make_waiting_rank(ranks), lambda: os.kill(os.getpid(), signal.SIGINT)])
        assert ranks.run([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("wrong", range(3))
def test_a_collective_that_fails_stops_all_its_ranks(wrong: int) -> None:
    """Also if it fails on the last rank to join, which finishes it for all."""
    ranks = InProcessTransport([CPU] * 3)

    def reduce(rank: int) -> Tensor:
        tensor = torch.ones(4 if rank == wrong else 3)
        ranks.endpoint(rank).group([0, 1, 2]).all_reduce(tensor)()
        return tensor

    for _ in range(3):
        with pytest.raises(RuntimeError, match="size"):
            ranks.run([functools.partial(reduce, rank) for rank in range(3)])
    wrong = -1
    assert all(x.tolist() == [3, 3, 3] for x in ranks.run([functools.partial(reduce, k) for k in range(3)]))


def test_threads_end_with_the_transport(collect: Callable[[], int]) -> None:
    before = set(threading.enumerate())
    ranks = InProcessTransport([CPU] * 3)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    del ranks
    collect()
    for worker in workers:
        worker.join(timeout=120)
    assert not any(worker.is_alive() for worker in workers)


def test_a_worker_holds_nothing_of_what_it_did() -> None:
    worker, tensor = Worker("test"), torch.zeros(1)
    reference = weakref.ref(tensor)
    worker.submit(tensor.clone)
    del tensor
    worker.wait_until_idle()
    worker.wait_until_idle()
    assert reference() is None


# launching


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes so many GPUs, and the environment of a launcher."""

    def make(num_gpus: int, **environment: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        for name in ("LOCAL_RANK", "SLURM_LOCALID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))

    return make


ALONE, FIRST, SECOND = World(0, 1), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("num_gpus", "environment", "here", "devices", "expected"),
    [
        (0, {}, ALONE, 3, {0: CPU, 1: CPU, 2: CPU}),
        (0, {}, World(2, 4), 4, {2: CPU}),
        (0, {}, World(2, 4), ["cpu", "cpu", "mps", "cpu"], {2: torch.device("mps")}),
        (0, {}, World(2, 4), ["cpu", "meta", "cpu", "cpu"], "entry 1 of devices is 'meta', which computes"),
        (0, {}, World(0, 2), 4, r"devices asks for 4 ranks, but 2 processes .* pass devices=2"),
        (0, {}, ALONE, ["cpu", "cuda"], "rank 1 asks for a GPU, but torch finds none on this machine"),
        # one process shares its GPUs round robin, several do not
        (2, {}, ALONE, 3, {0: FIRST, 1: SECOND, 2: FIRST}),
        (2, {}, ALONE, ["cpu"] * 2, {0: CPU, 1: CPU}),
        (2, {"LOCAL_RANK": 1}, World(3, 4), 4, {3: SECOND}),
        (2, {"LOCAL_RANK": 2}, World(2, 4), 4, "process 2 of this machine has no GPU .* are 2"),
        (2, {"LOCAL_RANK": 2}, World(2, 4), ["cuda"] * 4, "process 2 of this machine has no GPU of its own"),
        (2, {"SLURM_LOCALID": 1}, World(3, 4), 4, {3: SECOND}),
        (1, {"LOCAL_RANK": 3}, World(3, 8), 8, {3: FIRST}),  # as Slurm lets each task see one
        # a process has one of its own also where it is alone in its group
        (4, {}, World(1, 2, (1, 3)), 2, {1: torch.device("cuda", 3)}),
        (2, {"LOCAL_RANK": 1}, World(0, 1, (3,)), 1, {0: SECOND}),
        (2, {"LOCAL_RANK": 1}, World(0, 1, (3,)), ["cuda"] * 2, {0: SECOND, 1: SECOND}),
        (0, {}, World(0, 2, (0, 2)), 4, r"devices asks for 4 ranks, but 2 processes are in the group"),
        # cuda without an index is the GPU that a number of devices gives
        (2, {}, ALONE, [torch.device("cuda")] * 3, {0: FIRST, 1: SECOND, 2: FIRST}),
        (2, {}, ALONE, ["cuda:1", "cpu", "cuda"], {0: SECOND, 1: CPU, 2: FIRST}),
        (2, {"LOCAL_RANK": 1}, World(3, 4), ["cuda"] * 4, {3: SECOND}),
        (2, {"LOCAL_RANK": 1}, World(3, 4), ["cuda:0"] * 4, {3: FIRST}),
    ],
)
def test_each_rank_has_its_device(
    hardware: Callable[..., None],
    num_gpus: int,
    environment: dict[str, int],
    here: World,
    devices: Any,
    expected: Any,
) -> None:
    hardware(num_gpus, **environment)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            resolve_devices(devices, here)
    else:
        assert resolve_devices(devices, here) == expected
        counts = [default_num_ranks(each) for each in (ALONE, World(2, 4), World(0, 1, (3,)))]
        assert counts == [max(1, num_gpus), 4, 1]


def test_ranks_with_the_same_gpu_are_refused() -> None:
    require_own_gpus(["a", "b", "c"])
    with pytest.raises(InputError, match="ranks 0, 2 have the same GPU, a, but NCCL needs one for each"):
        require_own_gpus(["a", "b", "a"])


def test_a_process_of_several_makes_its_gpu_the_current_one_first_of_all(
    hardware: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA call before would take memory of GPU 0, where the process has nothing to do."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    hardware(2, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    Ranks(2, timeout=1)
    assert current == [torch.device("cuda", 1)]
    Ranks(["cpu", "cpu"], timeout=1)
    assert len(current) == 1


def test_a_gpu_is_current_only_while_its_instructions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set even if it is current: a new thread has no context until then."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda d: asked.append(d) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: asked.append(f"set {d}"))
    with current_device(torch.device("cuda", 1)), current_device(CPU):
        assert asked == [torch.device("cuda", 1), "set cuda:1"]


KINDS_OF_DIFFERENCES = {
    "batches": "streams",
    "backward of step 3": "backward alike",
    "the gradient of the loss": "other losses",
    "accumulates": "optimizers",
    "lr of the optimizer": "optimizers",
    "frozen parameters": "freeze",
    "args[0]": "different batches to step",
}


@pytest.mark.parametrize("name", KINDS_OF_DIFFERENCES)
def test_what_differs_between_ranks_is_named_by_its_kind(name: str) -> None:
    same = {"call": "step, train", "args[1]": "int64[8]"}
    first, *differences = mismatch_message([{**same, name: "1"}, {**same, name: "2"}]).splitlines()
    assert KINDS_OF_DIFFERENCES[name] in first
    assert differences[0] == f"  {name}: 1 on rank 0; 2 on rank 1"
    message = mismatch_message([{"call": "step, train", name: "1"}, {"call": "eval_step, eval", name: "2"}])
    assert "same calls" in message.splitlines()[0]
    assert f"{name}: " not in message
