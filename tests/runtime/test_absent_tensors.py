"""What a process does not hold keeps shape and type, and refuses whatever would take it for values."""

import copy
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.runtime.absent_tensors import (
    copies_of_absent,
    hold,
    is_absent,
    materialized,
    release_elsewhere,
    release_sharded,
)
from pipec.runtime.local_gradients import GradientNorms
from pipec.runtime.model_tensors import ModelTensors
from pipec.runtime.wrappers import refuse_wrappers


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.fixture
def model() -> nn.Module:
    """A model whose first weight and whose buffers are on rank 1."""
    made = network()
    release_elsewhere("0.weight", made[0].weight, "on rank 1")
    for name, buffer in made.named_buffers():
        release_elsewhere(name, buffer, "on rank 1")
    return made


READS: dict[str, Callable[[nn.Module], object]] = {
    "the model": lambda m: m(torch.ones(2, 4)),
    "a comparison": lambda m: bool((m[1].num_batches_tracked == 0).item()),
    "arithmetic with values": lambda m: m[0].weight + torch.ones(3, 4),
    "a norm": lambda m: torch._foreach_norm([m[0].bias, m[0].weight]),
    "a row": lambda m: m[0].weight[0],
    "numpy": lambda m: np.asarray(m[1].running_mean),
    "a row of a clone": lambda m: m[0].weight.clone()[0],
    "a script": lambda m: torch.jit.script(m),
    "its transpose": lambda m: m[0].weight.mT,
    "its numbers": lambda m: m[1].num_batches_tracked.tolist(),
    "its storage": lambda m: m[0].weight.untyped_storage(),
    "random values": lambda m: nn.init.normal_(m[0].weight),
    "a result with memory": lambda m: torch.mul(m[0].weight.detach(), 2, out=torch.empty(3, 4)),
    "writing it into a number": lambda m: torch.zeros((), dtype=torch.int64).copy_(m[1].num_batches_tracked),
    "a copy": lambda m: torch.empty(3, 4).copy_(m[0].weight.detach()),
    "copying values into it": lambda m: m[0].weight.data.copy_(torch.ones(3, 4)),
    "new data": lambda m: setattr(m[0].weight, "data", torch.ones(3, 4)),
    "memory": lambda m: m[0].weight.data_ptr(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "safetensors": lambda m: safetensors.torch.save(m.state_dict()),
    "gradients by it": lambda m: torch.autograd.grad(m[0].bias.sum(), [m[0].weight]),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_what_is_not_there_learns_where_it_is(model: nn.Module, read: str) -> None:
    with pytest.raises(InputError, match="on rank 1, and this process has none of its values"):
        READS[read](model)


TEMPLATES: dict[str, Callable[[Tensor], Tensor]] = {
    "new_zeros": lambda p: p.new_zeros(2, 5),
    "new_tensor": lambda p: p.new_tensor([1, 2]),
    "to": lambda p: torch.arange(3).to(p),
    "expand_as": lambda p: torch.arange(4).expand_as(p),
}


@pytest.mark.parametrize("make", TEMPLATES)
def test_what_needs_no_values_is_made_like_it(model: nn.Module, make: str) -> None:
    expected, made = TEMPLATES[make](network()[0].weight), TEMPLATES[make](model[0].weight)
    assert not is_absent(made)
    assert torch.equal(made, expected)
    assert made.dtype == expected.dtype


def test_a_tensor_like_it_is_absent_as_an_average_of_it(model: nn.Module) -> None:
    average = torch.zeros_like(model[0].weight)
    average.mul_(0.9).add_(model[0].weight, alpha=0.1)
    assert is_absent(average)
    assert average.shape == (3, 4)


def test_loading_into_it_says_so(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"copy_ cannot use 0.weight: it is on rank 1"):
        model.load_state_dict(network().state_dict())


def test_shape_and_type_are_as_they_were(model: nn.Module) -> None:
    for mine, plain in zip(model.state_dict().values(), network().state_dict().values(), strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (plain.shape, plain.dtype, plain.device)
        assert mine.is_floating_point() == plain.is_floating_point()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.requires_grad, weight.is_leaf, weight.grad, weight.numel()) == (True, True, None, 12)
    assert repr(weight) == "<0.weight: torch.float32, [3, 4], on rank 1>"
    model.double()
    assert model[0].weight is weight
    assert (weight.dtype, weight.shape) == (torch.float64, (3, 4))
    assert is_absent(weight)
    assert all(map(is_absent, model.buffers()))


def test_an_optimizer_passes_it_over(model: nn.Module) -> None:
    plain = network()
    made, expected = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    for _ in range(2):
        for each in (model, plain):
            for parameter in (each[0].bias, each[1].weight):
                parameter.grad = torch.ones_like(parameter)
        made.step()
        expected.step()
        made.zero_grad()
    assert torch.equal(model[0].bias, plain[0].bias)
    assert len(made.state) == len(expected.state)


def test_arithmetic_of_numbers_and_absent_tensors_is_left_to_others(model: nn.Module) -> None:
    weight, bias = model[0].weight, model[0].bias
    with torch.no_grad():
        assert weight.mul_(0.5).add_(1) is weight
        assert is_absent(weight.detach() + (weight.double() - weight) / torch.tensor(3))
        torch._foreach_lerp_([weight.data, bias], [weight.detach(), torch.ones(3)], 1.0)
    assert torch.equal(bias, torch.ones(3))
    with pytest.raises(InputError, match=r"_foreach_lerp_ cannot use 0.weight"):
        torch._foreach_lerp_([weight.data], [torch.ones(3, 4)], 1.0)
    with pytest.raises(InputError, match=r"_foreach_add_ cannot use 0.weight"):
        torch._foreach_add_([torch.ones(())], [weight.detach()])


def test_shards_are_not_changed_by_what_no_rank_would_do() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = mark = torch.ones(2)
    release_sharded("weight", parameter)
    assert parameter.grad is mark
    with pytest.raises(InputError, match="mul_ cannot use weight: it is kept in shards"):
        parameter.data.mul_(2)
    parameter.data = torch.zeros(2)
    assert type(parameter) is nn.Parameter
    assert parameter.grad is mark
    assert torch.equal(parameter, torch.zeros(2))


def test_values_come_back_to_the_same_object(model: nn.Module) -> None:
    weight = model[0].weight
    with materialized(model.parameters()):
        assert type(weight) is nn.Parameter
        assert weight.stride() == (4, 1)
    assert is_absent(weight)
    hold(weight, torch.ones(3, 4))
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, torch.ones(3, 4))
    assert not vars(weight)


def test_a_copy_of_the_model_lacks_the_same(model: nn.Module) -> None:
    copied = copy.deepcopy(model, copies_of_absent([*model.parameters(), *model.buffers()]))
    assert [*map(is_absent, copied.parameters())] == [*map(is_absent, model.parameters())]
    assert copied[0].weight is not model[0].weight


# gradients of one rank


@pytest.fixture
def gradients(model: nn.Module) -> Iterator[list[Tensor]]:
    for parameter in (model[0].bias, model[1].weight):
        parameter.grad = torch.ones_like(parameter)
    tensors: Any = SimpleNamespace(names=ModelTensors.of(model), is_source=lambda _: True, owner_ranks={})
    agreement: Any = SimpleNamespace(is_distributed=False, ranks=SimpleNamespace(count=1))
    norms = GradientNorms(tensors, agreement)
    norms.mark()
    yield [each.grad for each in model.parameters() if each.grad is not None]
    norms.unmark()
    assert [type(each.grad) for each in model.parameters() if each.grad is not None] == [Tensor, Tensor]


def _added(total: Tensor, numbers: list[Tensor]) -> Tensor:
    for each in numbers:
        total += each
    return total


GATHERED: dict[str, Callable[[list[Tensor]], Any]] = {
    "of norms": lambda g: torch.stack([each.norm() for each in g]).norm(),
    "as SAM's": lambda g: torch.norm(torch.stack([(1.0 * each).norm(p=2).to("cpu") for each in g]), p=2),
    "of stacked squares": lambda g: (torch.stack([each.norm() for each in g]) ** 2).sum().sqrt(),
    "of torch, by lists": lambda g: nn.utils.get_total_norm(g, foreach=True),
}


@pytest.mark.parametrize("total", GATHERED)
def test_stacked_norms_are_gathered(gradients: list[Tensor], total: str) -> None:
    found = GATHERED[total](gradients)
    assert type(found) is Tensor
    assert found.item() == pytest.approx(6**0.5)


TOTALS: dict[str, Callable[[list[Tensor]], object]] = {
    "of some": lambda g: torch.stack([each.norm() for each in [*g, torch.ones(2)]]).norm(),
    "one of them": lambda g: torch.stack([each.norm() for each in g])[0],
    "of only one": lambda g: sum(each.norm() for each in g[:1]),
    "into a number": lambda g: torch.add(torch.zeros(()), g[0].norm(), out=torch.zeros(())),
    "as numbers": lambda g: torch.stack([each.norm() for each in g]).tolist(),
    "of largest rows": lambda g: sum(each.max(dim=0).values.norm() for each in g),
    "of squares": lambda g: sum((each**2).sum() for each in g),
    "added in place": lambda g: _added(torch.zeros(()), [each.norm() ** 2 for each in g]),
    "of one of them twice": lambda g: torch.stack([g[0].norm(), g[0].norm()]).norm(),
    "of a vector of one of them": lambda g: torch.cat([g[0].flatten()]).norm(),
    "of one vector": lambda g: torch.cat([each.flatten() for each in g]).norm(),
    "written one by one": lambda g: torch.zeros(2).__setitem__(0, g[0].norm()),
}


@pytest.mark.parametrize("total", TOTALS)
def test_totals_of_one_ranks_gradients_are_refused(gradients: list[Tensor], total: str) -> None:
    with pytest.raises(InputError, match="of this rank's stages alone"):
        TOTALS[total](gradients)


def test_momentum_adds_up_the_gradient_of_one_number_and_a_norm_does_not() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.5))})
    model["scale"].grad = torch.tensor(3.0)
    tensors: Any = SimpleNamespace(names=ModelTensors.of(model), is_source=lambda _: True, owner_ranks={})
    agreement: Any = SimpleNamespace(is_distributed=False, ranks=SimpleNamespace(count=1))
    norms = GradientNorms(tensors, agreement)
    norms.mark()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for expected in (-2.5, -7.0):  # a step of 3, and of 1.5 + 3
        optimizer.step()
        assert model["scale"].item() == expected
    with pytest.raises(InputError, match="of this rank's stages alone"):
        _added(torch.zeros(()), [model["scale"].grad ** 2])


def test_a_trust_ratio_of_one_parameter_is_right_on_each_rank(
    gradients: list[Tensor], model: nn.Module
) -> None:
    """As LARS computes it."""
    for gradient in gradients:
        norm, decay = gradient.norm(), 0.1 * torch.ones(4).norm()
        ratio = torch.where(norm > 0, decay / (norm + 0.1 * decay + 1e-8), torch.ones(()))
        gradient.add_(torch.ones_like(gradient), alpha=0.1).mul_(ratio)
        expected = 1.1 * 0.2 / (3**0.5 + 0.02) if gradient is gradients[0] else None
        if expected is not None:
            assert gradient[0].item() == pytest.approx(expected, rel=1e-6)


def test_numbers_of_one_gradient_are_said_to_be_that(gradients: list[Tensor]) -> None:
    with pytest.warns(UserWarning, match="the norm of one parameter's gradient on this rank"):
        assert gradients[0].norm().item() == pytest.approx(3**0.5)


def test_a_gradient_of_one_rank_is_a_gradient_to_all_else(gradients: list[Tensor]) -> None:
    first = gradients[0]
    assert type(first.clone()) is type(copy.deepcopy(first)) is type(torch.zeros_like(first)) is Tensor
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(3))
    assert (first + 1)[0] == 2
    assert first.numpy().tolist() == [1, 1, 1]


def test_a_module_around_it_is_named(model: nn.Module) -> None:
    refuse_wrappers()
    with pytest.raises(InputError, match="OptimizedModule cannot take a pipeline"):
        torch.compile(model, backend="eager")
