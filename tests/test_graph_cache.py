"""What was captured is read by a later process if nothing that decided it has changed, and only then."""

import importlib
import logging
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipec
from pipec.capture import tracer
from pipec.graph_cache import files, folder

HELPER = """
SHIFT = 0.5

def shifted(x):
    return x + SHIFT
"""

MODEL = """
import dataclasses
import torch
import torch.nn.functional as F
from torch import nn
import kept_helper

OFFSET = 0.25

@dataclasses.dataclass
class Config:
    power: int = 1

def annealing(rate):
    def anneal(x):
        return x * rate
    return anneal

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Net(nn.Module):
    factor = 1.5

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
        self.scale, self.config, self.anneal = 2.0, Config(), annealing(0.5)
        self.held = torch.ones(8)

    def forward(self, x):
        hidden = self.act(self.first(x)) * self.scale + self.held
        hidden = kept_helper.shifted(hidden) * self.factor + F.softplus(hidden)
        return Doubled.apply(self.anneal(self.last(hidden))) ** self.config.power + OFFSET

def loss(output, target):
    return (output - target).square().mean()
"""

SCRIPT = """
import torch, pipec
from pipec.capture import tracer
import kept_model
real, calls = tracer.capture, []
def counted(*args, **kwargs):
    calls.append(1)
    return real(*args, **kwargs)
tracer.capture = counted
torch.manual_seed(0)
net, x = kept_model.Net(), torch.randn(4, 4)
pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=kept_model.loss)
print(len(calls), pipe.step(x, target=x).item(), len(calls))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a model and a helper, and of what is kept of the model."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "kept_model.py").write_text(MODEL)
    (folder / "kept_helper.py").write_text(HELPER)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        patched.setenv("PIPEC_CACHE_DIR", str(folder / "cache"))
        patched.setattr(files, "_started_ns", lambda: sys.maxsize)  # the files above are younger
        yield folder
    for name in ("kept_model", "kept_helper"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(sources: Path) -> Any:
    """The module of the model, which was captured and kept as it is."""
    module = importlib.import_module("kept_model")
    assert captures(module) == 1
    return module


def captures(module: types.ModuleType, net: nn.Module | None = None) -> int:
    """How often a step captured. Its loss and gradients are those of the unsplit model."""
    net = net or module.Net()
    x = torch.randn(4, 4)
    real, calls = tracer.capture, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracer, "capture", counted)
        pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=module.loss)
        check(pipe, net, module, x)
    return len(calls)


def check(pipe: pipec.Pipeline, net: nn.Module, module: Any, x: torch.Tensor) -> None:
    pipe.zero_grad()
    found = pipe.step(x, target=x)
    gradients = [parameter.grad for parameter in net.parameters()]
    expected = module.loss(net(x), x)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(expected, net.parameters())))


def test_equal_model_is_not_captured_again(model: Any) -> None:
    assert captures(model) == 0


CHANGES: dict[str, Callable[[Any, nn.Module, pytest.MonkeyPatch], object]] = {
    "attribute": lambda model, net, patch: patch.setattr(net, "scale", 3.0),
    "attribute of a config": lambda model, net, patch: patch.setattr(net.config, "power", 2),
    "closure": lambda model, net, patch: patch.setattr(net, "anneal", model.annealing(0.75)),
    "tensor of no module": lambda model, net, patch: net.held.add_(1),
    "attribute of the class": lambda model, net, patch: patch.setattr(model.Net, "factor", 2.5),
    "forward": lambda model, net, patch: patch.setattr(
        model.Net, "forward", lambda self, x: self.last(self.first(x))
    ),
    "backward": lambda model, net, patch: patch.setattr(
        model.Doubled, "backward", staticmethod(lambda ctx, gradient: gradient * 2.0)
    ),
    "global": lambda model, net, patch: patch.setattr(model, "OFFSET", 1.0),
    "global of a helper": lambda model, net, patch: patch.setattr(model.kept_helper, "SHIFT", 1.0),
    "function of a helper": lambda model, net, patch: patch.setattr(
        model.kept_helper, "shifted", lambda x: x - 1
    ),
    "function of torch": lambda model, net, patch: patch.setattr(
        nn.functional, "softplus", lambda x: x.exp()
    ),
    "class of torch": lambda model, net, patch: patch.setattr(nn.Tanh, "forward", lambda self, x: x.sin()),
    "switch of torch": lambda model, net, patch: torch.backends.mkldnn.set_flags(False),
    "hook": lambda model, net, patch: net.first.register_forward_hook(lambda module, given, out: out * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_captured_again(change: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model.Net()
    try:
        CHANGES[change](model, net, monkeypatch)
        assert captures(model, net) == 1
    finally:
        torch.backends.mkldnn.set_flags(True)


def test_edited_file_is_captured_again(sources: Path, model: Any) -> None:
    file = sources / "kept_helper.py"
    file.write_text(HELPER + "\n\ndef another(x):\n    return x\n")
    try:
        assert captures(model) == 1
    finally:
        file.write_text(HELPER)


def test_file_that_was_edited_after_the_start_is_not_trusted(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_started_ns", lambda: 0)
    with caplog.at_level(logging.DEBUG, "pipec"):
        assert captures(model) == 1
    assert "was changed since this process began" in caplog.text


def test_what_changes_after_it_was_read_is_captured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures(model)  # what a test before this one has kept in its place is of another model
    net, x = model.Net(), torch.randn(4, 4)
    pipe = pipec.compile(net, devices=2, microbatches=2, loss_fn=model.loss)
    monkeypatch.setattr(tracer, "capture", None)  # the first step would fail if it captured
    check(pipe, net, model, x)
    monkeypatch.undo()
    monkeypatch.setattr(model.kept_helper, "SHIFT", 2.0)
    check(pipe, net, model, x)
    monkeypatch.setattr(net, "anneal", model.annealing(0.25))
    check(pipe, net, model, x)


def test_what_is_read_is_the_same_artifact(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sources_of(pipe: pipec.Pipeline) -> list[str]:
        pipe.prepare(torch.zeros(4, 4), target=torch.zeros(4, 4))
        return [pipe.source(stage) for stage in range(2)]

    captures(model)
    read = sources_of(pipec.compile(model.Net(), devices=2, microbatches=2, loss_fn=model.loss))
    monkeypatch.setenv("PIPEC_CACHE_DIR", "")
    assert read == sources_of(pipec.compile(model.Net(), devices=2, microbatches=2, loss_fn=model.loss))


def test_damaged_file_is_made_again(
    sources: Path, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = sources / "damaged"
    shutil.copytree(sources / "cache", damaged)
    for file in damaged.iterdir():
        file.write_text(file.read_text().replace('"batch_size":2', '"batch_size":3'))
    monkeypatch.setenv("PIPEC_CACHE_DIR", str(damaged))
    assert captures(model) == 1
    assert "its checksum is another one" in caplog.text
    assert captures(model) == 0


def test_folder_that_others_can_write_is_not_read(
    sources: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "cache").chmod(0o777)
    try:
        assert captures(model) == 1
    finally:
        (sources / "cache").chmod(0o700)
    assert "because others can write it" in caplog.text


def test_files_are_let_go_when_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_BYTES", 1000)
    tmp_path.chmod(0o700)
    for key in range(12):
        folder.store(tmp_path, f"key{key}", "x" * 20)
    left = sorted(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in left) <= 1000
    assert folder.load(tmp_path, "key11") == "x" * 20
    folder.store(tmp_path, "large", "x" * 1000)
    assert folder.load(tmp_path, "large") is None


def test_second_process_does_not_capture(sources: Path) -> None:
    def run() -> list[str]:
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.split()

    script = sources / "script.py"
    script.write_text(SCRIPT)
    time.sleep(0.1)  # what is as young as the process is not trusted
    environment = {**os.environ, "PIPEC_CACHE_DIR": str(sources / "of_script")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(pipec.__file__).parents[1]), str(sources)])
    _, loss, captured = run()
    assert captured == "1"
    assert run() == ["0", loss, "0"]
