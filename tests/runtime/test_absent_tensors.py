"""What a process does not hold keeps shape and type, and refuses whatever would take it for values.

Outputs of the last stage do so on all other ranks; what can be computed of them has shape and type, too.
"""

import copy
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.errors import InputError
from pipec.runtime.absent_outputs import AbsentOutput, absent_output
from pipec.runtime.absent_tensors import (
    copies_of_absent,
    is_absent,
    materialized,
    plain_tensors,
    release_elsewhere,
    release_sharded,
)
from pipec.runtime.local_gradients import GradientNorms
from pipec.runtime.loss_tensors import STEP_LOSS, StepLoss
from pipec.runtime.model_tensors import ModelTensors, fill_tensors
from pipec.runtime.whole_model import StateOfRank0


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
    "arithmetic with values": lambda m: m[0].weight + torch.ones(3, 4),
    "a norm": lambda m: torch._foreach_norm([m[0].bias, m[0].weight]),
    "a row": lambda m: m[0].weight[0],
    "a row of a clone": lambda m: m[0].weight.clone()[0],
    "a script": lambda m: torch.jit.script(m),
    "its transpose": lambda m: m[0].weight.mT,
    "random values": lambda m: nn.init.normal_(m[0].weight),
    "writing it into a number": lambda m: torch.zeros((), dtype=torch.int64).copy_(m[1].num_batches_tracked),
    "a copy": lambda m: torch.empty(3, 4).copy_(m[0].weight.detach()),
    "copying values into it": lambda m: m[0].weight.data.copy_(torch.ones(3, 4)),
    "new data": lambda m: setattr(m[0].weight, "data", torch.ones(3, 4)),
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


def test_arithmetic_of_numbers_and_absent_tensors_is_left_to_others(model: nn.Module) -> None:
    weight, bias = model[0].weight, model[0].bias
    average = torch.zeros_like(weight).mul_(0.9).add_(weight, alpha=0.1)
    assert is_absent(average)
    assert average.shape == (3, 4)
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


def test_absent_tensors_hold_no_memory_until_values_come_back_to_the_same_object(model: nn.Module) -> None:
    """Also if it has two names."""
    weight, values = model[0].weight, torch.ones(3, 4)
    model.register_parameter("tied", weight)
    with plain_tensors():
        assert weight.untyped_storage().nbytes() == model[1].running_mean.untyped_storage().nbytes() == 4
    with materialized(model.parameters()):
        assert type(weight) is nn.Parameter
        assert weight.stride() == (4, 1)
    assert is_absent(weight)
    fill_tensors(model, {"0.weight": values, "tied": values, "1.running_mean": torch.ones(3)})
    assert type(weight) is nn.Parameter
    assert model.tied is weight
    assert torch.equal(weight, values)
    assert not vars(weight)
    with pytest.raises(InputError, match=r"has \[3\] on cpu as 0.bias; expected \[2\] with memory"):
        fill_tensors(model, {"0.bias": torch.ones(2)})


def test_a_copy_of_the_model_lacks_the_same(model: nn.Module) -> None:
    copied = copy.deepcopy(model, copies_of_absent([*model.parameters(), *model.buffers()]))
    assert [*map(is_absent, copied.parameters())] == [*map(is_absent, model.parameters())]
    assert copied[0].weight is not model[0].weight


# gradients of one rank


def norms_of(model: nn.Module) -> GradientNorms:
    tensors: Any = SimpleNamespace(names=ModelTensors.of(model), is_source=lambda _: True, owner_ranks={})
    agreement: Any = SimpleNamespace(is_distributed=False, ranks=SimpleNamespace(count=1))
    return GradientNorms(tensors, agreement)


@pytest.fixture
def gradients(model: nn.Module) -> Iterator[list[Tensor]]:
    for parameter in (model[0].bias, model[1].weight):
        parameter.grad = torch.ones_like(parameter)
    norms = norms_of(model)
    norms.mark()
    yield [each.grad for each in model.parameters() if each.grad is not None]
    norms.unmark()
    assert [type(each.grad) for each in model.parameters() if each.grad is not None] == [Tensor, Tensor]


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
    "added in place": lambda g: reduce(operator.iadd, [each.norm() ** 2 for each in g], torch.zeros(())),
    "of one of them twice": lambda g: torch.stack([g[0].norm(), g[0].norm()]).norm(),
    "of a vector of one of them": lambda g: torch.cat([g[0].flatten()]).norm(),
    "of one vector": lambda g: torch.cat([each.flatten() for each in g]).norm(),
    "written one by one": lambda g: operator.setitem(torch.zeros(2), 0, g[0].norm()),
}


@pytest.mark.parametrize("total", TOTALS)
def test_totals_of_one_ranks_gradients_are_refused(gradients: list[Tensor], total: str) -> None:
    with pytest.raises(InputError, match="of this rank's stages alone"):
        TOTALS[total](gradients)


def test_momentum_adds_up_the_gradient_of_one_number_and_a_norm_does_not() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.5))})
    model["scale"].grad = torch.tensor(3.0)
    norms = norms_of(model)
    norms.mark()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for expected in (-2.5, -7.0):  # a step of 3, and of 1.5 + 3
        optimizer.step()
        assert model["scale"].item() == expected
    with pytest.raises(InputError, match="of this rank's stages alone"):
        operator.iadd(torch.zeros(()), model["scale"].grad ** 2)


def test_a_trust_ratio_of_one_parameter_is_right_on_each_rank(gradients: list[Tensor]) -> None:
    """As LARS computes it."""
    for gradient in gradients:
        norm, decay = gradient.norm(), 0.1 * torch.ones(4).norm()
        ratio = torch.where(norm > 0, decay / (norm + 0.1 * decay + 1e-8), torch.ones(()))
        gradient.add_(torch.ones_like(gradient), alpha=0.1).mul_(ratio)
        assert gradient.tolist() == pytest.approx([1.1 * 0.2 / (3**0.5 + 0.02)] * 3, rel=1e-6)


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


# the state dict of ranks other than 0


@pytest.mark.parametrize("save", [torch.save, safetensors.torch.save_file])
def test_an_empty_state_is_not_written_over_that_of_rank_0(
    save: Callable[[object, Path], object], tmp_path: Path
) -> None:
    state = StateOfRank0()
    assert copy.deepcopy(state) == {} == {name: x.clone() for name, x in state.items()}
    with pytest.raises(InputError, match="rank 0 saves"):
        save(state, tmp_path / "file")
    with pytest.raises(InputError, match="rank 0 saves"):
        torch.save({"model": state, "step": 1}, tmp_path / "file")


# outputs that the ranks of the last stage alone have


Y = torch.tensor([0, 2, 1, 4])


def absent() -> AbsentOutput:
    memory = torch.empty(4, 5, device="meta", requires_grad=True)
    return absent_output(memory, [2, 3], torch.device("cpu"))


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "cross entropy": lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
    "weights": lambda x: F.cross_entropy(x, Y, weight=torch.ones(5)),
    "module": lambda x: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(-1), torch.ones(4, 5) / 5),
    "reflected": lambda x: 2 - torch.ones(4, 1) / x,
    "mask": lambda x: x[Y > 0],
    "mask and column": lambda x: x[Y > 0, 1:3],
    "mask of rows and columns": lambda x: x[torch.eye(4, 5) > 0],
    "where": lambda x: torch.where(Y[:, None] > 1, x, torch.tensor(0.0)),
    "gather": lambda x: x.log_softmax(-1).gather(1, Y[:, None]),
    "topk": lambda x: x.topk(2).values,
    "max": lambda x: x.max(1).indices,
    "rows": lambda x: torch.stack([*x]),
    "matmul": lambda x: torch.ones(3, 4) @ x,
    "equal elements": lambda x: (x.argmax(-1) == Y).float().mean(),
    "double": lambda x: x.to(torch.float64, copy=True),
    "move": lambda x: x.to("cpu", torch.float64).cpu().to(torch.device("cpu")).to(Y.device),
    "like": lambda x: torch.zeros_like(x, device="cpu") + x.new_ones(5, device="cpu"),
    "beside the device": lambda x: x + torch.zeros(5, device=x.device),
    "in place": lambda x: x.clone().add_(torch.ones(5)).relu_(),
    "write at a mask": lambda x: x.clone().masked_fill_(Y[:, None] > 0, 0.0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_shape_and_dtype(name: str) -> None:
    found, expected = COMPUTED[name](absent()), COMPUTED[name](torch.randn(4, 5, requires_grad=True))
    assert isinstance(found, AbsentOutput)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert found.requires_grad == expected.requires_grad


READ: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.mean().item(),
    "float": lambda x: float(x.mean()),
    "branch": lambda x: 1 if x.mean() > 0 else 0,
    "int": lambda x: int(x.argmax()),
    "range": lambda x: range(x.argmax()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "torch.equal": lambda x: torch.equal(x, torch.zeros(4, 5)),
    "torch.allclose": lambda x: torch.allclose(x, torch.zeros(4, 5)),
    "contains": lambda x: 3.0 in x,
    "format": lambda x: f"{x.mean():.3f}",
    "save": lambda x: torch.save(x, io.BytesIO()),
    "pickle": lambda x: pickle.dumps(x),
    "deepcopy": lambda x: copy.deepcopy(x),
    "own mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.argmax(-1).unique(),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "list": lambda x: torch.tensor([x.mean(), x.mean()]),
    "add up": lambda x: operator.iadd(torch.zeros(4, 5), x.detach()),
    "write into": lambda x: operator.setitem(torch.zeros(5), 1, x.detach().mean()),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.zeros(4, 5)),
    "another parameter": lambda x: x * nn.Parameter(torch.ones(5)),
}


def absent_parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(4, 5))
    release_elsewhere("weight", made, "on rank 1")
    return made


@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_value_that_is_read_is_refused(name: str) -> None:
    READ[name](torch.randn(4, 5))
    with pytest.raises(InputError, match=r"on ranks 2, 3 alone.*outputs=\"differentiable\""):
        READ[name](absent())
    with pytest.raises(InputError, match="on rank 1, and this process has none of its values"):
        READ[name](absent_parameter())


@pytest.mark.parametrize(
    "call",
    [
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.reduce(x, 0),
        lambda x: dist.all_gather([torch.zeros(())], x),
    ],
)
def test_a_collective_is_refused(call: Callable[[Tensor], object]) -> None:
    """The ranks with values would wait for the others."""
    if torch.__version__.startswith("2.11") and not dist.is_initialized():
        pytest.skip("torch 2.11 asks for a group first")
    with pytest.raises(InputError, match="on ranks 2, 3 alone"):
        call(absent().detach().mean())


def test_an_error_of_the_script_is_its_own_and_any_output_may_be_printed() -> None:
    assert str(absent()) == f"{absent()}" == "<float32[4, 5], on ranks 2, 3>"
    with pytest.raises(ValueError, match="to match target batch_size"):
        F.cross_entropy(absent(), Y[:3])


@pytest.mark.parametrize("value", [0.1, 0.125, float("nan")])
@pytest.mark.parametrize("function", [Tensor.mean, lambda x: x.mean().sqrt()])
def test_a_loss_has_a_value_after_its_backward(function: Callable[[Tensor], Tensor], value: float) -> None:
    """It is exact, whatever dtype the loss has here. Nothing else has one."""
    loss, other = function(absent()), absent().mean()
    loss.value = value
    loss.backward(torch.tensor(0.5))
    assert type(loss) is Tensor
    assert str(loss.item()) == str(value)
    assert f"{loss:.2f}" == f"{value:.2f}"
    with pytest.raises(InputError, match="float"):
        float(loss + other)


def test_a_loss_that_another_graph_has_saved_stays_without_a_value() -> None:
    loss, other = absent().mean(), absent().mean()
    product = loss * other
    loss.value = 0.1
    loss.backward()
    product.backward()
    with pytest.raises(InputError, match="item"):
        loss.item()


# the loss of a step, which explains its backward, and is a plain tensor otherwise


@pytest.fixture
def loss() -> StepLoss:
    return StepLoss.of(torch.tensor(2.5), STEP_LOSS)


def test_a_grad_scaler_is_refused_by_name(loss: StepLoss) -> None:
    with pytest.raises(InputError, match='precision="fp16-mixed"'):
        torch.amp.GradScaler("cpu").scale(loss)
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss


def test_results_copies_and_files_are_plain(loss: StepLoss) -> None:
    assert (repr(loss), str(loss), f"{loss:.2f}") == ("tensor(2.5000)", "tensor(2.5000)", "2.50")
    assert float(loss) == loss.item() == loss.numpy() == 2.5
    buffer, total = io.BytesIO(), torch.zeros(())
    total += loss
    torch.save({"loss": loss}, buffer)
    buffer.seek(0)
    computed = [loss + 0, 1 * loss, loss / 1, torch.stack([loss, loss]).mean(), total, sum([loss])]
    copied = [pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), loss.detach()]
    for found in (*computed, *copied, torch.load(buffer, weights_only=True)["loss"]):
        assert type(found) is Tensor
        assert not found.requires_grad
        assert found == 2.5


def test_every_call_that_returns_a_loss_returns_one_that_explains() -> None:
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), devices=2, loss_fn=loss_fn)
    x, y = torch.ones(4, 2), torch.ones(4, 1)
    losses = [pipe.step(x, target=y), pipe.step(x, target=y, outputs=True)[0], *pipe.stream([(x, y)])]
    for loss in losses:
        with pytest.raises(InputError, match=r"already computed the gradients.*pipe\.as_module\(\)"):
            loss.backward()
    with pytest.raises(InputError, match="computes no gradients"):
        pipe.eval_step(x, target=y).backward()
