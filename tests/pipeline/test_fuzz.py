"""Arguments and files at random: all is well, or an error of pipec's own, in a short time."""

import contextlib
import copy
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resumable_training import Run, start
from torch import nn

import pipec
from pipec.artifact.artifact import read_artifact
from pipec.checkpoint import plain_values
from pipec.checkpoint.convert import convert, open_checkpoint
from pipec.cost.profile import load_profile
from pipec.errors import PipecError
from pipec.hardware.topology import read_topology
from pipec.ir import Compute, Phase
from pipec.options import OPTIONS
from pipec.saved_folders import CHECKSUMS
from pipec.schedules import Workload, custom_schedule, make_schedule
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.schedules.custom import format_orders

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


often = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_sum(folder: Path, file: Path, before: bytes) -> None:
    """As somebody who edits a file writes its sum anew."""
    sums = folder / CHECKSUMS
    old, new = (hashlib.sha256(data).hexdigest() for data in (before, file.read_bytes()))
    sums.write_text(sums.read_text().replace(old, new))


def copied(folder: Path) -> Path:
    copy = folder.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(folder, copy))


def refused_or_fine(call: Callable[[], object]) -> None:
    """An error that is not of pipec's own fails the test, with its traceback."""
    with contextlib.suppress(PipecError):
        call()


# files that were right before something happened to them

_TOKENS = (b"0", b"1", b"-1", b"1000000", b"1e400", b"99999999999999999999", b"nan", b"null", b"true", b'""')
_TOKENS += (b"[" * 20_000, b"[" * 20_000 + b"]" * 20_000, b"(" * 300)
_TOKENS += (b'"x"', b'"../x"', b"[]", b"{}", b"[[]]", b"\x00", b"\xff", b"b", b"int64", b"\n", b"")


@st.composite
def damaged(draw: st.DrawFn, text: bytes) -> bytes:
    """The text with some of its words, numbers or bytes replaced, or without a part of it."""
    words = [match.span() for match in re.finditer(rb'"[^"]*"|-?\d[\d.e+-]*|\w+', text)]
    changed = text
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["word", "word", "byte", "cut", "end"]))
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        if kind == "word" and words:
            start, end = draw(st.sampled_from(words))
            changed = changed[:start] + draw(st.sampled_from(_TOKENS)) + changed[end:]
        elif kind == "byte":
            changed = changed[:at] + draw(st.binary(min_size=1, max_size=2)) + changed[at + 1 :]
        elif kind == "cut":
            changed = changed[:at] + changed[at + draw(st.integers(1, 60)) :]
        else:
            changed = changed[:at]
    return changed


@st.composite
def rewritten(
    draw: st.DrawFn, text: bytes, loads: Any = json.loads, dumps: Callable[[Any], bytes] | None = None
) -> bytes:
    """JSON, or what ``loads`` reads, that parses, with something else in one or two places."""
    facts = loads(text)
    for _ in range(draw(st.integers(1, 2))):
        node, steps = facts, draw(st.integers(1, 7))
        for _ in range(steps):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or not node[key] or steps == 1:
                node[key] = copy.deepcopy(draw(st.sampled_from(_VALUES) | st.sampled_from(keys)))
                break
            node = node[key]
        else:
            if isinstance(node, list):
                node.append(copy.deepcopy(node[0])) if draw(st.booleans()) else node.pop()
            else:
                node.pop(draw(st.sampled_from(list(node))))
    return dumps(facts) if dumps is not None else json.dumps(facts, indent=1).encode()


_NUMBERS = (0, 1, -1, 7, 0.5, 10**6, 10**30, math.inf, math.nan)
_VALUES: list[Any] = [None, True, *_NUMBERS, "", "x", "b", "2*b", "../x"]
_VALUES += [[], {}, [0], [1, 0], ["x"], {"x": 1}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = pipec.compile(model(), devices=2, loss_fn=nn.functional.mse_loss, microbatches=2)
    directory = tmp_path_factory.mktemp("fuzz") / "saved"
    pipe.prepare(X, target=Y).save(directory, tensors=True)
    return directory


@often
@given(data=st.data())
def test_a_damaged_artifact_is_refused_and_with_new_sums_it_may_be_as_good(
    saved: Path, data: st.DataObject
) -> None:
    """Somebody who edits it may write the sums anew: it is refused before it runs, or it runs."""
    copy, names = copied(saved), sorted(path.name for path in saved.iterdir())
    file = copy / data.draw(st.sampled_from([*names, "plan.json", "plan.json"]))
    before = file.read_bytes()
    kinds = [damaged, rewritten] if file.suffix == ".json" else [damaged]
    file.write_bytes(data.draw(data.draw(st.sampled_from(kinds))(before)))
    if file.read_bytes() != before:
        with pytest.raises(PipecError):
            read_artifact(copy)
    if file.suffix in (".json", ".txt", ".py"):
        write_sum(copy, file, before)
        refused_or_fine(lambda: read_artifact(copy))
    if file.suffix in (".json", ".txt"):  # code that was changed at random is checked, and not run
        refused_or_fine(lambda: pipec.load(copy).step(X, target=Y))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A training after a step, and the checkpoint of it."""
    run, place = start("1 stage"), tmp_path_factory.mktemp("fuzz") / "checkpoint"
    run.train(0, 1)
    run.save(place)
    return run, place


@pytest.mark.slow
@often
@given(data=st.data())
def test_a_checkpoint_with_new_sums_is_refused_or_as_good(
    trained: tuple[Run, Path], data: st.DataObject
) -> None:
    run, whole = trained
    place, converted = copied(whole), whole.parent / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    file = place / data.draw(st.sampled_from(["SHA256SUMS", "checkpoint.pt", "checkpoint.pt"]))
    text = file.read_bytes()
    changes = damaged(text)
    if file.suffix == ".pt":
        changes |= rewritten(text, plain_values.read, plain_values.written)
    file.write_bytes(data.draw(changes))
    if file.name != CHECKSUMS:
        write_sum(place, file, text)
    refused_or_fine(lambda: open_checkpoint(place))
    refused_or_fine(lambda: run.load(place))
    refused_or_fine(lambda: convert(place, converted, None, None))


TOPOLOGY = {
    "devices": [{"count": 4, "memory_bytes": 16e9, "speed": 1.0}],
    "levels": [{"size": 2, "bytes_per_second": 1e10, "latency_seconds": 1e-6}] * 2,
}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)
    example = pipec.Example(nn.Sequential(*layers), (X,), target=Y, loss_fn=nn.functional.mse_loss)
    path = tmp_path_factory.mktemp("fuzz") / "profile.json"
    pipec.profile(example, repeats=1).save(path)
    return path.read_bytes()


def simulated(source: Any) -> object:
    """What ``pipec schedule orders.csv`` does."""
    return simulate_schedule(custom_schedule(source, 2, 2), Workload.uniform(2))


@pytest.mark.parametrize("name", ["t.json", "t.toml", "profile.json", "orders.csv"])
@often
@given(data=st.data())
def test_a_damaged_file(name: str, profile: bytes, tmp_path: Path, data: st.DataObject) -> None:
    read: Callable[[Path], object] = read_topology
    text = json.dumps(TOPOLOGY, indent=1).encode()
    if name == "profile.json":
        read, text = load_profile, profile
    changes = damaged(text) | rewritten(text)
    if name == "orders.csv":
        schedule = data.draw(st.sampled_from(["1f1b", "zb-h1", "dualpipe-v"]))
        read, changes = simulated, damaged(format_orders(make_schedule(schedule, 2, 4)).encode())
    path = tmp_path / name
    path.write_bytes(data.draw(changes))
    refused_or_fine(lambda: read(path))


_PLACED = st.sampled_from([0, 0, 0, 1, 1, 2, -1, 2**40, 0.5, "0", None, True])
_CELLS = st.builds(Compute, st.sampled_from([*Phase, *Phase, "backward", None]), _PLACED, _PLACED)


@often
@given(data=st.data())
def test_any_schedule_of_a_function(data: st.DataObject) -> None:
    fine = make_schedule("1f1b", 2, 2)
    places = st.lists(st.lists(_PLACED, max_size=2) | _PLACED, max_size=3)
    orders = st.lists(st.lists(_CELLS | _PLACED, max_size=6) | st.none(), max_size=3)
    changes: dict[str, st.SearchStrategy[Any]] = {
        "num_microbatches": _PLACED,
        "placement": places | st.permutations([(0,), (1,)]).map(tuple),
        "orders": orders | st.permutations(fine.orders) | st.just([[*order][::-1] for order in fine.orders]),
        "stream": st.sampled_from([None, 3, "stream"]),
        "name": st.none() | st.text(max_size=2),
    }
    names = data.draw(st.sets(st.sampled_from(list(changes)), min_size=1))
    made = replace(fine, **{name: data.draw(changes[name]) for name in sorted(names)})
    refused_or_fine(lambda: simulated(lambda *_: made))


# arguments

odd = (
    st.sampled_from([*_VALUES, (), (2,), ("a",), object(), nn.Linear, X, len, Path("/"), Path("nowhere")])
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.lists(st.sampled_from(["cpu", "meta", "gpu", None, 3]), max_size=3)
    | st.functions(like=lambda ranks, microbatches: None, returns=st.none() | st.integers())
)


@often
@given(name=st.sampled_from(["model", *OPTIONS]), value=odd)
def test_any_argument_of_compile(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"model": model(), "devices": 2, "loss_fn": nn.functional.mse_loss}
    refused_or_fine(lambda: pipec.compile(**{**arguments, name: value}))
