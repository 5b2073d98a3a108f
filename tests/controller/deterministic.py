"""Trio on virtual time, in an order of tasks that a seed decides. The one file that touches trio's private switch."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
from trio._core import _run
from trio.testing import MockClock

T = TypeVar("T")

_scheduler: Any = _run


@contextmanager
def _ordered_by(seed: int) -> Iterator[None]:
    allowed, order = _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r
    _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r = True, random.Random(seed)
    try:
        yield
    finally:
        _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r = allowed, order


def run(seed: int, function: Callable[[], Awaitable[T]]) -> T:
    """Run to the end; the same seed gives the same run in every process, another one another order of tasks."""
    with _ordered_by(seed):
        return anyio.run(function, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
