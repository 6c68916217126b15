"""Steps in given microbatches, each a batch of its own with sizes of its own, against plain accumulation."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import given_microbatches
import pytest
import torch
from awkward_modules import Pair
from forward_modules import model as module
from given_microbatches import KINDS, Graphs, Rows, accumulate, compare, graphs, same
from slow_params import slow
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from unsplit_reference import Plain
from worker_processes import run_ranks

import pipec

SCRIPT = Path(given_microbatches.__file__)

Cases = list[tuple[str, dict[str, Any]]]
FAST: Cases = [
    ("rows", {"schedule": "1f1b"}),
    ("graphs", {"schedule": "interleaved-1f1b"}),
    ("images", {"schedule": "gpipe"}),
    ("graphs", {"counts": (3, 1, 4), "devices": 4, "replicas": 2}),
    ("graphs", {"counts": (3, 1, 4), "recompute": "full"}),
    ("graphs", {"counts": (3, 1, 4), "microbatches": 4}),
    ("graphs", {"counts": (3, 1, 4), "check": "always"}),
]
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b")
TABLE: Cases = [(kind, {"schedule": name}) for kind in KINDS for name in SCHEDULES]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def random_rows(count: int, target: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 8), torch.randn(count if target is None else target, 3)


def pair_of(fixes_norm: bool = True, **options: Any) -> Pair:
    """The batch norm may be one that is evaluated."""
    torch.manual_seed(0)
    model = Rows()
    model.norm.train(not fixes_norm)
    return Pair(model, mse_loss, **{"microbatches": None, **options})


@pytest.mark.parametrize(
    ("kind", "options"), [*FAST, *(slow(*each) for each in TABLE if each not in FAST)], ids=str
)
def test_is_plain_accumulation(kind: str, options: dict[str, Any]) -> None:
    """Three steps of microbatches of unequal sizes; the second has weights."""
    compare(kind, **{"devices": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks", "replicas"), [("rows", 2, 1), ("graphs", 2, 1), ("graphs", 4, 2)]
)
def test_under_torchrun(kind: str, num_ranks: int, replicas: int, tmp_path: Path) -> None:
    printed = run_ranks(SCRIPT, num_ranks, tmp_path, [kind, str(num_ranks), str(replicas)])
    assert [each.splitlines()[-1] for each in printed] == ["equal"] * num_ranks


@pytest.mark.slow
def test_random_lists() -> None:
    """Lists of 1 to 6 microbatches with random weights and sizes, 0 and 1 among them."""
    draw = random.Random(0)
    torch.manual_seed(0)
    pair = Pair(Graphs(4, 2), microbatches=None)
    for _ in range(50):
        sizes = [(draw.randint(1, 8), draw.randint(0, 6) or -1, draw.randint(1, 4)) for _ in range(6)]
        microbatches = [graphs(0, *each) for each in sizes[: draw.randint(1, 6)]]
        weights = draw.choice([None, "sum", [draw.uniform(-1, 2) for _ in microbatches]])
        same(pair, microbatches, weights)


@pytest.mark.parametrize("options", [{}, {"devices": 4, "replicas": 2, "shard": "parameters"}], ids=str)
def test_training_is_plain_training(options: dict[str, Any]) -> None:
    """The pipeline's own optimizer clips, every second step accumulates, and a stream of lists follows."""
    update = {"optimizer": lambda given: torch.optim.Adam(given, 0.01), "clip_grad_norm": 0.1}
    pair = pair_of("replicas" in options, **update, **options)  # replicas average statistics
    plain, pipe = Plain(pair.unsplit, **update), pair.pipe
    lists = [[random_rows(2 + k % 4) for k in range(count)] for count in (3, 2, 4, 1, 2, 3)]

    def expected(microbatches: Any, updates: bool = True) -> float:
        loss = accumulate(plain.model, microbatches, [1 / len(microbatches)] * len(microbatches), mse_loss)
        if updates:
            plain.update()
        return loss

    for first, second in (lists[:2], lists[2:4]):
        with pipe.accumulate():
            assert pipe.step(microbatches=first).item() == pytest.approx(expected(first, False), 1e-12)
        assert pipe.step(microbatches=second).item() == pytest.approx(expected(second), 1e-12)
    losses = [loss.item() for loss in pipe.stream(lists, microbatches=True)]
    assert losses == pytest.approx([expected(each) for each in lists], 1e-12)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)


def test_asynchronous_stream_has_sizes_of_each_microbatch() -> None:
    """Halves of a batch in turn; batches that are split into the same halves train alike.

    The other lists have other halves, which no batch is split into, and then another number.
    """
    options = {"schedule": "pipedream-2bw", "optimizer": lambda given: torch.optim.SGD(given, 0.1)}
    pipe, other = pair_of(microbatches=2, **options).pipe, pair_of(**options).pipe
    batches = [random_rows(5) for _ in range(6)]

    def cut(at: int) -> list[Any]:
        return [[(x[:at], y[:at]), (x[at:], y[at:])] for x, y in batches]

    wanted = [loss.item() for loss in pipe.stream(batches)]
    found = [loss.item() for loss in other.stream(cut(3), microbatches=True, weights=[0.6, 0.4])]
    assert found == pytest.approx(wanted, 1e-12)
    mixed = [one if k % 2 else two for k, (one, two) in enumerate(zip(cut(3), cut(2), strict=True))]
    before = other.num_steps
    assert all(loss.isfinite() for loss in other.stream([*mixed, mixed[0] * 2], microbatches=True))
    assert other.num_steps == before + 7
    with pytest.raises(pipec.InputError, match="run by several programs"):
        list(other.stream([cut(2)[0], cut(1)[0]], microbatches=True))
    assert other.num_steps == before + 8


LAYERS: dict[str, Any] = {name: lambda: nn.Linear(8, 8) for name in ("first", "second")}


@module(**LAYERS)
def Shared(self: Any, x: Tensor, y: Tensor, scale: float = 1.0, keep: int = 4, flag: bool = True) -> Tensor:
    """Two arguments of sizes that may be equal, a number, and a branch on a size, and one on a value."""
    shift = 1 if (y > -100).all() else 0
    x, y = self.second(torch.tanh(self.first(x))) + shift, self.second(y)
    if x.shape[0] > 6:
        x = 2 * x
    return (x[:, None] * y[None]).tanh()[..., :keep].sum() * scale


def both(x: int, y: int, **others: Any) -> dict[str, Any]:
    return {"x": torch.randn(x, 8), "y": torch.randn(y, 8), **others}


def test_sizes_that_are_equal_by_chance_and_change_later() -> None:
    """Equal sizes, one that differs in a later step, equal ones again, 1, and numbers that differ."""
    torch.manual_seed(0)
    pair = Pair(Shared(), microbatches=None)
    other = both(3, 4)
    for microbatches in (
        [both(4, 4), both(4, 4)],
        [both(4, 4), both(5, 5)],
        [both(4, 5), both(6, 4)],
        [both(1, 3), both(4, 1), both(1, 1), both(4, 4)],
        [both(9, 4), both(3, 4)],
        [other, other],
        [both(3, 4, scale=0.5), both(3, 4, scale=0.0), both(3, 4, scale=1.0)],
        [both(3, 4, keep=1), both(3, 4, keep=3), both(3, 5, keep=0)],
    ):
        same(pair, microbatches, "sum")
        before = pair.pipe.compile_seconds
        pair.pipe.step(microbatches=microbatches, weights=[0.0] * len(microbatches))
        assert pair.pipe.compile_seconds == before, "what was compiled is found"


def test_differences_and_mistakes_are_refused() -> None:
    pipe = pipec.compile(Shared(), devices=2)
    own = both(3, 4)
    for microbatches, named in (
        ([{**own, "flag": True}, {**own, "flag": False}], r"microbatches\[1\] .*'flag'\] is the bool False"),
        ([own, own, {**own, "x": own["x"].float()}], r"microbatches\[2\] .*kwargs\['x'\] is float32"),
        ([own, both(3, 4, keep=2)], r"microbatches\[1\] .*kwargs\['keep'\] is in one of them alone"),
        ([own, {**own, "x": torch.randn(2, 3, 8)}], r"microbatches\[1\] .*kwargs\['x'\] is float64 of 3 dim"),
        ([own, {"x": own["x"]}], r"microbatches\[1\]: .*missing a required argument: 'y'"),
        ([own, {**own, "y": own["y"] - 1000}], r"different branches .*y > -100"),
        ([], "empty"),
        (own, "microbatches is a dict"),
    ):
        with pytest.raises(pipec.InputError, match=named):
            pipe.step(microbatches=microbatches)
    for given, named in (
        ({"weights": [1.0]}, "weights has 1 numbers for 2"),
        ({"weights": [1.0, float("nan")]}, "expected a finite number"),
        ({"outputs": True}, "outputs of given microbatches"),
        (own, "given microbatches, and x, y as well"),
    ):
        with pytest.raises(pipec.InputError, match=named):
            pipe.step(microbatches=[own, own], **given)
    assert all(parameter.grad is None for parameter in pipe.parameters())


class Placing(nn.Module):
    """Knows where documents begin."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, begins: Tensor) -> Any:
        places = torch.arange(ids.shape[1])[None] - begins
        return self.model(input_ids=ids, position_ids=places, labels=ids).loss


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_documents_attend_to_each_other_as_in_eager_torch(use_cache: bool) -> None:
    """transformers keeps them apart without a cache of keys and values alone. The first row has one."""
    model: Any = given_microbatches.llama()
    model.config.use_cache = use_cache
    pair = Pair(Placing(model.double()), microbatches=None)
    ids, one = torch.arange(12)[None], torch.zeros(1, 12, dtype=torch.long)
    two = one + 5 * (torch.arange(12) >= 5)
    for begins in (one, two):
        same(pair, [{"ids": ids, "begins": begins}] * 2, None, 1e-6, 1e-6)


def test_a_microbatch_that_the_model_cannot_take_is_named() -> None:
    """One row, of which a batch norm has no variance; then none."""
    pipe = pair_of(fixes_norm=False).pipe
    with pytest.raises(pipec.InputError, match=r"microbatches\[1\]: .*\n.*\n.*more than 1 value per channel"):
        pipe.step(microbatches=[random_rows(3), random_rows(1)])
    pipe = pair_of().pipe
    with pytest.raises(pipec.InputError, match=r"microbatches\[2\]: args\[0\] is empty"):
        pipe.step(microbatches=[random_rows(3), random_rows(4), random_rows(0)])


def test_several_programs_cannot_be_skipped_together() -> None:
    pipe = pair_of(on_nan="skip").pipe
    with pytest.raises(pipec.InputError, match="given microbatches are run by several programs"):
        pipe.step(microbatches=[random_rows(3), random_rows(1)])
    with_nan = random_rows(4)
    with_nan[0][0] = float("nan")
    pipe.step(microbatches=[random_rows(3), with_nan])
    assert pipe.num_skipped == 1
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_logs_are_means_over_microbatches() -> None:
    def logged(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = (output - target).abs()
        return error.mean(), {"largest": error.max()}

    def by_row(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (output - target).abs().mean(), {"errors": (output - target).abs().mean(1)}

    pair, given = (
        Pair(nn.Linear(8, 3), logged, devices=1, microbatches=None),
        [random_rows(3), random_rows(5)],
    )
    wanted = sum(pair.loss(x, target=y)[0][1]["largest"].item() for x, y in given) / 2
    pair.pipe.step(microbatches=given, weights=[0.9, 0.1])
    assert pair.pipe.logs["largest"].item() == pytest.approx(wanted, 1e-12)
    with pytest.raises(pipec.InputError, match="logs that are no floating-point numbers"):
        pipec.compile(pair.model, loss_fn=by_row, devices=1).step(microbatches=given)


def test_without_microbatches_weights_are_an_argument_of_the_model() -> None:
    @module(**LAYERS)
    def Weighted(self: Any, x: Tensor, weights: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))).sum(1) * weights).mean()

    Pair(Weighted()).step(torch.randn(4, 8), weights=torch.rand(4))


def test_a_saved_artifact_takes_any_number_and_sizes(tmp_path: Path) -> None:
    """Fewer microbatches than it was compiled for, as many, and more; then what it cannot take."""
    pair = pair_of()
    pipe = pair.pipe
    pipe.prepare(microbatches=[random_rows(1), random_rows(3), random_rows(5), random_rows(2)])
    assert "3 given microbatches" in str(pipe.plan)
    assert "checked against the model itself on 1 + 1 rows" in str(pipe.plan)
    assert "planned for a microbatch of t = 5" in str(pipe.plan)
    pipe.save(tmp_path / "saved", tensors=True)
    pair.pipe = loaded = pipec.load(tmp_path / "saved")
    for count in (1, 3, 2, 7):
        microbatches, weights = [random_rows(2 + k) for k in range(count)], [0.1 + k for k in range(count)]
        same(pair, microbatches, weights)
    x, y = random_rows(4)
    with pytest.raises(pipec.InputError, match=r"microbatches\[1\]: .*right where t >= 2"):
        loaded.step(microbatches=[random_rows(4), random_rows(1)])
    with pytest.raises(pipec.InputError, match=r"microbatches\[0\]: .*target is 3, but t is 4"):
        loaded.step(microbatches=[random_rows(4, target=3)])
    with pytest.raises(pipec.InputError, match="compiled for given microbatches"):
        loaded.step(x, target=y)
    pipe.step(x, target=y)
    pipe.save(tmp_path / "split")
    with pytest.raises(pipec.InputError, match="compiled for a batch to be split"):
        pipec.load(tmp_path / "split").step(microbatches=[(x, y)])


@module(**LAYERS)
def Flagged(self: Any, x: Tensor, flag: Tensor) -> Tensor:
    """Branches on the values of an argument."""
    x = self.second(torch.tanh(self.first(x)))
    return (x * 2 if flag.sum() > 0 else x).mean()


def test_a_branch_is_decided_for_each_graph() -> None:
    """One row has a graph of its own, and so a branch of its own; others of one graph take the same."""
    torch.manual_seed(0)
    pair = Pair(Flagged(), microbatches=None)

    def flagged(*rows_and_flags: tuple[int, int]) -> list[dict[str, Tensor]]:
        flags = [(count, torch.full((2 + count % 3,), flag)) for count, flag in rows_and_flags]
        return [{"x": torch.randn(count, 8), "flag": flag} for count, flag in flags]

    for given in (((9, 1), (1, -1)), ((9, -1), (1, 1)), ((1, -1), (4, 1), (5, 1)), ((4, -1), (5, -1))):
        same(pair, flagged(*given), "sum")
    with pytest.raises(pipec.InputError, match="different branches"):
        pair.pipe.step(microbatches=flagged((9, 1), (8, -1)))


def test_random_numbers_are_those_of_a_microbatch() -> None:
    """Equal microbatches draw other numbers, also where a microbatch between them has a graph of its own."""
    layers = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)
    pipe = pipec.compile(nn.Sequential(*layers), loss_fn=mse_loss, devices=2)
    equal = random_rows(3)
    microbatches, found = [equal, equal, random_rows(1), equal], list[float]()
    for place in (0, 1, 3, 0):
        torch.manual_seed(7)
        weights = [float(place == each) for each in range(4)]
        found.append(pipe.step(microbatches=microbatches, weights=weights).item())
    assert found[0] == found[3]
    assert len({*found}) == 3


@module(**LAYERS)
def Otherwise(self: Any, x: Tensor) -> Tensor:
    """Is something else when it is traced."""
    x = self.second(torch.tanh(self.first(x)))
    return (x * 2 if torch.compiler.is_compiling() and x.shape[0] == 4 else x).mean()


def test_the_check_compares_the_first_two_microbatches() -> None:
    """The second one has a graph that is not what the model is."""
    microbatches = [{"x": torch.randn(count, 8)} for count in (5, 4, 6)]
    with pytest.raises(pipec.CaptureError, match="does not compute what the model computes"):
        pipec.compile(Otherwise(), devices=2).step(microbatches=microbatches)
    pipec.compile(Otherwise(), devices=2, check="off").step(microbatches=microbatches)


@pytest.mark.parametrize(
    ("norm", "batch", "message"),
    [
        (nn.SyncBatchNorm(8), "same", "norm has a collective between the replicas"),
        (nn.Identity(), "local", "the same list on every rank"),
    ],
)
def test_what_replicas_cannot_do_is_refused(norm: Any, batch: str, message: str) -> None:
    model = Rows()
    model.norm = norm
    pipe = pipec.compile(model, loss_fn=mse_loss, devices=4, replicas=2, batch=batch)
    with pytest.raises(pipec.InputError, match=message):
        pipe.step(microbatches=[random_rows(3), random_rows(4)])


def test_a_pipeline_takes_both_kinds_of_steps() -> None:
    pair, (x, y) = pair_of(microbatches=2), random_rows(8)
    halves = [(x[:4], y[:4]), (x[4:], y[4:])]
    wanted = accumulate(pair.unsplit, halves, [0.5, 0.5], mse_loss)
    assert pair.pipe.eval_step(microbatches=halves).item() == pytest.approx(wanted, 1e-12)
    for _ in range(2):
        assert pair.pipe.step(x, target=y).item() == pytest.approx(wanted, 1e-12)
        assert pair.pipe.step(microbatches=halves).item() == pytest.approx(wanted, 1e-12)


@module(**LAYERS, centre=lambda: nn.Buffer(torch.zeros(8)))
def Centred(self: Any, x: Tensor) -> Tensor:
    """Subtracts a running mean that its forward changes."""
    x = self.second(torch.tanh(self.first(x)))
    self.centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return (x - self.centre).pow(2).mean()


def test_buffers_change_in_the_order_of_microbatches() -> None:
    """As in a loop, of which nothing is said; replicas have copies, of which a warning speaks."""
    torch.manual_seed(0)
    pair = Pair(Centred(), microbatches=None)
    microbatches = [{"x": torch.randn(count, 8)} for count in (3, 4, 1, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", pipec.PipecWarning)
        same(pair, microbatches)
    with pytest.warns(pipec.PipecWarning, match="changes centre: each replica changes its own copy"):
        pipec.compile(Centred(), devices=4, replicas=2).step(microbatches=microbatches)
