"""Wrong arguments of the API and the command line: one line says which, what it is and what it must be."""

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pipec
from pipec import api
from pipec.artifact.artifact import read_artifact
from pipec.cli import app
from pipec.errors import ArtifactError, InputError
from pipec.ir.argument_checks import ArgumentRule
from pipec.options import OPTIONS, Options
from pipec.pipeline import Pipeline, load

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def compiled(**given: Any) -> Pipeline:
    arguments = {"model": make(), "devices": 2, "loss_fn": nn.functional.mse_loss, "microbatches": 2}
    return pipec.compile(**{**arguments, **given})


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return compiled().prepare(X, target=Y)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (pipec.profile, api.PROFILE_ARGUMENTS),
        (pipec.load, load.LOAD),
    ],
)
def test_every_argument_has_a_row(function: Callable[..., Any], kinds: Mapping[str, ArgumentRule]) -> None:
    assert list(kinds) == list(inspect.signature(function).parameters)


def test_compile_shows_every_option_with_its_default_and_meaning() -> None:
    parameters = inspect.signature(pipec.compile).parameters
    documentation = pipec.compile.__doc__ or ""
    lines = str(pipec.compile.__signature__).splitlines()  # type: ignore[attr-defined]
    assert "    schedule: str | Path | Callable[[int, int], Schedule] = '1f1b'," in lines
    assert list(parameters) == ["model", *OPTIONS]
    for name, option in OPTIONS.items():
        assert parameters[name].default == getattr(Options, name)
        assert f"        {name}: {option.meaning.splitlines()[0]}\n" in documentation
        assert option.rule.is_valid(getattr(Options, name))


def test_compile_takes_devices_by_position_and_others_by_name_alone() -> None:
    make_pipeline = functools.partial(pipec.compile, make(), 2, loss_fn=nn.functional.mse_loss)
    assert make_pipeline(microbatches=4).prepare(X, target=Y).plan.num_microbatches == 4
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        pipec.compile(make(), 2, nn.functional.mse_loss)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "hint"), [("microbatchs", "did you mean 'microbatches'?"), ("zzz", "help(pipec.compile) lists")]
)
def test_an_option_that_there_is_not(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {name!r}; {hint}")):
        compiled(**{name: 2})


def test_an_artifact_records_the_options(tmp_path: Path) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    pipe = compiled(optimizer=optimizer, batched={"input": 0}, clip_grad_norm=math.inf)
    pipe.prepare(X, target=Y).save(tmp_path / "artifact")
    options = read_artifact(tmp_path / "artifact")[0].options
    changed = {name: value for name, value in options.items() if value != getattr(Options, name)}
    assert list(options) == list(OPTIONS)
    assert changed == {
        "devices": 2,
        "loss_fn": "torch.nn.functional.mse_loss",
        "microbatches": 2,
        "optimizer": "partial(torch.optim.adamw.AdamW, lr=0.001)",
        "clip_grad_norm": "inf",
        "batched": {"input": 0},
    }


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": nn.Linear}, r"model is <class 'torch\.nn.*; expected an nn\.Module"),
        (
            {"model": Unprintable()},
            r"model is a Unprintable that does not print \(RuntimeError\); expected an nn",
        ),
        ({"devices": True}, "devices is True; expected"),
        ({"devices": []}, r"devices is \[\]; expected"),
        ({"devices": ["cpu", "gpu7"]}, r"devices is \['cpu', 'gpu7'\]; expected"),
        (
            {"loss_fn": 5.5},
            "loss_fn is 5.5; expected a function or the key, attribute or position of",
        ),
        ({"microbatches": 2.0}, r"microbatches is 2\.0; expected a whole number from 1 to 1048576 or None"),
        ({"timeout": math.nan}, r"timeout is nan; expected a number above 0 and up to 1e\+08"),
        (
            {"memory_limit": "1..2GB"},
            r"memory_limit is '1\.\.2GB'; expected a number of bytes or text such as",
        ),
        ({"batch": None}, "batch is None; expected one of 'same', 'rank0'"),
        (
            {"schedule": lambda ranks, microbatches: None},
            r"<lambda>\(2, 2\) returned None; expected a Schedule",
        ),
        (
            {"schedule": Path("/nowhere.csv")},
            "/nowhere.csv cannot be read: .*; expected a file of compute orders",
        ),
        ({"costs": 5}, r"costs is 5; expected a pipec\.Profile or the path of its file or what pipec\.calib"),
        ({"optimizer": lambda: None}, r"the optimizer factory .* raised TypeError: .*takes 0 positional"),
        ({"costs": "a100"}, "a100 is no profile: .*; make one with `pipec profile`"),
    ],
)
def test_a_wrong_argument_of_compile(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        compiled(**given).step(X, target=Y)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.source(None), "stage is None; expected the number of a stage"),
        (lambda p: p.clip_grad_norm_("1"), "max_norm is '1'; expected a number"),
        (lambda p: p.clip_grad_norm_(1.0, math.nan), "norm_type is nan; expected a number"),
        (lambda p: p.visualize(5), "path is 5; expected a path or None"),
        (lambda p: p.visualize(trace="t"), r"trace is 't'; expected what the with of trace\(\) gave or None"),
        (lambda p: p.visualize("/dev/null/x.svg"), "/dev/null/x.svg cannot be written: "),
        (lambda p: p.load_state_dict(None), "state_dict is None; expected a mapping of names to tensors"),
        (lambda p: pipec.profile(make()), r"example is Sequential\(.*; expected a pipec\.Example"),
        (
            lambda p: pipec.Example(make(), X),
            r"args is tensor\(.*; expected a tuple of the model's arguments",
        ),
        (lambda p: pipec.calibrate("gpu"), "device is 'gpu', which cannot be used here: "),
    ],
)
def test_a_wrong_argument_of_another_call(
    pipe: Pipeline, call: Callable[[Pipeline], object], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call(pipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["/dev/null/artifact", "/proc/artifact", "\0", "a" * 300])
def test_a_folder_that_cannot_be_written_is_named(pipe: Pipeline, place: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be written: "):
        pipe.save(place)


TARGETS = """
import sys, torch, pipec
def raises(): return 1 / 0
def leaves(): sys.exit("no")
def needs(x): return x
def wrong(): return pipec.Example(5)
def nothing(): return None
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("targets.py").write_text(TARGETS)
    Path("broken.py").write_text("def f(:\n")
    Path("bytes.csv").write_bytes(b"\xff\xfe")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan os:system --devices 2", "os:system raised TypeError: system() missing required argument"),
        ("plan targets.py:raises --devices 2", "raised ZeroDivisionError: division by zero ("),
        ("plan targets.py:leaves --devices 2", "targets.py:leaves raised SystemExit: no ("),
        ("plan targets.py:nothing --devices 2", "returned NoneType; expected pipec.Example("),
        ("plan broken.py:f --devices 2", "broken.py raised SyntaxError: invalid syntax"),
        ("plan ..:f --devices 2", "target is '..:f'; expected path/to/file.py:factory"),
        ("schedule bytes.csv", "bytes.csv cannot be read: 'utf-8' codec can't decode"),
        ("schedule 1f1b --output /dev/null/x.svg", "/dev/null/x.svg cannot be written: "),
        ("schedule 1f1b --forward inf", "forward is inf; expected 0 or more, and finite"),
        ("schedule 1f1b --stages 4000 --microbatches 100000", "make 400000000 forwards; expected at most"),
    ],
)
def test_a_wrong_word_on_the_command_line(folder: Path, words: str, message: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "run DIR --trace --seed -1",
        f"plan x:y --devices {10**9}",
        "schedule",
    ],
)
def test_numbers_that_nothing_can_be_are_bad_usage(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


def test_shells_can_complete_commands() -> None:
    completing = {"_PIPEC_COMPLETE": "complete_bash", "COMP_WORDS": "pipec sch", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], env={**os.environ, **completing}, prog_name="pipec")
    assert result.stdout.split() == ["schedule"]
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).stdout
