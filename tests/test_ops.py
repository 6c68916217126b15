"""Collectives that a model or its loss calls: with replicas, what the unsplit model computes of a round."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_params import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unsplit_reference import StepResult, relative_error, unsplit_step
from worker_processes import read_outcome, run_lines, train

import pipec
from pipec import ops
from pipec.capture import tracer
from pipec.capture.captured_collectives import use_local_statistics
from pipec.errors import CaptureError, InputError, MixedRowsError
from zoo.layers import Apply

ROWS, IGNORED = 16, 2
ROUNDING = 1e-12
"""Everything here is of float64."""

Loss = Callable[[Tensor, Tensor], Tensor]
Factory = Callable[[], nn.Module]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.SyncBatchNorm(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 6),
        nn.SyncBatchNorm(6, affine=False),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(10, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 2, 5, generator=random, dtype=torch.float64)
    return x, torch.randint(3, (ROWS,), generator=random)


def contrastive(x: Tensor, y: Tensor) -> Tensor:
    keys = F.one_hot(y, 3) + x.tanh()
    logits = x @ ops.all_gather(keys).T
    return (logits.logsumexp(1) - (x * keys).sum(1)).mean()


def two_views(x: Tensor, y: Tensor) -> Tensor:
    """Rows of a class attract each other. Those of a microbatch are behind each other twice.

    Their order among all does not matter.
    """
    both, classes = torch.cat([x, x.tanh()]), torch.cat([y, y])
    same = (classes[:, None] == ops.all_gather(classes)[None, :]).double()
    similarity = (both @ ops.all_gather(both).T).log_softmax(1)
    return -((similarity * same).sum(1) / same.sum(1)).mean()


def masked(x: Tensor, y: Tensor) -> Tensor:
    counts = (y != IGNORED).double()
    return (x.square().sum(1) * counts).sum() / ops.all_reduce(counts.sum())


def standardised(x: Tensor, y: Tensor) -> Tensor:
    mean = ops.all_reduce(x.sum(0)) / ops.all_reduce(torch.ones_like(x).sum(0))
    return ((x - mean).abs().mean(1) * (y + 1)).mean()


def through_first(x: Tensor, y: Tensor) -> Tensor:
    """Parameters are the same on all replicas, and so is what is broadcast of them."""
    return (x * ops.broadcast(torch.ones(3, dtype=x.dtype))).square().mean() + F.cross_entropy(x, y)


LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (contrastive, two_views, masked, standardised, through_first)
}


def reference(loss_fn: Loss, rounds: int = 1, make: Factory = model) -> StepResult:
    """What the plain script computes of one round after the other."""
    unsplit, (x, y) = make(), batch()
    sizes = [ROWS // rounds] * rounds
    loss = unsplit_step(lambda x, y: loss_fn(unsplit(x), y), {"x": x, "y": y}, sizes, unsplit)
    return StepResult.of(loss, unsplit)


def step(loss_fn: Loss, make: Factory = model, **options: Any) -> StepResult:
    trained, (x, y) = make(), batch()
    pipe = pipec.compile(trained, loss_fn=loss_fn, **options)
    return StepResult.of(pipe.step(x, target=y), trained)


def check(found: StepResult, wanted: StepResult) -> None:
    assert relative_error(found.loss, wanted.loss) < ROUNDING
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        if gradient.norm() > ROUNDING:  # what batch norms subtract has none, up to rounding
            assert relative_error(found.gradients[name], gradient) < ROUNDING, name
    for name, buffer in wanted.buffers.items():
        if not name.endswith("num_batches_tracked"):  # counts microbatches
            assert relative_error(found.buffers[name], buffer) < ROUNDING, name


class Shifted(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def wrapped() -> nn.Module:
    """A norm whose forward is called by another function, as libraries do that install hooks."""
    norm = nn.SyncBatchNorm(4)
    plain = norm.forward
    norm.forward = lambda x: plain(x) + 1  # type: ignore[method-assign]
    return norm


@pytest.mark.parametrize("make", [lambda: Shifted(4), wrapped])
def test_a_norm_with_a_forward_of_its_own_keeps_it(make: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(10, 4), make(), nn.Tanh(), nn.Linear(4, 3)).double()

    check(step(F.cross_entropy, net, devices=2, microbatches=1), reference(F.cross_entropy, make=net))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(CaptureError, match=r"^2 is an nn.SyncBatchNorm with a forward of its own"):
        use_local_statistics(net())


@pytest.mark.parametrize("collective", [ops.all_reduce, ops.all_gather, ops.broadcast])
def test_a_plain_script_gets_a_copy(collective: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    result = collective(x)
    assert torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()
    (result * torch.arange(2.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0]] * 3


@pytest.mark.parametrize("name", LOSSES)
def test_replicas_join_their_microbatches_to_the_loss_of_the_batch(name: str) -> None:
    """Unless told otherwise, a step is one round."""
    check(step(LOSSES[name], linear, devices=2, stages=1), reference(LOSSES[name], make=linear))


@pytest.mark.slow
def test_the_fallback_joins_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = {"make_fx": tracer.FRONT_ENDS["make_fx"]}
    monkeypatch.setattr(tracer, "FRONT_ENDS", fallback)
    check(step(contrastive, devices=2, stages=1), reference(contrastive))


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_checkpointed_batch_norm_sees_the_round() -> None:
    found = step(F.cross_entropy, lambda: Checkpointed(*model()), devices=2, stages=1)
    check(found, reference(F.cross_entropy))


PLANS: dict[str, dict[str, Any]] = {
    "1x4": {"devices": 4, "stages": 1},
    "2x2": {"devices": 4, "replicas": 2},
    "2x2 replayed": {"devices": 4, "replicas": 2, "schedule": "gpipe", "recompute": "full"},
    "2x2 alone": {"devices": 4, "replicas": 2, "microbatches": 2},
    "1x2 rounds": {"devices": 2, "stages": 1, "microbatches": 8},
    "2x2 zb-h1": {"devices": 4, "replicas": 2, "schedule": "zb-h1", "microbatches": 4},
    "2x2 zb-v": {"devices": 4, "replicas": 2, "schedule": "zb-v", "microbatches": 4},
    "2x2 interleaved": {"devices": 4, "replicas": 2, "schedule": "interleaved-1f1b", "microbatches": 4},
    "one replica": {"devices": 2, "replicas": 1},
}


@pytest.mark.parametrize("name", slow_but(PLANS, "1x4", "2x2", "2x2 alone", "2x2 zb-v"))
def test_plans_make_the_gradients_of_the_rounds_and_the_same_bits_again(name: str, said: list[str]) -> None:
    """Alone, a replica computes the bits of the plain script, in programs without collectives."""
    options = PLANS[name]
    replicas = options.get("replicas", options["devices"])
    rounds = options.get("microbatches", replicas) // replicas
    trained, (x, y) = model(), batch()
    pipe = pipec.compile(trained, loss_fn=contrastive, **options)
    found, wanted = StepResult.of(pipe.step(x, target=y), trained), reference(contrastive, rounds)
    check(found, wanted)
    trained.zero_grad()
    again = StepResult.of(pipe.step(x, target=y), trained)
    for expected in (found, wanted) if replicas == 1 else (found,):
        assert torch.equal(again.loss, expected.loss)
        assert all(torch.equal(again.gradients[name], each) for name, each in expected.gradients.items())
    assert any(stage.model_collectives for stage in pipe.plan.stages) == (replicas > 1)
    told = [each for each in said if "rounds of" in each and "all_gather at test_ops.py" in each]
    assert len(told) == (rounds > 1)


@pytest.mark.slow
def test_training_with_updates_in_the_program_and_shared_state_follows_the_plain_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps with the same code, one of fewer rows, and an evaluation, in which batch norms join nothing."""
    unsplit, trained, (x, y) = model(), model(), batch()
    factory = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = factory(unsplit.parameters())
    pipe = pipec.compile(
        trained, devices=4, replicas=2, loss_fn=contrastive, optimizer=factory, shard="parameters"
    )
    for rows in (ROWS, ROWS, ROWS, 6):
        loss = contrastive(unsplit(x[:rows]), y[:rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert relative_error(pipe.step(x[:rows], target=y[:rows]), loss.detach()) < ROUNDING
    assert "recompiling" not in "".join(capsys.readouterr())
    with pytest.raises(InputError, match="2 microbatches share 15 rows"):
        pipe.step(x[:15], target=y[:15])
    pipe.eval()
    unsplit.eval()
    assert relative_error(pipe.eval_step(x, target=y), contrastive(unsplit(x), y).detach()) < ROUNDING
    assert relative_error(pipe(x), unsplit(x).detach()) < ROUNDING


def replayed(x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = checkpoint(contrastive, x, y, use_reentrant=False)
    return loss


def found_among_own(x: Tensor, y: Tensor) -> Tensor:
    return (x - x[(x @ ops.all_gather(x).T).argmax(1)]).square().mean()


def numbered(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ ops.all_gather(x).T, torch.arange(len(x)))


SAME_NUMBER, SHARED = "the same number, known beforehand", "2 replicas share 3; pass a multiple of 2"
REFUSED: dict[str, tuple[Loss, dict[str, Any], type[Exception], str]] = {
    "diagonal": (lambda x, y: (x @ ops.all_gather(x).T).diagonal().mean(), {}, MixedRowsError, "diagonal at"),
    "sliced": (lambda x, y: (x - ops.all_gather(x)[: len(x)]).mean(), {}, MixedRowsError, "getitem at"),
    "found": (found_among_own, {}, MixedRowsError, "getitem at test_ops.py"),
    "gathered numbers": (
        lambda x, y: (ops.all_gather(torch.arange(len(x))).sum() * x).mean(),
        {},
        MixedRowsError,
        "all_gather at",
    ),
    "numbers of rows": (numbered, {}, MixedRowsError, r"numbers of rows.* as an argument"),
    "replayed": (replayed, {}, CaptureError, "call it outside of torch.utils.checkpoint"),
    "sum of means": (lambda x, y: ops.all_reduce(x.mean()), {}, MixedRowsError, "all_reduce at"),
    "truth": (lambda x, y: x.mean() * ops.all_reduce(y == 1).sum(), {}, pipec.PipecError, "adds numbers"),
    "unequal": (contrastive, {"replicas": (2, 1), "devices": 3}, InputError, "the same number, known"),
    "searched": (contrastive, {"replicas": "auto"}, InputError, SAME_NUMBER),
    "batch norm": (F.cross_entropy, {"replicas": "auto"}, InputError, "SyncBatchNorm '1' joins the replicas"),
    "half a round": (contrastive, {"microbatches": 3}, InputError, SHARED),
    "uneven rows": (contrastive, {"microbatches": 6}, InputError, "6 microbatches share 16 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_cannot_join_is_refused(name: str) -> None:
    loss_fn, options, kind, message = REFUSED[name]
    make, (x, y) = model if name == "batch norm" else linear, batch()
    pipe = pipec.compile(make(), **{"devices": 2, "replicas": 2, "loss_fn": loss_fn, **options})
    with pytest.raises(kind, match=message):
        pipe.prepare(x, target=y)


def test_a_profile_knows_of_one_replica_alone() -> None:
    x, y = batch()
    measured = pipec.profile(pipec.Example(linear(), (x,), {}, y, contrastive))
    pipe = pipec.compile(linear(), devices=2, stages=1, loss_fn=contrastive, costs=measured)
    with pytest.raises(InputError, match="a profile is measured on one replica"):
        pipe.prepare(x, target=y)


def test_gathered_rows_are_no_result_of_the_batch() -> None:
    (x, _), both = batch(), nn.Sequential(linear(), Apply(ops.all_gather))
    with pytest.raises(InputError, match=r"a value of all rows together[\s\S]* all_gather"):
        pipec.compile(both, devices=2, stages=1)(x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two replicas, with its tensors."""
    folder = tmp_path_factory.mktemp("saved") / "artifact"
    pipe, (x, y) = pipec.compile(model(), devices=2, stages=1, loss_fn=contrastive), batch()
    pipe.prepare(input=x, target=y).save(folder, tensors=True)
    return folder


def test_an_artifact_joins_as_the_pipeline_does(saved: Path) -> None:
    x, y = batch()
    loaded = pipec.load(saved)
    assert relative_error(loaded.step(input=x, target=y), reference(contrastive).loss) < ROUNDING
    with pytest.raises(InputError, match="2 microbatches share 15 rows"):
        loaded.step(input=x[:15], target=y[:15])


@pytest.mark.slow
def test_replicas_in_two_processes_have_the_same_gradients(saved: Path, tmp_path: Path) -> None:
    x, y = batch()
    assert train([saved, saved], {"input": x, "target": y}, tmp_path) == ["", ""]
    check(read_outcome(tmp_path, 2, replicated=True), reference(contrastive))


OWN_ROWS = """
import pipec
from tests.test_ops import batch, contrastive, model
pipe = pipec.compile(model(), devices=2, stages=1, loss_fn=contrastive, batch="local")
(x, y), own = batch(), slice(8 * pipe.replica, 8 * pipe.replica + 8)
print(pipe.step(x[own], target=y[own]).item())
try:
    pipe.step(x[: 4 - pipe.replica], target=y[: 4 - pipe.replica])
except pipec.InputError as error:
    print(*str(error).split())
"""


def test_replicas_with_batches_of_their_own_join_them(tmp_path: Path) -> None:
    """Of parts with different numbers of rows, every rank says that they cannot be joined."""
    for loss, refused in run_lines(OWN_ROWS, 2, tmp_path):
        assert float(loss) == pytest.approx(float(reference(contrastive).loss), rel=ROUNDING)
        assert "which must have equally many" in refused
