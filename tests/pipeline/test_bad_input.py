"""Bad input: each mistake is a clear error before anything is sent, and the pipeline works afterwards."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.errors import ArtifactError, InputError, PipecError, VerifyError
from pipec.pipeline import Pipeline


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return make(Net())


def make(model: nn.Module) -> Pipeline:
    return pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, microbatches=4)


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
    ids=["empty batch", "no target", "target rows", "shape", "no batch", "nothing"],
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


def test_what_is_not_compiled_yet_says_how() -> None:
    with pytest.raises(InputError, match=r"not compiled yet: call step\(\.\.\.\), or prepare"):
        print(make(Net()).plan)


def test_devices_that_contradict_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="devices asks for 2 ranks, but 3 processes were started"):
        pipec.compile(Net(), devices=2)


def test_a_model_without_anything_to_train() -> None:
    pipe = make(Net().requires_grad_(False))
    with pytest.raises(InputError, match=r"no parameter would get a gradient.* use eval_step\(\)"):
        pipe.step(X, target=Y)
    assert pipe.eval_step(X, target=Y) > 0


def test_names_that_are_code_stay_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential()
    model.add_module("\"\"\"\nopen('pwned', 'w') #'", nn.Linear(4, 8))
    model.add_module("'); open('pwned', 'w') #", nn.Linear(8, 2))
    pipe = make(model)
    pipe.step(X, target=Y)
    assert not (tmp_path / "pwned").exists()
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_saved_artifact_has_programs_and_code_and_no_model(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.prepare(X, target=Y).save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved")
    assert loaded.programs == pipe.programs
    assert [loaded.source(stage) for stage in range(2)] == [pipe.source(stage) for stage in range(2)]
    with pytest.raises(InputError, match="no modules of the model"):
        loaded.apply(nn.Module.eval)


def test_compiling_twice_gives_the_same_bytes(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.step(X, target=Y)
    again = make(Net()).prepare(X, target=Y)
    for name, saved in (("one", pipe), ("other", again)):
        saved.save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "other").iterdir())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes(), file


def change_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_sums(directory: Path, **digests: str) -> None:
    """Write these digests, and leave those of the other files."""
    sums = dict(line.split("  ")[::-1] for line in (directory / "SHA256SUMS").read_text().splitlines())
    lines = [f"{digest}  {name}\n" for name, digest in {**sums, **digests}.items()]
    (directory / "SHA256SUMS").write_text("".join(lines))


def name_a_file_outside(sums: Path) -> None:
    """The file is there and its checksum is right: nothing but its place is wrong."""
    (sums.parent.parent / "outside.txt").write_text("mine")
    edit_sums(sums.parent, **{"../outside.txt": hashlib.sha256(b"mine").hexdigest()})


def write_anew(file: Path, data: bytes) -> None:
    """With the checksum to match, so that what is written is what fails."""
    file.write_bytes(data)
    edit_sums(file.parent, **{file.name: hashlib.sha256(data).hexdigest()})


def replacing(old: str, new: str) -> Callable[[Path], None]:
    """Edits a file, and its checksum."""

    def edit(file: Path) -> None:
        assert old in file.read_text()
        write_anew(file, file.read_text().replace(old, new, 1).encode())

    return edit


def cut_short(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("stage_1.py", change_a_byte, "stage_1.py is not what was saved"),
        ("tensors.safetensors", change_a_byte, "tensors.safetensors is not what was saved"),
        ("stage_0.py", Path.unlink, "stage_0.py is missing"),
        ("plan.json", change_a_byte, "plan.json is not what was saved"),
        ("plan.json", lambda file: write_anew(file, b"{}"), "is not a plan of this format"),
        ("plan.json", replacing("pipec artifact", "pipec artifact 8"), "reads 'pipec artifact"),
        ("plan.json", replacing('"num_microbatches": 4', '"num_microbatches": 1000000'), "it was edited"),
        ("SHA256SUMS", lambda file: file.write_text("x\n"), "found 'x', expected a SHA-256 and a name"),
        ("SHA256SUMS", cut_short, "lists no tensors.safetensors; it was edited or cut short"),
        ("SHA256SUMS", Path.unlink, "SHA256SUMS cannot be read: No such file"),
        ("SHA256SUMS", name_a_file_outside, "names a file outside its folder: '../outside.txt'"),
        ("stage_0.py", lambda file: write_anew(file, b"\xff"), "stage_0.py cannot be read"),
        ("tensors.safetensors", lambda file: write_anew(file, b"no"), "is not a safetensors file"),
        ("plan.json", Path.unlink, "holds no plan.json"),
    ],
)
def test_a_damaged_artifact_is_refused(
    pipe: Pipeline, tmp_path: Path, file: str, damage: Callable[[Path], object], message: str
) -> None:
    pipe.step(X, target=Y)
    pipe.save(tmp_path / "saved", tensors=True)
    damage(tmp_path / "saved" / file)
    with pytest.raises((ArtifactError, VerifyError), match=message):
        pipec.load(tmp_path / "saved")


def test_saving_over_something_else_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.step(X, target=Y)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not an artifact of pipec"):
        pipe.save(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_lazy_model_is_called_once_before() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(InputError, match=r"0\.weight gets its shape .* as in model\(x\)"):
        make(model)
    model(X)
    assert make(model).step(X, target=Y).isfinite()
