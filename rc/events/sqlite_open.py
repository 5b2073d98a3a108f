"""Opening a journal file for writing: is it one, does it verify, what has to be repaired, and under which epoch.

The functions run in the writing connection's thread.
"""

from __future__ import annotations

import sqlite3
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from rc.errors import JournalUnusable
from rc.events.chain import Position
from rc.events.journal import Head
from rc.events.sqlite_reader import advance, describe_torn, position_at, read_lease
from rc.events.sqlite_schema import Identity, create_schema, identify
from rc.events.sqlite_thread import transaction
from rc.events.writer_lock import Holder

__all__ = ("Opening", "prepare", "take_lease")

FIRST_STRICT_SQLITE: Final = (3, 37, 0)
FULL: Final = 2


class Opening(NamedTuple):
    """What an opening for writing begins with. ``repaired`` says what was removed; None if nothing had to be."""

    epoch: int
    head: Head
    repaired: str | None


def prepare(connection: sqlite3.Connection, path: Path) -> Identity:
    """Make the connection durable, and an empty database a journal.

    Raises:
        JournalUnusable: If it is no journal, or this SQLite or file system cannot hold one.
    """
    if sqlite3.sqlite_version_info < FIRST_STRICT_SQLITE:
        raise JournalUnusable(f"SQLite {sqlite3.sqlite_version} is too old for a journal: 3.37 or newer is needed")
    identity = identify(connection, str(path))
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise JournalUnusable(
            f"{path}: SQLite cannot use a write-ahead log here (journal mode stays {mode!r}); use a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
    if synchronous != FULL:
        raise JournalUnusable(f"{path}: SQLite did not accept synchronous = FULL (it says {synchronous})")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    if not identity.journal_id:
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        create_schema(connection, journal_id=str(uuid.uuid4()), created_at=created_at)
        # Into the file itself at once: whoever loses the log later still has this journal, and not an empty database.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        identity = identify(connection, str(path))
    return identity


def take_lease(
    connection: sqlite3.Connection, path: Path, identity: Identity, verified: Position, holder: Holder
) -> Opening:
    """Take the next epoch, in one transaction with the last look at the chain and the repair of a torn tail.

    Args:
        connection: For writing.
        path: Of the file.
        identity: Of the journal.
        verified: How far the chain was followed already.
        holder: Who takes it.

    Raises:
        JournalCorrupt: If the chain does not verify; nothing was changed.
    """
    with transaction(connection):
        position = _follow_to_end(connection, path, verified)
        position, repaired = _repair_tail(connection, path, identity, position)
        lease = read_lease(connection)
        epoch = max(lease.epoch if lease else 0, position.epoch) + 1
        connection.execute(
            "INSERT OR REPLACE INTO lease (id, epoch, controller, host, pid, acquired_at) VALUES (1, ?, ?, ?, ?, ?)",
            (epoch, holder.controller, holder.host, holder.pid, holder.since),
        )
    return Opening(epoch, position.head, repaired)


def _follow_to_end(connection: sqlite3.Connection, path: Path, position: Position) -> Position:
    """Follow the chain to the end of what the connection sees."""
    while (reached := advance(connection, str(path), position)).seq > position.seq:
        position = reached
    return position


def _repair_tail(
    connection: sqlite3.Connection, path: Path, identity: Identity, position: Position
) -> tuple[Position, str | None]:
    """Remove a decision that is not whole. Nobody was told of it: an append returns only once all of it is durable."""
    torn = describe_torn(position)
    if torn is not None:
        whole = position_at(connection, str(path), identity.journal_id, position.whole_seq)
        position = whole or Position.start(identity.journal_id)
    connection.execute("DELETE FROM events WHERE seq > ?", (position.seq,))
    commands = connection.execute("DELETE FROM commands WHERE seq > ?", (position.seq,)).rowcount
    if torn is None and commands:
        torn = f"a command at {position.seq + 1} has none of its events"
    if torn is None:
        return position, None
    return position, f"{torn}; it was never acknowledged and has been removed, the journal ends at {position.seq}"
