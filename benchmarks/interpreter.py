"""Host time of the interpreter per step, with stages that compute nothing; and before the first instruction.

python benchmarks/interpreter.py

Four ranks run 1F1B over 32 microbatches; the stage functions return tensors made beforehand, so that all
that is left is what the runtime itself does. One rank is driven alone, by a transport
that delivers at once, and then all four run in this process, where they share one Python interpreter.

Before a step, pipec checks that what it compiled is still what the model and the loss would do. For that the
layers of GPT-2 small are taken, in which only the width is less: no tensor's size matters.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import pipec
from pipec.ir import InputLeaf, Instruction, Link, Mode, Payload, Plan, Program, Sizes, Stage, Value
from pipec.programs.lower import chain_links, lower
from pipec.runtime import InProcessTransport, Interpreter, Transport
from pipec.runtime.executions import STEP
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.schedules import make_schedule

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 32, 200
CPU = torch.device("cpu")
TENSOR = torch.zeros(1)
LOSS = torch.zeros(())
Job = Callable[[], dict[str, Tensor]]


class First:
    """A stage with one parameter that does nothing. The others differ in what they receive and send."""

    PARAMETERS = ("w",)
    BUFFERS = ()
    UPDATED_BUFFERS = ()

    @staticmethod
    def forward(w, x):
        return {"hidden_1": TENSOR}, [TENSOR], ()

    @staticmethod
    def backward(w, saved, grad_hidden_1):
        saved.clear()
        return {}, (TENSOR,)


class Second(First):
    @staticmethod
    def forward(w, hidden_1):
        return {"hidden_2": TENSOR}, [TENSOR], ()

    @staticmethod
    def backward(w, saved, grad_hidden_2):
        saved.clear()
        return {"grad_hidden_1": TENSOR}, (TENSOR,)


class Third(First):
    @staticmethod
    def forward(w, hidden_2):
        return {"hidden_3": TENSOR}, [TENSOR], ()

    @staticmethod
    def backward(w, saved, grad_hidden_3):
        saved.clear()
        return {"grad_hidden_2": TENSOR}, (TENSOR,)


class Last(First):
    @staticmethod
    def forward(w, hidden_3):
        return {"loss": LOSS}, [TENSOR], ()

    @staticmethod
    def backward(w, saved, grad_loss):
        saved.clear()
        return {"grad_hidden_3": TENSOR}, (TENSOR,)


STAGES = {0: First, 1: Second, 2: Third, 3: Last}


class Instant:
    """A transport on which everything has always just arrived."""

    def __init__(self, tensors: Sequence[Tensor] = (TENSOR,)) -> None:
        self.tensors = tensors

    def sender(self, instruction: Instruction, tag: int) -> Callable[[Sequence[Tensor], Sizes], None]:
        return self.send

    def receiver(self, instruction: Instruction, tag: int) -> "Instant":
        return self

    def post(self, sizes: Sizes) -> None:
        pass

    def wait(self) -> Sequence[Tensor]:
        return self.tensors

    def send(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        pass

    def finish(self) -> None:
        pass

    def check(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass


def make_plan() -> tuple[Plan, tuple[Program, ...]]:
    schedule = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    stages = tuple(Stage(k, k, k, parameters=First.PARAMETERS) for k in STAGES)
    loss = Link(NUM_RANKS - 1, -1, Payload.RESULT, (Value("loss", "float32", ()),))
    links = (*chain_links(NUM_RANKS), loss)
    inputs = (InputLeaf(0, "x", True, Value("x", "float32", ("b",))),)
    plan = Plan(Mode.TRAIN, "1f1b", NUM_MICROBATCHES, 1, schedule.placement, stages, links, inputs=inputs)
    return plan, lower(schedule, plan)


def make_jobs(endpoints: Sequence[Transport]) -> list[Job]:
    """What runs one step of each rank."""
    plan, programs = make_plan()
    microbatches = [{"x": TENSOR}] * NUM_MICROBATCHES
    span = BatchSlice([1] * NUM_MICROBATCHES, NUM_MICROBATCHES)
    jobs = []
    for program, endpoint in zip(programs, endpoints, strict=True):
        parameters = {"w": torch.nn.Parameter(torch.zeros(1))}
        interpreter = Interpreter(program, plan, STAGES, parameters, {}, endpoint, CPU)
        jobs.append(partial(interpreter.run, microbatches, span))
    return jobs


def seconds(job: Callable[[], object]) -> float:
    """The median time of a call, after some to warm up."""
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times[NUM_STEPS // 10 :])


def check(pipe: pipec.Pipeline, inputs: dict[str, object]) -> None:
    """What ``step`` does before its first instruction."""
    pipe._executions.agree(STEP, CallArguments((), inputs))


def before_steps() -> Iterator[tuple[str, float, float]]:
    """For sequences of three lengths, what ``prepare`` takes, and then the checks before a step, in seconds.

    The checks are those of GPT-2 small, from the call of ``step`` to the first instruction.
    """
    config = GPT2Config(n_embd=48, vocab_size=64, n_positions=48, bos_token_id=0, eos_token_id=0)
    pipe = pipec.compile(GPT2LMHeadModel(config), devices=2, microbatches=2)
    for number, length in (("first", 16), ("second", 24), ("third", 32)):
        tokens = torch.zeros(4, length, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        start = time.perf_counter()
        pipe.prepare(**inputs)
        prepared = time.perf_counter() - start
        yield number, prepared, seconds(partial(check, pipe, inputs))


def main() -> None:
    lengths = [len(program.instructions) for program in make_plan()[1]]
    print(
        f"1F1B, {NUM_RANKS} ranks, {NUM_MICROBATCHES} microbatches, empty stages; median of {NUM_STEPS} steps"
    )
    alone = make_jobs([Instant() for _ in range(NUM_RANKS)])
    for rank, (job, length) in enumerate(zip(alone, lengths, strict=True)):
        print(f"rank {rank} alone: {seconds(job) * 1e3:6.3f} ms for {length} instructions")
    ranks = InProcessTransport([CPU] * NUM_RANKS)
    jobs = make_jobs([ranks.endpoint(rank) for rank in range(NUM_RANKS)])
    together = seconds(lambda: ranks.run(jobs))
    print(f"all ranks in one process: {together * 1e3:6.3f} ms for {sum(lengths)} instructions")
    for number, prepared, checks in before_steps():
        print(
            f"{number} length: {prepared:5.2f} s to compile, {checks * 1e3:5.2f} ms of checks before a step"
        )


if __name__ == "__main__":
    main()
