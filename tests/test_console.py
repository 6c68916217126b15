"""The console helpers speak on rank 0 and are silent on every other rank."""

import io
import logging
import re
import time
import warnings

import pytest

from pipec import console


@pytest.fixture(params=["0", "3"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RANK", request.param)
    return str(request.param)


def test_rank_zero_alone_prints_plain_text_and_calls_functions(
    rank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "f32[b, 128] [red]stage 0[/red] " + "x" * 200
    console.log(text, 7)
    assert capsys.readouterr().out == (f"{text} 7\n" if rank == "0" else "")
    assert console.rank_zero_only(lambda value: value + 1)(5) == (6 if rank == "0" else None)


def test_words_go_to_stderr_behind_one_prefix_unless_a_handler_of_the_script_takes_them(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as script:
        script.setattr(logging.getLogger(), "handlers", [])  # a script that has configured no logging
        console.notice("recompiling: %s", "100% new")
        console.logger.warning("of any rank")
        console.logger.debug("of no interest")
        expected = "pipec: recompiling: 100% new\n" * (rank == "0") + "pipec: of any rank\n"
        assert capsys.readouterr() == ("", expected)
        for logger in (logging.getLogger(), console.logger):
            handler = logging.StreamHandler(io.StringIO())
            logger.addHandler(handler)
            console.logger.warning("once")
            logger.removeHandler(handler)
            assert (handler.stream.getvalue(), capsys.readouterr().err) == ("once\n", "")


def test_a_warning_is_at_the_line_of_the_script_and_may_be_an_error() -> None:
    with pytest.warns(UserWarning, match="not proved") as caught:
        console.warn("not proved")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not proved"):
            console.warn("not proved")


def test_a_notice_appears_once_patience_is_over(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    with console.delayed_status("compiles, for a reason"):
        pass
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.0)
    with console.delayed_status("compiles, for a reason"):
        while not said:  # the time limit of tests ends it
            time.sleep(0.001)
    assert [re.sub(r"\d+ s", "", each) for each in said] == [
        "compiles, for a reason",
        "compiles, for a reason: done in ",
    ]


def test_an_activity_that_ends_as_it_is_due_says_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.0)
    for _ in range(50):
        with console.delayed_status("compiling"):
            pass
    assert 2 * sum("done" in each for each in said) == len(said)
