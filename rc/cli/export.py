"""Trajectories with their provenance, as JSONL or Parquet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from rc.errors import CallerError
from rc.events.sqlite_reader import SqliteReader
from rc.projections.trajectories import Trajectory, TrajectoryFold

__all__ = ("export_trajectories",)

_BATCH_ROWS: Final = 1000
"""Rows of a Parquet row group: few enough to hold in memory with long trajectories."""


async def export_trajectories(journal: Path, out: Path, aborted: bool) -> int:
    """Write the journal's trajectories to a file that appears whole or not at all.

    Returns:
        How many were written.

    Raises:
        CallerError: The file's name does not say a known format, or its library is missing.
    """
    write = {".jsonl": _write_jsonl, ".parquet": _write_parquet}.get(out.suffix)
    if write is None:
        raise CallerError(f"{out}: trajectories are written as .jsonl or .parquet; name the file accordingly")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise CallerError("Parquet needs pyarrow: pip install 'rolloutcore[trainer]', or name a .jsonl file")
    if not out.parent.is_dir():
        raise CallerError(f"{out.parent} is not a directory; create it, or name another file")
    partial = out.with_name(out.name + ".partial")
    try:
        async with SqliteReader.open(journal) as reader:
            written = await write(partial, _trajectories(reader, aborted))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return written


async def _trajectories(reader: SqliteReader, aborted: bool) -> AsyncIterator[Trajectory]:
    fold = TrajectoryFold()
    async for record in reader.records():
        trajectory = fold.apply(record.seq, record.event)
        if trajectory is not None and (aborted or trajectory.status == "finished"):
            yield trajectory


async def _write_jsonl(path: Path, trajectories: AsyncIterator[Trajectory]) -> int:
    written = 0
    with path.open("wb") as stream:
        async for trajectory in trajectories:
            stream.write(msgspec.json.encode(trajectory) + b"\n")
            written += 1
    return written


async def _write_parquet(path: Path, trajectories: AsyncIterator[Trajectory]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    written, rows = 0, list[dict[str, Any]]()
    schema = _parquet_schema()
    with pq.ParquetWriter(path, schema) as writer:
        async for trajectory in trajectories:
            rows.append(_row(trajectory))
            written += 1
            if len(rows) == _BATCH_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return written


def _parquet_schema() -> Any:
    import pyarrow as pa

    turn = pa.struct(
        [
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
            ("spans", pa.list_(pa.struct([("label", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
            ("finish_reason", pa.string()),
            ("sampling", pa.string()),
            ("cached_tokens", pa.int32()),
            ("request", pa.string()),
            ("started_at", pa.float64()),
            ("finished_at", pa.float64()),
        ]
    )
    identity = pa.struct(
        [("run", pa.string()), ("step", pa.int64()), ("checkpoint", pa.string()), ("content_digest", pa.string())]
    )
    texts = ("rollout", "status", "reason", "label", "update", "engine", "boot", "vllm", "model", "profile")
    return pa.schema(
        [
            *((name, pa.string()) for name in texts),
            ("version", pa.int64()),
            ("identity", identity),
            ("attested", pa.bool_()),
            ("turns", pa.list_(turn)),
            ("admitted_at", pa.float64()),
            ("ended_at", pa.float64()),
            ("admit_seq", pa.int64()),
            ("end_seq", pa.int64()),
        ]
    )


def _row(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as a Parquet row. Sampling parameters differ in type from turn to turn: they go in as JSON text."""
    row: dict[str, Any] = msgspec.structs.asdict(trajectory)
    row["identity"] = msgspec.structs.asdict(trajectory.identity)
    row["turns"] = [
        {
            **msgspec.structs.asdict(turn),
            "spans": [msgspec.structs.asdict(span) for span in turn.spans],
            "sampling": msgspec.json.encode(turn.sampling).decode(),
        }
        for turn in trajectory.turns
    ]
    return row
