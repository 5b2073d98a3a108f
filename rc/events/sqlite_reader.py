"""Reading a journal file: from any process, while its writer lives, after it was killed, and after it closed.

A reader opens the file ``mode=ro``: it sees what is in the write-ahead log, and can neither write nor checkpoint.
Between two pages it holds no lock and no snapshot, so it never keeps the writer from resetting the log.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import anyio
import msgspec

from rc.errors import JournalCorrupt, JournalError, JournalUnusable
from rc.events.chain import EventIds, Position, follow_chain
from rc.events.journal import Record
from rc.events.sqlite_schema import Identity, identify, sqlite_warnings
from rc.events.sqlite_thread import SqliteThread, check_path, connected, error_code, unopenable, unreadable

__all__ = ("Lease", "SqliteReader", "advance", "describe_torn", "position_at", "read_lease")

POLL_S: Final = 0.05
"""How often `SqliteReader.follow` looks for news: sooner than a person notices, at 20 small queries a second."""

PAGE_RECORDS: Final = 256
"""Records fetched at once: enough that switching threads costs little, few enough for large trajectories."""


P = ParamSpec("P")
T = TypeVar("T")


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Which opening may append; not whether it still lives. ``acquired_at`` is in Unix seconds."""

    epoch: int
    controller: str
    host: str
    pid: int
    acquired_at: float


class SqliteReader:
    """A journal file, open for reading. Use `open`."""

    def __init__(
        self, path: Path, thread: SqliteThread, identity: Identity, *, until_grown: Callable[[int], Awaitable[object]]
    ) -> None:
        self.path = path
        self.created_at = identity.created_at
        self.torn_tail: str | None = None
        """What lies behind the last whole decision, as of the last read; never part of what is read."""
        self._journal_id = identity.journal_id
        self._thread = thread
        self._until_grown = until_grown

    @classmethod
    @asynccontextmanager
    async def open(cls, path: str | PathLike[str]) -> AsyncIterator[SqliteReader]:
        """Open a journal file for reading.

        Where its directory may not be written and nobody has it open, the file is read as it is now, and `follow` sees
        nothing new.

        Raises:
            JournalUnusable: If there is no journal, or none that this rc can read.
        """
        path = Path(path)
        if not await anyio.to_thread.run_sync(check_path, path):
            raise JournalUnusable(f"there is no journal at {path}; name the file that a controller writes")
        async with _connected_for_reading(path) as (thread, identity):
            yield cls(path, thread, identity, until_grown=lambda _: anyio.sleep(POLL_S))

    @property
    def journal_id(self) -> str:
        """Identifies this journal."""
        return self._journal_id

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the SQLite in use."""
        return sqlite_warnings()

    async def lease(self) -> Lease | None:
        """Read who opened the journal for writing last; None if nobody did."""
        return await self._call(0, read_lease)

    async def records(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the durable records behind ``after``, in order, each verified.

        Raises:
            JournalCorrupt: At the first record that does not verify.
            JournalUnusable: At one that a newer rc wrote.
        """
        position = await self._position(after)
        last = await self._call(after, _last_seq)
        while position and position.seq < last:
            page, position = await self._page(position)
            for record in page:
                yield record
            if not page:
                return

    async def follow(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Like `records`, then go on with new ones as they become durable, until cancelled."""
        position = await self._position(after)
        while position is None:
            await self._until_grown(after - 1)
            position = await self._position(after)
        while True:
            page, position = await self._page(position)
            for record in page:
                yield record
            if not page:
                await self._until_grown(position.seq)

    async def _position(self, after: int) -> Position | None:
        return await self._call(after, position_at, str(self.path), self._journal_id, after)

    async def _page(self, position: Position) -> tuple[list[Record], Position]:
        """Read whole decisions, about a page of them. An unfinished one at the end is left out.

        Whole ones before a record that does not verify are given first; the next call then fails.
        """
        page: list[Record] = []
        whole, reached = 0, position
        try:
            while not page or reached.due:
                rows = await self._call(reached.seq + 1, _read_rows, reached.seq)
                for record, ids in rows:
                    reached = follow_chain(str(self.path), reached, record, ids)
                    page.append(record)
                    if not reached.due:
                        whole, position = len(page), reached
                if not rows:
                    break
        except JournalError:
            if not whole:
                raise
        self.torn_tail = describe_torn(reached)
        return page[:whole], position

    async def _call(
        self, seq: int, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._thread.call(function, *args, **kwargs)
        except sqlite3.Error as error:
            raise unreadable(self.path, seq, error) from error


@asynccontextmanager
async def _connected_for_reading(path: Path) -> AsyncIterator[tuple[SqliteThread, Identity]]:
    async with AsyncExitStack() as stack:
        try:
            thread = await stack.enter_async_context(connected(path, "mode=ro"))
            try:
                identity = await thread.call(identify, str(path))
            except sqlite3.OperationalError as error:
                if error_code(error) not in _NO_SIDE_FILES or await anyio.to_thread.run_sync(_has_log, path):
                    raise
                # SQLite cannot make its -shm file here. Nothing is in the log, so the file alone is the whole journal.
                thread = await stack.enter_async_context(connected(path, "mode=ro&immutable=1"))
                identity = await thread.call(identify, str(path))
        except sqlite3.Error as error:
            raise unopenable(path, error) from error
        if not identity.journal_id:
            raise JournalUnusable(f"{path} is an empty database: no controller has opened it for writing yet")
        yield thread, identity


_NO_SIDE_FILES: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


_SELECT: Final = """
SELECT e.seq, e.epoch, e.at, e.kind, e.schema, e.body, e.cause, c.body, c.events, e.state_digest, e.hash,
  e.rollout, e.update_id, e.engine, e.version
FROM events AS e LEFT JOIN commands AS c ON c.seq = e.seq
WHERE e.seq > ? ORDER BY e.seq LIMIT ?
"""


def _read_rows(connection: sqlite3.Connection, after: int) -> list[tuple[Record, EventIds]]:
    return [_record(*row) for row in connection.execute(_SELECT, (after, PAGE_RECORDS)).fetchall()]


def _record(
    seq: int,
    epoch: int,
    at: float,
    kind: str,
    schema: int,
    body: str,
    cause: int,
    command: str | None,
    events: int | None,
    state_digest: str | None,
    chained: str,
    rollout: str | None,
    update: str | None,
    engine: str | None,
    version: int | None,
) -> tuple[Record, EventIds]:
    """Build a record from a row of `_SELECT`."""
    record = Record(
        seq=seq,
        epoch=epoch,
        at=at,
        kind=kind,
        schema=schema,
        body=body,
        cause=cause,
        command=command,
        events=events or 0,
        state_digest=state_digest,
        hash=chained,
    )
    return record, EventIds(rollout=rollout, update=update, engine=engine, version=version)


def _last_seq(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
    return int(last)


def advance(connection: sqlite3.Connection, source: str, position: Position) -> Position:
    """Follow the chain by one page; the position stays where it is at the end of the journal.

    Raises:
        JournalCorrupt, JournalUnusable: As `rc.events.chain.follow_chain`.
    """
    for record, ids in _read_rows(connection, position.seq):
        position = follow_chain(source, position, record, ids)
    return position


def position_at(connection: sqlite3.Connection, source: str, journal_id: str, seq: int) -> Position | None:
    """Give the position at a record, trusting the hash that is stored with it; None if there is no record yet.

    Raises:
        JournalCorrupt: If the record is missing although later ones are there, or its decision has no command.
    """
    if seq <= 0:
        return Position.start(journal_id)
    row = connection.execute("SELECT epoch, cause, hash FROM events WHERE seq = ?", (seq,)).fetchone()
    if row is None:
        last = _last_seq(connection)
        if last > seq:
            raise JournalCorrupt(source, seq, f"is missing (the last one is {last})")
        return None
    epoch, cause, hash_ = row
    command = connection.execute("SELECT events FROM commands WHERE seq = ?", (cause,)).fetchone()
    if command is None:
        raise JournalCorrupt(source, cause, "begins a decision but its command is missing")
    return Position(seq=seq, hash=hash_, epoch=epoch, cause=cause, due=max(0, cause + command[0] - 1 - seq))


def read_lease(connection: sqlite3.Connection) -> Lease | None:
    """Read the lease row; None before the first opening for writing."""
    row = connection.execute("SELECT epoch, controller, host, pid, acquired_at FROM lease").fetchone()
    if row is None:
        return None
    epoch, controller, host, pid, acquired_at = row
    return Lease(epoch=epoch, controller=controller, host=host, pid=pid, acquired_at=acquired_at)


def describe_torn(position: Position) -> str | None:
    """Say what of an unfinished decision a journal ends with; None if it ends with a whole one."""
    if not position.due:
        return None
    there = position.seq - position.cause + 1
    return f"the decision at {position.cause} has {there} of its {there + position.due} events"
