"""Time limits: a test that could hang must fail instead."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound=type)

TEST_TIMEOUT_S = 60.0
WORKERS_TIMEOUT_S = 30.0


class _Worker(threading.Thread):
    """Calls one function on a daemon thread and keeps what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - re-raised by run_bounded, on the caller's thread
            self.error = error


def run_bounded(
    functions: Sequence[Callable[[], T]], *, timeout_s: float = WORKERS_TIMEOUT_S
) -> list[T]:
    """Call all functions at once, each on its own thread; their results, in order.

    Raises the first error of any, or TimeoutError when one is still running after `timeout_s`;
    such a thread is a daemon and is left behind.
    """
    __tracebackhide__ = True
    workers = [_Worker(function) for function in functions]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    if any(worker.is_alive() for worker in workers):
        raise TimeoutError(f"still running after {timeout_s:g} s: a call of the tier hangs")
    return [worker.result for worker in workers]


def bounded(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, failing with TimeoutError when it takes longer than `TEST_TIMEOUT_S`."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        run_bounded([lambda: function(*args, **kwargs)], timeout_s=TEST_TIMEOUT_S)

    return wrapper


def bounded_tests(cls: C) -> C:
    """Class decorator: every `test_*` method of the class is bounded in time."""
    for name, function in list(vars(cls).items()):
        if name.startswith("test_"):
            setattr(cls, name, bounded(function))
    return cls
