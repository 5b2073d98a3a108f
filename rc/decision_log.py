"""Decide, append, evolve: the one loop through which state changes, in memory and on disk in the same order.

Decisions are made on the newest state, so that many can share one durable commit; what others may see and what effects
start from is the *settled* state, the part that is on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from rc.commands import Command
from rc.decide import decide
from rc.errors import JournalClosed, JournalError
from rc.events.codec import as_recorded
from rc.events.journal import Decision, Journal
from rc.events.types import AbortRollout, Admit, Event, FinishRollout
from rc.projections.control import CHECKPOINTS, ControlState, evolve, state_digest

__all__ = ("DecisionLog",)

_LOOK_AGAIN_S: Final = 0.01
"""How often to ask the journal about a decision whose caller is gone: some commits' worth of time."""


class DecisionLog:
    """The live state and the journal that it is a fold of.

    Args:
        journal: Where decisions are appended.
        state: The fold of what the journal holds already.
        on_event: Called with each event once it is durable, in order.
    """

    def __init__(self, journal: Journal, state: ControlState, on_event: Callable[[Event], None]) -> None:
        self.state = state
        self.failure: BaseException | None = None
        self._journal = journal
        self._on_event = on_event
        self._settled = state
        self._unsettled: deque[tuple[int, ControlState, tuple[Event, ...]]] = deque()
        self._next_seq = journal.head.seq + 1
        self._changed = anyio.Event()
        self._lifecycle_changed = anyio.Event()

    @property
    def settled(self) -> ControlState:
        """The state as far as it is durable."""
        self._settle()
        return self._settled

    @property
    def unsettled(self) -> bool:
        """Whether decisions wait for durability."""
        self._settle()
        return bool(self._unsettled)

    async def submit(self, command: Command) -> tuple[Event, ...]:
        """Decide a command and append what it causes; on return that is durable.

        A caller that is cancelled leaves the decision in place: it is carried out, and the journal tells.

        Raises:
            CallerError, EngineError: From the decision; nothing was changed.
            JournalError: The journal failed; the controller is stopped and the outcome unknown until it is reopened.
        """
        self.check_running()
        command = as_recorded(command)
        events = decide(self.state, command)
        if not events:
            return ()
        digests: list[str | None] = []
        state = self.state
        for event in events:
            state = evolve(state, event)
            digests.append(state_digest(state) if event.kind in CHECKPOINTS else None)
        decision = Decision(command=command, events=events, digests=tuple(digests))
        self.state = state
        self._next_seq += len(events)
        self._unsettled.append((self._next_seq - 1, state, events))
        try:
            with anyio.CancelScope(shield=True):
                await self._journal.append(decision)
        except Exception as error:  # whatever it is: memory is ahead of what the journal is known to hold
            self.fail(error)
            raise
        except BaseException:
            # asyncio's own cancellation, which no shield keeps out: others must see the decision become durable.
            self.poke()
            raise
        self._settle()
        return events

    def check_running(self) -> None:
        """Raise if the log was stopped by a failure."""
        if self.failure is None:
            return
        if isinstance(self.failure, JournalClosed):
            raise JournalClosed(str(self.failure)) from self.failure
        if isinstance(self.failure, JournalError):
            raise JournalClosed(f"the controller stopped when its journal failed: {self.failure}") from self.failure
        raise JournalClosed(f"the controller stopped on an internal error: {self.failure!r}") from self.failure

    def fail(self, error: BaseException) -> None:
        """Stop for good; the first error is kept, and everybody who waits is woken."""
        if self.failure is None:
            self.failure = error
        self._wake(lifecycle=True)

    def close(self) -> None:
        """Refuse whatever comes, and wake everybody who waits."""
        self.fail(JournalClosed("this controller was closed; open another one"))

    async def changed(self) -> None:
        """Wait until something more is durable; look by itself where a cancelled caller left a decision behind."""
        if self._settle():
            return  # what the caller waits for may be what just became durable
        with anyio.move_on_after(_LOOK_AGAIN_S if self._unsettled else None):
            await self._changed.wait()

    async def lifecycle_changed(self) -> None:
        """Wait until an event other than a rollout's own is durable, e.g. one that opens admission."""
        await self._lifecycle_changed.wait()

    def poke(self) -> None:
        """Make everybody who waits for a change look again."""
        self._wake(lifecycle=False)

    def _settle(self) -> bool:
        """Take note of what has become durable; tell whether anything has."""
        lifecycle = False
        settled = False
        while self._unsettled and self._unsettled[0][0] <= self._journal.head.seq:
            _, self._settled, events = self._unsettled.popleft()
            settled = True
            for event in events:
                lifecycle = lifecycle or not isinstance(event, Admit | FinishRollout | AbortRollout)
                self._on_event(event)
        if settled:
            self._wake(lifecycle=lifecycle)
        return settled

    def _wake(self, *, lifecycle: bool) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        if lifecycle:
            self._lifecycle_changed.set()
            self._lifecycle_changed = anyio.Event()
