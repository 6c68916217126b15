"""Wrong arguments, words, calls and files: each is one clear error, and the pipeline works afterwards."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_modules import model as module
from torch import Tensor, nn
from typer.testing import CliRunner

import pipec
from pipec import api
from pipec.artifact.artifact import read_artifact
from pipec.cli import app
from pipec.errors import ArtifactError, InputError, PipecError, VerifyError
from pipec.ir.argument_checks import ArgumentRule
from pipec.options import OPTIONS, Options
from pipec.pipeline import Pipeline, load
from zoo.layers import Apply


@module(first=lambda: nn.Linear(4, 8), second=lambda: nn.Linear(8, 2))
def Net(self: Any, x: Tensor) -> Tensor:
    return self.second(torch.tanh(self.first(x)))


X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


def compiled(**given: Any) -> Pipeline:
    arguments = {"model": Net(), "devices": 2, "loss_fn": nn.functional.mse_loss, "microbatches": 2}
    return pipec.compile(**{**arguments, **given})


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return compiled().prepare(X, target=Y)


# options and arguments


@pytest.mark.parametrize(
    ("function", "kinds"), [(pipec.profile, api.PROFILE_ARGUMENTS), (pipec.load, load.LOAD)]
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


def test_an_artifact_records_the_options(tmp_path: Path) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    pipe = compiled(optimizer=optimizer, batched={"x": 0}, clip_grad_norm=math.inf)
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
        "batched": {"x": 0},
    }


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": nn.Linear}, r"model is <class 'torch\.nn.*; expected an nn\.Module"),
        ({"model": Unprintable()}, r"model is a Unprintable that does not print \(RuntimeError\)"),
        ({"model": nn.Sequential(nn.LazyLinear(2))}, r"0\.weight gets its shape .* as in model\(x\)"),
        ({"model": Net().requires_grad_(False)}, r"no parameter would get a gradient.* use eval_step\(\)"),
        ({"devices": True}, "devices is True; expected"),
        ({"devices": []}, r"devices is \[\]; expected"),
        ({"devices": ["cpu", "gpu7"]}, r"devices is \['cpu', 'gpu7'\]; expected"),
        ({"loss_fn": 5.5}, "loss_fn is 5.5; expected a function or the key"),
        ({"microbatches": 2.0}, r"microbatches is 2\.0; expected a whole number from 1 to 1048576 or None"),
        ({"timeout": math.nan}, r"timeout is nan; expected a number above 0 and up to 1e\+08"),
        ({"memory_limit": "1..2GB"}, r"memory_limit is '1\.\.2GB'; expected a number of bytes"),
        ({"batch": None}, "batch is None; expected one of 'same', 'rank0'"),
        ({"schedule": lambda ranks, count: None}, r"<lambda>\(2, 2\) returned None; expected a Schedule"),
        ({"schedule": Path("/nowhere.csv")}, "/nowhere.csv cannot be read: .*; expected a file of compute"),
        ({"costs": 5}, r"costs is 5; expected a pipec\.Profile"),
        ({"optimizer": lambda: None}, r"the optimizer factory .* raised TypeError: .*takes 0 positional"),
        ({"microbatchs": 2}, "unexpected keyword argument 'microbatchs'; did you mean 'microbatches'"),
        ({"zzz": 2}, r"unexpected keyword argument 'zzz'; help\(pipec\.compile\) lists"),
        (lambda p: pipec.compile(Net(), 2, 3), "takes from 1 to 2 positional arguments but 3 were given"),
        ({"costs": "a100"}, "a100 is no profile: .*; make one with `pipec profile`"),
        (lambda p: compiled().plan, r"not compiled yet: call step\(\.\.\.\), or prepare"),
        (lambda p: p.source(None), "stage is None; expected the number of a stage"),
        (lambda p: p.clip_grad_norm_("1"), "max_norm is '1'; expected a number"),
        (lambda p: p.clip_grad_norm_(1.0, math.nan), "norm_type is nan; expected a number"),
        (lambda p: p.visualize(5), "path is 5; expected a path or None"),
        (lambda p: p.visualize(trace="t"), r"trace is 't'; expected .* trace\(\) gave or None"),
        (lambda p: p.visualize("/dev/null/x.svg"), "/dev/null/x.svg cannot be written: "),
        (lambda p: p.load_state_dict(None), "state_dict is None; expected a mapping of names to tensors"),
        (lambda p: pipec.profile(Net()), r"example is Net\(.*; expected a pipec\.Example"),
        (lambda p: pipec.Example(Net(), X), r"args is tensor\(.*; expected a tuple"),
        (lambda p: pipec.calibrate("gpu"), "device is 'gpu', which cannot be used here: "),
    ],
)
def test_a_wrong_argument(pipe: Pipeline, given: Any, message: str) -> None:
    """Of ``compile``, or of another call."""
    with pytest.raises((InputError, TypeError), match=message) as caught:
        given(pipe) if callable(given) else compiled(**given).step(X, target=Y)
    assert "\n" not in str(caught.value)


# words of the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan os:system --devices 2", "os:system raised TypeError: system() missing required argument"),
        ("plan leaves.py:leaves --devices 2", "leaves.py:leaves raised SystemExit: no ("),
        ("plan broken.py:f --devices 2", "broken.py raised SyntaxError: invalid syntax"),
        ("schedule bytes.csv", "bytes.csv cannot be read: 'utf-8' codec can't decode"),
        ("schedule 1f1b --output /dev/null/x.svg", "/dev/null/x.svg cannot be written: "),
        ("schedule 1f1b --forward inf", "forward is inf; expected 0 or more, and finite"),
        ("schedule 1f1b --stages 4000 --microbatches 100000", "make 400000000 forwards; expected at most"),
    ],
)
def test_a_wrong_word(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("leaves.py").write_text("import sys\ndef leaves(): sys.exit('no')\n")
    Path("broken.py").write_text("def f(:\n")
    Path("bytes.csv").write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# calls


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda p: p.step(X[:0], target=Y[:0]), "the batch has no rows"),
        (lambda p: p.step(X), r"target is missing: .* pass target="),
        (lambda p: p.step(X, target=Y[:6]), "target has 6 rows but the batch has 8"),
        (lambda p: p.step(X[:, :3].contiguous(), target=Y), "test_bad_input.py"),
        (lambda p: p.step(X[0, 0], target=Y[0, 0]), "needs a batch to split"),
        (lambda p: p.step(target=Y), r"Net\.forward\(x: .* cannot be called so: missing a required .* 'x'"),
    ],
)
def test_a_bad_call_is_refused_and_the_next_good_one_works(
    pipe: Pipeline, mistake: Callable[[Pipeline], Tensor], message: str
) -> None:
    before = pipe.step(X, target=Y)
    pipe.zero_grad()
    with pytest.raises(PipecError, match=message):
        mistake(pipe)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert torch.equal(pipe.step(X, target=Y), before)
    pipe.zero_grad()


@pytest.mark.slow
def test_dependent_rows_are_refused_whatever_their_number() -> None:
    """Also one row: a saved artifact of it would run other batches."""
    centred = nn.Sequential(nn.Linear(4, 8), Apply(lambda h: h - h.mean(0)), nn.Linear(8, 2))
    pipe = compiled(model=centred, microbatches=4)
    for rows in (1, 2, 8):
        with pytest.raises(InputError, match="rows depend on other rows"):
            pipe.step(X[:rows], target=Y[:rows])


@pytest.mark.slow
def test_a_batch_norm_needs_two_values_per_channel() -> None:
    """As torch says of a batch of one row. Of images each row has many values."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    pipe = compiled(model=model, microbatches=4)
    pipe.step(X, target=Y)
    for few in (1, 2, 4, 5):
        with pytest.raises(InputError, match=f"of {few} rows in 4 microbatches, some have one row"):
            pipe.step(X[:few], target=Y[:few])
    pipe.eval()
    pipe.eval_step(X[:2], target=Y[:2])
    pipe = compiled(model=model.train(), microbatches=1)
    pipe.step(X[:2], target=Y[:2])
    with pytest.raises(InputError, match="of 1 rows in 1 microbatches, some have one row"):
        pipe.step(X[:1], target=Y[:1])
    images = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 2))
    compiled(model=images, microbatches=4).step(X[:2, None], target=Y[:2])


# artifacts


def test_a_saved_artifact_has_programs_and_code_and_no_model(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved")
    assert loaded.programs == pipe.programs
    assert [loaded.source(stage) for stage in range(2)] == [pipe.source(stage) for stage in range(2)]
    with pytest.raises(InputError, match="no modules of the model"):
        loaded.apply(nn.Module.eval)


def test_compiling_twice_gives_the_same_bytes(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "one")
    compiled().prepare(X, target=Y).save(tmp_path / "other")
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other")
    )
    assert one == other


@pytest.mark.parametrize("place", ["/dev/null/artifact", "/proc/artifact", "\0", "a" * 300])
def test_a_folder_that_cannot_be_written_is_named(pipe: Pipeline, place: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be written: "):
        pipe.save(place)


def test_saving_over_something_else_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not an artifact of pipec"):
        pipe.save(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def edited(new: bytes, old: bytes | None = None) -> Callable[[Path], None]:
    """Replaces a text, or all, and the checksum with it, so that the text itself is refused."""

    def edit(file: Path) -> None:
        before, sums = file.read_bytes(), file.with_name("SHA256SUMS")
        assert old is None or old in before
        file.write_bytes(new if old is None else before.replace(old, new, 1))
        digests = [hashlib.sha256(data).hexdigest() for data in (before, file.read_bytes())]
        sums.write_text(sums.read_text().replace(*digests))

    return edit


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tensors.safetensors", rewritten(lambda data: data[:-1] + b"?"), "is not what was saved"),
        ("stage_0.py", Path.unlink, "stage_0.py is missing"),
        ("plan.json", edited(b"{}"), "is not a plan of this format"),
        ("plan.json", edited(b"pipec artifact 8", b"pipec artifact"), "reads 'pipec artifact"),
        ("plan.json", edited(b'num_microbatches": 1000000', b'num_microbatches": 2'), "it was edited"),
        ("SHA256SUMS", rewritten(lambda sums: b"x\n"), "found 'x', expected a SHA-256 and a name"),
        ("SHA256SUMS", rewritten(lambda sums: sums[: sums.rindex(b"\n", 0, -1) + 1]), "lists no tensors"),
        ("SHA256SUMS", Path.unlink, "SHA256SUMS cannot be read: No such file"),
        ("SHA256SUMS", rewritten(lambda sums: sums + b"0" * 64 + b"  ../x\n"), "outside its folder: '../x'"),
        ("stage_0.py", edited(b"\xff"), "stage_0.py cannot be read"),
        ("tensors.safetensors", edited(b"no"), "is not a safetensors file"),
        ("plan.json", Path.unlink, "holds no plan.json"),
    ],
)
def test_a_damaged_artifact_is_refused(
    pipe: Pipeline, tmp_path: Path, file: str, damage: Callable[[Path], object], message: str
) -> None:
    pipe.save(tmp_path / "saved", tensors=True)
    damage(tmp_path / "saved" / file)
    with pytest.raises((ArtifactError, VerifyError), match=message):
        pipec.load(tmp_path / "saved")
