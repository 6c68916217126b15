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
from worker_processes import run_lines

import pipec

ROWS = 12
QUICK = ("info_nce", "vicreg", "centered", "of_both_kinds", "shared_scale", "columns")
"""One loss of each kind."""


def columns(u: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Rows are not the first dimension of what the loss reads."""
    u, v = u.movedim(0, -1), v.movedim(0, -1)
    return F.cross_entropy(u.T @ v, torch.arange(u.shape[1]))


EVERY = {**LOSSES, "columns": columns}


def batch(rows: int = ROWS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 6, dtype=dtype)


def compiled(net: nn.Module, devices: int = 2, **options: Any) -> pipec.Pipeline:
    options = {"microbatches": 4, "batched": {"x": 0, "y": 0}} | options
    return pipec.compile(net, devices=devices, **options)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    largest = expected.detach().abs().max().item()
    return (found.detach() - expected.detach()).abs().max().item() / max(largest, 1e-12)


def made(loss: str) -> nn.Module:
    torch.manual_seed(0)
    return Towers(EVERY[loss]).double()


@pytest.mark.parametrize("loss", slow_but(EVERY, *QUICK))
def test_training_equals_the_whole_batch(loss: str) -> None:
    """Twelve rows in five microbatches: of three and of two."""
    net = made(loss)
    pipe, reference = compiled(net, microbatches=5), copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, reference)]
    for _ in range(2):
        inputs = batch()
        found, whole = pipe.step(*inputs), reference(*inputs)
        whole.backward()
        assert distance(found, whole) < 1e-6
        for each in optimizers:
            each.step()
            each.zero_grad()
    for name, value in net.state_dict().items():
        assert distance(value, reference.state_dict()[name]) < 1e-6, name


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


def follow(**options: Any) -> None:
    """Training and evaluation in turn are eager torch's, and leave what the tail reads where it is."""
    net = CenteredInTraining(1)
    reference = copy.deepcopy(net)
    pipe: Any = compiled(net, batched=None, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(13, 6)
        found, whole = pipe.train().step(x), reference.train()(x)
        whole.backward()
        assert distance(found, whole) < 1e-6
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert distance(pipe.eval().eval_step(x), reference.eval()(x)) < 1e-6
    (tail,) = [stage for stage in pipe.plan.stages if stage.tail]
    heads, body = ("heads.0.weight", "heads.0.bias"), ("body.weight", "body.bias")
    assert (tail.index, tail.tail.parameters) == (1, heads)
    stages = [[stage.parameters for stage in made.plan.stages] for made in pipe._executions._made.values()]
    assert stages == [[body, heads]] * 2
    for name, value in pipe.full_state_dict(all_ranks=True).items():
        assert distance(value, reference.state_dict()[name]) < 1e-6, name


def test_an_evaluation_leaves_what_the_tail_reads_where_it_is() -> None:
    follow()


@pytest.mark.slow
def test_what_only_the_tail_reads_is_on_its_rank(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    text = f"import sys\nsys.path.insert(0, {root!r})\nfrom tests.pipeline import test_whole_batch_losses\n"
    run_lines(text + "test_whole_batch_losses.follow(timeout=240.0)", 2, tmp_path)


def test_a_tail_that_reads_tensors_of_several_stages_is_refused() -> None:
    pipe, x = compiled(CenteredInTraining(4), batched=None), batch(dtype=torch.float32)[0]
    pipe.eval().eval_step(x)
    with pytest.raises(pipec.PlanError, match=r"heads\S+ of stage 1, but no.*sub at .* needs all rows"):
        pipe.train().step(x)


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
