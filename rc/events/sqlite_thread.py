"""Connections to SQLite, each in a thread of its own, and SQLite's errors in the words of the journal."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import aiosqlite
import anyio
import sniffio

from rc.errors import JournalClosed, JournalCorrupt, JournalError, JournalUnusable

__all__ = ("SqliteThread", "check_path", "connected", "error_code", "transaction", "unopenable", "unreadable")

BUSY_TIMEOUT_S: Final = 5.0
"""How long SQLite waits for somebody else's lock. Our own processes hold one for milliseconds."""

P = ParamSpec("P")
T = TypeVar("T")


class SqliteThread(aiosqlite.Connection):
    """A connection in a thread of its own, where a whole function runs in one go.

    A transaction is several statements; awaiting each of them would cost as many switches of threads.
    """

    async def call(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function(connection, ...)`` in the thread. Cancelling the caller does not stop it.

        Raises:
            JournalClosed: If the connection was closed.
        """
        if not self._running or self._connection is None:
            raise JournalClosed("the journal is closed; open it again")
        result: T = await self._execute(function, self._connection, *args, **kwargs)  # type: ignore[no-untyped-call]
        return result


@asynccontextmanager
async def connected(path: Path, parameters: str) -> AsyncIterator[SqliteThread]:
    """Connect to a database file, with SQLite's URI parameters: ``"mode=ro"``."""
    if sniffio.current_async_library() != "asyncio":
        raise JournalUnusable("a journal file needs asyncio, since aiosqlite does; on trio, use MemoryJournal")
    connection = SqliteThread(partial(_connect, path, parameters), iter_chunk_size=1)
    with anyio.CancelScope(shield=True):
        await connection
    try:
        yield connection
    finally:
        with anyio.CancelScope(shield=True):
            await connection.close()


def _connect(path: Path, parameters: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{parameters}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a write transaction: committed at the end of the block, rolled back if that raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # what went wrong first is what matters
            connection.rollback()
        raise


def check_path(path: Path) -> bool:
    """Look at the path before SQLite does, without opening it; tell whether a file with something in it is there.

    Raises:
        JournalUnusable: If no journal can be there.
    """
    if path.is_dir():
        raise JournalUnusable(f"{path} is a directory; name the journal file itself, e.g. {path / 'run.db'}")
    if not path.parent.is_dir():
        raise JournalUnusable(f"{path} cannot be opened: {path.parent} is not a directory; create it first")
    return path.exists() and path.stat().st_size > 0


def unopenable(path: Path, error: sqlite3.Error) -> JournalUnusable:
    """Translate an error at opening."""
    if error_code(error) == sqlite3.SQLITE_NOTADB:
        return JournalUnusable(f"{path} is not an rc journal: it is no SQLite database. Name another file")
    if error_code(error) == sqlite3.SQLITE_BUSY:
        return JournalUnusable(
            f"{path} is locked: another program has been writing to it for {BUSY_TIMEOUT_S:g} s. End that program, "
            f"also if it is a controller that hangs, then open the journal again"
        )
    return JournalUnusable(
        f"{path} cannot be opened: {error}. Check the permissions and the free space of the file and its directory"
    )


def unreadable(path: Path, seq: int, error: sqlite3.Error) -> JournalError:
    """Translate an error at reading record ``seq`` or one soon after it."""
    if error_code(error) in (None, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return JournalCorrupt(str(path), seq, f"(or one soon after it) cannot be read from the file: {error}")
    return JournalUnusable(f"{path}: reading record {seq} failed: {error}")


def error_code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None for an error of Python's own, such as text that is not UTF-8."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
