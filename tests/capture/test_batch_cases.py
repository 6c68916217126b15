"""What people write that treats the rows of a batch in any way is right, or refused: never silently wrong."""

import pytest
from batch_cases import CASES, NOT_PROVED
from batch_comparison import BatchCase, Expect, compare_with_eager


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
