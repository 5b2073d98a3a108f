"""Rollouts from admission to their end, whoever ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress

import anyio

from rc.commands import AbortRollouts, AdmitRollout, EndRollout, LoseEngine
from rc.decision_log import DecisionLog
from rc.effects.protocol import EngineAdapter
from rc.errors import JournalError, NotAdmitted, UnknownRollout, VersionMismatch
from rc.events.types import AbortRollout, Admit, Event, FinishRollout, Turn
from rc.leases import Leases
from rc.lifecycle import Phase
from rc.rollout import Rollout
from rc.task_group import BackgroundTasks

__all__ = ("Admission",)

_MAX_REASON = 1000
"""Characters of an owner's error that are kept in the journal; some libraries put whole tensors into theirs."""


class Admission:
    """Admits rollouts, renews and reaps their leases, and records how they end."""

    def __init__(
        self,
        log: DecisionLog,
        engines: Mapping[str, EngineAdapter],
        tasks: BackgroundTasks,
        *,
        now: Callable[[], float],
        check_open: Callable[[], None],
    ) -> None:
        self._log = log
        self._engines = engines
        self._tasks = tasks
        self._now = now
        self._check_open = check_open
        self._leases = Leases()

    def note(self, event: Event) -> None:
        """Take in a durable event."""
        match event:
            case Admit():
                self._leases.start(event.rollout, event.lease_s, event.at)
            case FinishRollout() | AbortRollout():
                self._leases.end(event.rollout)

    @asynccontextmanager
    async def rollout(self, rollout_id: str, lease_s: float, *, wait: bool) -> AsyncIterator[Rollout]:
        """Admit a rollout and record how its block ends; see `Controller.rollout`."""
        rollout = await self._admit(rollout_id, lease_s, wait=wait)
        try:
            yield rollout
            if not rollout.ended and rollout.turns:
                await rollout.finish()
        except BaseException as error:
            with suppress(JournalError):  # the owner's own error matters more; a stopped controller says so everywhere
                await self.abort((rollout.id,), _reason(error))
            raise
        await self.abort((rollout.id,), "its owner ended it without generating")

    async def _admit(self, rollout: str, lease_s: float, *, wait: bool) -> Rollout:
        while True:
            self._check_open()
            try:
                await self._log.submit(AdmitRollout(at=self._now(), rollout=rollout, lease_s=lease_s))
            except NotAdmitted as refusal:
                if not (wait and refusal.transient):
                    raise
                await self._log.lifecycle_changed()
                continue
            except Exception:
                raise  # nothing was admitted, or the journal failed
            except BaseException:
                # Cancelled while the admission was on its way to disk: it holds, but nobody holds it.
                self._tasks.start_soon(self._give_back, rollout)
                raise
            active = self._log.state.rollouts.active.get(rollout)
            if active is not None:  # else its engine was lost meanwhile: asking again tells what to do
                engine = self._engines[active.engine]
                return Rollout(self, active, engine, self._log.state.engine(active.engine).max_model_len)

    async def _give_back(self, rollout: str) -> None:
        with suppress(JournalError):
            await self.abort((rollout,), "its owner was cancelled while being admitted")

    async def abort(self, rollouts: tuple[str, ...], reason: str) -> None:
        """Abort those of the rollouts that are active."""
        active = tuple(rollout for rollout in rollouts if rollout in self._log.state.rollouts.active)
        if active:
            await self._log.submit(AbortRollouts(at=self._now(), rollouts=active, reason=reason))

    def check_active(self, rollout: str) -> None:
        """Raise `UnknownRollout` unless the rollout is active."""
        self._log.check_running()
        if rollout not in self._log.state.rollouts.active:
            raise UnknownRollout(rollout)

    def renew(self, rollout: str) -> None:
        """Extend a rollout's lease by its full length."""
        self._leases.renew(rollout, self._now())

    def lease_held(self, rollout: str) -> AbstractContextManager[None]:
        """Suspend a rollout's lease while a request of its own, which has a deadline, is under way."""
        return self._leases.held(rollout)

    async def end_rollout(self, rollout: str, turns: tuple[Turn, ...]) -> None:
        """Record a rollout's trajectory; see `Rollout.finish`."""
        ended = await self._log.submit(EndRollout(at=self._now(), rollout=rollout, turns=turns))
        if isinstance(ended[0], AbortRollout):
            raise VersionMismatch(f"rollout {rollout} was aborted: {ended[0].reason}")

    async def engine_failed(self, engine: str) -> None:
        """Look at an engine that may be gone, and record it if its process is, or is another."""
        used = self._log.state.engine(engine)
        observed = await self._engines[engine].observe()
        known = self._log.state.engine(engine)
        if known.phase is Phase.ABSENT or known.boot != used.boot:
            return
        if observed.gone:
            reason = observed.problem or "nothing listens at its address"
        elif observed.boot is not None and observed.boot != known.boot:
            reason = "its server process was restarted"
        else:
            return
        await self._log.submit(LoseEngine(at=self._now(), engine=engine, reason=reason))

    async def reap_overdue(self) -> None:
        """Abort rollouts whose lease has run out, until the log stops, or until cancelled."""
        while self._log.failure is None:
            late = self._leases.overdue(self._now())
            if late:
                try:
                    await self.abort(late, "its lease ran out without a sign of life from its owner")
                except JournalError:
                    return  # the log has stopped and says so to everybody
            deadline = self._leases.next_deadline()
            # A lease that starts while we sleep is never due sooner than we look again, unless it is below a second.
            await anyio.sleep(1.0 if deadline is None else min(1.0, max(0.0, deadline - self._now())))

    def now(self) -> float:
        """The controller's time in Unix seconds."""
        return self._now()


def _reason(error: BaseException) -> str:
    """Why a rollout's owner left its block."""
    if not isinstance(error, Exception):
        return "its owner was cancelled"
    reason = f"its owner raised {type(error).__name__}: {error}".removesuffix(": ")[:_MAX_REASON]
    return reason.encode(errors="replace").decode()
