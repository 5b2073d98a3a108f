"""Tasks that belong to a context manager of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVarTuple

import anyio
import anyio.abc

__all__ = ("BackgroundTasks", "background_tasks")

Ts = TypeVarTuple("Ts")


class BackgroundTasks:
    """Tasks that run beside a body until it has ended, whoever cancels the body.

    A cancellation of what lies around the context manager reaches the body, which then closes in good order; that needs
    the tasks. So they are shielded from it, and cancelled when the body has ended.
    """

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._scopes: set[anyio.CancelScope] = set()
        self._ended = False

    def start_soon(self, function: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start a task."""
        self._group.start_soon(self._run, function, args)

    async def _run(self, function: Callable[[*Ts], Awaitable[object]], args: tuple[*Ts]) -> None:
        with anyio.CancelScope(shield=True) as scope:
            if self._ended:
                scope.cancel()
            self._scopes.add(scope)
            try:
                await function(*args)
            finally:
                self._scopes.discard(scope)

    def end(self) -> None:
        """Cancel them all."""
        self._ended = True
        for scope in tuple(self._scopes):
            scope.cancel()


@asynccontextmanager
async def background_tasks() -> AsyncIterator[BackgroundTasks]:
    """Run tasks beside the body and cancel them when it ends; the body's exception comes out as itself.

    A plain task group would wrap a user's ``ValueError`` in an exception group, which no ``except ValueError`` catches.
    """
    error: BaseException | None = None
    async with anyio.create_task_group() as group:
        tasks = BackgroundTasks(group)
        try:
            yield tasks
        except BaseException as raised:  # noqa: BLE001 - re-raised below, outside of the group
            error = raised
        tasks.end()
    if error is not None:
        raise error
