"""The journal in memory: the same contract without a file, without threads, on asyncio and on trio.

A `MemoryStore` is what a file is to `rc.events.sqlite.SqliteJournal`: it outlives its openings, has one writer at a
time, and fences out one that was replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from rc.errors import JournalClosed, JournalError, JournalFenced, JournalLocked, JournalUnusable
from rc.events.chain import Position, follow_chain
from rc.events.journal import Decision, EncodedDecision, Head, Record, chain_records, encode_decision, genesis_hash

__all__ = ("MemoryJournal", "MemoryReader", "MemoryStore")


class MemoryStore:
    """Records that outlive the journals which write them.

    Args:
        journal_id: Identifies the journal; the same id and decisions give the same hashes.
        capacity: Records after which it is full, as a disk is; None for no limit.
    """

    def __init__(self, *, journal_id: str = "memory", capacity: int | None = None) -> None:
        self.journal_id = journal_id
        self.capacity = capacity
        self.records: list[Record] = []
        self.epoch = 0
        self.holder: str | None = None
        self.grown = anyio.Event()

    @property
    def head(self) -> Head:
        """The last record."""
        if not self.records:
            return Head(seq=0, hash=genesis_hash(self.journal_id))
        return Head(seq=self.records[-1].seq, hash=self.records[-1].hash)


class MemoryReader:
    """Reading from a store. It needs no opening."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def journal_id(self) -> str:
        """Identifies the journal."""
        return self._store.journal_id

    async def records(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the records behind ``after``, in order, each verified; see `JournalReader.records`."""
        await anyio.lowlevel.checkpoint()
        async for record in self._between(after, len(self._store.records)):
            yield record

    async def follow(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the records behind ``after`` and go on with new ones; see `JournalReader.follow`."""
        while True:
            await anyio.lowlevel.checkpoint()
            async for record in self._between(after, len(self._store.records)):
                yield record
                after = record.seq
            if after >= len(self._store.records):
                await self._until_grown()

    async def _between(self, after: int, last: int) -> AsyncIterator[Record]:
        position = self._position(after)
        for index in range(max(after, 0), last):
            record = self._store.records[index]
            position = follow_chain(f"memory journal {self.journal_id}", position, record)
            yield record

    def _position(self, after: int) -> Position:
        if not 0 < after <= len(self._store.records):
            return Position.start(self.journal_id)
        record = self._store.records[after - 1]
        due = record.cause + self._store.records[record.cause - 1].events - 1 - after
        return Position(seq=after, hash=record.hash, epoch=record.epoch, cause=record.cause, due=due)

    async def _until_grown(self) -> None:
        await self._store.grown.wait()


class MemoryJournal(MemoryReader):
    """A store, open for writing. Use `open`; valid inside its ``async with`` block."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        store.epoch += 1
        self._epoch = store.epoch
        self._head = store.head
        self._waiting: deque[_Append] = deque()
        self._closed = False
        self._failure: JournalError | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, store: MemoryStore, *, controller: str, takeover: bool = False) -> AsyncIterator[MemoryJournal]:
        """Open a store for writing; arguments and errors are those of `SqliteJournal.open`."""
        await anyio.lowlevel.checkpoint()
        if store.holder is not None and not takeover:
            raise JournalLocked(
                f"memory journal {store.journal_id} is held by controller {store.holder}. Close that one first; if it "
                f"hangs, open with takeover=True, which fences it out"
            )
        journal = cls(store)
        store.holder = controller
        try:
            async for _ in journal.records():
                pass
            yield journal
        finally:
            journal._write_waiting()
            journal._closed = True
            if journal._epoch == store.epoch:
                store.holder = None

    @property
    def epoch(self) -> int:
        """The epoch of this opening; larger than every earlier one's."""
        return self._epoch

    @property
    def head(self) -> Head:
        """The last record."""
        return self._head

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        """Append a decision; see `Journal.append`."""
        if self._failure is not None:
            raise JournalClosed(f"the journal was stopped by an earlier error: {self._failure}") from self._failure
        if self._closed:
            raise JournalClosed("the journal is closed; open it again")
        append = _Append(encode_decision(decision))
        self._waiting.append(append)
        try:
            # Others run between the call and durability, as they do while a disk writes.
            await anyio.lowlevel.checkpoint()
        finally:
            self._write_waiting()  # also for a caller that was cancelled meanwhile: nobody else may come
        if append.failure is not None:
            raise append.failure
        return append.records

    def _write_waiting(self) -> None:
        """Write everything that waits, in the order of the calls, also for those who were cancelled meanwhile."""
        while self._waiting:
            append = self._waiting.popleft()
            if self._failure is not None:
                append.failure = JournalClosed(f"stopped before this was written: {self._failure}")
                continue
            try:
                append.records = self._write(append.encoded)
            except JournalError as error:
                self._failure = append.failure = error

    def _write(self, encoded: EncodedDecision) -> tuple[Record, ...]:
        store = self._store
        if store.epoch != self._epoch:
            raise JournalFenced(
                f"memory journal {store.journal_id} was taken over by controller {store.holder} (epoch {store.epoch}); "
                f"this one (epoch {self._epoch}) wrote nothing and may not write again"
            )
        records = chain_records(self._head, self._epoch, encoded)
        if store.capacity is not None and len(store.records) + len(records) > store.capacity:
            raise JournalUnusable(
                f"memory journal {store.journal_id}: appending record {records[0].seq} failed: it is full"
            )
        store.records.extend(records)
        self._head = store.head
        store.grown.set()
        store.grown = anyio.Event()
        return records


class _Append:
    """A decision that waits for durability, and what became of it."""

    def __init__(self, encoded: EncodedDecision) -> None:
        self.encoded = encoded
        self.records: tuple[Record, ...] = ()
        self.failure: JournalError | None = None
