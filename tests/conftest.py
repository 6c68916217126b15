"""What every test shares: a thread per rank, captured graphs, reproducible hypothesis runs, golden files."""

import difflib
import gc
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from constant_batch import constant_front_ends

from pipec import console
from pipec.capture import tracer
from pipec.errors import PipecWarning

GOLDEN = Path(__file__).parent / "golden"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in the background
torch.set_num_threads(1)  # a sum over threads would depend on how many there are
console.STATUS_DELAY_SECONDS = 3600.0  # what is printed would depend on how fast the machine is
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # empties caches, 20 ms for each capture
gc.set_threshold(50_000)  # what tracing makes lives short, and a look at all objects takes half a second


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Iterator[list[str]]:
    """What pipec logs and warns of, in order."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    warned = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *given: Any, **more: Any) -> None:
        if category is PipecWarning:
            messages.append(str(message))
        warned(message, category, *given, **more)

    warnings.simplefilter("always", PipecWarning)
    monkeypatch.setattr(warnings, "showwarning", show)
    console.logger.addHandler(handler)
    yield messages
    console.logger.removeHandler(handler)


@pytest.fixture
def constant_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture every graph as that of a model that makes a constant of the batch."""
    monkeypatch.setattr(tracer, "FRONT_ENDS", constant_front_ends())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no worker is left alone with one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def collect() -> Iterator[Callable[[], int]]:
    """``gc.collect`` of what the test itself makes. All that is there takes seconds after many tests."""
    gc.freeze()
    yield gc.collect
    gc.unfreeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(text, name)`` compares ``text`` with the file ``tests/golden/<name>``, or writes it."""

    def compare(text: str, name: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            lines = (each.splitlines(keepends=True) for each in (expected, text))
            diff = "".join(difflib.unified_diff(*lines, str(path), "this run"))
            pytest.fail(f"{diff}\nif the change is meant, run pytest with --update-golden", pytrace=False)

    return compare
