"""The journal in one SQLite file, written by one controller at a time.

Theory of operation
    One connection writes and does every checkpoint of the write-ahead log; it lives in a thread of its own. Everybody
    who reads has another connection, opened ``mode=ro``. Appends that wait while a transaction is being written share
    the next one, in the order of their calls, so that a group of decisions costs one durable commit.

    Two things keep a second controller out. A lock of the operating system (`rc.events.writer_lock`) refuses it while
    the first lives. The epoch, a number in the ``lease`` row that grows with every opening, is checked inside every
    append transaction: after a takeover the old controller finds another number there and writes nothing.

    A commit that failed is not one that did not happen: it may be on disk and show up at the next opening. So any
    error in an append stops this opening, and reopening reads what is there.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel

from rc.errors import JournalClosed, JournalError
from rc.events.chain import Position
from rc.events.journal import Decision, EncodedDecision, Head, Record, encode_decision
from rc.events.sqlite_open import Opening, prepare, take_lease
from rc.events.sqlite_reader import SqliteReader, advance
from rc.events.sqlite_schema import Identity, identify, sqlite_warnings
from rc.events.sqlite_thread import SqliteThread, check_path, connected, error_code, unopenable, unreadable
from rc.events.sqlite_write import append_group, checkpoint, unwritable
from rc.events.writer_lock import Holder, WriterLock
from rc.task_group import background_tasks

__all__ = ("SqliteJournal",)

GROUP_EVENTS: Final = 512
"""Events that share a transaction, unless one decision has more. Beyond some hundreds the commit no longer counts."""

GROUP_BYTES: Final = 4 * 2**20
"""Text that shares a transaction, unless one decision has more: a second or so on a slow disk."""

CHECKPOINT_BYTES: Final = 8 * 2**20
"""Write-ahead log after which it is copied into the file; SQLite's own default is 4 MiB."""

COMMIT_BYTES: Final = 12 * 2**10
"""What a transaction adds to the log beside its text: about three pages."""


class SqliteJournal:
    """A journal file, open for writing. Use `open`; valid inside its ``async with`` block."""

    def __init__(
        self, path: Path, writing: SqliteThread, reading: SqliteThread, identity: Identity, opening: Opening
    ) -> None:
        self.path = path
        self.created_at = identity.created_at
        self.repaired = opening.repaired
        """What opening removed from the end of the file: a decision that was never acknowledged. None normally."""
        self._journal_id = identity.journal_id
        self._epoch = opening.epoch
        self._head = opening.head
        self._writing = writing
        self._reader = SqliteReader(path, reading, identity, until_grown=self._until_grown)
        self._queue: deque[_Group] = deque()
        self._wanted = anyio.Event()
        self._grown = anyio.Event()
        self._closed = False
        self._failure: JournalError | None = None
        self._log_bytes = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: str | PathLike[str], *, controller: str, takeover: bool = False
    ) -> AsyncIterator[SqliteJournal]:
        """Open a journal file for writing; create it if there is none.

        The whole chain is verified first. What the body appends is on disk when the block is left, however it is left.

        Args:
            path: Of the file, on a local disk.
            controller: Names this opening to the one that finds the journal locked.
            takeover: Fence out a controller that still holds the journal but hangs.

        Raises:
            JournalLocked: Another controller holds it.
            JournalUnusable: It is no journal, of a newer schema, or cannot be read or written here.
            JournalCorrupt: A record does not verify; nothing was changed.
        """
        path, holder = Path(path), Holder.here(controller)
        async with AsyncExitStack() as stack:
            await _leave_strangers_alone(path)
            lock = await anyio.to_thread.run_sync(lambda: WriterLock.acquire(path, holder, takeover=takeover))
            stack.callback(lock.release)
            try:
                writing = await stack.enter_async_context(connected(path, "mode=rwc"))
                identity = await writing.call(prepare, path)
                verified = await _verify(writing, path, identity)
                opening = await writing.call(take_lease, path, identity, verified, holder)
                stack.push_async_callback(_make_whole, writing, path, opening.epoch)
                reading = await stack.enter_async_context(connected(path, "mode=ro"))
            except sqlite3.Error as error:
                raise unopenable(path, error) from error
            journal = cls(path, writing, reading, identity, opening)
            tasks = await stack.enter_async_context(background_tasks())
            tasks.start_soon(journal._write_groups)
            try:
                yield journal
            finally:
                journal._close()  # the group then waits for the writer, which writes what is queued

    @property
    def journal_id(self) -> str:
        """Identifies this journal."""
        return self._journal_id

    @property
    def epoch(self) -> int:
        """The epoch of this opening; larger than every earlier one's."""
        return self._epoch

    @property
    def head(self) -> Head:
        """The last durable record."""
        return self._head

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the SQLite in use."""
        return sqlite_warnings()

    def records(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the durable records behind ``after``; see `JournalReader.records`."""
        return self._reader.records(after=after)

    def follow(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the records behind ``after`` and go on with new ones; see `JournalReader.follow`."""
        return self._reader.follow(after=after)

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        """Append a decision; when this returns, it is on disk. See `Journal.append` for what it raises."""
        self._check_open()
        encoded = encode_decision(decision)
        group = self._joinable_group(encoded)
        place = group.add(encoded)
        self._wanted.set()
        await group.done.wait()
        if group.failure is not None:
            raise type(group.failure)(*group.failure.args) from group.failure
        return group.records[place]

    def _check_open(self) -> None:
        if self._failure is not None:
            raise JournalClosed(
                f"{self.path} was stopped by an earlier error; nothing was written: {self._failure}"
            ) from self._failure
        if self._closed:
            raise JournalClosed(f"{self.path} is closed; open it again")

    def _joinable_group(self, encoded: EncodedDecision) -> _Group:
        if not self._queue or not self._queue[-1].has_room_for(encoded):
            self._queue.append(_Group())
        return self._queue[-1]

    async def _write_groups(self) -> None:
        """Write what waits until the journal is closed. What was queued is written even if everybody was cancelled."""
        with anyio.CancelScope(shield=True):
            while True:
                while self._queue:
                    await self._write(self._queue.popleft())
                    # Those who were just answered may append at once: let them into the next group.
                    await anyio.lowlevel.cancel_shielded_checkpoint()
                if self._closed:
                    break
                self._wanted = anyio.Event()
                await self._wanted.wait()

    async def _write(self, group: _Group) -> None:
        try:
            group.records = await self._writing.call(append_group, self.path, self._epoch, self._head, group.decisions)
        except Exception as error:  # noqa: BLE001 - those who wait must hear of it, whatever it is
            self._stop(group, error)
            return
        last = group.records[-1][-1]
        self._head = Head(seq=last.seq, hash=last.hash)
        group.done.set()
        self._announce()
        self._log_bytes += group.nbytes + COMMIT_BYTES
        if self._log_bytes >= CHECKPOINT_BYTES:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        try:
            await self._writing.call(checkpoint, self.path, self._epoch, "PASSIVE")
        except (sqlite3.Error, JournalError) as error:
            self._stop(_Group(), error)
        self._log_bytes = 0

    def _stop(self, group: _Group, error: Exception) -> None:
        """Fail those whose group failed, and refuse those behind them."""
        self._failure = unwritable(self.path, self._head.seq + 1, error)
        self._failure.__cause__ = error
        group.fail(self._failure)
        refused = JournalClosed(f"{self.path} was stopped before this was written: {self._failure}")
        while self._queue:
            self._queue.popleft().fail(refused)

    def _close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._announce()

    def _announce(self) -> None:
        self._grown.set()
        self._grown = anyio.Event()

    async def _until_grown(self, seq: int) -> None:
        while self._head.seq <= seq:
            if self._closed:
                raise JournalClosed(f"{self.path} is closed; open it again")
            await self._grown.wait()


class _Group:
    """Decisions that share a transaction, and those who wait for it."""

    def __init__(self) -> None:
        self.decisions: list[EncodedDecision] = []
        self.records: list[tuple[Record, ...]] = []
        self.nbytes = 0
        self.done = anyio.Event()
        self.failure: JournalError | None = None
        self._events = 0

    def has_room_for(self, encoded: EncodedDecision) -> bool:
        """Whether a decision can join; an empty group takes one of any size."""
        return not self.decisions or (
            self._events + len(encoded.bodies) <= GROUP_EVENTS and self.nbytes + encoded.nbytes <= GROUP_BYTES
        )

    def add(self, encoded: EncodedDecision) -> int:
        """Queue a decision behind the others and give its place."""
        self.decisions.append(encoded)
        self.nbytes += encoded.nbytes
        self._events += len(encoded.bodies)
        return len(self.decisions) - 1

    def fail(self, failure: JournalError) -> None:
        """Tell all that wait that it failed."""
        self.failure = failure
        self.done.set()


async def _leave_strangers_alone(path: Path) -> None:
    """Look at a file read-only first: opening another program's for writing could already change it.

    Raises:
        JournalUnusable: If it is not ours.
    """
    if not await anyio.to_thread.run_sync(check_path, path):
        return
    try:
        async with connected(path, "mode=ro") as probe:
            await probe.call(identify, str(path))
    except sqlite3.Error as error:
        # A rollback journal lies beside it: an rc was killed while it created the file. Writing finishes the rollback.
        if error_code(error) != sqlite3.SQLITE_READONLY:
            raise unopenable(path, error) from error


async def _verify(writing: SqliteThread, path: Path, identity: Identity) -> Position:
    """Follow the whole chain, a page at a time, so that opening can be cancelled."""
    position = Position.start(identity.journal_id)
    while True:
        try:
            reached = await writing.call(advance, str(path), position)
        except sqlite3.Error as error:
            raise unreadable(path, position.seq + 1, error) from error
        if reached.seq == position.seq:
            return position
        position = reached


async def _make_whole(writing: SqliteThread, path: Path, epoch: int) -> None:
    """Leave a file that is whole without its log. If that fails, nothing is lost: the log stays and is read."""
    with anyio.CancelScope(shield=True), suppress(sqlite3.Error, JournalError):
        await writing.call(checkpoint, path, epoch, "TRUNCATE")
