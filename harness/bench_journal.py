"""How near the journal's appends come to what SQLite itself can do, measured side by side in one run.

``python harness/bench_journal.py`` writes ``artifacts/bench_journal.json``. Rounds of both kinds alternate, since disks
and neighbours drift; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rc.commands import AdmitRollout
from rc.events.journal import Decision, Head, chain_records, encode_decision, genesis_hash
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.sqlite_schema import create_schema
from rc.events.types import Admit
from rc.events.verify import verify

BATCH_ROWS = 100
APPENDERS = 1000
ENGINE = "http://127.0.0.1:8000"


def admit(number: int) -> Decision:
    at, rollout = 1_700_000_000.0 + number, f"rollout-{number:08x}"
    event = Admit(at=at, rollout=rollout, engine=ENGINE, version=3, lease_s=600.0)
    command = AdmitRollout(at=at, rollout=rollout, lease_s=600.0)
    return Decision(command=command, events=(event,), digests=(None,))


def raw_rows(count: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Make the rows that rc would write, ahead of the measurement."""
    head = Head(seq=0, hash=genesis_hash("raw"))
    events: list[tuple[Any, ...]] = []
    commands: list[tuple[Any, ...]] = []
    for number in range(count):
        (row,) = chain_records(head, 1, encode_decision(admit(number)))
        head = Head(seq=row.seq, hash=row.hash)
        ids = (f"rollout-{number:08x}", None, ENGINE, 3)
        events.append((row.seq, 1, row.at, row.kind, row.schema, *ids, row.cause, row.body, row.state_digest, row.hash))
        commands.append((row.seq, 1, row.command))
    return events, commands


def raw_per_s(path: Path, count: int, batch: int) -> float:
    """Insert with the sqlite3 module alone, ``batch`` events a transaction; events per second."""
    events, commands = raw_rows(count)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        create_schema(connection, journal_id="raw", created_at="")
        started = time.perf_counter()
        for start in range(0, count, batch):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", events[start : start + batch]
            )
            connection.executemany("INSERT INTO commands VALUES (?, ?, ?)", commands[start : start + batch])
            connection.execute("COMMIT")
        return count / (time.perf_counter() - started)


async def lone_per_s(path: Path, count: int) -> float:
    """Append one after the other; events per second."""
    async with SqliteJournal.open(path, controller="bench") as journal:
        decisions = [admit(number) for number in range(count)]
        started = time.perf_counter()
        for decision in decisions:
            await journal.append(decision)
        return count / (time.perf_counter() - started)


async def concurrent_per_s(path: Path, each: int) -> float:
    """Append from many tasks at once, each awaiting its own; events per second."""
    async with SqliteJournal.open(path, controller="bench") as journal:

        async def append(decisions: Iterable[Decision]) -> None:
            for decision in decisions:
                await journal.append(decision)

        lanes = [[admit(lane * each + number) for number in range(each)] for lane in range(APPENDERS)]
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for lane in lanes:
                tasks.start_soon(append, lane)
        return APPENDERS * each / (time.perf_counter() - started)


async def verified(path: Path) -> tuple[int, float]:
    """Count the records that verify, and how many that is per second."""
    async with SqliteReader.open(path) as reader:
        started = time.perf_counter()
        report = await verify(reader)
        return report.records if report.intact else -1, report.records / (time.perf_counter() - started)


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "aiosqlite": version("aiosqlite"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "rc": version("rolloutcore"),
        "profile": "fake",
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(directory: Path, rounds: int, commits: int, each: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run the rounds and give figures and checks."""
    raw_batch, raw_commit, together, lone, verify_per_s = [], [], [], [], []
    checks: list[dict[str, Any]] = []
    for number in range(rounds):
        path: Callable[[str], Path] = lambda name, number=number: directory / f"{name}-{number}.db"  # type: ignore[misc]  # noqa: E731
        raw_batch.append(raw_per_s(path("raw-batch"), APPENDERS * each, BATCH_ROWS))
        together.append(anyio.run(concurrent_per_s, path("together"), each))
        raw_commit.append(raw_per_s(path("raw-commit"), commits, 1))
        lone.append(anyio.run(lone_per_s, path("lone"), commits))
        for name, expected in (("together", APPENDERS * each), ("lone", commits)):
            observed, per_s = anyio.run(verified, path(name))
            checks.append(check(f"round {number}: every record appended {name} verifies", expected, observed))
            verify_per_s.append(per_s)
    figures = {
        "append_per_s": statistics.median(together),
        "append_over_raw_batch": ratio(together, raw_batch),
        "lone_append_per_s": statistics.median(lone),
        "lone_append_over_raw_commit": ratio(lone, raw_commit),
        "raw_batch_per_s": statistics.median(raw_batch),
        "raw_commit_per_s": statistics.median(raw_commit),
        "verify_per_s": statistics.median(verify_per_s),
    }
    return figures, checks


def ratio(ours: list[float], raw: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, raw, strict=True))


def check(name: str, expected: object, observed: object) -> dict[str, Any]:
    return {"name": name, "expected": expected, "observed": observed, "passed": expected == observed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where to write the journals, on the disk to measure (default: temporary)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commits", type=int, default=300, help="lone appends per round")
    parser.add_argument("--each", type=int, default=10, help=f"appends of each of the {APPENDERS} tasks per round")
    parser.add_argument("--out", default="artifacts/bench_journal.json")
    arguments = parser.parse_args()
    started, clock = datetime.now(UTC), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        figures, checks = measure(Path(directory), arguments.rounds, arguments.commits, arguments.each)
    artifact = {
        "experiment": "bench_journal",
        "passed": all(one["passed"] for one in checks),
        "checks": checks,
        "figures": {name: round(value, 3) for name, value in figures.items()},
        "environment": environment(),
        "command": "python " + " ".join(["harness/bench_journal.py", *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - clock, 1),
    }
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_bytes(msgspec.json.format(msgspec.json.encode(artifact), indent=2) + b"\n")
    for name, value in artifact["figures"].items():  # type: ignore[attr-defined]
        print(f"{name:30} {value:>12,.2f}")
    return 0 if artifact["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
