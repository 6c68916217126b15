"""Whatever a forward can read: where it changes between two steps, that is noticed, or the model was refused.

What Dynamo cannot follow has no guards: a warning at capture says so. Nothing is silent.
"""

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError
from pipec.graph import Fingerprint, ModelSnapshot, TrainingGraph, torch_values
from pipec.ir import Mode

NOTICED = """
global | x * NUMBER | NUMBER = 3.0
tuple | x * PAIR[1] | PAIR = (1.0, 3.0)
item of a list | x * NUMBERS[1] | NUMBERS[1] = 3.0
item of a dict | x * OPTIONS["scale"] | OPTIONS["scale"] = 3.0
get of a dict | x * OPTIONS.get("scale", 1.0) | OPTIONS["scale"] = 3.0
absent key of a dict | x * OPTIONS.get("more", 1.0) | OPTIONS["more"] = 3.0
nested containers | x * OPTIONS["nested"][0]["scale"] | OPTIONS["nested"][0]["scale"] = 3.0
added to a set | x * when("b" in NAMES) | NAMES.add("b")
deque | x * DEQUE[1] | DEQUE = collections.deque([1.0, 3.0])
chain map | x * CHAIN["scale"] | CHAIN["scale"] = 3.0
mapping proxy | x * PROXY["scale"] | PROXIED["scale"] = 3.0
name space | x * SPACE.scale | SPACE.scale = 3.0
value of an enum | x * COLOR.value | COLOR = Color.BLUE
flags | x * when(FLAGS & Flag.B) | FLAGS = Flag.A | Flag.B
dataclass | x * CONFIG.scale | CONFIG.scale = 3.0
slice | x[:, SLICE] | SLICE = slice(0, 3)
tensor | x * TENSOR | TENSOR = torch.full((4,), 2.0)
tensor in place | x * TENSOR | TENSOR.add_(1)
array in place | x * torch.from_numpy(ARRAY) | ARRAY[1] = 3.0
view of an array | x * torch.from_numpy(MATRIX[1]) | MATRIX[1, 1] = 3.0
numpy's scalar | x * SCALAR | SCALAR = np.float32(3.0)
array of doubles | x * DOUBLES[1] | DOUBLES[1] = 3.0
bytearray | x * BYTEARRAY[1] | BYTEARRAY[1] = 3
context variable | x * VARIABLE.get() | VARIABLE.set(3.0)
function | scaled(x) | scaled = tripled
code of a function | scaled(x) | scaled.__code__ = (lambda x, by=2.0, *, more=1.0: x - 1).__code__
default | scaled(x) | scaled.__defaults__ = (3.0,)
default by name | scaled(x) | scaled.__kwdefaults__ = {"more": 3.0}
attribute of a function | x * getattr(scaled, "tag", 1.0) | scaled.tag = 3.0
function in a dict | TABLE["function"](x) | TABLE["function"] = tripled
partial | PARTIAL(x) | PARTIAL = functools.partial(scaled, by=3.0)
keywords of a partial | PARTIAL(x) | PARTIAL.keywords["by"] = 3.0
property of an object | x * THING.scale | THING._hidden = 3.0
descriptor | x * THING.described | THING._hidden = 3.0
cached property | x * THING.cached | vars(THING)["cached"] = 3.0
getattr of an object | x * THING.computed | THING._hidden = 3.0
class method | x * Thing.of_class() | Thing.common = 3.0
attribute of a class | x * Thing.common | Thing.common = 3.0
attribute that hides the class's | x * THING.common | THING.common = 3.0
class of an object | x * THING.common | THING.__class__ = Child
call of an object | THING(x) | THING._hidden = 3.0
method of a class | THING(x) | Thing.__call__ = lambda self, x: x * 3
length of an object | x * len(THING) | THING.items = [1.0, 2.0]
equality of an object | x * when(THING == 2.0) | THING._hidden = 3.0
slots | x * net.slotted.scale | net.slotted.scale = 3.0
hasattr of an object | x * when(hasattr(SPACE, "more")) | SPACE.more = 3.0
attrgetter | x * operator.attrgetter("scale")(SPACE) | SPACE.scale = 3.0
autograd function | Twice.apply(x) | Twice.factor = 3.0
built-in function | x * abs(-NUMBER) | patch.setattr(builtins, "abs", lambda value: 3.0)
attribute | x * net.scale | net.scale = 3.0
use_cache | x * when(net.use_cache) | net.use_cache = False
getattr with a default | x * getattr(net, "more", 1.0) | net.more = 3.0
appended to an attribute | x * len(net.numbers) | net.numbers.append(3.0)
own array in place | x * torch.from_numpy(net.array) | net.array[1] = 3.0
own tensor in place | x * net.tensor | net.tensor.add_(1)
own tensor resized by data | x * net.tensor | net.tensor.data = torch.full((4,), 3.0)
own list of tensors | x * net.tensors[0] | net.tensors[0].add_(1)
own object | x * net.thing.scale | net.thing._hidden = 3.0
own closure | net.closed(x) | net.closed = closure(3.0)
own property | x * net.computed | net.scale = 3.0
method | net.helper(x) | net.helper = tripled
method of the model's class | net.helper(x) | Net.helper = lambda self, x: x * 3
appended layer | through(net.layers, x) | net.layers.append(nn.ReLU())
module in a plain list | net.plain[0](x) | net.plain[0] = nn.ReLU()
added parameter | x * len(net.parts) | net.parts.append(torch.ones(4))
missing parameter | x * when(net.missing is None) | net.missing = nn.Parameter(torch.ones(4))
attribute of a parameter | x * when(hasattr(net.norm.weight, "tag")) | net.norm.weight.tag = 1
requires_grad | x * when(net.norm.weight.requires_grad) | net.norm.requires_grad_(False)
type of a buffer | x * when(net.mean.dtype is torch.float32) | net.mean = net.mean.double()
number of a layer | net.norm(x) | net.norm.eps = 1.0
mode of a layer | x * when(net.drop.training) | net.drop.train()
mode | x * when(net.training) | net.train()
hook | net.norm(x) | net.norm.register_forward_hook(lambda module, args, output: output * 3)
forward of a layer | net.norm(x) | net.norm.forward = tripled
class of a layer | net.named["first"](x) | net.named["first"].__class__ = nn.Softsign
deterministic algorithms | x * when(torch.are_deterministic_algorithms_enabled()) \
| torch.use_deterministic_algorithms(True)
cudnn | x * when(torch.backends.cudnn.enabled) | patch.setattr(torch.backends.cudnn, "enabled", False)
flash attention | x * when(torch.backends.cuda.flash_sdp_enabled()) \
| torch.backends.cuda.enable_flash_sdp(False)
matmul precision | x * when(torch.get_float32_matmul_precision() == "highest") \
| torch.set_float32_matmul_precision("high")
default type | x * torch.tensor([0.1]).double() | torch.set_default_dtype(torch.float64)
anomaly detection | x * when(torch.is_anomaly_enabled()) | torch.autograd.set_detect_anomaly(True, False)
function of torch | torch.relu(x) | patch.setattr(torch, "relu", torch.tanh)
method of a tensor | x.tanh() | patch.setattr(Tensor, "tanh", lambda self: self * 3, raising=False)
layer of torch | net.layers[1](x) | patch.setattr(nn.Tanh, "forward", lambda self, x: x * 3)
torch's version | x * when(torch.__version__ == "0") | patch.setattr(torch, "__version__", "0")
environment | x * when(os.environ.get("PIPEC_TEST_READ")) | patch.setenv("PIPEC_TEST_READ", "1")
getenv | x * when(os.getenv("PIPEC_TEST_READ", "no") == "no") | patch.setenv("PIPEC_TEST_READ", "1")
local of a thread | x * LOCAL.scale | LOCAL.scale = 3.0
iterator | x * next(COUNTER) | next(COUNTER)
filters of warnings | x * len(warnings.filters) \
| patch.setattr(warnings, "filters", [*warnings.filters, warnings.filters[0]])
level of a logger | x * when(log.level == logging.DEBUG) | patch.setattr(log, "level", logging.DEBUG)
"""
"""A name, what the forward returns, and a change of what that reads."""

TOLD = """
time | x * time.time()
date | x * datetime.datetime.now().microsecond
file | x * of_file()
file that exists | x * when(os.path.exists("more"))
working folder | x * len(os.getcwd())
number of threads | x * threading.active_count()
torch's threads | x * torch.get_num_threads()
decimal context | x * decimal.getcontext().prec
C | x * ctypes.c_int.in_dll(ctypes.pythonapi, "Py_OptimizeFlag").value
memory | x * sys.getrefcount(net)
host | x * len(os.uname().nodename)
stack | x * sys._getframe().f_lineno
"""

Things = dict[str, Any]
NUMBERS = itertools.count()


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> Iterator[Things]:
    """The names of a fresh module of things to read. Dynamo keeps modules by their names, so each is new."""
    name, path = f"things_to_read_{next(NUMBERS)}", Path(__file__).with_name("things_to_read.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    module.patch = monkeypatch
    yield vars(module)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)


def net_of(things: Things, read: str) -> Any:
    forward = eval(f"lambda net, x: {read}", things)
    things["net"] = type("Reader", (things["Net"],), {"forward": forward})()
    return things["net"]


def rows(text: str) -> list[Any]:
    split = [line.split(" | ", 2) for line in text.strip().splitlines()]
    return [pytest.param(*row, id=name) for name, *row in split]


def captured(net: nn.Module) -> tuple[TrainingGraph, Fingerprint]:
    return capture(CaptureRequest(net, None, Mode.FORWARD, ModelCall((X,), {}))), fingerprint(net)


def fingerprint(net: nn.Module) -> Fingerprint:
    return ModelSnapshot(net).fingerprint(Mode.FORWARD, torch_values())


def is_noticed(graph: TrainingGraph, before: Fingerprint, net: nn.Module) -> bool:
    return bool(graph.reads.difference()) or fingerprint(net) != before


X = torch.arange(1.0, 9.0).view(2, 4)


@pytest.mark.parametrize(("read", "change"), rows(NOTICED))
def test_what_changes_is_noticed(read: str, change: str, things: Things) -> None:
    if change in ("net.norm.weight.tag = 1", "next(COUNTER)") and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 has no guard for it")
    net = net_of(things, read)
    before = net(X)
    graph, before_change = captured(net)
    assert not is_noticed(graph, before_change, net)
    exec(change, things)
    after = net(X)
    assert before.shape != after.shape or not torch.equal(before, after), "the change changes nothing"
    assert is_noticed(graph, before_change, net)


def test_what_differs_in_every_step_is_refused(things: Things) -> None:
    """Random numbers are in ``test_refused``."""
    with pytest.raises(CaptureError):
        captured(net_of(things, "x * uuid.uuid4().int"))


@pytest.mark.parametrize("read", rows(TOLD))
def test_what_no_front_end_can_tell_is_said(
    read: str, things: Things, caplog: pytest.LogCaptureFixture
) -> None:
    captured(net_of(things, read))
    assert "what its code reads is taken to stay as it is" in caplog.text
