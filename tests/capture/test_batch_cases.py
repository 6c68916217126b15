"""What people write that treats the rows of a batch in any way is right, or refused: never silently wrong."""

import pytest
from batch_cases import CASES
from batch_comparison import BatchCase, compare_with_eager


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow)
        for case in CASES.values()
    ],
)
def test_microbatches_make_what_the_batch_would_or_it_is_said(case: BatchCase) -> None:
    result = compare_with_eager(case)
    assert result.allowed(case), f"{result.verdict}: {result.message}"
