"""A loaded artifact: what it refuses, and how it gets the values that it was saved without."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed_saves import killed_in_call
from torch import nn

import pipec
from pipec.artifact.artifact import _structure
from pipec.errors import ArtifactError, InputError
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


def test_a_batch_of_another_size_is_as_good(saved: Path) -> None:
    x, y = torch.cat([X, X])[:11], torch.cat([Y, Y])[:11]
    assert torch.equal(pipec.load(saved).step(x, target=y), compiled().step(x, target=y))


def test_a_batch_norm_is_refused_one_row(saved: Path) -> None:
    with pytest.raises(
        InputError, match=r"right where b >= 2, but the arguments have b = 1: the rows of a mi"
    ):
        pipec.load(saved).step(X[:6], target=Y[:6])


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
    with pytest.raises(
        InputError, match=r"given kwargs\['a'\], kwargs\['c'\], target; this artifact was made"
    ):
        loaded.step(a=X, c=X, target=Y)


@pytest.mark.usefixtures("constant_batch")
def test_an_artifact_for_one_size_takes_no_other(tmp_path: Path) -> None:
    fixed = compiled()
    fixed.save(tmp_path / "fixed", tensors=True)
    loaded = pipec.load(tmp_path / "fixed")
    with pytest.raises(InputError, match="exactly 2 rows, so a batch of 8; the batch has 4"):
        loaded.step(X[:4], target=Y[:4])
    assert torch.equal(loaded.step(X, target=Y), fixed.step(X, target=Y))


def test_devices_must_match_the_ranks_of_the_plan(saved: Path) -> None:
    with pytest.raises(InputError, match="is for 2 ranks, but devices asks for 3"):
        pipec.load(saved, devices=3)
    assert pipec.load(saved, devices=["cpu", "cpu"]).plan.num_ranks == 2


def test_tensors_that_were_not_saved_are_given_values_later(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "empty")
    loaded = pipec.load(tmp_path / "empty")
    assert all(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    with pytest.raises(InputError, match=r"0\.weight and 8 other tensors are on the meta device and hold no"):
        loaded.step(X, target=Y)
    loaded.to_empty(device="cpu").load_state_dict(pipe.state_dict())
    assert torch.equal(loaded.step(X, target=Y), pipe.step(X, target=Y))


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    pipe = pipec.compile(
        model, microbatches=4, loss_fn=nn.functional.mse_loss, optimizer=ADAM, **{"devices": 2, **options}
    )
    return pipe.prepare(X, target=Y)


def test_what_an_artifact_needs_for_its_updates_is_asked_for(saved: Path, tmp_path: Path) -> None:
    updating(clip_grad_norm=1.0).save(tmp_path / "clips")
    updating().save(tmp_path / "updates")
    mistakes = [
        (tmp_path / "updates", {}, "update the weights, but optimizer is None; pass a function"),
        (saved, {"optimizer": ADAM}, "end with gradients, but optimizer is .*to no other"),
        (
            tmp_path / "clips",
            {"optimizer": ADAM},
            "clip gradients, but clip_grad_norm is None; pass a number",
        ),
        (
            tmp_path / "updates",
            {"optimizer": ADAM, "clip_grad_norm": 1.0},
            "the artifact's programs do not clip",
        ),
        (
            tmp_path / "clips",
            {"optimizer": ADAM, "clip_grad_norm": 0.0},
            "clip_grad_norm is 0.0; expected a number above 0",
        ),
    ]
    for directory, options, message in mistakes:
        with pytest.raises(InputError, match=message):
            pipec.load(directory, **options)


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
    loaded = pipec.load(tmp_path / "saved")
    with pytest.raises(InputError, match=r"eval_step was called in training mode, but the artifact holds"):
        loaded.eval_step(X, target=Y)
    loaded.eval()
    assert torch.equal(loaded.eval_step(X, target=Y), expected[0])
    assert torch.equal(loaded(X[:6]), expected[1])
    with pytest.raises(
        InputError, match=r"step was called in evaluation mode, but the artifact holds its co"
    ):
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
