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
from awkward_modules import Pair, assert_near
from memory_meter import measure_memory
from torch import Tensor, nn
from unsplit_reference import Plain
from whole_batch_losses import LOSSES, Towers
from worker_processes import run_lines

import pipec
from zoo.layers import Apply

ROWS = 12
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def batch(rows: int = ROWS) -> Tensor:
    """Both inputs of two towers."""
    return torch.randn(2, rows, 6, dtype=torch.float64)


def towers(combine: Any, **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(Towers(combine).double(), **{"microbatches": 4, "batched": {"x": 0, "y": 0}, **options})


@pytest.mark.parametrize("loss", LOSSES)
def test_training_equals_the_whole_batch(loss: str) -> None:
    """Twelve rows in five microbatches: of three and of two."""
    pair = towers(LOSSES[loss], microbatches=5)
    for _ in range(2):
        pair.step(*batch(), error=1e-9)
        assert_near(pair.model.center, pair.unsplit.center, "center")
        for model in (pair.model, pair.unsplit):
            SGD(model.parameters()).step()


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_that_balances_experts_is_one_of_all_tokens(padded: bool) -> None:
    """Logits stay in their microbatch: the tail reads sums of them, and of what the routers say."""
    net, inputs = huggingface_models.mixtral()
    if not padded:
        inputs = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"]}
    pair = Pair(net, microbatches=4, schedule="1f1b")
    pair.step(**inputs, error=1e-5)
    read = [value.shape for stage in pair.pipe.plan.stages if stage.tail for value in stage.tail.inputs]
    assert {rows for rows, *_ in read} == {"b"}
    assert max(math.prod(map(int, row)) for _, *row in read) <= 4


def test_logs_outputs_and_evaluation_of_the_whole_batch() -> None:
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, features = output
        right = (logits.argmax(1) == target).double()
        loss = F.cross_entropy(logits, target)
        return loss, {"right": right.mean(), "spread": logits.std(), "norms": features.norm(dim=1)}

    pair = towers(lambda u, v, *_: (u @ v.T, u), loss_fn=loss_fn)
    inputs, target, pipe = batch(10), torch.arange(10), pair.pipe
    (loss, logs), output = pair.loss(*inputs, target=target)
    found = (
        pipe.step(*inputs, target=target),
        pipe.logs,
        pipe.eval_step(*inputs, target=target),
        pipe(*inputs),
    )
    torch.testing.assert_close(found, (loss, logs, loss, output), rtol=1e-12, atol=1e-14)


def test_random_numbers_of_the_tail_are_drawn_once() -> None:
    """Mixup: the permutation is one of all rows, another in each step, and follows the seed."""

    def mixed(u: Tensor, v: Tensor, order: Tensor) -> Tensor:
        return F.mse_loss(0.7 * u + 0.3 * u[order], v[order]).sqrt()

    def mixup(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        order = torch.randperm(len(output[0]))
        return mixed(*output, order), {"order": order.double() / 1}

    pair = towers(lambda u, v, *_: (u, v), loss_fn=mixup)
    orders, inputs = list[list[int]](), batch()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = pair.pipe.step(*inputs, target=torch.zeros(ROWS))
        order = pair.pipe.logs["order"].long()
        assert sorted(order.tolist()) == [*range(ROWS)]
        assert_near(loss, mixed(*pair.unsplit(*inputs), order), "loss")
        orders.append(order.tolist())
    assert orders[0] == orders[1] != orders[2]


def test_what_is_refused() -> None:
    x, y = batch()
    for centred in (
        lambda h: h - h.mean(0),
        lambda h: (sys._getframe(), h - h.mean(0))[1],  # which Dynamo cannot trace
    ):
        deep = nn.Sequential(nn.Linear(6, 8), Apply(centred), nn.Linear(8, 6)).double()
        with pytest.raises(pipec.InputError, match=r"(?s)other rows.*trained weights of several dim"):
            pipec.compile(deep, 2, loss_fn=F.mse_loss, microbatches=4).step(x, target=y)

    def drawing(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.square().mean(), {"order": torch.randperm(len(target))}

    with pytest.raises(pipec.InputError, match=r"of all rows together[\s\S]*randperm at"):
        towers(lambda u, v, *_: u - v, loss_fn=drawing).pipe.step(x, y, target=torch.ones(ROWS))
    with pytest.raises(pipec.InputError, match="rows depend on other rows"):
        towers(LOSSES["info_nce"], schedule="pipedream-2bw", optimizer=SGD).pipe.step(x, y)


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
    plain = Plain(copy.deepcopy(net), SGD)
    pipe: Any = pipec.compile(net, 2, microbatches=4, optimizer=SGD, **options)
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(13, 6)
        assert_near(pipe.train().step(x), plain.step(x), "loss")
        plain.eval()
        assert_near(pipe.eval().eval_step(x), plain.eval_step(x), "loss of an evaluation")
        plain.train()
    (tail,) = [stage for stage in pipe.plan.stages if stage.tail]
    heads, body = ("heads.0.weight", "heads.0.bias"), ("body.weight", "body.bias")
    assert (tail.index, tail.tail.parameters) == (1, heads)
    stages = [[stage.parameters for stage in made.plan.stages] for made in pipe._executions._made.values()]
    assert stages == [[body, heads]] * 2
    for name, value in pipe.full_state_dict(all_ranks=True).items():
        assert_near(value, plain.state_dict()[name], name)


def test_an_evaluation_leaves_what_the_tail_reads_where_it_is() -> None:
    follow()


@pytest.mark.slow
def test_what_only_the_tail_reads_is_on_its_rank(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    text = f"import sys\nsys.path.insert(0, {root!r})\nfrom tests.pipeline import test_whole_batch_losses\n"
    run_lines(text + "test_whole_batch_losses.follow(timeout=240.0)", 2, tmp_path)


def test_a_tail_that_reads_tensors_of_several_stages_is_refused() -> None:
    pipe, x = pipec.compile(CenteredInTraining(4), 2, microbatches=4), torch.randn(ROWS, 6)
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


def deep_pipe(schedule: str = "1f1b", **options: Any) -> pipec.Pipeline:
    batched = {"x": 0, "y": 0}
    return pipec.compile(DeepTower(), 2, schedule=schedule, microbatches=8, batched=batched, **options)


def deep_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(128, 64), torch.randn(128, 64)


def highest(memory: Any) -> float:
    return max(each.peak_bytes for each in memory)


def test_a_step_recomputes_where_all_forwards_first_do_not_fit() -> None:
    free = deep_pipe().prepare(*deep_batch())
    limit = int(0.8 * highest(free.memory()))
    pipe = deep_pipe(memory_limit=limit, recompute="auto").prepare(*deep_batch())
    assert any(stage.has_recompute for stage in pipe.plan.stages)
    assert highest(pipe.memory()) <= limit
    assert re.search("between all forwards and all backwards, in ", str(pipe.plan))
    assert_near(pipe.step(*deep_batch()), DeepTower()(*deep_batch()), "loss", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_recomputing_forwards_take_the_predicted_bytes_and_fewer(schedule: str) -> None:
    peaks = []
    for recompute in ("none", "full"):
        pipe = deep_pipe(schedule, recompute=recompute)
        measured, predicted = measure_memory(pipe, *deep_batch()), pipe.memory()
        for found, expected in zip(measured, predicted, strict=True):
            assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03)
        peaks.append(highest(measured))
    assert peaks[1] < 0.9 * peaks[0]
