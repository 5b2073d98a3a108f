"""The transfer group over gloo: bytes arrive as they were, and no wait is for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rc.vllm_plugin.gloo_group import GlooGroup, StillMissing  # noqa: E402 - it imports torch

ADDRESS = "127.0.0.1"
TIMEOUT_S = 2.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def meet(threads: ThreadPoolExecutor, workers: int, timeout_s: float = TIMEOUT_S) -> list[GlooGroup]:
    """Form a group in this process: the trainer first, then its workers."""
    trainer, port = GlooGroup.host(ADDRESS, workers + 1, timeout_s)
    joining = [
        threads.submit(GlooGroup.join, ADDRESS, port, rank, workers + 1, timeout_s) for rank in range(1, workers + 1)
    ]
    trainer.wait_for("joined", lambda: None)
    trainer.connect(ADDRESS)
    return [trainer, *(future.result() for future in joining)]


def receive(group: GlooGroup, like: Any) -> Any:
    tensor = torch.empty_like(like)
    group.broadcast(tensor)
    return tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_every_worker_receives_the_bytes_that_were_sent(threads: ThreadPoolExecutor, dtype: str) -> None:
    trainer, *workers = meet(threads, 2)
    sent = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    received = [threads.submit(receive, worker, sent) for worker in workers]
    trainer.broadcast(sent)
    for future in received:
        assert torch.equal(future.result().view(torch.uint8), sent.view(torch.uint8))


def test_a_rank_that_does_not_join_is_named_after_the_timeout(threads: ThreadPoolExecutor) -> None:
    trainer, port = GlooGroup.host(ADDRESS, 3, 0.5)
    joining = threads.submit(GlooGroup.join, ADDRESS, port, 2, 3, 0.5)
    with pytest.raises(StillMissing, match=r"ranks \[1\] of the transfer group have not joined") as missing:
        trainer.wait_for("joined", lambda: None)
    assert missing.value.ranks == [1]
    assert joining.exception() is not None, "nor does the one that came wait for ever"


def test_a_wait_ends_when_the_workers_call_has_failed() -> None:
    trainer, _ = GlooGroup.host(ADDRESS, 2, 60.0)

    def failed() -> None:
        raise ValueError("the engine refused")

    began = time.monotonic()
    with pytest.raises(ValueError, match="the engine refused"):
        trainer.wait_for("joined", failed)
    assert time.monotonic() - began < 5


def test_a_trainer_waits_until_every_worker_is_ready_to_receive(threads: ThreadPoolExecutor) -> None:
    trainer, *workers = meet(threads, 2)
    workers[0].begin_round()
    sign = trainer.begin_round()
    with pytest.raises(StillMissing, match="have not got ready") as missing:
        trainer.wait_for(sign, lambda: None)
    assert missing.value.ranks == [2]
    workers[1].begin_round()
    trainer.wait_for(sign, lambda: None)


def test_a_worker_gives_up_on_a_trainer_that_sends_nothing(threads: ThreadPoolExecutor) -> None:
    _, worker = meet(threads, 1, timeout_s=0.5)
    with pytest.raises(RuntimeError, match="Timed out"):
        worker.broadcast(torch.empty(4))


def test_a_trainer_gives_up_on_a_worker_that_receives_nothing(threads: ThreadPoolExecutor) -> None:
    trainer, _ = meet(threads, 1, timeout_s=0.5)
    with pytest.raises(RuntimeError, match="Timed out"):
        trainer.broadcast(torch.empty(50_000_000, dtype=torch.uint8))


@pytest.mark.parametrize("leaver", ["trainer", "worker"])
def test_who_leaves_frees_who_waits_at_once(threads: ThreadPoolExecutor, leaver: str) -> None:
    trainer, worker = meet(threads, 1, timeout_s=30.0)
    # Larger than the sockets' buffers, so that the sender waits too.
    tensor = torch.empty(50_000_000, dtype=torch.uint8)
    leaving, staying = (trainer, worker) if leaver == "trainer" else (worker, trainer)
    began = time.monotonic()
    waiting: Future[None] = threads.submit(staying.broadcast, tensor)
    threading.Timer(0.2, leaving.close).start()
    assert "Connection" in str(waiting.exception())
    assert time.monotonic() - began < 10


def test_a_closed_group_sends_nothing(threads: ThreadPoolExecutor) -> None:
    trainer, _ = meet(threads, 1)
    trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match="group is closed"):
        trainer.broadcast(torch.empty(1))


def test_a_worker_does_not_wait_for_a_trainer_that_is_gone() -> None:
    with socket.create_server((ADDRESS, 0)) as listener:
        port = listener.getsockname()[1]
    join: Callable[[], GlooGroup] = lambda: GlooGroup.join(ADDRESS, port, 1, 2, 0.5)  # noqa: E731
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        join()
    assert time.monotonic() - began < 10
