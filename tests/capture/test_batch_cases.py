"""What people write that treats the rows of a batch in any way is right, or refused: never silently wrong.

No claim about a value of a random program is wrong, nor any pipeline of one.
"""

import re
from dataclasses import replace
from unittest import mock

import pytest
from batch_cases import CASES, NOT_PROVED
from batch_comparison import BatchCase, ComparisonStatus, Expect, compare_with_eager
from fuzz_batch_analysis import Check, check_claims, check_pipeline, fuzz
from random_batch_programs import MENU, Program, draw_program
from slow_params import slow

from pipec.capture import tracer


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow)
        for case in CASES.values()
    ],
)
def test_microbatches_make_what_the_batch_would_or_it_is_said(case: BatchCase) -> None:
    """What is right is also proved: a check, or a tail, would hide that a rule knows less than before."""
    result = compare_with_eager(case)
    assert result.allowed(case), f"{result.verdict}: {result.message}"
    if case.expect is Expect.RIGHT or case.name.startswith("norm"):
        assert result.is_proved == (case.name not in NOT_PROVED)


@pytest.mark.parametrize("name", ["cross entropy, class weights, smoothed", "several terms"])
def test_a_graph_of_forward_and_backward_shows_how_a_loss_adds_up(name: str) -> None:
    """A warning says that Dynamo did not trace the model."""
    with mock.patch.object(tracer, "FRONT_ENDS", {"make_fx": tracer.FRONT_ENDS["make_fx"]}):
        result = compare_with_eager(CASES[f"loss: {name}"])
    assert (result.verdict, result.is_proved) == (ComparisonStatus.WARNED, True), result.message


@pytest.mark.usefixtures("constant_batch")
@pytest.mark.parametrize(
    "name",
    [
        *("loss: cross entropy, ignored", "loss: cross entropy, class weights, smoothed"),
        *("loss: masked mean", "loss: several terms", "loss: stacked rows", "output: rows, sums and means"),
    ],
)
def test_code_for_one_size_adds_up_counts_of_microbatches(name: str) -> None:
    result = compare_with_eager(replace(CASES[name], microbatches=4))
    assert result.verdict is ComparisonStatus.RIGHT, result.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixed and mixing: ones of all rows", "microbatches of 3 and 3 rows"),
        slow("fixed: a loss that counts", "3 and 2 rows are compiled apart"),
    ],
)
def test_microbatches_of_several_sizes_have_graphs_of_their_own(name: str, message: str) -> None:
    """Of three, three and two rows, a run tells what the graph for three makes of six rows."""
    result = compare_with_eager(replace(CASES[name], microbatches=3))
    assert (result.verdict, message in result.message) == (ComparisonStatus.REFUSED, True), result.message


@pytest.mark.parametrize(("check", "number", "most"), [slow(check_claims, 120, 6), (check_pipeline, 6, 3)])
def test_nothing_is_wrong_about_random_programs(check: Check, number: int, most: int) -> None:
    outcomes, faults = fuzz((draw_program(seed, most) for seed in range(number)), check)
    assert not faults, "\n\n".join(faults)
    if check is check_claims:  # it would be easy to be right by refusing everything
        assert outcomes["of them proved"] > number


@pytest.mark.slow
@pytest.mark.parametrize("kind", MENU)
def test_no_claim_about_an_operator_is_wrong(kind: str) -> None:
    """Each statement of the menu, once and of its own result; all of them run."""
    programs = [draw_program(seed, 2, {kind: [each]}) for each in MENU[kind] for seed in range(3)]
    assert all(any(program.names for program in three) for three in zip(*[iter(programs)] * 3, strict=True))
    _, faults = fuzz(programs)
    assert not faults, "\n\n".join(faults)


ATTACKS = """
F.embedding(k, z[:, None]) | z[k] | z.index_select(0, k) | z.expand(6, -1).gather(0, t.argsort(0))
z.index_put((torch.tensor([0, 1]),), torch.ones(2).double()) | h.index_put((m,), z)
z.index_fill(0, torch.tensor([1]), 2) | z.scatter(0, torch.tensor([0]), torch.ones(1).double())
z.index_add(0, torch.tensor([0]), torch.ones(1).double())
h.new_zeros(9).index_add(0, n, h.sum(1)) | h.new_zeros(9).index_add(0, n % 2, h.sum(1))
h.new_zeros(9).index_put((k,), h.sum(1), accumulate=True) | h.T @ h | (h.T @ h).sum() + h.mean() | h @ h.T
h.repeat(1, 9)[k % 2, n] | h.repeat(1, 9)[n, n] | h.flatten()[n]
h.new_zeros(9).index_put((k,), h.sum(1)) | h.new_zeros(9).scatter_add(0, n, w[n])
z.scatter_reduce(0, torch.tensor([0]), torch.ones(1).double(), 'amax') | F.pad(z, (1, 0), value=1.0)
torch.select_scatter(t, z, 0, 0) | torch.select_scatter(t, h.sum(0), 0, 0) | torch.histc(z, 3, 0, 1)
torch.bincount(torch.arange(6), weights=h.sum(0)) | torch.bincount(torch.arange(6), weights=z)
torch.bincount((h > 0).sum(1)) | torch.histc(h.sum(0), 3, 0, 1) | F.layer_norm(z, z.shape)
F.nll_loss(z[None], torch.zeros(1, dtype=torch.long), reduction="sum") * h | F.cross_entropy(h, k, weight=z)
F.conv1d(h[None], w[:, None, None], w, groups=h.shape[0])
F.conv1d(h[None], w[:, None, None], q, groups=h.shape[0])
h.mean() + h.shape[0] | h.mean() + 1 / h.shape[0] | torch.add(h.sum(), h.mean(), alpha=h.shape[0])
torch.stack([q[:, None] * h, torch.ones_like(h)]) | F.pad(torch.ones(3), (1, 1)).mean() * h
w.new_ones(torch.cartesian_prod(w, w).shape[0], 2).mean() * h
torch.eye(torch.pdist(h).shape[0]).double() @ torch.pdist(h)
h.new_zeros(h[m].shape[0] + 1).add(1).sum() * w | c.expand(h[m].shape[0], -1).sum(0) * h
n.double().index_put((m,), c[0])
torch.cat([n] * 4).unflatten(0, (2, -1)).sum(0).double() | h * n.bool()[:, None] | n.to(torch.bool).double()
torch.where(n.bool()[:, None], h, 0) | torch.zeros_like(m).copy_(n).double() | n[n].double() | n[m].sum() * w
n.double().view(torch.int64) | w.view(torch.int32).double() | h.sum(0).view(torch.int64)
torch.zeros(6).long().copy_(h.sum(0)).double() | h.sum(0).long().double()
h.mean(0).bool().double() * h | (h > 0).sum(0).char().double()
torch.select_scatter(n[:, None].expand(-1, 2).clone(), torch.zeros(n.shape[0]).long(), 1, 0).double()
F.pad(w, (1, -1)) | F.pad(s, (0, 0, 0, 0, 1, -1)) | t @ (h.T @ h) | z * h.sum(0) | h[m].amax(0).sum() | h[0]
"""
"""Uses of a mean ``z`` and rows ``q`` that a number of rows divides, of row numbers ``n``, and of sums."""


@pytest.mark.parametrize("line", re.split(r" \| |\n", ATTACKS.strip()))
def test_sums_and_the_number_of_rows_are_followed_or_refused(line: str) -> None:
    statements = ("z = s.sum((0, 1)) / s.shape[0]", "q = w / w.shape[0]", "n = arange(h.shape[0])")
    checked = check_claims(Program((*statements, f"v = {line}"), ("z", "q", "n", "v"), 0))
    assert not checked.wrong
    assert "skipped" not in checked.said


PROVED = """
w.float().view(torch.int32).double() | h.mT.unflatten(0, (2, 3))[t[:2, :3] > 0].sum(0)
torch.cat([h[m], h[m]], 1).sum(0) | torch.cat([h, 2 * h]).chunk(2)[1] | h.repeat(2, 1).view(2, h.shape[0], -1)
h.new_zeros(9).index_put((k,), h.sum(1), accumulate=True) | t[0] * h.sum(0) / t[1].abs() | h.softmax(1)
F.bilinear(h, h * 2, t[None].expand(3, -1, -1)) | F.local_response_norm(s[:, None], 2) | h + t[k]
h.gather(1, k[:, None]) | h.index_add(1, torch.tensor([0, 0, 1]), h[:, 3:])
h * torch.bucketize(h, torch.tensor([-0.5, 0.0]).double()) | F.group_norm(s, 5) | F.glu(h, 1)
F.unfold(F.pad(s[:, None], (1, 1, 1, 1), mode="reflect"), 3) | s @ s.mT | torch.quantile(h, 0.3, 1)
F.conv1d(s.mT, t[:, :, None], padding=1) | F.conv_transpose1d(s.mT, t[:, :, None]) | F.layer_norm(s, (6,))
torch.zeros_like(h).scatter(1, k[:, None], h[:, :1]) | h.index_copy(1, torch.tensor([0, 2]), h[:, 4:])
F.interpolate(s[:, None], (7, 9), mode="bilinear") | h.index_select(1, torch.tensor([2, 0, 0]))
"""
"""What stays row by row, or adds up."""


@pytest.mark.parametrize("line", re.split(r" \| |\n", PROVED.strip()))
def test_what_stays_rows_or_adds_up_is_proved(line: str) -> None:
    assert check_claims(Program((f"v = {line}",), ("v",), 0)).said == "proved"
