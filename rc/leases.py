"""Leases of active rollouts: who has until when, and who is overdue."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("Leases",)


class Leases:
    """Deadlines by rollout id, in the controller's clock. A rollout that is *held* is never overdue.

    Renewals are not journaled: they only keep this controller from reaping; a dead controller's rollouts end anyway.
    """

    def __init__(self) -> None:
        self._length_s: dict[str, float] = {}
        self._until: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self._heap: list[tuple[float, str]] = []

    def start(self, rollout: str, length_s: float, now: float) -> None:
        """Begin a lease of ``length_s`` seconds."""
        self._length_s[rollout] = length_s
        self._until[rollout] = now + length_s
        heapq.heappush(self._heap, (now + length_s, rollout))

    def renew(self, rollout: str, now: float) -> None:
        """Extend a lease by its full length from ``now``; nothing happens if it has ended."""
        length_s = self._length_s.get(rollout)
        if length_s is not None:
            self._until[rollout] = now + length_s

    @contextmanager
    def held(self, rollout: str) -> Iterator[None]:
        """Suspend the lease while work that has a deadline of its own is under way; several at once may hold it."""
        self._held[rollout] += 1
        try:
            yield
        finally:
            self._held[rollout] -= 1
            if not self._held[rollout]:
                del self._held[rollout]

    def end(self, rollout: str) -> None:
        """Forget a rollout."""
        self._length_s.pop(rollout, None)
        self._until.pop(rollout, None)

    def overdue(self, now: float) -> tuple[str, ...]:
        """Give the rollouts whose lease has run out; costs nothing for those whose deadline has not come."""
        late: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            _, rollout = heapq.heappop(self._heap)
            until = self._until.get(rollout)
            if until is None:
                continue
            if rollout in self._held:
                until = now + self._length_s[rollout]
            if until > now:
                heapq.heappush(self._heap, (until, rollout))
            else:
                late.append(rollout)
        return tuple(late)

    def next_deadline(self) -> float | None:
        """When to look again; None while there is no lease."""
        return self._heap[0][0] if self._heap else None
