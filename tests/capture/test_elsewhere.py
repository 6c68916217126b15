"""A model that is captured for devices other than those it is on stays where it is."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pipec
from pipec.pipeline import Pipeline
from pipec.torch_compat.module_state import replace_with_fake_tensors, restore_module

GPU = torch.device("cuda", 0)


class Tied(nn.Module):
    """Two linear layers of one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def test_fakes_of_the_other_device_stand_for_tensors_without_memory() -> None:
    model = Tied()
    before = dict(model.state_dict(keep_vars=True))
    with restore_module(model):
        replace_with_fake_tensors(model, GPU)
        now = dict(model.state_dict(keep_vars=True))
        assert all(isinstance(tensor, FakeTensor) and tensor.device == GPU for tensor in now.values())
        assert model.first.weight is model.second.weight
        assert [x.requires_grad for x in now.values()] == [x.requires_grad for x in before.values()]
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())


def test_constants_of_an_artifact_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled tensor of ``cuda:0`` would be made there by every process."""
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    pipe = pipec.compile(Tied(), ["cpu"] * 2, loss_fn=loss_fn, microbatches=2)
    assert isinstance(pipe, Pipeline)
    pipe.prepare(torch.ones(4, 4), target=torch.zeros(4, dtype=torch.int64))
    (staged,) = pipe._executions.compiler.cache.staged_graphs
    graph, schedule = staged.graph, pipec.schedules.make_schedule("gpipe", 2, 2)
    with FakeTensorMode():
        on_gpu = {name: torch.empty(4, device=GPU) for name in graph.constants}
    assert on_gpu
    monkeypatch.setitem(vars(graph), "constants", on_gpu)
    constants = staged.evaluate(schedule, 2).artifact().constants
    assert {x.device.type for x in constants.values()} == {"cpu"}
