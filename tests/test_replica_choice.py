"""How many replicas stages get, and on which ranks these are: by the costs of the model and its links."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.hardware.devices import DeviceModel, LinkModel
from pipec.hardware.topology import Topology, alike
from pipec.ir import Plan
from pipec.pipeline import Pipeline

ROWS, MICROBATCHES = 16, 8


class Wide(nn.Module):
    """What VGG is in large: convolutions with few weights, then many weights that take little time."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.body = nn.Sequential(*(layer for each in convolutions for layer in (each, nn.Tanh())))
        self.head = nn.Linear(8 * 16 * 16, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def device() -> DeviceModel:
    """One on which arithmetic alone takes time."""
    return DeviceModel("test", {"float32": 1e9}, 1e15, 0.0, 2**40, LinkModel(1e9, 0.0), "made up")


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 8, 16, 16), torch.randn(ROWS, 96)


def prepared(model: nn.Module, topology: Topology, **options: object) -> Pipeline:
    pipe = pipec.compile(
        model,
        len(topology.devices),
        loss_fn=nn.functional.mse_loss,
        topology=topology,
        device_model=device(),
        **{"microbatches": MICROBATCHES, "replicas": "auto", **options},  # type: ignore[arg-type]
    )
    x, y = batch()
    return pipe.prepare(x, target=y)


def replicas_of(plan: Plan) -> list[int]:
    return [len(ranks) for ranks in plan.placement]


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"), [(1e12, [4]), (4e7, [3, 1])], ids=["fast links", "slow links"]
)
def test_weights_that_are_slow_to_sum_get_one_rank(bytes_per_second: float, expected: list[int]) -> None:
    pipe = prepared(Wide(), alike(4, LinkModel(bytes_per_second, 0.0)))
    assert replicas_of(pipe.plan) == expected


def test_a_step_on_the_planners_replicas_is_that_of_the_model() -> None:
    torch.manual_seed(1)
    model = Wide()
    alone = copy.deepcopy(model)
    pipe = prepared(model, alike(4, LinkModel(4e7, 0.0)))
    assert replicas_of(pipe.plan) == [3, 1]
    x, y = batch()
    loss, expected = pipe.step(x, target=y), nn.functional.mse_loss(alone(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(pipe.eval_step(x, target=y), expected, rtol=1e-6, atol=0)


def test_what_the_planner_would_gain_is_told() -> None:
    links = alike(4, LinkModel(4e7, 0.0))
    pipe = prepared(Wide(), links, microbatches=None, replicas=1)
    taken = pipe.simulate().makespan
    assert replicas_of(pipe.plan) == [1] * 4
    said = next(each for each in pipe.plan.alternatives if each.replicas == (3, 1))
    assert said.refused == f"{1 - said.seconds / taken:.1%} faster, tried by replicas='auto'"
    assert "  3-1  " in str(pipe.plan)
    auto = prepared(Wide(), links, microbatches=said.num_microbatches)
    assert auto.simulate().makespan == pytest.approx(said.seconds)
    assert [each.replicas for each in auto.plan.alternatives if len({*each.replicas}) > 1] == []
