"""Updates from their caller's side: check the weights, wait for the turn, request, follow to the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Literal

import anyio
import anyio.to_thread

from rc.commands import AbandonUpdate, StartUpdate
from rc.decision_log import DecisionLog
from rc.effects.handlers import EffectHandlers
from rc.effects.protocol import EngineAdapter, WeightSource, WeightTransfer
from rc.errors import EngineUnsuitable, IllegalTransition, InvalidWeights, JournalError, UpdateInProgress
from rc.events.types import Event, UpdatePath
from rc.lifecycle import Phase
from rc.task_group import BackgroundTasks
from rc.update_watch import Commit, UpdateWatch
from rc.versions import Manifest, WeightIdentity, version_label

__all__ = ("Updates", "WhenBusy")

WhenBusy = Literal["queue", "refuse"]
"""Whether an update runs after one that is in progress, or raises `UpdateInProgress`."""


class Updates:
    """The updates of one controller.

    ``expected`` holds, by engine, the parameters that it loads, where that is known; the controller fills it in.
    """

    def __init__(
        self,
        log: DecisionLog,
        engines: Mapping[str, EngineAdapter],
        handlers: EffectHandlers,
        transfer: WeightTransfer | None,
        tasks: BackgroundTasks,
        *,
        now: Callable[[], float],
        new_id: Callable[[str], str],
        check_open: Callable[[], None],
        look_for_loss: Callable[[str], Awaitable[None]],
    ) -> None:
        self.expected: dict[str, Manifest] = {}
        self._log = log
        self._engines = engines
        self._handlers = handlers
        self._transfer = transfer
        self._tasks = tasks
        self._now = now
        self._new_id = new_id
        self._check_open = check_open
        self._look_for_loss = look_for_loss
        self._watches: dict[str, UpdateWatch] = {}
        self._turn = anyio.Lock()

    async def publish(self, identity: WeightIdentity, weights: WeightSource, when_busy: WhenBusy) -> Commit:
        """Publish weights; see `Controller.update`."""
        manifest = await self._check_weights(weights)
        current = self._log.state.update
        if when_busy == "refuse" and (current is not None or self._turn.locked()):
            target = version_label(self._log.state.next_version)
            raise UpdateInProgress(current.update if current else "that waits its turn", target)
        async with self._turn:
            await self._prepare_transfer()
            return await self._run(identity, weights, when_busy, manifest)

    async def adopt(self, identity: WeightIdentity) -> Commit:
        """Publish what a fresh engine loaded, as the first version."""
        return await self._run(identity, None, "queue")

    async def abandon(self, update: str, reason: str) -> None:
        """Give an update up, if it has neither ended nor begun to mutate."""
        with suppress(IllegalTransition, JournalError):
            await self._log.submit(AbandonUpdate(at=self._now(), update=update, reason=reason))

    def note(self, event: Event) -> None:
        """Take in a durable event."""
        for watch in tuple(self._watches.values()):
            watch.note(event)
            if watch.ended:
                self._forget(watch.update)

    async def _check_weights(self, weights: WeightSource) -> Manifest:
        """Refuse weights that the engines cannot take; give their manifest as the engines' own compares to it."""
        problems = list(await anyio.to_thread.run_sync(weights.problems))
        manifest = weights.manifest()
        comparable = manifest
        for name, expected in self.expected.items():
            against = manifest.problems_against(expected, optional=weights.optional())
            problems += [f"{problem} (engine {name})" for problem in against]
            extra = weights.optional() - {spec.name for spec in expected.parameters}
            comparable = Manifest.of(spec for spec in manifest.parameters if spec.name not in extra)
        if problems:
            raise InvalidWeights("these weights cannot be published; nothing was changed:\n  " + "\n  ".join(problems))
        return comparable

    async def _prepare_transfer(self) -> None:
        """Meet the engines' workers while they still serve; the gap does not pay for it, and preflight looks again.

        A process that has taken an engine's place is noticed here, before it is paused: afterwards it would look like
        one that somebody else has paused.
        """
        for name, engine in self._log.state.engines.items():
            if engine.phase not in (Phase.JOINED, Phase.READY):
                continue
            await self._look_for_loss(name)
            if self._transfer is not None and self._log.state.engine(name).phase is engine.phase:
                problem = await self._transfer.ready(self._engines[name])
                if problem is not None:
                    raise EngineUnsuitable(f"engine {name} cannot receive weights now; nothing was changed: {problem}")

    async def _run(
        self,
        identity: WeightIdentity,
        weights: WeightSource | None,
        when_busy: WhenBusy,
        manifest: Manifest | None = None,
    ) -> Commit:
        update = self._new_id("update")
        if weights is not None:
            self._handlers.weights[update] = weights
        watch = self._watches[update] = UpdateWatch(update)
        try:
            await self._request(update, identity, "adopt" if weights is None else "one_phase", when_busy, manifest)
            return await watch.outcome(self._log)
        except BaseException:
            current = self._log.state.update
            if current is not None and current.update == update and self._log.failure is None:
                self._tasks.start_soon(self.abandon, update, "its caller was cancelled")
            else:
                self._forget(update)
            raise

    async def _request(
        self, update: str, identity: WeightIdentity, path: UpdatePath, when_busy: WhenBusy, manifest: Manifest | None
    ) -> None:
        """Request the update, once no other is in progress."""
        while True:
            self._check_open()
            request = StartUpdate(
                at=self._now(),
                update=update,
                identity=identity,
                path=path,
                backend=self._transfer.backend if self._transfer is not None and path != "adopt" else None,
                manifest_digest=manifest.digest if manifest else None,
                nbytes=manifest.nbytes if manifest else 0,
            )
            try:
                await self._log.submit(request)
            except UpdateInProgress:
                if when_busy == "refuse":
                    raise
                await self._log.lifecycle_changed()
            else:
                return

    def _forget(self, update: str) -> None:
        self._watches.pop(update, None)
        self._handlers.weights.pop(update, None)
