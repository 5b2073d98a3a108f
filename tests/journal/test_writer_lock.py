"""The operating-system lock by itself; what it is for is tested with real processes in `test_sqlite_processes`."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from rc.errors import JournalLocked, JournalUnusable
from rc.events.writer_lock import Holder, WriterLock, lock_path

FIRST = Holder(controller="first", host="node-3", pid=4711, since=1_700_000_000.0)
SECOND = Holder(controller="second", host="node-4", pid=42, since=1_700_000_100.0)


def test_who_holds_it_is_told_to_the_next_one_with_what_to_do(path: Path) -> None:
    lock = WriterLock.acquire(path, FIRST, takeover=False)
    with pytest.raises(JournalLocked) as refused:
        WriterLock.acquire(path, SECOND, takeover=False)
    lock.release()
    assert str(refused.value) == (
        f"{path} is held by controller first (process 4711 on node-3, since 2023-11-14T22:13:20Z). End that process "
        f"first; if it hangs and cannot be ended, open with takeover=True, which fences it out"
    )


def test_it_can_be_taken_again_once_released(path: Path) -> None:
    for holder in (FIRST, SECOND, FIRST):
        WriterLock.acquire(path, holder, takeover=False).release()
    assert lock_path(path).read_bytes() == b""


def test_a_holder_that_has_not_signed_yet_is_not_a_stranger(path: Path) -> None:
    lock = WriterLock.acquire(path, FIRST, takeover=False)
    lock_path(path).write_bytes(b"")
    with pytest.raises(JournalLocked, match="is being opened or closed by another controller; try again"):
        WriterLock.acquire(path, SECOND, takeover=False)
    lock.release()


def test_a_takeover_leaves_the_old_holder_with_a_lock_that_nobody_meets(path: Path) -> None:
    old = WriterLock.acquire(path, FIRST, takeover=False)
    new = WriterLock.acquire(path, SECOND, takeover=True)
    old.release()
    with pytest.raises(JournalLocked, match="held by controller second"):
        WriterLock.acquire(path, FIRST, takeover=False)
    new.release()
    assert [file.name for file in path.parent.iterdir()] == ["run.db.lock"]


def test_a_file_that_a_takeover_replaced_meanwhile_is_not_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock
    taken: list[WriterLock] = []

    def flock_late(descriptor: int, operation: int) -> None:
        if not taken:
            monkeypatch.setattr(fcntl, "flock", flock)
            holder = WriterLock.acquire(path, FIRST, takeover=False)
            taken.append(WriterLock.acquire(path, SECOND, takeover=True))
            holder.release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(JournalLocked, match="held by controller second"):
        WriterLock.acquire(path, FIRST, takeover=False)
    taken[0].release()


def test_a_lock_file_that_cannot_be_made_is_an_error_about_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    lock_path(path).mkdir()
    with pytest.raises(JournalUnusable, match=r"run.db.lock cannot be written \(Is a directory\)"):
        WriterLock.acquire(path, FIRST, takeover=False)
    lock_path(path).rmdir()
    (tmp_path / "not-a-directory").touch()
    with pytest.raises(JournalUnusable, match="cannot be opened for writing"):
        WriterLock.acquire(tmp_path / "not-a-directory" / "run.db", FIRST, takeover=False)
