"""The loop that keeps doing what the state calls for."""

from __future__ import annotations

from collections.abc import Callable

from rc.commands import ReportEvidence
from rc.decision_log import DecisionLog
from rc.effects.handlers import EffectHandlers
from rc.errors import JournalError
from rc.next_effects import Effect, next_effects
from rc.task_group import BackgroundTasks

__all__ = ("EffectLoop",)


class EffectLoop:
    """Starts each effect once its event is on disk, one at a time per engine, and submits what the handler saw."""

    def __init__(
        self, log: DecisionLog, handlers: EffectHandlers, tasks: BackgroundTasks, now: Callable[[], float]
    ) -> None:
        self._log = log
        self._handlers = handlers
        self._tasks = tasks
        self._now = now
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Go on until the log stops, or until cancelled."""
        while self._log.failure is None:
            for effect in next_effects(self._log.settled):
                if effect.engine not in self._busy:
                    self._busy.add(effect.engine)
                    self._tasks.start_soon(self._perform, effect)
            await self._log.changed()

    async def _perform(self, effect: Effect) -> None:
        try:
            evidence = await self._handlers.perform(effect)
            # An effect that the state no longer calls for (its update was abandoned meanwhile) has nothing to say.
            if effect in next_effects(self._log.state):
                await self._log.submit(ReportEvidence(at=self._now(), engine=effect.engine, evidence=evidence))
        except JournalError:
            pass  # the log has stopped and says so to everybody
        except Exception as error:  # noqa: BLE001 - a defect of ours: stop for good rather than guess
            self._log.fail(error)
        finally:
            self._busy.discard(effect.engine)
            self._log.poke()
