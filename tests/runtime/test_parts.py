"""The parts of the runtime: gradient sums, results, random streams, the in-process transport, launching."""

import contextlib
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipec.errors import InputError, TransportError, VerifyError
from pipec.ir import Instruction, Link, Mode, Op, Payload, Plan, Program, Stage, Value
from pipec.runtime import InProcessTransport, Interpreter, World, resolve_devices, world
from pipec.runtime.absent_tensors import is_absent, materialized, plain_tensors, release_elsewhere
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.distributed_transport import require_own_gpus
from pipec.runtime.model_tensors import (
    ModelTensors,
    fill_tensors,
    register_tensors,
)
from pipec.runtime.processes.launch import default_num_ranks
from pipec.runtime.processes.worker import Worker
from pipec.runtime.random_operators import call_with_generator, dropout
from pipec.runtime.random_seeds import OperatorGenerators, mix_seed
from pipec.runtime.stages.gradients import GradientAccumulator
from pipec.runtime.stages.input_layout import as_contiguous
from pipec.runtime.step import interpreter
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.step_results import check_mergeable, merge

CPU = torch.device("cpu")


# what holds tensors


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("passing", torch.ones(1), persistent=False)


def test_held_tensors_are_the_models_own() -> None:
    model, holder = Tied(), torch.nn.Module()
    register_tensors(holder, ModelTensors.of(model))
    assert holder.state_dict().keys() == model.state_dict().keys()
    assert dict(holder.named_buffers()).keys() == {"kept", "passing"}
    assert holder.second.weight is holder.first.weight is model.first.weight
    assert holder.kept is model.kept


def test_absent_tensors_hold_no_memory_and_get_some_for_a_while() -> None:
    model = Tied()
    tensors = ModelTensors.of(model)
    release_elsewhere("first.weight", model.first.weight, "on rank 1")
    release_elsewhere("kept", model.kept, "on rank 1")
    with plain_tensors():
        assert model.second.weight.untyped_storage().nbytes() == model.kept.untyped_storage().nbytes() == 4
    with materialized(tensors.unique().values()):
        assert not is_absent(model.first.weight)
        assert model.first.weight.is_contiguous()
    assert is_absent(model.first.weight)
    assert is_absent(model.kept)
    assert (model.first.weight.shape, model.kept.shape) == ((2, 2), (1,))
    fill_tensors(
        model, {"first.weight": torch.ones(2, 2), "second.weight": torch.ones(2, 2), "kept": torch.ones(1)}
    )
    assert type(model.second.weight) is torch.nn.Parameter
    assert torch.equal(model.second.weight, torch.ones(2, 2))
    with pytest.raises(InputError, match=r"has \[2\] on cpu as first.bias; expected \[3\] with memory"):
        fill_tensors(model, {"first.bias": torch.ones(3)})


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
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    with torch.no_grad():
        gradients = [torch.ones(3, 2).mm(torch.ones(2, 4)).t().t()]
    address = gradients[0].data_ptr()
    total = GradientAccumulator([weight], ())
    total.begin_step()
    total.kept = gradients
    total.accumulate()
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
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        sum_of([weight], [make_gradient()], [make_gradient()])
        assert torch.equal(weight.grad, 2 * torch.ones(2, 3)), name
        assert weight.grad.stride() == weight.stride(), name
        assert weight.grad.untyped_storage().nbytes() == 2 * 3 * 4, name
    assert torch.equal(held, torch.ones(2, 3))


def test_one_tensor_as_the_gradient_of_two_parameters() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    gradient = torch.ones(3)
    both = [gradient, gradient]
    del gradient
    sum_of([first, second], both, [torch.ones(3), None])
    assert first.grad.tolist() == [2, 2, 2]
    assert second.grad.tolist() == [1, 1, 1]


def test_gradients_add_to_what_earlier_steps_left_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
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


def test_a_floating_result_without_batch_is_the_mean_over_samples() -> None:
    loss = merge(Value("loss", "float32", ()), [torch.tensor(1.0), torch.tensor(5.0)], [0.75, 0.25], {"b": 4})
    assert loss.item() == 2.0


def test_results_that_cannot_stand_for_the_batch_are_refused() -> None:
    count = Value("count", "int64", ())
    assert merge(count, [torch.tensor(2), torch.tensor(2)], [0.5, 0.5], {"b": 2}).item() == 2
    with pytest.raises(
        InputError, match=r"result count: i64\[\] differs between microbatches.*return it per sample"
    ):
        merge(count, [torch.tensor(2), torch.tensor(3)], [0.5, 0.5], {"b": 2})
    padded = Value("padded", "float32", ("b + 1",))
    with pytest.raises(InputError, match=r"padded: f32\[b \+ 1\] has size 4 .* but 3 for the whole batch"):
        merge(padded, [torch.zeros(2), torch.zeros(2)], [0.5, 0.5], {"b": 2})
    similarity = Value("similarity", "float32", ("b", "b"))
    with pytest.raises(
        VerifyError, match=r"similarity: f32\[b, b\] has the batch in more than one dimension"
    ):
        check_mergeable(similarity)


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
        assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_that_fails_leaves_the_default_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="p_in >= 0"):
        call_with_generator(OperatorGenerators(CPU, (0, 0))(1), torch.bernoulli, -torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_scales_what_its_mask_keeps() -> None:
    x = torch.linspace(1, 2, 50)
    for p in (0.0, 0.3, 1.0):
        output, mask = dropout(x, p, OperatorGenerators(CPU, (0, 0))(1))
        assert torch.equal(output, torch.where(mask, x * (1 / (1 - p)) if p < 1 else x, 0.0))
        assert mask.all() if p == 0 else mask.any() == (p < 1)


@given(st.lists(st.tuples(*[st.integers(0, 2**32)] * 4), min_size=2, max_size=20, unique=True))
def test_keys_lead_to_seeds_of_their_own(keys: list[tuple[int, ...]]) -> None:
    seeds = [mix_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)


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
        assert run_in_thread(torch.get_num_threads) == 4
    finally:
        torch.set_num_threads(before)


def run_in_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_messages_of_a_link_arrive_in_order_and_by_reference() -> None:
    ranks = InProcessTransport([CPU, CPU])
    link = Link(0, 1, Payload.ACTIVATION, (Value("x", "float32", ("b",)),))
    send = ranks.endpoint(0).sender(Instruction(Op.SEND, 0, 0, link, peer=1), tag=0)
    receiver = ranks.endpoint(1).receiver(Instruction(Op.RECV, 1, 0, link, peer=0, slot=0), tag=0)
    sent = [torch.full((2,), float(number)) for number in range(3)]

    def send_all() -> list[Tensor]:
        for tensor in sent:
            send([tensor], {"b": 2})
        return []

    def receive_all() -> list[Tensor]:
        received = []
        for _ in sent:
            receiver.post({"b": 2})
            received += receiver.wait()
        return received

    _, received = ranks.run([send_all, receive_all])
    assert all(found is expected for found, expected in zip(received, sent, strict=True))


def make_waiting_rank(ranks: InProcessTransport) -> Callable[[], object]:
    """What rank 0 does to wait for a message that rank 1 never sends."""
    link = Link(1, 0, Payload.ACTIVATION, (Value("x", "float32", ("b",)),))
    return ranks.endpoint(0).receiver(Instruction(Op.RECV, 0, 0, link, peer=1, slot=0), tag=7).wait


def fail(error: BaseException) -> None:
    raise error


def test_an_error_stops_ranks_that_wait_and_the_first_is_raised() -> None:
    ranks, error = InProcessTransport([CPU, CPU]), ValueError("first")
    for _ in range(2):
        with pytest.raises(ValueError, match="first") as caught:
            ranks.run([make_waiting_rank(ranks), lambda: fail(error)])
        assert caught.value is error
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


def test_an_error_stops_a_rank_that_only_sends() -> None:
    ranks = InProcessTransport([CPU, CPU])
    link = Link(0, 1, Payload.ACTIVATION, (Value("x", "float32", ("b",)),))
    send = ranks.endpoint(0).sender(Instruction(Op.SEND, 0, 0, link, peer=1), tag=0)
    stopped: list[str] = []

    def send_until_stopped() -> None:
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                send([], {"b": 2})
        except TransportError as error:
            stopped.append(str(error))

    with pytest.raises(ValueError, match="elsewhere"):
        ranks.run([send_until_stopped, lambda: fail(ValueError("elsewhere"))])
    assert stopped == ["another rank of this process failed"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """What a terminal's Ctrl-C does, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_ranks_that_wait() -> None:
    ranks = InProcessTransport([CPU, CPU])
    with pytest.raises(KeyboardInterrupt):
        ranks.run([make_waiting_rank(ranks), lambda: os.kill(os.getpid(), signal.SIGINT)])
    assert ranks.run([lambda: 1, lambda: 2]) == [1, 2]


def test_threads_end_with_the_transport(collect: Callable[[], int]) -> None:
    before = set(threading.enumerate())
    ranks = InProcessTransport([CPU] * 3)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    del ranks
    collect()
    for worker in workers:
        worker.join(timeout=10)
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


def test_a_lone_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world() == World(0, 1)
    assert not world().is_distributed
    assert resolve_devices(3, world()) == {0: CPU, 1: CPU, 2: CPU}


def test_torchrun_gives_each_process_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world() == World(2, 4)
    assert world().is_distributed
    assert resolve_devices(4, world()) == {2: CPU}
    assert resolve_devices(["cpu", "cpu", "mps", "cpu"], world()) == {2: torch.device("mps")}
    with pytest.raises(InputError, match="entry 1 of devices is 'meta', which computes nothing"):
        resolve_devices(["cpu", "meta", "cpu", "cpu"], world())
    assert default_num_ranks(world()) == 4


def test_devices_that_contradict_the_world_are_refused() -> None:
    with pytest.raises(InputError, match=r"devices asks for 4 ranks, but 2 processes .* pass devices=2"):
        resolve_devices(4, World(0, 2))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_shared_in_one_process_but_not_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert default_num_ranks(World(0, 1)) == 2
    assert resolve_devices(3, World(0, 1)) == {0: first, 1: second, 2: first}
    assert resolve_devices(["cpu"] * 2, World(0, 1)) == {0: CPU, 1: CPU}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_devices(4, World(3, 4)) == {3: second}
    monkeypatch.setenv("LOCAL_RANK", "2")
    for devices in (4, ["cuda"] * 4):
        with pytest.raises(InputError, match="process 2 of this machine has no GPU of its own: there are 2"):
            resolve_devices(devices, World(2, 4))


@pytest.mark.usefixtures("two_gpus")
def test_cuda_without_an_index_is_the_gpu_that_a_number_of_devices_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchrun it is not GPU 0 on every rank, and the index is known from the start."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert resolve_devices(["cuda"], World(0, 1)) == {0: first}
    assert resolve_devices([torch.device("cuda")] * 3, World(0, 1)) == resolve_devices(3, World(0, 1))
    assert resolve_devices(["cuda:1", "cpu", "cuda"], World(0, 1)) == {0: second, 1: CPU, 2: first}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_devices(["cuda"] * 4, World(3, 4)) == {3: second}
    assert resolve_devices(["cuda:0"] * 4, World(3, 4)) == {3: first}


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gives one to each task, and each task knows it as the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert resolve_devices(8, World(3, 8)) == {3: torch.device("cuda", 0)}


@pytest.mark.usefixtures("two_gpus")
def test_slurm_numbers_the_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert resolve_devices(4, World(3, 4)) == {3: torch.device("cuda", 1)}


def test_ranks_with_the_same_gpu_are_refused() -> None:
    require_own_gpus(["a", "b", "c"])
    with pytest.raises(InputError, match="ranks 0, 2 have the same GPU, a, but NCCL needs one for each"):
        require_own_gpus(["a", "b", "a"])


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="rank 1 asks for a GPU, but torch finds none on this machine"):
        resolve_devices(["cpu", "cuda"], World(0, 1))


@pytest.mark.usefixtures("two_gpus")
def test_a_process_of_several_makes_its_gpu_the_current_one_first_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA call before would take memory of GPU 0, where the process has nothing to do."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    Ranks(2, timeout=1)
    assert current == [torch.device("cuda", 1)]
    Ranks(["cpu", "cpu"], timeout=1)
    assert len(current) == 1


def test_instructions_run_with_their_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels and extensions ask for it, and a step may be made on any thread."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(torch.device("meta"))

    seen: list[list[torch.device]] = []

    class Code:
        PARAMETERS = BUFFERS = UPDATED_BUFFERS = INPUTS = ()

        @staticmethod
        def forward(frame: object) -> tuple[dict[str, Tensor], list[Tensor], tuple[Tensor, ...]]:
            seen.append(list(entered))
            return {}, [], ()

    monkeypatch.setattr(interpreter, "current_device", current_device)
    plan = Plan(Mode.FORWARD, "gpipe", 1, 1, placement=((0,),), stages=(Stage(0, 0, 0),), links=())
    program = Program(0, [Instruction(Op.FORWARD, 0, 0)])
    Interpreter(program, plan, {0: Code}, {}, {}, InProcessTransport([CPU]).endpoint(0), CPU).run(
        [{}], BatchSlice([1], 1)
    )
    assert seen == [[CPU]]
    assert entered == [CPU, torch.device("meta")]


def test_a_gpu_is_current_only_while_its_instructions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set even if it is current: a new thread has no context until then."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda d: asked.append(d) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: asked.append(f"set {d}"))
    with current_device(torch.device("cuda", 1)), current_device(CPU):
        assert asked == [torch.device("cuda", 1), "set cuda:1"]
