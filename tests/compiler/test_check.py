"""The first step of a kind of call beside the model in eager torch: wrong steps stop, right ones pass."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.compiler.check import check as checks
from pipec.compiler.check.compare import TOLERANCES, Comparison
from pipec.compiler.check.draws import FixedDraws
from pipec.compiler.check.unsplit_run import StepValues
from pipec.errors import MixedRowsError, UnequalStepError

WIDTH = 6


class Model(nn.Module):
    """Two layers, and between them what a case is about."""

    def __init__(self, inner: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.parts = inner, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)), self.last, *self.parts)


class _Clipped(torch.autograd.Function):
    """A gradient that is clipped as a whole, if it is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / (gradient.norm() / ctx.most).clamp(min=1.0), None


def hooked(h: Tensor, last: nn.Module) -> Tensor:
    h.register_hook(lambda gradient: gradient / gradient.norm())
    out: Tensor = last(h)
    return out


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target[:, None]).square().mean()


def over_selected(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, target: of(y[target > 0])


Case = tuple[Callable[..., Tensor], Callable[[], list[nn.Module]], Callable[[Tensor, Tensor], Tensor]]


def case(
    inner: Callable[..., Tensor] = lambda h, last: last(h),
    modules: Callable[[], list[nn.Module]] = list,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> Case:
    return inner, modules, loss


UNEQUAL: dict[str, Case] = {
    "rows as a factor": case(lambda h, last: last(h * h.shape[0])),
    "a bound of random numbers": case(lambda h, last: last(h * torch.rand(len(h), 1) * len(h))),
    "rows as a factor behind a batch norm": case(
        lambda h, last, norm: last(norm(h) * h.shape[0]), lambda: [nn.BatchNorm1d(WIDTH)]
    ),
    "a norm over rows": case(lambda h, last: last(nn.InstanceNorm1d(16)(h.t()).t())),
    "frequencies of a table": case(
        lambda h, last, table: last(h + table((h[:, 0] * 9).long() % 5)),
        lambda: [nn.Embedding(5, WIDTH, scale_grad_by_freq=True)],
    ),
    "frequencies of bags": case(
        lambda h, last, table: last(h + table((h[:, :2] * 9).long() % 5)),
        lambda: [nn.EmbeddingBag(5, WIDTH, scale_grad_by_freq=True, mode="sum")],
    ),
    "a backward of weights alone": case(lambda h, last: F.linear(h, _Clipped.apply(last.weight, 1e-3))),
    "a hook": case(hooked),
    "ones like selected rows": case(loss=over_selected(lambda s: s.sum() / torch.ones_like(s).sum())),
}
"""What no rule refuses, or none did."""

REFUSED_BY_RULES = {
    *("rows as a factor", "a bound of random numbers", "rows as a factor behind a batch norm", "a hook")
}

RIGHT: dict[str, Case] = {
    "dropout": case(lambda h, last, drop: last(drop(h)), lambda: [nn.Dropout(0.5)]),
    "random masks": case(lambda h, last: last(h * (torch.rand_like(h) > 0.3))),
    "noise": case(lambda h, last: last(h + torch.randn_like(h))),
    "batch norm": case(lambda h, last, norm: last(norm(h)), lambda: [nn.BatchNorm1d(WIDTH)]),
    "attention with dropout": case(
        lambda h, last: last(
            F.scaled_dot_product_attention(*[h[:, None, None]] * 3, dropout_p=0.2).flatten(1)
        )
    ),
    "a recurrent layer with dropout": case(
        lambda h, last, lstm: last(lstm(h[:, None])[0][:, 0]),
        lambda: [nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)],
    ),
    "a tail": case(loss=lambda y, target: (y @ y.T).logsumexp(1).mean() + target.sum() * 0),
    "a tail of three rows for each": case(
        loss=lambda y, target: (y.reshape(-1, 2) @ y.reshape(-1, 2).T).logsumexp(1).mean() + target.sum() * 0
    ),
    "a tail of selected rows": case(loss=lambda y, target: y.square().mean(1).topk(4).values.mean()),
    "a gradient of zero": case(lambda h, last: last(h) * 0 + h),
    "tables": case(
        lambda h, last, table: last(h + table((h[:, 0] * 9).long() % 5)), lambda: [nn.Embedding(5, WIDTH)]
    ),
}


def compiled(model: nn.Module) -> pipec.Pipeline:
    return pipec.compile(model, 2, loss_fn=loss_of, microbatches=4)


def step(case: Case, **options: Any) -> tuple[pipec.Pipeline, Tensor, nn.Module]:
    """A step of 16 rows, and the model as it was before."""
    inner, modules, loss = case
    torch.manual_seed(0)
    with _double():
        model = Model(inner, *modules())
        before = copy.deepcopy(model)
        pipe = pipec.compile(model, 2, loss_fn=loss, **{"microbatches": 4, **options})
        return pipe, pipe.step(*batch(), target=torch.linspace(-1, 1, 16)), before


def batch() -> tuple[Tensor, ...]:
    return (torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


@contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_step_that_is_not_the_models_is_stopped(name: str) -> None:
    kind = MixedRowsError if name in REFUSED_BY_RULES else UnequalStepError
    with pytest.raises(kind, match="microbatches"):
        step(UNEQUAL[name])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes(name: str) -> None:
    pipe, _, _ = step(RIGHT[name])
    assert "agree to" in pipe.plan.checked


def test_without_microbatches_the_step_has_one() -> None:
    pipe, loss, before = step(UNEQUAL["rows as a factor"], microbatches=None)
    with torch.no_grad():
        torch.testing.assert_close(loss, loss_of(before(*batch()), torch.linspace(-1, 1, 16).double()))
    assert pipe.plan.num_microbatches == 1


def test_arguments_without_values_are_not_checked() -> None:
    """A plan may be made of them."""
    model = nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9))
    pipe = pipec.compile(model, 2, loss_fn=F.cross_entropy, microbatches=4)
    tokens = torch.empty(16, dtype=torch.int64, device="meta")
    pipe.prepare(tokens, target=tokens)
    assert pipe.plan.checked == "not checked: the arguments have no values"


UNPROVEN: dict[str, Case] = {
    "a backward of weights alone": UNEQUAL["a backward of weights alone"],
    "an operator": case(lambda h, last: last(h + torch.searchsorted(torch.arange(4.0).double(), h.detach()))),
    "a backward of rows": case(lambda h, last: last(_Clipped.apply(h, 1e-3))),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_unproven_is_said_where_nothing_is_checked(name: str, said: list[str]) -> None:
    pipe, _, _ = step(UNPROVEN[name], check="off")
    assert any("nothing proves that" in message for message in said)
    assert pipe.plan.checked == ""


def test_the_check_changes_nothing() -> None:
    """Neither buffers nor generators nor gradients."""
    left = []
    for check in ("first", "off"):
        random.seed(0)
        pipe, loss, _ = step(RIGHT["batch norm"], check=check)
        state = [torch.get_rng_state(), *pipe.unsplit_model.state_dict().values(), loss]
        left.append([*state, *(p.grad for p in pipe.unsplit_model.parameters())])
    assert all(map(torch.equal, *left))


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(torch.ones(3, 4), 0.5),
    "bernoulli": lambda: torch.full((3, 4), 0.7).bernoulli(),
    "bernoulli_": lambda: torch.empty(3, 4).bernoulli_(0.2),
    "randint": lambda: torch.randint(7, (3, 4)),
    "randperm": lambda: torch.randperm(5),
    "normal_": lambda: torch.empty(3, 4).normal_(2.0, 3.0),
    "normal": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "uniform_": lambda: torch.empty(3).uniform_(-1, 1),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "multinomial": lambda: torch.tensor([[0.1, 0.7, 0.2]]).multinomial(2),
    "random_": lambda: torch.empty(3).random_(4),
    "rrelu": lambda: F.rrelu(torch.randn(0), training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_each_time(name: str) -> None:
    with FixedDraws() as draws:
        one, other = DRAWS[name](), DRAWS[name]()
    assert torch.equal(one, other)
    assert bool(draws.unknown) == (name == "rrelu")
    assert name != "randint" or (one == 6).all(), "the largest below the bound"


def test_later_steps_are_checked_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()
    plain = checks.check_call

    def counting(*given: Any) -> Any:
        checked.append(len(checked))
        return plain(*given)

    monkeypatch.setattr(checks, "check_call", counting)
    for check, expected in (("first", 1), (2, 3), ("always", 5)):
        checked.clear()
        pipe, _, _ = step(RIGHT["tables"], check=check)
        with _double():
            for _ in range(4):
                pipe.step(*batch(), target=torch.linspace(-1, 1, 16))
        assert len(checked) == expected


def test_what_is_not_proved_is_checked_again_when_later_batches_show_it() -> None:
    """The first and the second batch have small gradients, which the function leaves alone."""
    torch.manual_seed(0)
    model = Model(lambda h, last: last(_Clipped.apply(h, 1.0)))
    pipe, x, target = compiled(model), torch.randn(16, WIDTH), torch.randn(16)
    for _ in range(2):
        pipe.step(x, target=target)
    with pytest.raises(UnequalStepError):
        pipe.step(x, target=1000 * target)


def test_what_is_not_proved_is_checked_on_the_whole_batch() -> None:
    """Few rows have few classes, and all of them; the first microbatches lack one."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(4, WIDTH))

    def numbered(h: Tensor, last: nn.Module, weights: nn.ParameterList) -> Tensor:
        _, numbers = torch.unique((10 * h[:, 0]).long().abs() % 4, return_inverse=True)
        out: Tensor = last(h + weights[0][numbers])
        return out

    model = Model(numbered, nn.ParameterList([table]))
    with pytest.raises(UnequalStepError, match=r"microbatches of 4 and 4 and 4 and 4 rows"):
        compiled(model).step(torch.randn(16, WIDTH), target=torch.randn(16))


def test_what_a_forward_notes_in_its_configuration_stays_as_it_was(said: list[str]) -> None:
    """As ``problem_type`` of transformers: else the next step would be compiled anew, and ranks differ."""
    settings = SimpleNamespace(kind=None)

    def inner(h: Tensor, last: nn.Module) -> Tensor:
        if settings.kind is None:
            settings.kind = "regression"
        out: Tensor = last(h)
        return out

    model = Model(inner)
    model.settings = settings
    pipe = compiled(model)
    for _ in range(2):
        pipe.step(torch.randn(16, WIDTH), target=torch.randn(16))
    assert settings.kind is None
    assert not any("recompiling" in each for each in said)


def test_a_gradient_that_one_step_lacks_is_a_difference() -> None:
    comparison = Comparison((), TOLERANCES[torch.float32])
    values = StepValues({}, {"w": torch.ones(2)}), StepValues()
    assert not comparison(*values).is_equal
    assert not comparison(*reversed(values)).is_equal
