"""What Python and torch let a forward do besides operators: stages do the same, or the model is refused."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import WIDTH, Net, Odd, Pair, train_as_eager
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import pipec
from pipec.errors import CaptureError, InputError

ROWS = 8


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def compiled(net: nn.Module, **options: Any) -> pipec.Pipeline:
    return pipec.compile(net, **{"devices": 2, "microbatches": 2, "loss_fn": F.mse_loss, **options})


def assert_trains_as_eager(
    odd: Odd, prepare: Callable[[Any], object] = lambda net: None, **others: Any
) -> None:
    x, target = batch()
    train_as_eager(Net(odd, prepare), x, target=target, loss_fn=F.mse_loss, **others)


def sine(self: Any, x: Tensor, **others: Any) -> Tensor:
    return x.sin()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


def within(context: Callable[[], Any], compute: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    def odd(self: Any, x: Tensor) -> Tensor:
        with context():
            return compute(self, x)

    return odd


CONTEXTS = {
    "saved tensors doubled": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
    "saved tensors cut by functions of torch": lambda: torch.autograd.graph.saved_tensors_hooks(
        F.relu, F.relu
    ),
    "saved tensors moved": torch.autograd.graph.save_on_cpu,
    "function mode": Doubling,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_in_forward_acts_as_in_eager_mode(name: str) -> None:
    assert_trains_as_eager(within(CONTEXTS[name], sine))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (Doubling, "the mode Doubling"),
        (CONTEXTS["saved tensors doubled"], "saved_tensors"),
        (CONTEXTS["saved tensors cut by functions of torch"], "saved_tensors"),
    ],
)
def test_a_context_around_a_call_is_refused(context: Callable[[], Any], name: str) -> None:
    (x, target), pipe = batch(), compiled(Net(sine))
    pipe.step(x, target=target)
    with context(), pytest.raises(InputError, match=f"{name}.* is active around this call"):
        pipe.step(x, target=target)
    with torch.autograd.graph.save_on_cpu():
        pipe.step(x, target=target)


def test_a_default_device_may_be_set() -> None:
    torch.set_default_device("cpu")
    try:
        assert_trains_as_eager(lambda self, x: x + torch.arange(WIDTH))
    finally:
        torch.set_default_device(None)


class Named(nn.Parameter):
    """A parameter with more attributes, as many libraries have."""


def test_a_parameter_may_be_of_another_class() -> None:
    assert_trains_as_eager(sine, lambda net: setattr(net.middle, "weight", Named(net.middle.weight.data)))


def with_attribute(x: Tensor) -> Tensor:
    x.scale = 3.0  # type: ignore[attr-defined]
    return x


UNUSUAL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "has an attribute 'scale'": (with_attribute, lambda z: getattr(z, "scale", 2.0)),
    "is a lazy negative": (lambda z: torch.complex(z, z).conj().imag, lambda z: 2 if z.is_neg() else 3),
    "is a lazy conjugate": (lambda z: torch.complex(z, z).conj(), lambda z: 2 if z.is_conj() else 3),
}


@pytest.mark.parametrize("match", UNUSUAL)
def test_an_argument_that_is_more_than_its_values_is_refused(match: str) -> None:
    make, read = UNUSUAL[match]
    (x, target), (z, _) = batch(), batch()
    pipe = compiled(Net(lambda self, x, z: x * read(z) + z.real))
    if match != "is a lazy conjugate":
        pipe.step(x, target=target, z=z.clone())
    with pytest.raises(InputError, match=rf"kwargs\['z'\] {match}"):
        pipe.step(x, target=target, z=make(z))


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": lambda z: 2 if z.is_contiguous() else 3,
    "stride": lambda z: z.stride(0),
    "dim_order": lambda z: 2 if z.dim_order() == (0, 1) else 3,
    "as_strided": lambda z: z.as_strided((WIDTH,), (2,)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("differentiates", [False, True])
def test_a_forward_that_asks_for_a_layout_gets_that_of_its_argument(name: str, differentiates: bool) -> None:
    def odd(self: Any, x: Tensor, z: Tensor) -> Tensor:
        if differentiates:  # so that Dynamo does not trace it
            leaf = x.detach().requires_grad_()
            x = x + torch.autograd.grad(leaf.sin().sum(), leaf)[0]
        return x * LAYOUTS[name](z) + z.sum()

    z = torch.randn(WIDTH, 3)
    assert_trains_as_eager(odd, z=z)
    assert_trains_as_eager(odd, z=z.t())


def test_rows_keep_the_strides_of_the_batch() -> None:
    def odd(self: Any, x: Tensor, z: Tensor) -> Tensor:
        return x * (2 if z.is_contiguous() else 3) + z

    wide = torch.randn(ROWS, 2 * WIDTH)
    for z in (torch.randn(WIDTH, ROWS).t(), wide[:, ::2], wide[:, :1].expand(ROWS, WIDTH)):
        assert_trains_as_eager(odd, z=z)


def test_rows_behind_another_dimension_keep_their_layout() -> None:
    @model(layer=lambda: nn.Linear(WIDTH, WIDTH))
    def TimeFirst(self: Any, x: Tensor) -> Tensor:
        return self.layer(x * (2 if x.is_contiguous() else 3)).square().mean()

    transposed, wide = torch.randn(ROWS, 5, WIDTH).transpose(0, 1), torch.randn(3, ROWS, 2 * WIDTH)
    for x in (wide[..., :WIDTH].contiguous(), transposed, transposed[1:], wide[:, :, ::2]):
        train_as_eager(TimeFirst(), x, options={"batched": {"x": 1}, "devices": 1})


@pytest.mark.parametrize("check", ["first", "off"])
def test_where_the_batch_is_in_memory_is_refused(check: str) -> None:
    by_method = Tensor.storage_offset, Tensor.data_ptr, Tensor._is_view, lambda x: x.is_set_to(x)
    for asked in (*by_method, lambda x: x._base is None, lambda x: x._version):
        pipe = compiled(Net(lambda self, x, f=asked: x * (1 + f(x))), loss_fn=None, check=check)
        with pytest.raises(CaptureError, match=r"differs in stages"):
            pipe.step(torch.randn(ROWS + 1, WIDTH)[1:])


def test_keyword_arguments_come_in_the_order_of_the_call() -> None:
    def odd(self: Any, x: Tensor, **others: Tensor) -> Tensor:
        one, other = others.values()
        return x + 2 * one - other

    one, other = batch()
    assert_trains_as_eager(odd, b=one, a=other)
    net = Net(odd)
    pipe = pipec.compile(net, devices=2, microbatches=2)
    torch.testing.assert_close(pipe(one, a=one, b=other), net(one, a=one, b=other))
    torch.testing.assert_close(pipe(one, b=other, a=one), net(one, b=other, a=one))


COUNT = [0]


def count_globally(self: Any, x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


def count_in_a_name(self: Any, x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return x * TOTAL


TOTAL = 0


def count_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.calls.append(1)
    return x * len(self.calls)


@pytest.mark.parametrize(
    ("odd", "name"),
    [(count_globally, "COUNT"), (count_in_a_name, "test_foreign_code"), (count_in_a_list, "calls")],
)
def test_a_warning_names_python_state_that_forward_changes(
    odd: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, target = batch()
    with caplog.at_level(logging.WARNING, "pipec"):
        compiled(Net(odd, lambda net: setattr(net, "calls", []))).step(x, target=target)
    (said,) = [message for message in caplog.messages if "leave it alone" in message]
    assert f"{name}; pipelines run what was captured" in said


def double(module: nn.Module, gradients: Any) -> Any:
    return tuple(gradient if gradient is None else 2 * gradient for gradient in gradients)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_around_the_forward_of_every_module_are_refused(register: Any) -> None:
    x, target = batch()
    pipe = compiled(Net(sine))
    pipe.step(x, target=target)
    hook = register(lambda module, *call: None)
    try:
        with pytest.raises(CaptureError, match=r"with register_forward_(pre_)?hook"):
            pipe.step(x, target=target)
    finally:
        hook.remove()


def test_hooks_before_the_backward_of_every_module() -> None:
    hook = register_module_full_backward_pre_hook(double)
    try:
        assert_trains_as_eager(sine)
    finally:
        hook.remove()


class Half(torch.autograd.Function):
    """Two results. The gradient of one that is not used is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> Tensor:
        return first * 5 if second is None else first + second


def test_a_missing_gradient_is_none_in_a_custom_backward() -> None:
    assert_trains_as_eager(lambda self, x: Half.apply(x)[0])


@dataclass
class Box:
    value: Tensor
    unit: str


pytree.register_pytree_node(
    Box,
    lambda box: ([box.value], box.unit),
    lambda values, unit: Box(*values, unit),
    serialized_type_name="Box",
)


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Boxed(self: Any, x: Tensor) -> Box:
    return Box(self.layer(x), "m")


def test_the_loss_is_found_behind_an_object_that_the_model_made() -> None:
    net, (x, target) = Boxed(), batch()
    pipe = compiled(net, devices=1, loss_fn=lambda box, target: F.mse_loss(box.value, target))
    loss, box = pipe.step(x, target=target, outputs=True)
    expected = net(x).value.detach()
    torch.testing.assert_close(loss, F.mse_loss(expected, target))
    torch.testing.assert_close(box.value, expected)
    assert box.unit == "m"


@pytest.mark.parametrize(
    "times",
    [lambda x, memory: 2 if memory is x else 1, lambda x, memory: 2 if id(x) == id(memory) else 1],
    ids=["is", "id"],
)
@pytest.mark.parametrize("dim", [slow(0), 1])
def test_a_tensor_that_is_passed_twice_is_one_object(
    times: Callable[[Tensor, Tensor], float], dim: int
) -> None:
    class Comparing(nn.Linear):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return super().forward(x) * times(x, memory) + memory

    batched = dict.fromkeys(("x", "memory", "target"), dim)
    pair = Pair(Comparing(WIDTH, WIDTH), F.mse_loss, batched=batched)
    shape = (ROWS, 3, WIDTH) if dim == 0 else (3, ROWS, WIDTH)
    x, other = torch.randn(shape), torch.randn(shape)
    for given in ((x, other, other), (x, x, other), (x, other, x), (x, x, x)):
        pair.step(*given[:2], target=given[2])


def test_a_tensor_that_is_passed_twice_and_split_once_is_refused_where_it_is_compared() -> None:
    class Alone(nn.Linear):
        def forward(self, whole: Tensor, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if whole is x else 1) + whole.mean(0)

    (x, target), batched = batch(), {"whole": None, "x": 0, "target": 0}
    pair = Pair(Alone(WIDTH, WIDTH), F.mse_loss, microbatches=None, batched=batched)
    with pytest.raises(InputError, match=r"args\[1\] is args\[0\], but is not split like it"):
        pair.pipe.step(x, x, target=target)
    pair.step(x, x.clone(), target=target)


def test_an_artifact_knows_which_arguments_were_one_tensor(tmp_path: Path) -> None:
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target)

    x, other = (each.reshape(4, 2, WIDTH) for each in batch())
    batched = dict.fromkeys(("query", "key", "value", "target"), 1)
    pipe = pipec.compile(nn.MultiheadAttention(WIDTH, 2), devices=1, loss_fn=loss_fn, batched=batched)
    pipe.prepare(x, x, x, target=other).save(tmp_path, tensors=True)
    loaded = pipec.load(tmp_path)
    assert loaded.step(x, x, x, target=other) == pipe.step(x, x, x, target=other)
    with pytest.raises(InputError, match=r"args\[1\] is args\[0\] and args\[2\] is args\[0\]"):
        loaded.step(x, other, other, target=other)
