"""The journal's tables in SQLite, and how a file is recognised as a journal.

Made to be read by others: STRICT tables, JSON text, ids pulled out of the bodies, and views for the usual questions.
The bodies are what counts; the columns and views are there for people and are checked against the bodies.
"""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from rc.errors import JournalUnusable
from rc.events.sqlite_thread import transaction

__all__ = ("APPLICATION_ID", "SCHEMA_VERSION", "Identity", "create_schema", "identify", "sqlite_warnings")

APPLICATION_ID: Final = 0x7263_6A6E
"""The letters ``rcjn``; `file` and others show it."""

SCHEMA_VERSION: Final = 1

_SCHEMA: Final = """
CREATE TABLE events (
  seq INTEGER PRIMARY KEY CHECK (seq > 0),  -- position, without gaps
  epoch INTEGER NOT NULL,                   -- which opening wrote it
  at REAL NOT NULL,                         -- Unix seconds
  kind TEXT NOT NULL,
  schema INTEGER NOT NULL,                  -- version of the body's shape
  rollout TEXT,                             -- ids pulled out of the body; NULL where it has none
  update_id TEXT,
  engine TEXT,
  version INTEGER,                          -- 7 is rc-7; the target where the event is about an update's target
  cause INTEGER NOT NULL,                   -- seq of the first event of the same decision
  body TEXT NOT NULL,                       -- the event as JSON
  state_digest TEXT,                        -- state after this event, on checkpoint events
  hash TEXT NOT NULL                        -- SHA-256 over this record and the previous hash
) STRICT;

CREATE INDEX events_update ON events (update_id) WHERE update_id IS NOT NULL;

CREATE TABLE commands (
  seq INTEGER PRIMARY KEY CHECK (seq > 0),  -- seq of the first event that the command caused
  events INTEGER NOT NULL,                  -- how many it caused
  body TEXT NOT NULL                        -- the command as JSON
) STRICT;

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE lease (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  epoch INTEGER NOT NULL,                   -- only the opening with this epoch may append
  controller TEXT NOT NULL,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  acquired_at REAL NOT NULL
) STRICT;

CREATE VIEW rollouts AS
WITH lives AS (
  SELECT seq, kind, at, rollout, engine, version,
    lead(seq) OVER (PARTITION BY rollout ORDER BY seq) AS end_seq
  FROM events WHERE rollout IS NOT NULL
)
SELECT a.rollout, a.version, a.engine,
  CASE e.kind WHEN 'finish_rollout' THEN 'finished' WHEN 'abort_rollout' THEN 'aborted' ELSE 'active' END AS outcome,
  a.at AS admitted_at, e.at AS ended_at, e.at - a.at AS duration_s,
  json_array_length(e.body, '$.turns') AS turns,
  (SELECT sum(json_array_length(t.value, '$.token_ids')) FROM json_each(e.body, '$.turns') AS t) AS tokens,
  json_extract(e.body, '$.reason') AS reason,
  a.seq AS admit_seq, e.seq AS end_seq
FROM lives AS a LEFT JOIN events AS e ON e.seq = a.end_seq
WHERE a.kind = 'admit';

CREATE VIEW updates AS
SELECT update_id,
  max(CASE kind WHEN 'request_update' THEN version END) AS version,
  coalesce(max(CASE kind WHEN 'committed' THEN 'committed' WHEN 'update_abandoned' THEN 'abandoned' END),
    max(CASE kind WHEN 'tainted' THEN 'tainted' END), 'in progress') AS outcome,
  max(CASE kind WHEN 'request_update' THEN json_extract(body, '$.identity.run') END) AS run,
  max(CASE kind WHEN 'request_update' THEN json_extract(body, '$.identity.step') END) AS step,
  max(CASE kind WHEN 'request_update' THEN json_extract(body, '$.path') END) AS path,
  min(CASE kind WHEN 'request_update' THEN at END) AS requested_at,
  min(CASE kind WHEN 'committed' THEN at END) AS committed_at,
  max(CASE kind WHEN 'quiesced' THEN at END) - min(CASE kind WHEN 'drain' THEN at END) AS drain_s,
  max(CASE kind WHEN 'resumed' THEN at END) - min(CASE kind WHEN 'quiesced' THEN at END) AS paused_s,
  max(CASE WHEN kind IN ('update_abandoned', 'tainted') THEN json_extract(body, '$.reason') END) AS reason,
  min(seq) AS first_seq, max(seq) AS last_seq
FROM events WHERE update_id IS NOT NULL GROUP BY update_id;

CREATE VIEW versions AS
SELECT c.version, c.update_id, c.at AS committed_at, c.seq AS committed_seq,
  json_extract(c.body, '$.identity.run') AS run,
  json_extract(c.body, '$.identity.step') AS step,
  json_extract(c.body, '$.identity.checkpoint') AS checkpoint,
  coalesce(r.admitted, 0) AS admitted, coalesce(r.finished, 0) AS finished, coalesce(r.aborted, 0) AS aborted
FROM events AS c LEFT JOIN (
  SELECT version, sum(kind = 'admit') AS admitted, sum(kind = 'finish_rollout') AS finished,
    sum(kind = 'abort_rollout') AS aborted
  FROM events WHERE rollout IS NOT NULL GROUP BY version
) AS r ON r.version = c.version
WHERE c.kind = 'committed';
"""


class Identity(NamedTuple):
    """What a database says about itself. ``journal_id`` is empty in an empty database."""

    journal_id: str
    created_at: str


def create_schema(connection: sqlite3.Connection, *, journal_id: str, created_at: str) -> None:
    """Make an empty database a journal, in one transaction.

    Args:
        connection: To the database, outside of a transaction.
        journal_id: Goes into the genesis hash.
        created_at: ISO 8601.
    """
    with transaction(connection):
        for statement in _statements():
            connection.execute(statement)
        meta = {"schema_version": str(SCHEMA_VERSION), "journal_id": journal_id, "created_at": created_at}
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())


def _statements() -> list[str]:
    pragmas = [f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {SCHEMA_VERSION}"]
    statements, statement = [], ""
    for line in _SCHEMA.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            statements.append(statement.strip())
            statement = ""
    return pragmas + statements


def identify(connection: sqlite3.Connection, path: str) -> Identity:
    """Tell whether a database is a journal that this rc can use.

    Raises:
        JournalUnusable: If it belongs to another program, or to a newer rc.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == 0 and version == 0 and objects == 0:
        return Identity("", "")
    if application != APPLICATION_ID:
        raise JournalUnusable(
            f"{path} is an SQLite database of another program (application id {application}, {objects} tables and "
            f"other objects), not an rc journal; it was left untouched. Name another file"
        )
    if version > SCHEMA_VERSION:
        raise JournalUnusable(
            f"{path} is a journal of schema version {version}; this rc reads up to {SCHEMA_VERSION}. Upgrade rc"
        )
    meta: dict[str, str] = dict(connection.execute("SELECT key, value FROM meta"))
    missing = {"journal_id", "created_at"} - meta.keys()
    if missing:
        raise JournalUnusable(f"{path}: its meta table lacks {', '.join(sorted(missing))}; restore a whole copy")
    return Identity(meta["journal_id"], meta["created_at"])


def sqlite_warnings(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> tuple[str, ...]:
    """Say what a user should know about a version of SQLite.

    The WAL-reset bug: two connections that write and checkpoint at the same moment can lose committed frames.
    """
    fixed = version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51, 0) or (3, 44, 6) <= version < (3, 45, 0)
    if version < (3, 7, 0) or fixed:
        return ()
    number = ".".join(map(str, version))
    return (
        f"SQLite {number} has the WAL-reset bug (fixed in 3.51.3, 3.50.7 and 3.44.6). rc is not exposed to it, since "
        f"one connection does all writing and checkpointing: while a controller runs, let no other program write to "
        f"the journal",
    )
