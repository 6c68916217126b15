"""Random programs over a batch: no claim about any of their values is wrong, nor any pipeline of them."""

from fuzz_batch import fuzz, fuzz_whole

NUM_PROGRAMS, NUM_PIPELINES = 120, 6


def test_no_claim_about_a_value_is_wrong() -> None:
    tally = fuzz(range(NUM_PROGRAMS))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())
    assert tally.num_proved > NUM_PROGRAMS  # it would be easy to be right by refusing everything


def test_no_pipeline_is_silently_wrong() -> None:
    tally = fuzz_whole(range(NUM_PIPELINES))
    assert not tally.faults, "\n\n".join(f"seed {seed}\n{fault}" for seed, fault in tally.faults.items())
