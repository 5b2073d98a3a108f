"""What the writing connection does in its thread: append transactions, and checkpoints of the write-ahead log."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rc.errors import JournalError, JournalFenced, JournalUnusable
from rc.events.chain import ids_of
from rc.events.journal import EncodedDecision, Head, Record, chain_records
from rc.events.sqlite_reader import read_lease
from rc.events.sqlite_thread import error_code, transaction
from rc.events.types import Event

__all__ = ("append_group", "checkpoint", "unwritable")

_INSERT_EVENT = """
INSERT INTO events (seq, epoch, at, kind, schema, rollout, update_id, engine, version, cause, body, state_digest, hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_INSERT_COMMAND = "INSERT INTO commands (seq, events, body) VALUES (?, ?, ?)"

_ADVICE = {
    sqlite3.SQLITE_FULL: "free space on that disk",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable",
    sqlite3.SQLITE_BUSY: "another program has been writing to it for some seconds: end that program",
    sqlite3.SQLITE_CONSTRAINT: "another program has written to it: find that program",
    sqlite3.SQLITE_IOERR: "check that disk",
}


def append_group(
    connection: sqlite3.Connection, path: Path, epoch: int, head: Head, decisions: Sequence[EncodedDecision]
) -> list[tuple[Record, ...]]:
    """Append decisions behind ``head`` in one transaction and give their records; on return they are on disk.

    Raises:
        JournalFenced: If the epoch is no longer ours; nothing was written.
        sqlite3.Error: If anything went wrong; whether they are on disk is then unknown.
    """
    laid_out: list[tuple[Record, ...]] = []
    for decision in decisions:
        records = chain_records(head, epoch, decision)
        head = Head(seq=records[-1].seq, hash=records[-1].hash)
        laid_out.append(records)
    rows = [
        _row(record, event)
        for decision, records in zip(decisions, laid_out, strict=True)
        for event, record in zip(decision.decision.events, records, strict=True)
    ]
    with transaction(connection):
        _check_epoch(connection, path, epoch)
        connection.executemany(_INSERT_EVENT, rows)
        connection.executemany(_INSERT_COMMAND, [(first.seq, first.events, first.command) for first, *_ in laid_out])
    return laid_out


def _row(record: Record, event: Event) -> tuple[object, ...]:
    ids = ids_of(event)
    return (
        record.seq,
        record.epoch,
        record.at,
        record.kind,
        record.schema,
        ids.rollout,
        ids.update,
        ids.engine,
        ids.version,
        record.cause,
        record.body,
        record.state_digest,
        record.hash,
    )


def _check_epoch(connection: sqlite3.Connection, path: Path, epoch: int) -> None:
    """Hold the lease against the epoch that we were opened with.

    Raises:
        JournalFenced: If a newer opening took it.
    """
    lease = read_lease(connection)
    if lease is not None and lease.epoch == epoch:
        return
    newer = f"controller {lease.controller} (epoch {lease.epoch}, process {lease.pid})" if lease else "somebody"
    raise JournalFenced(
        f"{path} was taken over by {newer}; this controller (epoch {epoch}) wrote nothing and may not write again. "
        f"End it, or open the journal anew"
    )


def checkpoint(connection: sqlite3.Connection, path: Path, epoch: int, mode: Literal["PASSIVE", "TRUNCATE"]) -> None:
    """Copy the write-ahead log into the file, as far as readers allow, if the lease is still ours.

    Raises:
        JournalFenced: If it is not.
        sqlite3.Error: If the copy failed; the log still has everything.
    """
    _check_epoch(connection, path, epoch)
    connection.execute(_CHECKPOINT[mode]).fetchone()


_CHECKPOINT = {"PASSIVE": "PRAGMA wal_checkpoint(PASSIVE)", "TRUNCATE": "PRAGMA wal_checkpoint(TRUNCATE)"}


def unwritable(path: Path, seq: int, error: Exception) -> JournalError:
    """Translate what went wrong in appending record ``seq`` and perhaps some behind it."""
    if isinstance(error, JournalFenced):
        return error
    advice = _ADVICE.get(error_code(error) or 0) if isinstance(error, sqlite3.Error) else None
    return JournalUnusable(
        f"{path}: appending record {seq} failed: {error}. This opening is stopped, and whether the record was written "
        f"is unknown until the journal is opened again{': ' + advice + ' first' if advice else ''}"
    )
