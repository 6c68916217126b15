"""The console helpers speak on rank 0 and are silent on every other rank."""

import contextlib
import io
import logging
import re
import threading
import time
import warnings
from collections import UserString
from collections.abc import Callable, Iterator

import pytest
import tqdm
from rich import get_console
from rich.console import Console
from rich.live import Live
from rich.progress import Progress

from pipec import console


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


def test_rank_zero_only_calls_the_function_on_rank_zero_only(rank: str) -> None:
    calls = []
    result = console.rank_zero_only(lambda value: calls.append(value) or "done")(5)
    assert (calls, result) == (([5], "done") if rank == "0" else ([], None))


@contextlib.contextmanager
def without_handlers() -> Iterator[None]:
    """As in a script that has configured no logging."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_words_go_to_stderr_behind_one_prefix(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    with without_handlers():
        console.notice("recompiling: %s", "100% new")
        logging.getLogger("pipec").warning("of any rank")
        logging.getLogger("pipec").debug("of no interest")
    expected = "pipec: recompiling: 100% new\n" * (rank == "0") + "pipec: of any rank\n"
    assert capsys.readouterr() == ("", expected)


def test_a_level_silences_as_of_any_logger(capsys: pytest.CaptureFixture[str]) -> None:
    console.logger.setLevel(logging.ERROR)
    try:
        with without_handlers():
            console.notice("recompiling")
            console.logger.warning("of any rank")
    finally:
        console.logger.setLevel(logging.INFO)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", [None, "pipec"])
def test_a_handler_of_the_script_takes_the_words(
    name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = io.StringIO()
    handler = logging.StreamHandler(taken)
    with without_handlers():
        logging.getLogger(name).addHandler(handler)
        console.logger.warning("once")
        logging.getLogger(name).removeHandler(handler)
    assert (taken.getvalue(), capsys.readouterr().err) == ("once\n", "")


def test_a_warning_is_at_the_line_of_the_script_and_may_be_an_error() -> None:
    with pytest.warns(UserWarning, match="not proved") as caught:
        console.warn("not proved")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not proved"):
            console.warn("not proved")


def wait_until(is_true: Callable[[], object]) -> None:
    """Return as soon as the condition holds; the time limit of tests ends it where it never does."""
    while not is_true():
        time.sleep(0.001)


def without_seconds(notice: str) -> str:
    return re.sub(r"(: done) in \d+ s", r"\1", notice)


@pytest.mark.parametrize("in_terminal", [False, True])
def test_a_notice_appears_once_patience_is_over(
    in_terminal: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=in_terminal, width=80)
    monkeypatch.setattr(console, "terminal", lambda: screen)

    def told() -> str:
        return out.getvalue() if in_terminal else "".join(said)

    with console.delayed_status("compiles, for a reason"):
        pass
    assert not out.getvalue()
    assert not said
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.0)
    progress = UserString("search")
    with console.delayed_status("compiles, for a reason", progress):
        wait_until(lambda: "compiles, for a reason: search" in told())
        progress.data = "generate code"
        if in_terminal:
            wait_until(lambda: "generate code" in told())
    assert ("generate code" in told()) == in_terminal
    assert ("compiles, for a reason: done in " in told()) != in_terminal


class CountedConsole(Console):
    """Counts the live displays that are in the terminal at the same time."""

    def __init__(self, out: io.StringIO) -> None:
        super().__init__(file=out, force_terminal=True, width=80)
        self.num_live = self.most_live = 0

    def set_live(self, live: Live) -> bool:
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        return super().set_live(live)

    def clear_live(self) -> None:
        self.num_live -= 1
        super().clear_live()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> CountedConsole:
    screen = CountedConsole(io.StringIO())
    monkeypatch.setattr(console, "terminal", lambda: screen)
    monkeypatch.setattr(console, "STATUS_DELAY_SECONDS", 0.0)
    return screen


def test_the_terminal_has_one_line_whatever_is_in_progress(screen: CountedConsole) -> None:
    out = screen.file
    with console.status("loading torch"):
        wait_until(lambda: "pipec: loading torch ..." in out.getvalue())
        with console.delayed_status("compiling, for a reason"):
            wait_until(lambda: "pipec: compiling, for a reason" in out.getvalue())
        out.truncate(0)
        wait_until(lambda: "pipec: loading torch ..." in out.getvalue())
    assert (screen.most_live, screen.num_live) == (1, 0)


def test_activities_of_several_threads_share_the_line(screen: CountedConsole) -> None:
    begun, ended = threading.Barrier(3), threading.Barrier(3)

    def compile_stage(stage: int) -> None:
        with console.delayed_status(f"compiling stage {stage}"):
            begun.wait()
            ended.wait()

    threads = [threading.Thread(target=compile_stage, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    wait_until(lambda: screen.num_live)
    assert screen.num_live == 1
    ended.wait()
    for thread in threads:
        thread.join()
    assert (screen.most_live, screen.num_live) == (1, 0)


@pytest.mark.parametrize("library", ["tqdm", "rich"])
def test_beside_a_bar_of_the_script_an_activity_is_logged(
    library: str, screen: CountedConsole, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    if library == "tqdm":
        bar = tqdm.tqdm(total=2, file=io.StringIO())
    else:
        bar = Progress(console=get_console())
        bar.start()
    try:
        with console.delayed_status("compiling, for a reason"):
            wait_until(lambda: said)
    finally:
        bar.close() if library == "tqdm" else bar.stop()
    assert [without_seconds(each) for each in said] == [
        "compiling, for a reason",
        "compiling, for a reason: done",
    ]
    assert screen.most_live == 0


def test_an_activity_that_ends_as_it_is_due_leaves_nothing(screen: CountedConsole) -> None:
    for _ in range(50):
        with console.delayed_status("compiling"):
            pass
    assert screen.num_live == 0
