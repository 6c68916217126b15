"""Loops over the modules of a pipeline act on the model's own modules."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 5)
        self.scale = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        return F.cross_entropy(self.last(hidden) * self.scale, y)


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def set_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0


def initialise(model: nn.Module) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)

    model.apply(fill)


def initialise_by_name(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name == "last":
            nn.init.normal_(module.weight)


def initialise_children(model: nn.Module) -> None:
    for child in model.children():
        if type(child) is nn.Linear:
            child.weight.data.normal_()


def set_root_attribute(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "scale"):
            module.scale = 3.0


def assign_attribute(model: nn.Module) -> None:
    model.scale = 3.0


def reach_submodule(model: nn.Module) -> None:
    model.get_submodule("drop").p = 1.0
    model.first.weight.requires_grad_(False)


def hook(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, given, output: output * 2)


def replace_submodule(model: nn.Module) -> None:
    model.drop = nn.Dropout(1.0)


CHANGES = (
    freeze_norms,
    set_dropout,
    initialise,
    initialise_by_name,
    initialise_children,
    set_root_attribute,
    assign_attribute,
    reach_submodule,
    hook,
    replace_submodule,
)


@pytest.mark.parametrize(
    ("change", "as_module"),
    [
        *((change, False) for change in CHANGES),
        *((change, True) for change in (freeze_norms, assign_attribute, replace_submodule)),
    ],
)
def test_a_loop_over_modules_acts_on_the_model(change: Callable[[nn.Module], None], as_module: bool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    freeze_norms(model)
    eager, pipe = copy.deepcopy(model), pipec.compile(model, devices=2, microbatches=4)
    changed = pipe.as_module() if as_module else pipe
    for _ in range(2):  # before the first call, and after it
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))
        for each in (changed, eager):
            torch.manual_seed(1)
            change(each)
            each.zero_grad()
        loss = eager(x, y)
        loss.backward()
        assert torch.allclose(pipe.step(x, y), loss.detach())
        for name, parameter in eager.named_parameters():
            found = pipe.get_parameter(name).grad
            assert (found is None) == (parameter.grad is None), name
            assert found is None or torch.allclose(found, parameter.grad), name


def test_groups_by_class_have_the_pipelines_parameters() -> None:
    pipe = pipec.compile(Net(), devices=2, microbatches=4)
    linears = [each for each in pipe.modules() if isinstance(each, nn.Linear)]
    assert {id(x) for each in linears for x in each.parameters()} < {id(x) for x in pipe.parameters()}
    assert [name for name, _ in pipe.named_children()] == ["first", "norm", "drop", "last"]


def test_the_models_own_train_decides_which_modules_train() -> None:
    class Frozen(Net):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.norm.eval()
            return self

    pipe = pipec.compile(Frozen(), devices=2)
    assert pipe.train() is pipe
    assert not pipe.norm.training
    assert pipe.last.training
