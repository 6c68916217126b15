"""One call of a pipeline at a time: a call on a second thread is refused before it changes anything.

If it waited for the first one, it might wait for ever: the iterator of a stream is read on a thread for which
the call waits. And threads would come in another order on each rank.
"""

import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from pipec.console import logger
from pipec.errors import InputError, PipecError, trim_traceback
from pipec.runtime.loss_tensors import STEP_LOSS, StepLoss

Method = TypeVar("Method", bound=Callable[..., Any])


class CallGuard:
    """The call of a pipeline that runs, before those that it makes itself on its thread."""

    _with_calls: ClassVar["list[CallGuard]"] = []
    """The guards of all pipelines of this process that have begun calls, one for each call."""

    def __init__(self) -> None:
        self._lock, self._running = threading.RLock(), list[str]()

    def begin(self, method: str) -> None:
        """Begin a call. Raises InputError while another one runs on another thread."""
        if not self._lock.acquire(blocking=False):
            thread, running = threading.current_thread().name, next(iter(self._running), "another call")
            raise InputError(
                f"{method} was called on thread {thread!r} while {running} ran on another thread. A pipeline "
                "makes one call at a time, and this one changed nothing; make all calls on one thread, or "
                "hold a lock of your own around each of them"
            )
        self._running.append(method)
        self._with_calls.append(self)

    def end(self) -> None:
        """End the call that was begun last."""
        self._running.pop()
        self._with_calls.remove(self)
        self._lock.release()

    def elsewhere(self) -> str:
        """A description of what this process does instead if it runs a call, but none of this pipeline."""
        others = [guard for guard in self._with_calls if guard is not self]
        return "" if self._running or not others else "a call of another pipeline"


def exclusive_call(method: Method) -> Method:
    """Refuse a method of a pipeline while another call runs on another thread.

    Inference mode is left meanwhile: what is captured, placed or read in it could not be trained.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._call_guard.begin(name)
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return method(self, *args, **kwargs)
            return method(self, *args, **kwargs)
        except PipecError as error:
            log_and_trim(error)
            raise
        finally:
            self._call_guard.end()

    return cast(Method, call)


def log_and_trim(error: PipecError) -> None:
    """Leave the frames of the script in an error that says by itself what was wrong; log all, to debug."""
    logger.debug("%s", error, exc_info=error)
    trim_traceback(error)


class LossIterator(Iterator[Tensor]):
    """The losses of a stream of a pipeline. To ask for the next one is a call."""

    def __init__(self, pipeline: Any, losses: Generator[Tensor]) -> None:
        self._pipeline, self._call_guard, self._losses = pipeline, pipeline._call_guard, losses

    def __next__(self) -> Tensor:
        self._call_guard.begin("stream")
        try:
            return StepLoss.of(next(self._losses), STEP_LOSS)
        except PipecError as error:
            log_and_trim(error)
            raise
        finally:
            self._call_guard.end()

    def close(self) -> None:
        """Leave the stream, as the end of a loop does."""
        self._losses.close()
