"""Where the script of this process is between its calls of a pipeline, for other ranks that wait for it.

A rank that saves or generates comes back to its loop. A rank that has left the loop by an exception does not:
the exception went through the function that made the last call, which has ended, or is past the loop.
"""

import ast
import functools
import linecache
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType


@dataclass(frozen=True)
class Whereabouts:
    """The line of the script that runs, "" inside a call of a pipeline; and the exception that it handles.

    ``has_left`` says whether that exception led out of the loop. ``loop`` has the lines of the loop that made
    the last call, if the script has gone past it: by an exception that it caught, or because the loop ended.
    """

    line: str = ""
    exception: str = ""
    has_left: bool = False
    loop: str = ""

    def __str__(self) -> str:
        past = f", past the loop of its last call, {self.loop}" if self.loop else ""
        handling = f", where it handles {self.exception}" if self.exception else ""
        return f"at {self.line}{past}{handling}"


IN_A_CALL = Whereabouts()


@dataclass
class _LastCall:
    """The place in the script from which it called a pipeline last. It does not keep the frame alive."""

    frame_id: int = 0
    code: CodeType | None = None
    line: int = 0

    def is_frame(self, frame: FrameType) -> bool:
        return id(frame) == self.frame_id and frame.f_code is self.code


_last_call = _LastCall()


def note_call() -> None:
    """Note the line of the script that makes a call. The calls of all ranks are made on the main thread."""
    frame = _script_frame(sys._getframe(1))
    if frame is not None:
        _last_call.frame_id, _last_call.code, _last_call.line = id(frame), frame.f_code, frame.f_lineno


def whereabouts() -> Whereabouts:
    """Where the main thread is, as another thread sees it."""
    thread = threading.main_thread().ident or 0
    innermost = sys._current_frames().get(thread)
    if innermost is None or _is_inside(innermost):
        return IN_A_CALL
    frame = _script_frame(innermost) or innermost
    error = _handled_exception(thread)
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    has_left = error is not None and _has_left(error, innermost)
    return Whereabouts(_line(frame), text, has_left, _passed_loop(innermost))


def _handled_exception(thread: int) -> BaseException | None:
    """The exception that the thread handles now, in an ``except`` or ``finally``."""
    found = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found


def _has_left(error: BaseException, innermost: FrameType) -> bool:
    """Whether ``error`` went through the frame of the last call, which has ended or is past its loop."""
    traceback, has_passed = error.__traceback__, False
    while traceback is not None:
        has_passed = has_passed or _last_call.is_frame(traceback.tb_frame)
        traceback = traceback.tb_next
    if not has_passed or _last_call.code is None:
        return False
    frame = _frame_of_last_call(innermost)
    first, last = _loop(_last_call.code, _last_call.line)
    return frame is None or not first <= frame.f_lineno <= last


def _passed_loop(innermost: FrameType) -> str:
    """The lines of the loop that made the last call, if its function is past that loop; else ""."""
    frame = _frame_of_last_call(innermost)
    if frame is None:
        return ""
    first, last = _loop(frame.f_code, _last_call.line)
    return f"lines {first} to {last}" if first < last < frame.f_lineno else ""


def _frame_of_last_call(innermost: FrameType) -> FrameType | None:
    frame: FrameType | None = innermost
    while frame is not None and not _last_call.is_frame(frame):
        frame = frame.f_back
    return frame


@functools.cache
def _loop(code: CodeType, line: int) -> tuple[int, int]:
    """The first and the last line of the outermost loop around ``line``; that line if there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return line, line
    loops = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and code.co_firstlineno <= node.lineno
    ]
    return min((loop for loop in loops if loop[0] <= line <= loop[1]), default=(line, line))


def _is_inside(frame: FrameType | None) -> bool:
    """Whether a call of pipec is on the stack."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "pipec":
            return True
        frame = frame.f_back
    return False


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is of no installed library."""
    while frame is not None and _is_installed(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def _is_installed(filename: str, module: str) -> bool:
    return module.partition(".")[0] in ("pipec", "torch") or filename.startswith(_INSTALLED)


_INSTALLED = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen",
)


def _line(frame: FrameType) -> str:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    text = linecache.getline(path, frame.f_lineno).strip()
    return f"{Path(path).name}:{frame.f_lineno} in {name}{': ' * bool(text)}{text}"
