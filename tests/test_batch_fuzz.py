"""Random programs over a batch: no claim about any of their values is wrong, nor any pipeline of them."""

import re

import pytest
from fuzz_batch_analysis import Tally, fault_of, fuzz, fuzz_whole
from random_batch_programs import Program

NUM_PROGRAMS, NUM_PIPELINES = 120, 6


def test_no_claim_about_a_value_is_wrong() -> None:
    tally = fuzz(range(NUM_PROGRAMS))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())
    assert tally.num_proved > NUM_PROGRAMS  # it would be easy to be right by refusing everything


def test_no_pipeline_is_silently_wrong() -> None:
    tally = fuzz_whole(range(NUM_PIPELINES))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())


POWERS = """
F.embedding(k, z[:, None]) | z[k] | z.index_select(0, k) | z.expand(6, -1).gather(0, t.argsort(0))
z.index_put((torch.tensor([0, 1]),), torch.ones(2).double()) | h.index_put((m,), z)
z.index_fill(0, torch.tensor([1]), 2) | z.scatter(0, torch.tensor([0]), torch.ones(1).double())
z.index_add(0, torch.tensor([0]), torch.ones(1).double())
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
"""
"""What may become of a mean ``z``, and of rows ``q``, that a number of rows divides."""


@pytest.mark.parametrize("line", re.split(r" \| |\n", POWERS.strip()))
def test_what_the_number_of_rows_divides_is_followed_or_refused(line: str) -> None:
    statements = ("z = s.sum((0, 1)) / s.shape[0]", "q = w / w.shape[0]", f"v = {line}")
    tally = Tally()
    assert not fault_of(Program(statements, ("z", "q", "v"), 0), tally)
    assert not any("microbatches do not run" in outcome for outcome in tally.outcomes)
