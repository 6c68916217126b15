"""The console helpers speak on rank 0 and are silent on every other rank."""

import io
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rich.console import Console

from pipec import console


@dataclass(frozen=True)
class Table:
    rows: int

    def __str__(self) -> str:
        return f"a table of {self.rows} :smile:"


@pytest.fixture(params=["0", "3"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RANK", request.param)
    console.terminal.cache_clear()
    yield request.param
    console.terminal.cache_clear()


def test_log_prints_plain_text_on_rank_zero_only(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "f32[b, 128] [red]stage 0[/red] " + "x" * 200
    console.log(text, 7)
    assert capsys.readouterr().out == (f"{text} 7\n" if rank == "0" else "")


def test_log_prints_an_object_by_its_str(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.log(Table(4))
    assert capsys.readouterr().out == ("a table of 4 :smile:\n" if rank == "0" else "")


def test_rank_zero_only_calls_the_function_on_rank_zero_only(rank: str) -> None:
    calls = []
    result = console.rank_zero_only(lambda value: calls.append(value) or "done")(5)
    assert (calls, result) == (([5], "done") if rank == "0" else ([], None))


def test_progress_yields_every_item_and_leaves_no_bar_in_a_file(
    rank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    for item in (bar := console.progress(["a", "b"], "training")):
        bar.show(f"loss of {item}")
        seen.append(item)
    assert seen == ["a", "b"]
    assert capsys.readouterr().out == ""


def test_a_process_started_alone_is_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert console.is_rank_zero()


@pytest.mark.parametrize("in_terminal", [False, True])
def test_a_notice_appears_once_patience_is_over(in_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    screen = Console(file=out, force_terminal=in_terminal, width=80)
    monkeypatch.setattr(console, "terminal", lambda: screen)
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.05)
    with console.delayed_status("compiles, for a reason"):
        pass
    time.sleep(0.1)
    assert out.getvalue() == ""
    with console.delayed_status("compiles, for a reason") as told:
        told.now("search")
        deadline = time.monotonic() + 20
        while "search" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.now("generate code")
        time.sleep(0.2)
    assert "compiles, for a reason: search" in out.getvalue()
    assert ("generate code" in out.getvalue()) == in_terminal


def test_a_notice_beside_a_bar_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=80)
    monkeypatch.setattr(console, "terminal", lambda: screen)
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.0)
    for _ in console.progress(["a"], "training"):
        with console.delayed_status("compiles, for a reason"):
            time.sleep(0.3)
    assert "compiles, for a reason" in out.getvalue()
