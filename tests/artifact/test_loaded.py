"""A loaded artifact: what it refuses, and how it gets the values that it was saved without."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed_saves import killed_in_call
from torch import nn

import pipec
from pipec.artifact.artifact import _structure, read_artifact
from pipec.artifact.interface import interface_of, require_interface
from pipec.errors import ArtifactError, InputError, VerifyError
from pipec.pipeline import Pipeline

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


def compiled() -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    pipe = pipec.compile(model, devices=2, loss_fn=nn.functional.mse_loss, microbatches=4)
    return pipe.prepare(X, target=Y)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return compiled()


@pytest.fixture(scope="module")
def saved(pipe: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with its tensors, for microbatches of any size."""
    directory = tmp_path_factory.mktemp("saved") / "artifact"
    pipe.save(directory, tensors=True)
    return directory


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda p: p.step(X[:, :3], target=Y), r"args\[0\] is torch.float32 of shape \(8, 3\); expected"),
        (lambda p: p.step(X.double(), target=Y), r"args\[0\] is torch.float64 of .*; expected torch.float32"),
        (lambda p: p.step(X, target=Y[:6]), r"target is .* of shape \(6, 2\); expected .* of shape \(8, 2\)"),
        (lambda p: p.step(X), r"target is None; expected torch.float32 of shape \(8, 2\)"),
        (
            lambda p: p.step(x=X, target=Y),
            r"given kwargs\['x'\], target; this artifact was made for args\[0\], t",
        ),
        (lambda p: p.step(X, mask=X, target=Y), r"step was given args\[0\], kwargs\['mask'\], target; this"),
        (lambda p: p.eval().step(X, target=Y), r"in evaluation mode, .* for training mode .*train\(True\)"),
        (lambda p: p.step(X[:0], target=Y[:0]), "the batch has no rows"),
        (lambda p: p.step(X[:6], target=Y[:6]), r"right where b >= 2, but the arguments have b = 1"),
        (lambda p: p.step(X[0, 0], target=Y), r"args\[0\] is torch.float32 of shape \(\); expected"),
        (lambda p: p.step(X[0, 0]), r"the arguments hold no batch; expected args\[0\] \("),
        (lambda p: p.as_module(), "a loaded artifact has no model"),
        (lambda p: p(X), "forward was called, but this artifact holds no code for it"),
        (lambda p: p.eval_step(X, target=Y), "eval_step was called, but this artifact holds no code"),
        (
            lambda p: p.step(X, target=Y, outputs=True),
            "step with outputs was called, but this artifact holds no",
        ),
    ],
)
def test_a_bad_call_is_refused_and_the_next_good_one_works(
    saved: Path, mistake: Callable[[Pipeline], object], message: str
) -> None:
    loaded = pipec.load(saved)
    with pytest.raises(InputError, match=message):
        mistake(loaded)
    loaded.train()
    assert all(parameter.grad is None for parameter in loaded.parameters())
    assert loaded.step(X, target=Y).isfinite()


def test_keywords_are_matched_by_name(tmp_path: Path) -> None:
    class Difference(nn.Linear):
        def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return super().forward(a - 2 * b)

    torch.manual_seed(0)
    pipe = pipec.compile(Difference(4, 2), devices=1, loss_fn=nn.functional.mse_loss, microbatches=2)
    expected = pipe.step(b=X, a=X + 1, target=Y)
    pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved")
    assert torch.equal(loaded.step(b=X, a=X + 1, target=Y), expected)
    assert torch.equal(loaded.step(a=X + 1, b=X, target=Y), expected)
    with pytest.raises(InputError, match=r"given kwargs\['a'\], kwargs\['c'\], target; this artifact"):
        loaded.step(a=X, c=X, target=Y)


@pytest.mark.usefixtures("constant_batch")
def test_an_artifact_for_one_size_takes_no_other(tmp_path: Path) -> None:
    fixed = compiled()
    fixed.save(tmp_path / "fixed", tensors=True)
    loaded = pipec.load(tmp_path / "fixed")
    with pytest.raises(InputError, match="exactly 2 rows, so a batch of 8; the batch has 4"):
        loaded.step(X[:4], target=Y[:4])
    assert torch.equal(loaded.step(X, target=Y), fixed.step(X, target=Y))


def test_tensors_that_were_not_saved_are_given_values_later(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "empty")
    loaded = pipec.load(tmp_path / "empty")
    assert all(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    with pytest.raises(InputError, match=r"0\.weight and 8 other tensors are on the meta device and hold no"):
        loaded.step(X, target=Y)
    loaded.to_empty(device="cpu").load_state_dict(pipe.state_dict())
    assert torch.equal(loaded.step(X, target=Y), pipe.step(X, target=Y))


@pytest.mark.slow
def test_a_process_killed_anywhere_leaves_an_artifact(pipe: Pipeline, tmp_path: Path) -> None:
    """With its tensors and without by turns, so that a mixture of two would show."""
    directory, number = tmp_path / "saved", 1
    pipe.save(directory, tensors=True)
    while killed_in_call(functools.partial(pipe.save, directory, tensors=number % 2 == 0), number):
        has_tensors = [not tensor.is_meta for tensor in pipec.load(directory).parameters()]
        assert len({*has_tensors}) == 1
        number += 1
    assert number > 15
    assert pipec.load(directory).programs == pipe.programs
    pipe.save(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


def updating(**options: object) -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    how = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "optimizer": ADAM, **options}
    return pipec.compile(model, 2, **how).prepare(X, target=Y)


def test_options_that_are_not_of_an_artifact_are_refused(saved: Path, tmp_path: Path) -> None:
    updating(clip_grad_norm=1.0).save(tmp_path / "clips")
    updating().save(tmp_path / "updates")
    mistakes = [
        ("updates", {}, "update the weights, but optimizer is None; pass a function"),
        ("saved", {"optimizer": ADAM}, "end with gradients, but optimizer is .*to no other"),
        ("saved", {"devices": 3}, "is for 2 ranks, but devices asks for 3"),
        ("clips", {"optimizer": ADAM}, "clip gradients, but clip_grad_norm is None; pass a number"),
        ("updates", {"optimizer": ADAM, "clip_grad_norm": 1.0}, "the artifact's programs do not clip"),
        ("clips", {"optimizer": ADAM, "clip_grad_norm": 0.0}, "clip_grad_norm is 0.0; expected a number"),
    ]
    for name, options, message in mistakes:
        with pytest.raises(InputError, match=message):
            pipec.load(saved if name == "saved" else tmp_path / name, **options)


def test_an_edited_program_is_verified_although_its_checksum_fits(tmp_path: Path) -> None:
    updating(shard="parameters", stages=1).save(tmp_path / "saved")
    path, checksums = tmp_path / "saved" / "rank_0.txt", tmp_path / "saved" / "SHA256SUMS"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"bucket 0", b"bucket 77", 1))
    old, new = (hashlib.sha256(each).hexdigest() for each in (before, path.read_bytes()))
    checksums.write_text(checksums.read_text().replace(old, new))
    with pytest.raises(VerifyError, match="unshard names bucket 77; expected"):
        read_artifact(tmp_path / "saved")


class Tied(nn.Module):
    """A tied weight, and a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh() * self.scale)[:, :2]


def test_a_loaded_artifact_saves_and_resumes_as_the_pipeline_does(tmp_path: Path) -> None:
    def compiled_tied() -> Pipeline:
        torch.manual_seed(0)
        loss = nn.functional.mse_loss
        return pipec.compile(Tied(), devices=2, microbatches=2, loss_fn=loss, optimizer=ADAM)

    pipe = compiled_tied().prepare(X, target=Y)
    pipe.save(tmp_path / "saved", tensors=True)
    loaded, resumed, again = (pipec.load(tmp_path / "saved", optimizer=ADAM) for _ in range(3))
    for each in (pipe, loaded):
        each.step(X, target=Y)
    pipe.save_checkpoint(tmp_path / "of_pipe")
    loaded.save_checkpoint(tmp_path / "of_loaded", extra={"epoch": 1})
    resumed.load_checkpoint(tmp_path / "of_pipe")
    other = compiled_tied()
    assert other.load_checkpoint(tmp_path / "of_loaded") == {"epoch": 1}
    manager = pipec.CheckpointManager(tmp_path / "run", every=1)
    manager.resume(again)
    again.step(X, target=Y)
    losses = [each.step(X, target=Y).item() for each in (pipe, loaded, resumed, other, again)]
    assert losses == losses[:1] * 5
    assert loaded.state_dict().keys() == pipe.state_dict().keys()
    assert loaded.num_steps == resumed.num_steps == 2


def test_a_loaded_artifact_evaluates_what_was_evaluated_before(tmp_path: Path) -> None:
    pipe = compiled()
    pipe.eval()
    expected = pipe.eval_step(X, target=Y), pipe(X[:6])
    pipe.train()
    pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved", devices=["cpu", "cpu"])
    with pytest.raises(InputError, match=r"eval_step was called in training mode, but the artifact holds"):
        loaded.eval_step(X, target=Y)
    loaded.eval()
    assert torch.equal(loaded.eval_step(X, target=Y), expected[0])
    assert torch.equal(loaded(X[:6]), expected[1])
    with pytest.raises(InputError, match="step was called in evaluation mode, but the artifact holds"):
        loaded.step(X, target=Y)
    loaded.train()
    assert torch.equal(loaded.step(X, target=Y), pipe.step(X, target=Y))
    loaded.save(tmp_path / "again", tensors=True)
    again, files = pipec.load(tmp_path / "again").eval(), sorted(tmp_path.glob("again/*/plan.json"))
    assert [file.parent.name for file in files] == ["eval_step", "forward"]
    assert torch.equal(again.eval_step(X, target=Y), loaded.eval().eval_step(X, target=Y))


@pytest.mark.parametrize("spec", ['[1, {"0": null}]', "[7, {}]", "[1", "[1, 2]"])
def test_a_damaged_structure_of_outputs_is_refused(spec: str) -> None:
    with pytest.raises(ArtifactError, match=r"output_spec of plan\.json names no structure of outputs: "):
        _structure(spec)


# the interface of a stage's code: what an edit may not change

CODE = """
PARAMETERS = ('a', 'b')


def backward_0(frame):
    x = frame["x"]
    return {"grad_x": frame.pop("saved")}, (x, None)
"""


def test_the_inside_may_change_and_functions_may_be_added() -> None:
    edited = CODE.replace("    return", "    print(x)\n    return") + "\n\ndef helper(x):\n    return x\n"
    require_interface(edited, interface_of(CODE, "it"), "it")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(x, None)", "(x, x)", r"returns \({'grad_x'}, \(…, …\)\); expected .* \({'grad_x'}, \(…, None\)\)"),
        ('["x"]', '["y"]', r"takes 'saved', 'y' and .*; expected \(frame\) takes 'saved', 'x'"),
        ("backward_0", "backward_1", "it has no backward_0"),
        ("'b'", "'c'", r"PARAMETERS is \('a', 'c'\); expected is"),
        ("return", "retrun", "does not compile: line 7"),
    ],
)
def test_an_edit_of_the_interface_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        require_interface(CODE.replace(old, new), interface_of(CODE, "it"), "it")
