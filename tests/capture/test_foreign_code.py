"""What Python and torch let a forward do besides operators: stages do the same, or the model is refused."""

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import pipec
from pipec.errors import CaptureError, InputError

ROWS, WIDTH = 8, 6


class Net(nn.Module):
    """Three layers, with something odd between the first two."""

    def __init__(
        self, odd: Callable[..., Tensor], prepare: Callable[[nn.Module], Any] = lambda net: None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = odd
        prepare(self)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.last(self.middle(self.odd(self, self.first(x), **others)).tanh())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def step(net: nn.Module, x: Tensor, target: Tensor, **others: Any) -> Tensor:
    pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=F.mse_loss)
    return pipe.step(x, target=target, **others)


def assert_trains_as_eager(make: Callable[[], nn.Module], **others: Any) -> None:
    """Compare the loss and all gradients of a step with those of eager torch."""
    net, eager = make(), make()
    x, target = batch()
    loss, expected = step(net, x, target, **others), F.mse_loss(eager(x, **others), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def refused(make: Callable[[], nn.Module], error: type[Exception], match: str, **others: Any) -> None:
    x, target = batch()
    with pytest.raises(error, match=match):
        step(make(), others.pop("x", x), target, **others)


# contexts that forward enters


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
    assert_trains_as_eager(lambda: Net(within(CONTEXTS[name], lambda self, x: x.sin())))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (Doubling, "the mode Doubling"),
        (CONTEXTS["saved tensors doubled"], "saved_tensors"),
        (CONTEXTS["saved tensors cut by functions of torch"], "saved_tensors"),
    ],
)
def test_a_context_around_a_call_is_refused(context: Callable[[], Any], name: str) -> None:
    net = Net(lambda self, x: x.sin())
    x, target = batch()
    pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=F.mse_loss)
    pipe.step(x, target=target)
    with context(), pytest.raises(InputError, match=f"{name}.* is active around this call"):
        pipe.step(x, target=target)
    with torch.autograd.graph.save_on_cpu():
        pipe.step(x, target=target)


def test_a_default_device_may_be_set() -> None:
    torch.set_default_device("cpu")
    try:
        assert_trains_as_eager(lambda: Net(lambda self, x: x + torch.arange(WIDTH)))
    finally:
        torch.set_default_device(None)


# classes of tensors


class Tripled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is F.linear else result


class Named(nn.Parameter):
    """A parameter with more attributes, as many libraries have."""


class Image(Tensor):
    """A tensor that a model may tell from others."""


def test_a_parameter_whose_class_changes_operators_is_refused() -> None:
    def replace(net: Any, kind: type[nn.Parameter]) -> None:
        net.middle.weight = kind(net.middle.weight.data)

    def odd(self: Any, x: Tensor) -> Tensor:
        return x

    refused(
        lambda: Net(odd, lambda net: replace(net, Tripled)),
        CaptureError,
        r"middle.weight is a .*Tripled, whose class says",
    )
    assert_trains_as_eager(lambda: Net(odd, lambda net: replace(net, Named)))


def test_an_argument_of_another_class_is_refused() -> None:
    def make() -> nn.Module:
        return Net(lambda self, x, z: x * (2 if isinstance(z, Image) else 3))

    image = batch()[0].as_subclass(Image)
    refused(make, InputError, r"kwargs\['z'\] is a .*Image.*as_subclass\(torch.Tensor\)", z=image)
    refused(make, InputError, r"args\[0\] is a .*Image", x=image, z=batch()[0])


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
    net = Net(lambda self, x, z: x * read(z) + z.real)
    (x, target), (z, _) = batch(), batch()
    pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=F.mse_loss)
    if match != "is a lazy conjugate":
        pipe.step(x, target=target, z=z.clone())
    with pytest.raises(InputError, match=rf"kwargs\['z'\] {match}"):
        pipe.step(x, target=target, z=make(z))


def test_a_sparse_argument_is_refused() -> None:
    def make() -> nn.Module:
        return Net(lambda self, x, z: x + z.to_dense().sum())

    refused(make, InputError, r"kwargs\['z'\] has layout torch.sparse_coo", z=torch.eye(5).to_sparse())


# the layout of arguments

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
    assert_trains_as_eager(lambda: Net(odd), z=z)
    assert_trains_as_eager(lambda: Net(odd), z=z.t())


def test_rows_keep_the_strides_of_the_batch() -> None:
    def odd(self: Any, x: Tensor, z: Tensor) -> Tensor:
        return x * (2 if z.is_contiguous() else 3) + z

    assert_trains_as_eager(lambda: Net(odd), z=torch.randn(WIDTH, ROWS).t())
    assert_trains_as_eager(lambda: Net(odd), z=torch.randn(ROWS, 2 * WIDTH)[:, ::2])
    assert_trains_as_eager(lambda: Net(odd), z=torch.randn(ROWS, 1).expand(ROWS, WIDTH))


class TimeFirst(nn.Module):
    """Takes its rows as dimension 1, and asks how they are laid out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * (2 if x.is_contiguous() else 3)).tanh()).square().mean()


def test_rows_behind_another_dimension_keep_their_layout() -> None:
    time_first = torch.randn(3, ROWS, WIDTH)
    transposed = torch.randn(ROWS, 5, WIDTH).transpose(0, 1)
    for x in (time_first, transposed, transposed[1:], torch.randn(3, ROWS, 2 * WIDTH)[:, :, ::2]):
        net, eager = TimeFirst(), TimeFirst()
        loss = pipec.compile(net, devices=2, microbatches=2, batched={"x": 1}).step(x)
        expected = eager(x)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(net.first.weight.grad, eager.first.weight.grad)


def test_an_offset_into_memory_is_refused() -> None:
    def make() -> nn.Module:
        return Net(lambda self, x, z: x * (z.storage_offset() + 1) + z.sum())

    refused(make, CaptureError, r"storage_offset at test_foreign_code.py", z=torch.randn(9)[3:])


@pytest.mark.parametrize("check", ["first", "off"])
def test_where_the_batch_is_in_memory_is_refused(check: str) -> None:
    by_method = Tensor.storage_offset, Tensor.data_ptr, Tensor._is_view, lambda x: x.is_set_to(x)
    for asked in (*by_method, lambda x: x._base is None, lambda x: x._version):
        pipe = pipec.compile(
            Net(lambda self, x, f=asked: x * (1 + f(x))), devices=2, microbatches=2, check=check
        )
        with pytest.raises(CaptureError, match=r"differs in stages"):
            pipe.step(torch.randn(ROWS + 1, WIDTH)[1:])


# the order of keyword arguments


def test_keyword_arguments_come_in_the_order_of_the_call() -> None:
    def odd(self: Any, x: Tensor, **others: Tensor) -> Tensor:
        one, other = others.values()
        return x + 2 * one - other

    one, other = batch()
    assert_trains_as_eager(lambda: Net(odd), b=one, a=other)
    net = Net(odd)
    pipe = pipec.compile(net, devices=2, microbatches=2)
    torch.testing.assert_close(pipe(one, a=one, b=other), net(one, a=one, b=other))
    torch.testing.assert_close(pipe(one, b=other, a=one), net(one, b=other, a=one))


# what changes more than values


def assign(self: Any, name: str, value: Any) -> None:
    setattr(self, name, value)


def freeze(self: Any, x: Tensor) -> Tensor:
    self.middle.weight.requires_grad_(False)
    return x


def clear_gradient(self: Any, x: Tensor) -> Tensor:
    self.middle.weight.grad = None
    return x


def replace_parameter(self: Any, x: Tensor) -> Tensor:
    self.middle.weight = nn.Parameter(self.middle.weight.detach() * 2)
    return x


def replace_data(self: Any, x: Tensor) -> Tensor:
    self.middle.weight.data = self.middle.weight.data * 0.5
    return x


def seed(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + torch.randn(WIDTH)


def read_seed(self: Any, x: Tensor) -> Tensor:
    return x * (torch.initial_seed() % 7)


@pytest.mark.parametrize(
    ("odd", "match"),
    [
        (freeze, "sets requires_grad of a parameter"),
        (clear_gradient, "sets or asks for the grad"),
        (replace_parameter, "replaces a parameter"),
        (replace_data, "replaces a parameter or its data"),
        (seed, "seeds torch's random generator"),
        (read_seed, "seeds torch's random generator"),
    ],
)
def test_a_forward_that_changes_more_than_values_is_refused(odd: Any, match: str) -> None:
    generator = torch.random.default_generator
    refused(lambda: Net(odd), CaptureError, match)
    assert torch.random.default_generator is generator
    assert not {"grad", "data", "requires_grad", "requires_grad_", "stride"} & {*vars(Tensor)}


def use_buffers(net: Any) -> None:
    net.register_buffer("one", torch.tensor(1.0))
    net.register_buffer("other", torch.tensor(2.0))
    net.register_buffer("table", torch.zeros(WIDTH, WIDTH))


def swap(self: Any, x: Tensor) -> Tensor:
    self.one, self.other = self.other, self.one
    return x * self.one


def alias_weight(self: Any, x: Tensor) -> Tensor:
    self.table = self.middle.weight.detach().t()
    return x


def alias_argument(self: Any, x: Tensor, z: Tensor) -> Tensor:
    self.one = z
    return x * z.sum()


@pytest.mark.parametrize(
    ("odd", "match", "others"),
    [
        (swap, "assigns other, or a view of it, to the buffer one", {}),
        (alias_weight, "assigns middle.weight, or a view of it, to the buffer table", {}),
        (
            alias_argument,
            r"assigns argument kwargs\['z'\], or a view of it, to the buffer one",
            {"z": torch.ones(3)},
        ),
    ],
)
def test_a_buffer_is_not_replaced_by_a_tensor_that_others_hold(
    odd: Any, match: str, others: dict[str, Any]
) -> None:
    refused(lambda: Net(odd, use_buffers), CaptureError, match, **others)


def hold_views(net: Any) -> None:
    net.register_buffer("one", torch.zeros(WIDTH))
    net.views = [net.one[:3], net.middle.weight.detach()]


def read_buffer_view(self: Any, x: Tensor) -> Tensor:
    self.one.add_(1)
    return x * self.views[0].sum()


def read_weight(self: Any, x: Tensor) -> Tensor:
    return x @ self.views[1]


@pytest.mark.parametrize(("odd", "owner"), [(read_buffer_view, "one"), (read_weight, "middle.weight")])
def test_an_unregistered_view_of_what_training_changes_is_refused(odd: Any, owner: str) -> None:
    refused(lambda: Net(odd, hold_views), CaptureError, f"shares memory with {owner}, which changes")


COUNT = [0]


def count_globally(self: Any, x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


def count_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.calls.append(1)
    return x * len(self.calls)


def count_in_a_name(self: Any, x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return x * TOTAL


TOTAL = 0


@pytest.mark.parametrize(
    ("odd", "name"),
    [(count_globally, "COUNT"), (count_in_a_name, "test_foreign_code"), (count_in_a_list, "calls")],
)
def test_a_warning_names_python_state_that_forward_changes(
    odd: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, target = batch()
    with caplog.at_level(logging.WARNING, "pipec"):
        step(Net(odd, lambda net: assign(net, "calls", [])), x, target)
    (said,) = [message for message in caplog.messages if "leave it alone" in message]
    assert f"{name}; pipelines run what was captured" in said


# hooks of every module


def double(module: nn.Module, gradients: Any) -> Any:
    return tuple(gradient if gradient is None else 2 * gradient for gradient in gradients)


def test_hooks_of_every_module() -> None:
    modules = torch.nn.modules.module

    def make() -> nn.Module:
        return Net(lambda self, x: x.sin())

    hook = modules.register_module_forward_hook(lambda module, args, output: None)
    try:
        refused(make, CaptureError, "with register_forward_hook")
    finally:
        hook.remove()
    hook = modules.register_module_full_backward_pre_hook(double)
    try:
        assert_trains_as_eager(make)
    finally:
        hook.remove()


# gradients and checkpoints


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
    assert_trains_as_eager(lambda: Net(lambda self, x: Half.apply(x)[0]))


# results


class Box:
    def __init__(self, value: Tensor, unit: str) -> None:
        self.value, self.unit = value, unit


@pytest.fixture
def registered_box() -> Iterator[None]:
    pytree.register_pytree_node(
        Box,
        lambda box: ([box.value], box.unit),
        lambda values, unit: Box(*values, unit),
        serialized_type_name="Box",
    )
    yield
    pytree._deregister_pytree_node(Box)


def test_the_loss_is_found_behind_an_object_that_the_model_made(registered_box: None) -> None:
    class Boxed(Net):
        def forward(self, x: Tensor, **others: Any) -> Any:
            return Box(super().forward(x), "m")

    net = Boxed(lambda self, x: x.sin())
    x, target = batch()
    pipe = pipec.compile(
        net, devices=2, microbatches=2, loss_fn=lambda box, target: F.mse_loss(box.value, target)
    )
    loss, box = pipe.step(x, target=target, outputs=True)
    expected = net(x)
    torch.testing.assert_close(loss, F.mse_loss(expected.value, target).detach())
    torch.testing.assert_close(box.value, expected.value.detach())
    assert box.unit == "m"


@pytest.mark.parametrize(
    "times",
    [
        lambda x, memory: 2 if memory is x else 1,
        lambda x, memory: 2 if id(x) == id(memory) else 1,
    ],
    ids=["is", "id"],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_that_is_passed_twice_is_one_object(
    times: Callable[[Tensor, Tensor], float], dim: int
) -> None:
    class Comparing(nn.Linear):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return super().forward(x) * times(x, memory) + memory

    model = Comparing(WIDTH, WIDTH)
    pipe = pipec.compile(
        copy.deepcopy(model),
        devices=2,
        microbatches=2,
        loss_fn=F.mse_loss,
        batched=dict.fromkeys(("x", "memory", "target"), dim),
    )
    shape = (ROWS, 3, WIDTH) if dim == 0 else (3, ROWS, WIDTH)
    x, other = torch.randn(shape), torch.randn(shape)
    for given in ((x, other, other), (x, x, other), (x, other, x), (x, x, x)):
        loss = pipe.step(*given[:2], target=given[2])
        torch.testing.assert_close(loss, F.mse_loss(model(*given[:2]), given[2]).detach())


def test_a_tensor_that_is_passed_twice_and_split_once_is_refused_where_it_is_compared() -> None:
    class Alone(nn.Linear):
        def forward(self, whole: Tensor, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if whole is x else 1) + whole.mean(0)

    model, (x, target) = Alone(WIDTH, WIDTH), batch()
    batched = {"whole": None, "x": 0, "target": 0}
    pipe = pipec.compile(copy.deepcopy(model), devices=2, loss_fn=F.mse_loss, batched=batched)
    with pytest.raises(InputError, match=r"args\[1\] is args\[0\], but is not split like it"):
        pipe.step(x, x, target=target)
    loss = pipe.step(x, x.clone(), target=target)
    torch.testing.assert_close(loss, F.mse_loss(model(x, x.clone()), target).detach())


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


def test_a_scan_is_refused_by_its_name() -> None:
    def running_sums(net: nn.Module, x: Tensor) -> Tensor:
        return scan(lambda total, row: (total + row, total * row), torch.zeros_like(x[0]), x)[1]

    refused(
        lambda: Net(running_sums), CaptureError, "the higher-order operator 'scan', which no stage can run"
    )
