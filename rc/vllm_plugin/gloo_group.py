"""The transfer group over gloo: one trainer, rank 0, and every worker of the engine; with a bound on every wait.

A TCP store on the trainer is the meeting point. Both sides leave signs in it, so that whoever waits can say who is
missing, and so that the trainer starts to broadcast only when every worker is there to receive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

__all__ = ("GlooGroup", "StillMissing")

# Torch's stubs leave out half of what these modules offer.
_dist: Any = torch.distributed

_POLL_S: Final = 0.002


class StillMissing(TimeoutError):
    """Ranks that did not come within the time allowed."""

    def __init__(self, what: str, ranks: list[int], waited_s: float) -> None:
        super().__init__(f"ranks {ranks} of the transfer group have not {what} within {waited_s:g} s")
        self.ranks = ranks


class GlooGroup:
    """One side of a transfer group.

    Args:
        store: The meeting point.
        rank: Ours; 0 is the trainer.
        size: Trainer and workers together.
        timeout_s: Bound on each wait and on each broadcast.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._store = store
        self._group: Any | None = None
        self._round = 0

    @classmethod
    def host(cls, address: str, size: int, timeout_s: float) -> tuple[GlooGroup, int]:
        """Open the trainer's side on a free port; give it and the port."""
        timeout = timedelta(seconds=timeout_s)
        store = _dist.TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        return cls(store, 0, size, timeout_s), store.port

    @classmethod
    def join(cls, address: str, port: int, rank: int, size: int, timeout_s: float) -> GlooGroup:
        """Open a worker's side and connect."""
        timeout = timedelta(seconds=timeout_s)
        store = _dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        group = cls(store, rank, size, timeout_s)
        group._sign("joined")
        group.connect(address)
        return group

    def connect(self, address: str) -> None:
        """Connect to every other rank; on the trainer, after `wait_for` has seen them all."""
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=self._timeout_s)
        self._group = _dist.ProcessGroupGloo(_dist.PrefixStore("gloo", self._store), self.rank, self.size, options)

    def wait_for(self, sign: str, check: Callable[[], object]) -> None:
        """Wait until every worker has left a sign.

        Args:
            sign: Which one, see `begin_round`.
            check: Called between looks; raises to end the wait, e.g. when the workers' call has failed.

        Raises:
            StillMissing: Naming the ranks that did not.
        """
        deadline = time.monotonic() + self._timeout_s
        while missing := [rank for rank in range(1, self.size) if not self._store.check([f"{sign}/{rank}"])]:
            check()
            if time.monotonic() > deadline:
                raise StillMissing(sign.partition("/")[0], missing, self._timeout_s)
            time.sleep(_POLL_S)

    def begin_round(self) -> str:
        """Count one more payload; a worker leaves the sign that it is ready to receive it. Gives the sign."""
        self._round += 1
        sign = f"got ready/{self._round}"
        if self.rank != 0:
            self._sign(sign)
        return sign

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous CPU tensor's bytes from rank 0 into the same tensor of every other rank."""
        if self._group is None:
            raise RuntimeError("the transfer group is closed")
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        # As bytes: gloo does not know every dtype.
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        """Disconnect; ranks that wait for us see a broken connection.

        Gloo cannot end a broadcast of ours that another thread is in: it goes on until its peer leaves or its timeout
        passes, and this waits for it.
        """
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _sign(self, sign: str) -> None:
        self._store.set(f"{sign}/{self.rank}", "1")
