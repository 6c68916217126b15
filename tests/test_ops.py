"""Collectives that a model or its loss calls: with replicas, what the unsplit model computes of a round."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_params import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unsplit_reference import StepResult, relative_error
from worker_processes import read_outcome, run_ranks, train

import pipec
from pipec import ops
from pipec.artifact.artifact import read_artifact
from pipec.capture import tracer
from pipec.capture.captured_collectives import use_local_statistics
from pipec.errors import CaptureError, InputError, MixedRowsError
from pipec.ir import Op

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


def supervised(x: Tensor, y: Tensor) -> Tensor:
    """Rows of the same class attract each other (Khosla et al. 2020)."""
    same = (y[:, None] == ops.all_gather(y)[None, :]).double()
    similarity = (x @ ops.all_gather(x).T).log_softmax(1)
    return -((similarity * same).sum(1) / same.sum(1)).mean()


def two_views(x: Tensor, y: Tensor) -> Tensor:
    """The rows of a microbatch are behind each other twice; their order among all does not matter."""
    both, classes = torch.cat([x, x.tanh()]), torch.cat([y, y])
    same = (classes[:, None] == ops.all_gather(classes)[None, :]).double()
    return -((both @ ops.all_gather(both).T).log_softmax(1) * same).sum(1).mean()


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
    loss.__name__: loss for loss in (contrastive, supervised, two_views, masked, standardised, through_first)
}


def reference(loss_fn: Loss, rounds: int = 1, make: Factory = model) -> StepResult:
    """What the plain script computes of one round after the other."""
    unsplit, (x, y) = make(), batch()
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in zip(x.chunk(rounds), y.chunk(rounds), strict=True):
        loss = loss_fn(unsplit(inputs), targets) / rounds
        loss.backward()
        total += loss.detach()
    return StepResult.of(total, unsplit)


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
        return nn.Sequential(nn.Linear(10, 4), make(), nn.Tanh(), nn.Linear(4, 3)).double()

    unsplit, trained, (x, y) = net(), net(), batch()
    loss = F.cross_entropy(unsplit(x.flatten(1)), y)
    pipe = pipec.compile(trained, 2, loss_fn=F.cross_entropy, microbatches=1)
    assert relative_error(pipe.step(x.flatten(1), target=y), loss.detach()) < ROUNDING
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(CaptureError, match=r"^1 is an nn.SyncBatchNorm with a forward of its own"):
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


def test_the_numbers_of_rows_in_the_batch_are_an_argument() -> None:
    def numbered(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ ops.all_gather(x).T, torch.arange(len(x)))

    with pytest.raises(MixedRowsError, match=r"numbers of rows.* as an argument"):
        step(numbered, linear, devices=2, stages=1)


@pytest.mark.slow
def test_the_fallback_joins_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = {"make_fx": tracer.FRONT_ENDS["make_fx"]}
    monkeypatch.setattr(tracer, "FRONT_ENDS", fallback)
    check(step(contrastive, devices=2, stages=1), reference(contrastive))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_checkpointed_batch_norm_sees_the_round() -> None:
    """Its bits are those of one that is not checkpointed."""
    found = []
    for wrap in (nn.Sequential, Checkpointed):
        trained, (x, y) = wrap(model()), batch()
        pipe = pipec.compile(trained, devices=2, stages=1, loss_fn=F.cross_entropy, microbatches=2)
        found.append(StepResult.of(pipe.step(x, target=y), trained))
        assert any(join.op is Op.ALL_GATHER for join in pipe.plan.stages[0].model_collectives)
    assert torch.equal(found[0].loss, found[1].loss)
    gradients = [list(each.gradients.values()) for each in found]
    assert all(map(torch.equal, *gradients))


@pytest.mark.slow
def test_a_batch_of_another_size_is_joined() -> None:
    trained, unsplit, (x, y) = model(), model(), batch()
    pipe = pipec.compile(trained, devices=2, stages=1, loss_fn=contrastive)
    pipe.prepare(x, target=y)
    wanted = contrastive(unsplit(x[:6]), y[:6]).detach()
    assert relative_error(pipe.step(x[:6], target=y[:6]), wanted) < ROUNDING


PLANS: dict[str, dict[str, Any]] = {
    "1x4": {"devices": 4, "stages": 1},
    "2x2": {"devices": 4, "replicas": 2},
    "2x2 replayed": {"devices": 4, "replicas": 2, "schedule": "gpipe", "recompute": "full"},
    "2x2 alone": {"devices": 4, "replicas": 2, "microbatches": 2},
    "1x2 rounds": {"devices": 2, "stages": 1, "microbatches": 8},
    "2x2 zb-h1": {"devices": 4, "replicas": 2, "schedule": "zb-h1", "microbatches": 4},
    "2x2 zb-v": {"devices": 4, "replicas": 2, "schedule": "zb-v", "microbatches": 4},
    "2x2 interleaved": {"devices": 4, "replicas": 2, "schedule": "interleaved-1f1b", "microbatches": 4},
}


@pytest.mark.parametrize("name", slow_but(PLANS, "1x4", "2x2", "2x2 alone", "2x2 zb-v"))
def test_plans_make_the_gradients_of_the_rounds_and_the_same_bits_again(name: str) -> None:
    options = PLANS[name]
    replicas = options.get("replicas", options["devices"])
    trained, (x, y) = model(), batch()
    pipe = pipec.compile(trained, loss_fn=contrastive, **options)
    found = StepResult.of(pipe.step(x, target=y), trained)
    check(found, reference(contrastive, options.get("microbatches", replicas) // replicas))
    gradients = {name: gradient.clone() for name, gradient in found.gradients.items()}
    trained.zero_grad()
    again = StepResult.of(pipe.step(x, target=y), trained)
    assert torch.equal(again.loss, found.loss)
    assert all(torch.equal(again.gradients[name], each) for name, each in gradients.items())


def test_training_with_updates_in_the_program_and_shared_state_follows_the_plain_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three steps with the same code, and then an evaluation, in which batch norms join nothing."""
    unsplit, trained, (x, y) = model(), model(), batch()
    factory = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = factory(unsplit.parameters())
    pipe = pipec.compile(
        trained, devices=4, replicas=2, loss_fn=contrastive, optimizer=factory, shard="parameters"
    )
    for _ in range(3):
        loss = contrastive(unsplit(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert relative_error(pipe.step(x, target=y), loss.detach()) < ROUNDING
    assert "recompiling" not in "".join(capsys.readouterr())
    with pytest.raises(InputError, match="2 microbatches share 15 rows"):
        pipe.step(x[:15], target=y[:15])
    pipe.eval()
    unsplit.eval()
    assert relative_error(pipe.eval_step(x, target=y), contrastive(unsplit(x), y).detach()) < ROUNDING
    assert relative_error(pipe(x), unsplit(x).detach()) < ROUNDING


@pytest.mark.slow
def test_alone_they_are_the_identity_and_cost_nothing() -> None:
    """One replica: the bits of the plain script, and programs without collectives."""
    trained, (x, y) = model(), batch()
    pipe = pipec.compile(trained, devices=2, loss_fn=contrastive)
    found, wanted = StepResult.of(pipe.step(x, target=y), trained), reference(contrastive)
    assert torch.equal(found.loss, wanted.loss)
    assert all(torch.equal(found.gradients[name], each) for name, each in wanted.gradients.items())
    assert pipe.plan.num_microbatches == 1
    assert not any(stage.model_collectives for stage in pipe.plan.stages)


@pytest.mark.slow
def test_more_rounds_than_one_are_told_once(said: list[str]) -> None:
    (x, y), pipe = (
        batch(),
        pipec.compile(model(), devices=2, stages=1, loss_fn=contrastive, microbatches=4),
    )
    pipe.step(x, target=y)
    pipe.step(x, target=y)
    (told,) = (message for message in said if "rounds" in message)
    assert "reduces rounds of 2 of the 4 microbatches, not the whole batch" in told
    assert "all_gather at test_ops.py" in told


def diagonal(x: Tensor, y: Tensor) -> Tensor:
    return (x @ ops.all_gather(x).T).diagonal().mean()


def sliced(x: Tensor, y: Tensor) -> Tensor:
    return (x - ops.all_gather(x)[: len(x)]).square().mean()


def found_among_own(x: Tensor, y: Tensor) -> Tensor:
    return (x - x[(x @ ops.all_gather(x).T).argmax(1)]).square().mean()


def gathered_numbers(x: Tensor, y: Tensor) -> Tensor:
    return (ops.all_gather(torch.arange(len(x))).sum() * x).mean()


def replayed(x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = checkpoint(contrastive, x, y, use_reentrant=False)
    return loss


def sum_of_means(x: Tensor, y: Tensor) -> Tensor:
    return ops.all_reduce(x.mean())


def of_truth(x: Tensor, y: Tensor) -> Tensor:
    return x.mean() * ops.all_reduce(y == 1).sum()


REFUSED: dict[str, tuple[Loss, dict[str, Any], type[Exception], str]] = {
    "diagonal": (diagonal, {}, MixedRowsError, "diagonal at test_ops.py"),
    "sliced": (sliced, {}, MixedRowsError, "getitem at test_ops.py"),
    "found": (found_among_own, {}, MixedRowsError, "getitem at test_ops.py"),
    "gathered numbers": (gathered_numbers, {}, MixedRowsError, "all_gather at test_ops.py"),
    "replayed": (replayed, {}, CaptureError, "call it outside of torch.utils.checkpoint"),
    "sum of means": (sum_of_means, {}, MixedRowsError, "all_reduce at test_ops.py"),
    "truth": (of_truth, {}, pipec.PipecError, "all_reduce adds numbers"),
    "unequal": (contrastive, {"replicas": (2, 1), "devices": 3}, InputError, "the same number, known"),
    "searched": (contrastive, {"replicas": "auto"}, InputError, "the same number, known beforehand"),
    "batch norm": (
        F.cross_entropy,
        {"replicas": "auto"},
        InputError,
        "the nn.SyncBatchNorm '1' joins the replicas",
    ),
    "half a round": (
        contrastive,
        {"microbatches": 3},
        InputError,
        "2 replicas share 3; pass a multiple of 2",
    ),
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
    (x, _), both = batch(), nn.Sequential(linear(), Gathered())
    with pytest.raises(InputError, match=r"a value of all rows together[\s\S]* all_gather"):
        pipec.compile(both, devices=2, stages=1)(x)


class Gathered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.all_gather(x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two replicas, with the tensors of a model that returns its loss."""
    folder = tmp_path_factory.mktemp("saved") / "artifact"
    (x, y), whole = batch(), _WithLoss()
    pipec.compile(whole, devices=2, stages=1).prepare(x=x, y=y).save(folder, tensors=True)
    return folder


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return contrastive(self.model(x), y)


def _expected() -> StepResult:
    whole, (x, y) = _WithLoss(), batch()
    loss = whole(x, y)
    loss.backward()
    return StepResult.of(loss.detach(), whole)


def test_an_artifact_joins_as_the_pipeline_does(saved: Path) -> None:
    x, y = batch()
    loaded = pipec.load(saved)
    assert relative_error(loaded.step(x=x, y=y), _expected().loss) < ROUNDING
    with pytest.raises(InputError, match="2 microbatches share 15 rows"):
        loaded.step(x=x[:15], y=y[:15])
    joins = read_artifact(saved)[0].plan.stages[0].model_collectives
    assert [join.op for join in joins] == ["all_gather"] * 3 + ["reduce_scatter"] * 3


@pytest.mark.slow
def test_replicas_in_two_processes_have_the_same_gradients(saved: Path, tmp_path: Path) -> None:
    x, y = batch()
    assert train([saved, saved], {"x": x, "y": y}, tmp_path) == ["", ""]
    check(read_outcome(tmp_path, 2, replicated=True), _expected())


def test_replicas_with_batches_of_their_own_join_them(tmp_path: Path) -> None:
    """Of parts with different numbers of rows, every rank says that they cannot be joined."""
    printed = run_ranks(Path(__file__).parent / "helpers" / "contrastive_local_batch_script.py", 2, tmp_path)
    for each in printed:
        (loss,) = re.findall(r"^loss (\S+)$", each, re.MULTILINE)
        assert float(loss) == pytest.approx(float(reference(contrastive).loss))
        assert "which must have equally many" in each
