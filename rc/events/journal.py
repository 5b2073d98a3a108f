"""The journal protocol: what every backend promises, and the hash chain that all of them share.

A `Decision` (one command and the events it caused) is appended whole or not at all. An append that returned is
durable. Each record's hash covers its content and its predecessor's hash, so that an edit, a gap or a reordering
anywhere shows at the first record after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from rc.commands import Command
from rc.events.codec import decode_command, decode_event, encode_command, encode_event
from rc.events.types import Event

__all__ = (
    "Decision",
    "EncodedDecision",
    "Head",
    "Journal",
    "JournalReader",
    "Record",
    "chain_records",
    "encode_decision",
    "genesis_hash",
    "record_hash",
)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A command and the events that it caused.

    ``digests`` holds, per event, the digest of the state after it where that event is a checkpoint, else None.
    """

    command: Command
    events: tuple[Event, ...]
    digests: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if not self.events or len(self.digests) != len(self.events):
            raise ValueError("a decision has at least one event, and one digest or None for each")


class EncodedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision together with the text that is stored of it. ``nbytes`` is the size of that text, roughly."""

    decision: Decision
    command: str
    bodies: tuple[str, ...]
    nbytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One event as stored.

    Attributes:
        seq: Position in the journal, from 1, without gaps.
        epoch: Epoch of the controller that wrote it.
        at: Unix seconds, as the event says.
        kind, schema: Which event type, in which schema version.
        body: The event as JSON text, exactly as written.
        cause: ``seq`` of the first event that the same command caused.
        command: On that first event, the command as JSON text; None on the others.
        events: On that first event, how many events the command caused; 0 on the others.
        state_digest: Digest of the state after this event, on checkpoint events.
        hash: SHA-256 in hex over all of the above and the previous record's hash.
    """

    seq: int
    epoch: int
    at: float
    kind: str
    schema: int
    body: str
    cause: int
    command: str | None
    events: int
    state_digest: str | None
    hash: str

    @property
    def event(self) -> Event:
        """The decoded event, brought up to date."""
        return decode_event(self.kind, self.schema, self.body)

    def decoded_command(self) -> Command | None:
        """The command that caused this event, on the first event of its decision."""
        return None if self.command is None else decode_command(self.command)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The last record's position and hash; position 0 and the genesis hash in an empty journal."""

    seq: int
    hash: str


class JournalReader(Protocol):
    """Reading, from any process."""

    @property
    def journal_id(self) -> str:
        """Identifies this journal; part of its genesis hash, so that chains cannot be spliced."""
        ...

    def records(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Yield the records behind ``after`` that are durable now, in order, each verified against the chain.

        Raises:
            JournalCorrupt: At the first record that does not verify.
        """
        ...

    def follow(self, *, after: int = 0) -> AsyncIterator[Record]:
        """Like `records`, then go on with new ones as they become durable, until cancelled."""
        ...


class Journal(JournalReader, Protocol):
    """Writing, by the one controller that holds the lease."""

    @property
    def epoch(self) -> int:
        """The epoch of this opening; larger than every earlier one's."""
        ...

    @property
    def head(self) -> Head:
        """The last durable record."""
        ...

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        """Append a decision; when this returns, it is durable.

        Concurrent appends share one transaction and keep the order of their calls. Cancelling the caller does not
        cancel the append: it is either wholly there or wholly not, and reading tells which.

        Raises:
            JournalFenced: A newer controller took the journal over; nothing was written.
            JournalUnusable: The medium refused (full, read-only, I/O error). Whether it was written is unknown until
                the journal is reopened; this opening is stopped.
            JournalClosed: The journal was closed or stopped before; nothing was written.
            UnreadableEvent: An event has no text that could be read back (a NaN, say); nothing was written.
        """
        ...


def genesis_hash(journal_id: str) -> str:
    """The hash that the first record follows."""
    return hashlib.sha256(f"rc journal {journal_id}".encode()).hexdigest()


_Content = tuple[int, int, float, str, int, str, int, str | None, int, str | None]
"""A record's fields in the order in which they are hashed; this order and its JSON are the format."""

_encoder = msgspec.json.Encoder()


def record_hash(previous: str, record: Record) -> str:
    """Compute the hash that a record must carry after ``previous``."""
    content = (
        record.seq,
        record.epoch,
        record.at,
        record.kind,
        record.schema,
        record.body,
        record.cause,
        record.command,
        record.events,
        record.state_digest,
    )
    return _content_hash(previous, content)


def _content_hash(previous: str, content: _Content) -> str:
    return hashlib.sha256(previous.encode() + _encoder.encode(content)).hexdigest()


def encode_decision(decision: Decision) -> EncodedDecision:
    """Encode a decision once, before it is queued.

    What could not be read back is refused here, where it fails alone: in the file it would keep it from opening.

    Raises:
        UnreadableEvent: Naming the event that could not be read back.
    """
    bodies = tuple(encode_event(event) for event in decision.events)
    for event, body in zip(decision.events, bodies, strict=True):
        decode_event(event.kind, event.schema, body)
    command = encode_command(decision.command)
    nbytes = len(command) + sum(map(len, bodies))
    return EncodedDecision(decision=decision, command=command, bodies=bodies, nbytes=nbytes)


def chain_records(head: Head, epoch: int, encoded: EncodedDecision) -> tuple[Record, ...]:
    """Lay a decision out as the records that follow ``head``."""
    decision = encoded.decision
    records: list[Record] = []
    command: str | None = encoded.command
    cause, previous, count = head.seq + 1, head.hash, len(decision.events)
    parts = zip(decision.events, encoded.bodies, decision.digests, strict=True)
    for seq, (event, body, digest) in enumerate(parts, start=cause):
        at = float(event.at)  # an int would come back from the file as a float and hash differently
        content = (seq, epoch, at, event.kind, event.schema, body, cause, command, count, digest)
        previous = _content_hash(previous, content)
        records.append(_record(content, previous))
        command, count = None, 0
    return tuple(records)


def _record(content: _Content, hash_: str) -> Record:
    seq, epoch, at, kind, schema, body, cause, command, events, state_digest = content
    return Record(
        seq=seq,
        epoch=epoch,
        at=at,
        kind=kind,
        schema=schema,
        body=body,
        cause=cause,
        command=command,
        events=events,
        state_digest=state_digest,
        hash=hash_,
    )
