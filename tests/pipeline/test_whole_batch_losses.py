"""Losses that mix rows: loss, gradients and buffers are those of the whole batch on one device."""

import copy
import functools
import math
import re
import sys
from pathlib import Path
from typing import Any

import huggingface_models
import pytest
import torch
import torch.nn.functional as F
from memory_meter import measure_memory
from slow_params import slow_but
from torch import Tensor, nn
from whole_batch_losses import LOSSES, Towers
from worker_processes import run_ranks

import pipec
from pipec.ir import Op

ROWS = 12
QUICK = ("info_nce", "vicreg", "centered", "of_both_kinds", "shared_scale")
"""One loss of each kind, for the tests that are not slow."""


def batch(rows: int = ROWS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 6, dtype=dtype)


def compiled(net: nn.Module, devices: int = 2, **options: Any) -> pipec.Pipeline:
    options = {"microbatches": 4, "batched": {"x": 0, "y": 0}} | options
    return pipec.compile(net, devices=devices, **options)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    largest = expected.detach().abs().max().item()
    return (found.detach() - expected.detach()).abs().max().item() / max(largest, 1e-12)


def worst_of_training(net: nn.Module, pipe: pipec.Pipeline, rows: int = ROWS) -> float:
    """The largest distance of losses, parameters and buffers to those of the model on one device."""
    reference, distances = copy.deepcopy(net), list[float]()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for _ in range(2):
        inputs = batch(rows)
        loss = pipe.step(*inputs)
        whole = reference(*inputs)
        whole.backward()
        distances.append(distance(loss, whole))
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    pairs = zip(net.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(*distances, *(distance(found, whole) for found, whole in pairs))


def made(loss: str) -> nn.Module:
    torch.manual_seed(0)
    return Towers(LOSSES[loss]).double()


@pytest.mark.parametrize("loss", slow_but(LOSSES, *QUICK))
def test_training_equals_the_whole_batch(loss: str) -> None:
    """Twelve rows in five microbatches: of three and of two."""
    net = made(loss)
    assert worst_of_training(net, compiled(net, microbatches=5)) < 1e-6


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_that_balances_experts_is_one_of_all_tokens(padded: bool) -> None:
    """Logits stay in their microbatch: the tail reads sums of them, and of what the routers say."""
    net, inputs = huggingface_models.mixtral()
    if not padded:
        inputs = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"]}
    pipe = pipec.compile(copy.deepcopy(net), devices=2, microbatches=4, schedule="1f1b")
    loss, expected = pipe.step(**inputs), net(**inputs)
    expected.loss.backward()
    assert distance(loss, expected.loss) < 1e-6
    pairs = zip(pipe.parameters(), net.parameters(), strict=True)
    assert max(distance(found.grad, each.grad) for found, each in pairs) < 1e-4
    assert max(math.prod(shape) for shape in tail_shapes(pipe)) <= 4


def tail_shapes(pipe: pipec.Pipeline) -> list[list[int]]:
    """The shapes of a row of each value that the tail reads."""
    tails = [stage.tail for stage in pipe.plan.stages if stage.tail]
    assert {value.shape[0] for tail in tails for value in tail.inputs} == {"b"}
    return [[int(size) for size in value.shape[1:]] for tail in tails for value in tail.inputs]


def test_of_sums_a_tail_reads_a_number_a_row() -> None:
    pipe = compiled(made("dice"))
    pipe.prepare(*batch())
    assert tail_shapes(pipe) == [[], []]


def test_rows_elsewhere_than_in_front_and_rows_of_one() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            u, v = self.b(torch.tanh(self.a(x))).movedim(0, -1), self.a(y).movedim(0, -1)
            return F.cross_entropy(u.T @ v, torch.arange(u.shape[1]))

    net = TimeFirst().double()
    assert worst_of_training(net, compiled(net), rows=5) < 1e-6


def test_logs_outputs_and_evaluation_of_the_whole_batch() -> None:
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, features = output
        right = (logits.argmax(1) == target).double()
        loss = F.cross_entropy(logits, target)
        return loss, {"right": right.mean(), "spread": logits.std(), "norms": features.norm(dim=1)}

    def similarities(u: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return u @ v.T, u

    torch.manual_seed(0)
    net = Towers(similarities).double()
    pipe, inputs, target = compiled(net, loss_fn=loss_fn), batch(10), torch.arange(10)
    loss = pipe.step(*inputs, target=target)
    output = copy.deepcopy(net)(*inputs)
    expected, logs = loss_fn(output, target)
    assert distance(loss, expected) < 1e-12
    assert {name: distance(pipe.logs[name], value) < 1e-12 for name, value in logs.items()} == dict.fromkeys(
        logs, True
    )
    assert distance(pipe.eval_step(*inputs, target=target), expected) < 1e-12
    for found, whole in zip(pipe(*inputs), output, strict=True):
        assert distance(found, whole) < 1e-12


def test_random_numbers_of_the_tail_are_drawn_once() -> None:
    """Mixup: the permutation is one of all rows, another in each step, and follows the seed."""

    def mixup(u: Tensor, v: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        order = torch.randperm(len(u))
        loss = F.mse_loss(0.7 * u + 0.3 * u[order], v[order]).sqrt()
        return loss, {"order": order.double() / 1}

    torch.manual_seed(0)
    net = Towers(lambda u, v, *_: (u, v)).double()
    pipe = compiled(net, loss_fn=lambda output, target: mixup(*output, target))
    orders, (x, y) = list[list[int]](), batch()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = pipe.step(x, y, target=torch.zeros(ROWS))
        order = pipe.logs["order"].long()
        u, v = net(x, y)
        assert sorted(order.tolist()) == [*range(ROWS)]
        assert distance(loss, F.mse_loss(0.7 * u + 0.3 * u[order], v[order]).sqrt()) < 1e-12
        orders.append(order.tolist())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.slow
def test_the_plan_and_the_programs_show_the_tail() -> None:
    net = made("info_nce")
    pipe = compiled(net)
    pipe.prepare(*batch())
    (tail,) = [stage.tail for stage in pipe.plan.stages if stage.tail]
    assert "matmul" in tail.location
    assert re.search("tail: matmul .* between all forwards and all backwards", str(pipe.plan))
    assert [stage for stage in (0, 1) if "def tail(" in pipe.source(stage)] == [1]
    ops = [each.op for each in pipe.programs[1].instructions]
    assert ops.count(Op.TAIL) == 1
    assert (
        max(k for k, op in enumerate(ops) if op is Op.FORWARD) < ops.index(Op.TAIL) < ops.index(Op.BACKWARD)
    )
    assert any(event.instruction.op is Op.TAIL for event in pipe.simulate().events)


@pytest.mark.slow
def test_predicted_bytes_are_the_measured_ones() -> None:
    """And a tail of all rows needs less than a microbatch of all rows."""
    torch.manual_seed(0)
    net, (x, y) = Towers(LOSSES["info_nce"], width=64), batch(256, torch.float32)
    peaks = {}
    for microbatches in (1, 8):
        pipe = compiled(copy.deepcopy(net), devices=1, microbatches=microbatches, recompute="full")
        pipe.step(x, y)
        measured, predicted = measure_memory(pipe, x, y)[0], pipe.memory()[0]
        peaks[microbatches] = measured.peak_bytes
        assert measured.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.03)
    assert peaks[8] < peaks[1]


def test_what_is_refused() -> None:
    class Deep(nn.Module):
        def __init__(self, is_exported: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
            self.is_exported = is_exported

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.is_exported:
                sys._getframe()  # which Dynamo cannot trace
            hidden = self.a(x)
            return F.mse_loss(self.b(hidden - hidden.mean(0)), self.a(y))

    for is_exported in (False, True):
        with pytest.raises(pipec.InputError, match=r"(?s)other rows.*trained weights of several dim"):
            compiled(Deep(is_exported)).step(*batch(dtype=torch.float32))
    drawn = compiled(
        Towers(lambda u, v, *_: u - v).double(),
        loss_fn=lambda output, target: (output.square().mean(), {"order": torch.randperm(len(target))}),
    )
    with pytest.raises(pipec.InputError, match=r"of all rows together[\s\S]*randperm at"):
        drawn.step(*batch(), target=torch.ones(ROWS))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(pipec.InputError, match="rows depend on other rows"):
        compiled(made("info_nce"), schedule="pipedream-2bw", optimizer=sgd).step(*batch())


class CenteredInTraining(nn.Module):
    """Its frozen heads need all rows in training, and a row each in evaluation, by other operators."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 64)
        self.heads = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_heads))).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.heads(h - h.mean(0) if self.training else h).square().mean()


def test_an_evaluation_leaves_what_the_tail_reads_where_it_is() -> None:
    pipe, x = compiled(CenteredInTraining(1), batched=None), batch(dtype=torch.float32)[0]
    pipe.step(x)
    pipe.eval().eval_step(x)
    stages = [
        [stage.parameters for stage in compiled.plan.stages]
        for compiled in pipe._executions.compiler.cache.compiled
    ]
    heads, body = ("heads.0.weight", "heads.0.bias"), ("body.weight", "body.bias")
    assert stages == [[body, heads], [body, heads]]


def test_a_tail_that_reads_tensors_of_several_stages_is_refused() -> None:
    pipe, x = compiled(CenteredInTraining(4), batched=None), batch(dtype=torch.float32)[0]
    pipe.eval().eval_step(x)
    with pytest.raises(pipec.PlanError, match=r"heads\S+ of stage 1, but no.*sub at .* needs all rows"):
        pipe.train().step(x)


@pytest.mark.slow
def test_the_mean_over_microbatches_on_request() -> None:
    net = made("rmse")
    pipe, (x, y) = compiled(net, microbatch_weight="rows"), batch()
    parts = [net(a, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert distance(pipe.step(x, y), torch.stack(parts).mean()) < 1e-12


class DeepTower(nn.Module):
    """A tower that saves much more than the rows that its loss compares."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.a, self.b = nn.Sequential(*layers, nn.Linear(width, 4)), nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.a(x) @ self.b(y).T, torch.arange(len(x)))


def deep_pipe(**options: Any) -> pipec.Pipeline:
    pipe = compiled(DeepTower(), schedule="1f1b", microbatches=8, **options)
    return pipe.prepare(*deep_batch())


def deep_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(128, 64), torch.randn(128, 64)


def highest(memory: Any) -> float:
    return max(each.peak_bytes for each in memory)


def test_a_step_recomputes_where_all_forwards_first_do_not_fit() -> None:
    free = deep_pipe()
    limit = int(0.8 * highest(free.memory()))
    pipe = deep_pipe(memory_limit=limit, recompute="auto")
    assert any(stage.has_recompute for stage in pipe.plan.stages)
    assert highest(pipe.memory()) <= limit
    assert re.search("between all forwards and all backwards, in ", str(pipe.plan))
    assert distance(pipe.step(*deep_batch()), DeepTower()(*deep_batch())) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_recomputing_forwards_take_the_predicted_bytes_and_fewer(schedule: str) -> None:
    peaks = []
    for recompute in ("none", "full"):
        pipe = compiled(DeepTower(), schedule=schedule, microbatches=8, recompute=recompute)
        measured, predicted = measure_memory(pipe, *deep_batch()), pipe.memory()
        for found, expected in zip(measured, predicted, strict=True):
            assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03)
        peaks.append(highest(measured))
    assert peaks[1] < 0.9 * peaks[0]


PLACED = """
import copy, sys
sys.path[:0] = {paths!r}
import torch, pipec
from test_whole_batch_losses import CenteredInTraining, compiled, distance
net = CenteredInTraining(1)
reference = copy.deepcopy(net)
pipe = compiled(net, batched=None, timeout=240.0)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
expected = torch.optim.SGD(reference.parameters(), lr=0.1)
torch.manual_seed(1)
for step in range(3):
    x = torch.randn(13, 6)
    found, whole = pipe.train().step(x), reference.train()(x)
    whole.backward()
    assert distance(found, whole) < 1e-6, (step, found, whole)
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    assert distance(pipe.eval().eval_step(x), reference.eval()(x)) < 1e-6, step
(tail,) = [stage for stage in pipe.plan.stages if stage.tail]
assert (tail.index, tail.tail.parameters) == (1, ("heads.0.weight", "heads.0.bias"))
made = pipe._executions._made.values()
stages = [[x.parameters for x in each.plan.stages] for each in made]
assert stages == 2 * [[("body.weight", "body.bias"), tail.tail.parameters]], stages
for name, value in pipe.full_state_dict().items():
    assert distance(value, reference.state_dict()[name]) < 1e-6, name
print("equal")
"""


@pytest.mark.slow
def test_what_only_the_tail_reads_is_on_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    script.write_text(PLACED.format(paths=paths))
    assert all("equal" in printed for printed in run_ranks(script, 2, tmp_path))
