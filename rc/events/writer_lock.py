"""One writer a journal: an operating-system lock on a file of its own, beside the journal.

The lock is `flock` on ``PATH.lock``, never on the journal itself: SQLite keeps POSIX locks on that one, and a process
loses those when it closes any descriptor of the file. The kernel releases the lock when its holder dies, however it
dies. The file names the holder, for the message that the next one gets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
import weakref
from pathlib import Path

import msgspec

from rc.errors import JournalLocked, JournalUnusable

__all__ = ("Holder", "WriterLock", "lock_path")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who opened a journal for writing. ``since`` is in Unix seconds."""

    controller: str
    host: str
    pid: int
    since: float

    @classmethod
    def here(cls, controller: str) -> Holder:
        """Describe this process, now."""
        return cls(controller=controller, host=socket.gethostname(), pid=os.getpid(), since=time.time())


def lock_path(path: Path) -> Path:
    """Name the lock file of a journal; one for all symbolic links to it."""
    real = path.resolve()
    return real.with_name(real.name + ".lock")


class WriterLock:
    """The held lock. `acquire` makes one; `release` gives it back."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, holder: Holder, *, takeover: bool) -> WriterLock:
        """Lock a journal for writing, without waiting.

        Args:
            path: The journal.
            holder: What the next one is told.
            takeover: Put a lock of our own in the place of one that is held. Its holder keeps a lock that nobody
                looks at any more; what keeps it from writing is the journal's epoch.

        Raises:
            JournalLocked: Somebody else holds it.
            JournalUnusable: The lock file cannot be made.
        """
        lock_file = lock_path(path)
        try:
            descriptor = _lock_existing(lock_file)
            if descriptor is None and takeover:
                descriptor = _replace(lock_file)
            if descriptor is None:
                raise JournalLocked(_held_message(path, lock_file))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(holder) + b"\n", 0)
        except OSError as error:
            raise JournalUnusable(
                f"{path} cannot be opened for writing: its lock file {lock_file.name} cannot be written "
                f"({error.strerror}). Make the directory writable, or read the journal without a controller"
            ) from error
        return cls(descriptor)

    def release(self) -> None:
        """Let the next one in. The file stays: removing it would race with somebody who has just opened it."""
        _held.discard(self)
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _close_in_child(self) -> None:
        os.close(self._descriptor)


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child shares the lock and would keep it after its parent died: a data loader's worker, for instance."""
    for lock in list(_held):
        lock._close_in_child()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _lock_existing(lock_file: Path) -> int | None:
    """Lock the file that is at the path now; None if somebody else has it."""
    while True:
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if _is_at(descriptor, lock_file):
            return descriptor
        os.close(descriptor)  # a takeover replaced the file between opening and locking it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _replace(lock_file: Path) -> int:
    """Lock a new file and move it to the path: whoever comes later meets this lock and not the old one."""
    descriptor, name = tempfile.mkstemp(prefix=lock_file.name + ".", dir=lock_file.parent)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(name).replace(lock_file)
    except BaseException:
        os.close(descriptor)
        Path(name).unlink()
        raise
    return descriptor


def _held_message(path: Path, lock_file: Path) -> str:
    try:
        holder = msgspec.json.decode(lock_file.read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return f"{path} is being opened or closed by another controller; try again in a moment"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(holder.since))
    return (
        f"{path} is held by controller {holder.controller} (process {holder.pid} on {holder.host}, since {since}). End "
        f"that process first; if it hangs and cannot be ended, open with takeover=True, which fences it out"
    )
