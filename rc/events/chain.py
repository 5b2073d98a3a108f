"""Following a chain: is this record the one that belongs behind those before it?

Pure, and the same for every backend, for opening, for tailing and for an audit.
"""

from __future__ import annotations

import msgspec

from rc.errors import JournalCorrupt, JournalUnusable
from rc.events.codec import UnreadableEvent
from rc.events.journal import Head, Record, genesis_hash, record_hash
from rc.events.types import Event

__all__ = ("EventIds", "Position", "UnreadableRecord", "follow_chain", "ids_of")


class UnreadableRecord(JournalUnusable):
    """A record that is authentic but says what this rc cannot read: a newer one wrote it."""

    def __init__(self, source: str, seq: int, problem: str) -> None:
        super().__init__(f"{source}: record {seq} cannot be read: {problem}")
        self.seq = seq


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a chain was followed.

    Attributes:
        seq, hash: The last record; 0 and the genesis hash before the first.
        epoch: Its epoch.
        cause: First record of its decision.
        due: Records that its decision still lacks; 0 where the decision is whole.
    """

    seq: int
    hash: str
    epoch: int = 0
    cause: int = 0
    due: int = 0

    @classmethod
    def start(cls, journal_id: str) -> Position:
        """Give the position before the first record."""
        return cls(seq=0, hash=genesis_hash(journal_id))

    @property
    def head(self) -> Head:
        """The position as the head of a journal that ends here."""
        return Head(seq=self.seq, hash=self.hash)

    @property
    def whole_seq(self) -> int:
        """The last record of the last decision that is complete."""
        return self.cause - 1 if self.due else self.seq


class EventIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids in an event that people search for. ``version`` is the update's target where the event names one."""

    rollout: str | None
    update: str | None
    engine: str | None
    version: int | None


def ids_of(event: Event) -> EventIds:
    """Pull the ids out of an event; None where it has none."""
    return EventIds(
        rollout=getattr(event, "rollout", None),
        update=getattr(event, "update", None),
        engine=getattr(event, "engine", None),
        version=getattr(event, "version", getattr(event, "target", None)),
    )


def follow_chain(source: str, position: Position, record: Record, ids: EventIds | None = None) -> Position:
    """Step from ``position`` to ``record``.

    Args:
        source: The journal's name for errors: its path.
        position: Where the record before it led.
        record: What was read next.
        ids: What is stored beside it for searching, where a backend does that.

    Raises:
        JournalCorrupt: If the record is altered, out of order, or not whole, or the one before it is missing.
        UnreadableRecord: If the record is authentic, but this rc cannot read it.
    """
    expected = position.seq + 1
    if record.seq != expected:
        raise JournalCorrupt(source, expected, f"is missing (the next one is {record.seq})")
    problem = _misplaced(position, record)
    if problem is None and record.hash != record_hash(position.hash, record):
        problem = "does not match its hash: it, or a record before it, was altered, moved or replaced"
    if problem is not None:
        raise JournalCorrupt(source, record.seq, problem)
    _check_body(source, record, ids)
    return Position(
        seq=record.seq,
        hash=record.hash,
        epoch=record.epoch,
        cause=record.cause,
        due=(position.due or record.events) - 1,
    )


def _misplaced(position: Position, record: Record) -> str | None:
    """Say how the record does not fit the decision it should continue or begin."""
    if record.epoch < position.epoch:
        return f"has epoch {record.epoch} behind one of epoch {position.epoch}"
    if position.due and record.cause != position.cause:
        return f"does not belong to the decision at {position.cause}, which lacks {position.due} records"
    if position.due and (record.command is not None or record.events):
        return f"has a command of its own within the decision at {position.cause}"
    if not position.due and record.cause != record.seq:
        return f"names {record.cause} as its cause, a decision that is complete without it"
    if not position.due and (record.command is None or record.events < 1):
        return "begins a decision but its command is missing"
    return None


def _check_body(source: str, record: Record, ids: EventIds | None) -> None:
    try:
        event = record.event
    except UnreadableEvent as error:
        raise UnreadableRecord(source, record.seq, str(error)) from error
    if event.at != record.at:
        raise JournalCorrupt(source, record.seq, f"is dated {record.at!r} where its body says {event.at!r}")
    if ids is not None and ids != ids_of(event):
        raise JournalCorrupt(source, record.seq, f"has columns that disagree with its body: {_describe(ids, event)}")


def _describe(ids: EventIds, event: Event) -> str:
    said = ids_of(event)
    return ", ".join(
        f"{name} is {getattr(ids, name)!r}, not {getattr(said, name)!r}"
        for name in EventIds.__struct_fields__
        if getattr(ids, name) != getattr(said, name)
    )
