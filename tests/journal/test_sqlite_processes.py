"""Real processes: killed, stopped, taken over, starved of disk. A thread or a mock would prove nothing here."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from rc.errors import JournalClosed, JournalFenced, JournalLocked
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.verify import verify
from tests.journal.decisions import Tail, admit, read

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]


class Child:
    """A process of ours that works on a journal."""

    def __init__(self, action: str, path: Path, *options: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), action, str(path), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        """Wait for a line of its output; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def lines(self) -> list[str]:
        """Read its output to the end."""
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def ask(self) -> str:
        """Let it append once and give its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def child(action: str, path: Path, *options: str) -> Iterator[Child]:
    started = Child(action, path, *options)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def last_whole_number(lines: list[str]) -> int:
    """The largest acknowledged seq; the last line may have been cut by the kill."""
    return max((int(line) for line in lines if line.isdigit()), default=0)


@pytest.mark.timeout(240)  # it starts a dozen processes, one after the other
async def test_every_acknowledged_event_survives_sigkill_at_any_moment(path: Path) -> None:
    moments = random.Random(20)
    acknowledged = 0
    for kill in range(12):
        with child("append_for_ever", path) as writer:
            assert writer.line() == f"open {2 * kill + 1}"
            await anyio.sleep(moments.uniform(0.0, 0.12))
            writer.signal(signal.SIGKILL)
            lines = [line for line in writer.lines() if line]
        # The pipe holds whole lines: each was written by one call.
        acknowledged = max(acknowledged, last_whole_number(lines))
        async with SqliteReader.open(path) as reader:
            report = await verify(reader)
            assert report.intact, report.problem
            assert report.torn_tail is None
            assert report.records >= acknowledged
        async with SqliteJournal.open(path, controller="heir") as journal:
            assert journal.epoch == 2 * kill + 2
            assert journal.head == report.head
            assert journal.repaired is None
            acknowledged = (await journal.append(admit(kill)))[-1].seq
    assert acknowledged > 100


async def test_a_tail_in_another_process_sees_each_record_once_and_in_order(path: Path) -> None:
    with child("append_for_ever", path) as writer:
        assert writer.line() == "open 1"
        async with SqliteReader.open(path) as reader, anyio.create_task_group() as tasks:
            tail = Tail(reader, wanted=300)
            tasks.start_soon(tail.run)
            with anyio.fail_after(20):
                await tail.enough.wait()
            writer.signal(signal.SIGKILL)
            acknowledged = last_whole_number(writer.lines())
            with anyio.fail_after(20):
                while tail.seen[-1].seq < acknowledged:  # noqa: ASYNC110 - what is awaited happens in the tail's reader
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        async with SqliteReader.open(path) as reader:
            assert tail.seen == (await read(reader))[: len(tail.seen)]


async def test_a_tail_goes_on_across_the_writers_death_and_a_new_one(path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        with child("append_on_demand", path) as writer:
            writer.line()
            assert [writer.ask() for _ in range(3)] == ["1", "2", "3"]
            reader = SqliteReader.open(path)
            tail = Tail(await reader.__aenter__(), wanted=5)
            tasks.start_soon(tail.run)
            writer.signal(signal.SIGKILL)
        with child("append_on_demand", path) as writer:
            writer.line()
            assert [writer.ask() for _ in range(2)] == ["4", "5"]
            with anyio.fail_after(10):
                await tail.enough.wait()
        tasks.cancel_scope.cancel()
    await reader.__aexit__(None, None, None)
    assert [(record.seq, record.epoch) for record in tail.seen] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


async def test_a_second_process_is_refused_while_the_first_lives_and_let_in_when_it_is_dead(path: Path) -> None:
    with child("append_on_demand", path) as writer:
        writer.line()
        expected = re.escape(f"held by controller child (process {writer.process.pid} on ")
        with pytest.raises(JournalLocked, match=expected):
            async with SqliteJournal.open(path, controller="second"):
                pass
        assert writer.ask() == "1"
        writer.signal(signal.SIGKILL)
        writer.process.wait()
        async with SqliteJournal.open(path, controller="second") as journal:
            assert (journal.epoch, journal.head.seq) == (2, 1)


async def test_a_stopped_writer_that_was_taken_over_is_fenced_when_it_wakes(path: Path) -> None:
    with child("append_on_demand", path) as hung:
        hung.line()
        assert hung.ask() == "1"
        hung.signal(signal.SIGSTOP)
        with pytest.raises(JournalLocked):
            async with SqliteJournal.open(path, controller="heir"):
                pass
        async with SqliteJournal.open(path, controller="heir", takeover=True) as heir:
            await heir.append(admit(100))
            hung.signal(signal.SIGCONT)
            assert hung.ask().startswith(JournalFenced.__name__)
            assert hung.ask().startswith(JournalClosed.__name__)
            await heir.append(admit(101))
            assert [record.epoch for record in await read(heir)] == [1, 2, 2]
            with child("open_once", path) as third:
                assert third.line().startswith(f"JournalLocked {path} is held by controller heir")


async def test_a_full_disk_loses_nothing_that_was_acknowledged(path: Path) -> None:
    with child("append_until_full", path) as writer:
        *numbers, failure = writer.lines()
    acknowledged = last_whole_number(numbers)
    assert acknowledged > 3
    assert failure.startswith(f"JournalUnusable {path}: appending record {acknowledged + 1} failed: ")
    assert "unknown until the journal is opened again" in failure
    async with SqliteJournal.open(path, controller="heir") as journal:
        assert journal.head.seq in (acknowledged, acknowledged + 1)
        await journal.append(admit())


@pytest.mark.timeout(240)  # it starts a dozen processes, one after the other
async def test_a_writer_killed_while_it_creates_the_file_leaves_one_that_opens(tmp_path: Path) -> None:
    moments = random.Random(21)
    for kill in range(10):
        path = tmp_path / f"run{kill}.db"
        with child("create", path) as creator:
            assert creator.line() == "creating"
            await anyio.sleep(moments.uniform(0.0, 0.06))
        async with SqliteJournal.open(path, controller="heir") as journal:
            assert journal.head.seq == 0
            assert journal.epoch in (1, 2)
            await journal.append(admit())


async def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(path: Path) -> None:
    with child("fork_and_die", path) as parent:
        orphan = int(parent.line())
        try:
            parent.process.wait()
            async with SqliteJournal.open(path, controller="heir") as journal:
                assert journal.epoch == 1
        finally:
            os.kill(orphan, signal.SIGKILL)
