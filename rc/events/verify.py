"""An audit of a whole journal that reports instead of raising."""

from __future__ import annotations

import msgspec

from rc.errors import JournalCorrupt, JournalError
from rc.events.chain import Position, UnreadableRecord
from rc.events.journal import Head, JournalReader
from rc.events.sqlite_reader import SqliteReader

__all__ = ("EpochSpan", "VerifyReport", "verify")


class EpochSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Records ``first`` to ``last``, all written by one opening."""

    epoch: int
    first: int
    last: int


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found.

    Attributes:
        journal_id: Of the journal.
        records: How many records verified, from the first.
        decisions: How many commands caused them.
        head: The last record that verified. Noted elsewhere, it shows later that nothing before it was changed or cut
            off.
        epochs: Which opening wrote what.
        problem: The first thing that is wrong; nothing behind it was checked. None if nothing is.
        problem_seq: The record it concerns, where known.
        torn_tail: An unfinished decision behind the head. It was never acknowledged, and opening for writing removes
            it.
    """

    journal_id: str
    records: int
    decisions: int
    head: Head
    epochs: tuple[EpochSpan, ...]
    problem: str | None = None
    problem_seq: int | None = None
    torn_tail: str | None = None

    @property
    def intact(self) -> bool:
        """Whether everything that was acknowledged verifies."""
        return self.problem is None


async def verify(reader: JournalReader) -> VerifyReport:
    """Check every record: hash, order, completeness of decisions, columns against bodies, readability of commands."""
    head = Position.start(reader.journal_id).head
    decisions = 0
    epochs: list[EpochSpan] = []
    problem: JournalError | None = None
    try:
        async for record in reader.records():
            decisions += record.decoded_command() is not None
            head = Head(seq=record.seq, hash=record.hash)
            if not epochs or epochs[-1].epoch != record.epoch:
                epochs.append(EpochSpan(epoch=record.epoch, first=record.seq, last=record.seq))
            epochs[-1] = msgspec.structs.replace(epochs[-1], last=record.seq)
    except JournalError as error:
        problem = error
    return VerifyReport(
        journal_id=reader.journal_id,
        records=head.seq,
        decisions=decisions,
        head=head,
        epochs=tuple(epochs),
        problem=None if problem is None else str(problem),
        problem_seq=problem.seq if isinstance(problem, JournalCorrupt | UnreadableRecord) else None,
        torn_tail=reader.torn_tail if isinstance(reader, SqliteReader) else None,
    )
