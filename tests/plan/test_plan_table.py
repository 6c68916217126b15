"""Tables of text: numbers end, and words begin, below each other."""

from pipec.plan.plan_table import table_lines


def test_columns_are_aligned_to_the_right_unless_they_are_words() -> None:
    assert table_lines(["rank", "module"], [["10", "h.0"], ["2", ""]], left=["module"]) == [
        " rank   module",
        " ─────────────",
        "   10   h.0",
        "    2",
    ]
