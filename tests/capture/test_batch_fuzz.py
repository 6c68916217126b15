"""Random programs over a batch: no claim about any of their values is wrong, nor any pipeline of them."""

import re

import pytest
from fuzz_batch_analysis import Tally, claims_of, fault_of, fuzz, fuzz_whole
from random_batch_programs import Program

NUM_PROGRAMS, NUM_PIPELINES = 120, 6


@pytest.mark.slow
def test_no_claim_about_a_value_is_wrong() -> None:
    tally = fuzz(range(NUM_PROGRAMS))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())
    assert tally.num_proved > NUM_PROGRAMS  # it would be easy to be right by refusing everything


def test_no_pipeline_is_silently_wrong() -> None:
    tally = fuzz_whole(range(NUM_PIPELINES))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())


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
    statements = (
        "z = s.sum((0, 1)) / s.shape[0]",
        "q = w / w.shape[0]",
        "n = arange(h.shape[0])",
        f"v = {line}",
    )
    tally = Tally()
    assert not fault_of(Program(statements, ("z", "q", "n", "v"), 0), tally)
    assert not any("skipped" in outcome for outcome in tally.outcomes)


PROVED = """
w.float().view(torch.int32).double() | h.mT.unflatten(0, (2, 3))[t[:2, :3] > 0].sum(0)
torch.cat([h[m], h[m]], 1).sum(0) | torch.cat([h, 2 * h]).chunk(2)[1]
h.new_zeros(9).index_put((k,), h.sum(1), accumulate=True) | t[0] * h.sum(0) / t[1].abs() | h.softmax(1)
"""
"""What stays row by row, or adds up."""


@pytest.mark.parametrize("line", re.split(r" \| |\n", PROVED.strip()))
def test_what_stays_rows_or_adds_up_is_proved(line: str) -> None:
    assert claims_of(Program((f"v = {line}",), ("v",), 0)).said == "proved"
