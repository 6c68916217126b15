"""What is said of the progress of a compilation."""

import pytest

from pipec.compiler import stopwatch


def test_progress_is_estimated_from_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s expected, the first half takes 20 s, so that as much is left. No share falls."""
    now = 100.0
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now)
    progress = stopwatch.Progress(10.0, started=now)
    texts = []
    for seconds, step in ((2, ""), (4, ""), (14, "differentiate"), (10, ""), (0, "capture"), (500, "")):
        now += seconds
        if step:
            progress.begin(step)
        texts.append(str(progress))
    assert texts == [
        "capture, 20%, about 8 s left",
        "capture, 45%, about 7 s left",
        "differentiate, 50%, about 20 s left",
        "differentiate, 75%, about 10 s left",
        "capture, 75%, about 10 s left",
        "capture, 85%, about 94 s left",
    ]
