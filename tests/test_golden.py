"""The golden fixture itself: it compares, it shows what changed, and it writes only when asked."""

from pathlib import Path

import pytest
from golden_files import compare_golden


def test_update_writes_what_a_later_comparison_accepts(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "plan.txt"
    compare_golden("stage 0\n", path, update=True)
    compare_golden("stage 0\n", path, update=False)
    assert path.read_text() == "stage 0\n"


def test_a_difference_fails_with_a_unified_diff(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("stage 0\nstage 1\n")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)-stage 1\n\+stage 2.*--update-golden"):
        compare_golden("stage 0\nstage 2\n", path, update=False)
    assert path.read_text() == "stage 0\nstage 1\n"


def test_a_missing_golden_file_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="does not exist: run pytest with --update-golden"):
        compare_golden("stage 0\n", tmp_path / "plan.txt", update=False)
