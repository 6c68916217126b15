"""A model of three stages written by hand, as the code generator would emit it, and what runs it.

::

    stage 0    skip = x @ a;  hidden_1 = tanh(skip)
    stage 1    hidden_2 = (relu(hidden_1 @ w + bias) - mean) * dropout mask;  mean moves with every microbatch
    stage 2    loss = mse((hidden_2 + skip) @ a.T + position, target)          a is borrowed from stage 0
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bare_programs import lower
from torch import Tensor

from pipec.ir import InputLeaf, Link, Mode, Payload, Plan, Schedule, Stage, Value
from pipec.runtime import InProcessTransport, Interpreter, Transport
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.step.batch_slice import BatchSlice

WIDTH, HIDDEN, DROPOUT_ID = 8, 6, 7
CPU = torch.device("cpu")


class _Stage:
    BUFFERS = UPDATED_BUFFERS = INPUTS = ()

    @classmethod
    def backward(cls, frame):
        sent, saved, _ = cls.backward_input(frame)
        return sent, cls.backward_weight({"saved": saved})


class Stage0(_Stage):
    PARAMETERS = ("a",)
    INPUTS = ("x",)

    @staticmethod
    def forward(frame):
        x, (a,) = frame["x"], frame["w"]
        skip = x.mm(a)
        hidden_1 = skip.tanh()
        return {"hidden_1": hidden_1, "skip": skip}, [x, hidden_1], ()

    @staticmethod
    def backward_input(frame):
        grad_hidden_1, grad_skip = frame.pop("grad_hidden_1"), frame.pop("grad_skip")
        x, hidden_1 = frame.pop("saved")
        grad = torch.ops.aten.tanh_backward(grad_hidden_1, hidden_1) + grad_skip
        return {}, [x, grad], (None,)

    @staticmethod
    def backward_weight(frame):
        x, grad = frame.pop("saved")
        return (x.t().mm(grad),)


class Stage1(_Stage):
    PARAMETERS = ("w", "bias")
    BUFFERS = ("unused", "mean")
    UPDATED_BUFFERS = ("mean",)

    @staticmethod
    def forward(frame):
        return Stage1.computed(frame, frame.pop("hidden_1"))

    @staticmethod
    def computed(frame, hidden_1):
        rng, device = frame["rng"], frame["device"]
        w, bias = frame["w"]
        _, mean = frame["buffers"]
        z = hidden_1.mm(w) + bias
        mask = torch.rand(z.shape, generator=rng(DROPOUT_ID), device=device) > 0.5
        sent = {"hidden_2": (z.relu() - mean) * mask}
        return sent, [hidden_1, z, mask], (mean * 0.9 + z.mean(0) * 0.1,)

    @staticmethod
    def backward_input(frame):
        grad_hidden_2 = frame.pop("grad_hidden_2")
        w, _ = frame["w"]
        hidden_1, z, mask = frame.pop("saved")
        grad = torch.ops.aten.threshold_backward(grad_hidden_2 * mask, z, 0)
        return {"grad_hidden_1": grad.mm(w.t())}, [hidden_1, grad], (None, None)

    @staticmethod
    def backward_weight(frame):
        hidden_1, grad = frame.pop("saved")
        return hidden_1.t().mm(grad), grad.sum(0)


class Stage2(_Stage):
    PARAMETERS = ("a",)
    INPUTS = ("target",)

    @staticmethod
    def constants(b, device):
        return (torch.arange(b, device=device)[:, None] * 0.01,)

    @staticmethod
    def forward(frame):
        hidden_2, skip, target = frame.pop("hidden_2"), frame.pop("skip"), frame["target"]
        (a,) = frame["w"]
        (position,) = frame["constants"]
        u = hidden_2 + skip
        output = u.mm(a.t()) + position
        difference = output - target
        loss = (difference * difference).mean()
        return {"loss": loss, "output": output}, [u, difference], ()

    @staticmethod
    def backward_input(frame):
        grad_loss, (a,) = frame["grad_loss"], frame["w"]
        u, difference = frame.pop("saved")
        half = grad_loss.expand(difference.shape) / difference.numel() * difference
        grad = half + half
        grad_u = grad.mm(a)
        return {"grad_hidden_2": grad_u, "grad_skip": grad_u}, [u, grad], (None,)

    @staticmethod
    def backward_weight(frame):
        u, grad = frame.pop("saved")
        return (grad.t().mm(u),)


STAGES = {0: Stage0, 1: Stage1, 2: Stage2}


def _value(name: str, *shape: int | str) -> Value:
    return Value(name, "float32", shape)


LINKS = (
    Link(0, 2, Payload.WEIGHT, (_value("a", WIDTH, HIDDEN),)),
    Link(0, 1, Payload.ACTIVATION, (_value("hidden_1", "b", HIDDEN),)),
    Link(0, 2, Payload.ACTIVATION, (_value("skip", "b", HIDDEN),)),
    Link(1, 2, Payload.ACTIVATION, (_value("hidden_2", "b", HIDDEN),)),
    Link(2, 1, Payload.GRADIENT, (_value("grad_hidden_2", "b", HIDDEN),)),
    Link(2, 0, Payload.GRADIENT, (_value("grad_skip", "b", HIDDEN),)),
    Link(1, 0, Payload.GRADIENT, (_value("grad_hidden_1", "b", HIDDEN),)),
    Link(2, 0, Payload.WEIGHT_GRADIENT, (_value("a", WIDTH, HIDDEN),)),
    Link(2, -1, Payload.RESULT, (_value("loss"), _value("output", "b", WIDTH))),
)


def make_plan(schedule: Schedule) -> Plan:
    stages = []
    for index, code in STAGES.items():
        tensors = {"parameters": code.PARAMETERS, "borrowed_parameters": ("a",) if index == 2 else ()}
        tensors |= {"buffers": code.BUFFERS, "updated_buffers": code.UPDATED_BUFFERS}
        stages.append(Stage(index, index, index, **tensors))
    inputs = (
        InputLeaf(0, "x", True, _value("x", "b", WIDTH)),
        InputLeaf(1, "target", True, _value("target", "b", WIDTH)),
    )
    return Plan(
        mode=Mode.TRAIN,
        schedule=schedule.name,
        num_microbatches=schedule.num_microbatches,
        microbatch_size=max(SIZES),
        placement=schedule.placement,
        stages=tuple(stages),
        links=LINKS,
        inputs=inputs,
    )


@dataclass
class Model:
    """The tensors of the model; every rank has its own copy, equal at first."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def make_model() -> Model:
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (WIDTH, HIDDEN), "w": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=random)) for name, shape in shapes.items()
    }
    return Model(parameters, {"unused": torch.zeros(1), "mean": torch.randn(HIDDEN, generator=random)})


def make_batch(sizes: Sequence[int], step: int = 0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(100 + step)
    return [{name: torch.randn(size, WIDTH, generator=random) for name in ("x", "target")} for size in sizes]


def reference_step(model: Model, sizes: Sequence[int], step: int, seed: int = 5) -> dict[str, Tensor]:
    """The unsplit model under autograd, one microbatch after the other.

    The two uses of the tied parameter have sums of their own, as in a pipeline.
    """
    borrowed = model.parameters["a"].detach().clone().requires_grad_()
    w, bias, mean = model.parameters["w"], model.parameters["bias"], model.buffers["mean"]
    losses, outputs = [], []
    for microbatch, (inputs, size) in enumerate(zip(make_batch(sizes, step), sizes, strict=True)):
        skip = inputs["x"].mm(model.parameters["a"])
        z = skip.tanh().mm(w) + bias
        mask = (
            torch.rand(z.shape, generator=OperatorGenerators(CPU, (seed + step, microbatch))(DROPOUT_ID))
            > 0.5
        )
        hidden_2 = (z.relu() - mean) * mask
        mean = (mean * 0.9 + z.mean(0) * 0.1).detach()
        output = (hidden_2 + skip).mm(borrowed.t()) + torch.arange(size)[:, None] * 0.01
        difference = output - inputs["target"]
        loss = (difference * difference).mean() * (size / sum(sizes))
        loss.backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    model.parameters["a"].grad += borrowed.grad
    model.buffers["mean"].copy_(mean)
    return {"loss": functools.reduce(torch.add, losses), "output": torch.cat(outputs)}


def make_interpreter(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    model: Model,
    stages: Mapping[int, Any] = STAGES,
) -> Interpreter:
    plan = make_plan(schedule)
    program = lower(schedule, plan.links)[rank]
    return Interpreter(program, plan, stages, model.parameters, model.buffers, transport, CPU)


def whole_batch(sizes: Sequence[int]) -> BatchSlice:
    return BatchSlice(sizes, sum(sizes))


class Pipeline:
    """All ranks in this process, sharing one model."""

    def __init__(self, schedule: Schedule, stages: Mapping[int, Any] = STAGES) -> None:
        self.model = make_model()
        self.ranks = InProcessTransport([CPU] * schedule.num_ranks)
        self.interpreters = [
            make_interpreter(schedule, rank, self.ranks.endpoint(rank), self.model, stages)
            for rank in range(schedule.num_ranks)
        ]

    def step(
        self,
        sizes: Sequence[int],
        step: int = 0,
        seed: int = 5,
        batch: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Run one step; the results of each rank."""
        batch, span = batch or make_batch(sizes, step), whole_batch(sizes)
        return self.ranks.run([partial(each.run, batch, span, seed + step) for each in self.interpreters])


NUM_RANKS, SIZES = 3, (4, 4, 3, 4, 1)


class FailingStage1(Stage1):
    @staticmethod
    def backward(frame):
        raise ValueError("the backward of stage 1 is broken")
