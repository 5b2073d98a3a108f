"""What tests run in processes of their own, to kill, stop and starve: ``python child.py ACTION PATH [--unprivileged]``.

Each line of output is flushed, so that the parent knows what was acknowledged before it killed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from rc.errors import JournalError
from rc.events.journal import Journal
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.writer_lock import Holder, WriterLock
from tests.journal.decisions import abort_all, admit, finish

APPENDERS = 4
NOBODY = 65534


def say(*words: object) -> None:
    print(*words, flush=True)


async def append_for_ever(path: Path) -> None:
    """Append from several tasks, decisions of one to three events, and say each last seq once it is acknowledged."""

    async def append(journal: Journal, lane: int) -> None:
        number = lane
        while True:
            number += APPENDERS
            decision = abort_all(*range(number % 4)) if number % 4 else finish(number, tokens=200)
            say((await journal.append(decision))[-1].seq)

    async with SqliteJournal.open(path, controller="child") as journal, anyio.create_task_group() as tasks:
        say("open", journal.epoch)
        for lane in range(APPENDERS):
            tasks.start_soon(append, journal, lane)


async def append_on_demand(path: Path) -> None:
    """Append one record per line of input; end with the input."""
    async with SqliteJournal.open(path, controller="child") as journal:
        say("open", journal.epoch)
        for number, _ in enumerate(iter(sys.stdin.readline, "")):
            try:
                say((await journal.append(admit(number)))[-1].seq)
            except JournalError as error:
                say(type(error).__name__, error)


async def append_until_full(path: Path) -> None:
    """Append to a disk on which no file may grow beyond 300 kB."""
    async with SqliteJournal.open(path, controller="child") as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        for number in range(1000):
            try:
                say((await journal.append(finish(number, tokens=500)))[-1].seq)
            except JournalError as error:
                say(type(error).__name__, error)
                return


async def open_once(path: Path) -> None:
    """Open for writing, and say what came of it."""
    try:
        async with SqliteJournal.open(path, controller="child") as journal:
            say("open", journal.epoch)
    except JournalError as error:
        say(type(error).__name__, error)


async def create(path: Path) -> None:
    """Open for writing, after a line that says when it begins."""
    say("creating")
    await open_once(path)


async def fork_and_die(path: Path) -> None:
    """Hold the lock, leave an orphan that would live for a minute, and die."""
    lock = WriterLock.acquire(path, Holder.here("parent"), takeover=False)
    say(fork_orphan())
    os.kill(os.getpid(), signal.SIGKILL)
    lock.release()


def fork_orphan() -> int:
    """Fork a process that only sleeps; return once it does."""
    ready, tell = os.pipe()
    orphan = os.fork()
    if orphan == 0:
        os.close(1)
        os.write(tell, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    return orphan


async def read(path: Path) -> None:
    """Say how many records can be read."""
    async with SqliteReader.open(path) as reader:
        say(sum([1 async for _ in reader.records()]))


ACTIONS: dict[str, Callable[[Path], Awaitable[None]]] = {
    "append_for_ever": append_for_ever,
    "append_on_demand": append_on_demand,
    "append_until_full": append_until_full,
    "create": create,
    "fork_and_die": fork_and_die,
    "open_once": open_once,
    "read": read,
}


def become_nobody() -> None:
    """Give up root's right to write what is read-only, once everything is imported that root's files hold."""
    anyio.run(anyio.sleep, 0)
    Path.cwd().as_uri()
    if os.geteuid() == 0:
        os.setuid(NOBODY)


if __name__ == "__main__":
    if "--unprivileged" in sys.argv:
        become_nobody()
    anyio.run(ACTIONS[sys.argv[1]], Path(sys.argv[2]))
