"""The controller: what a trainer embeds.

It owns one journal and the engines of one deployment. Users see rollouts and updates; everything between is the loop of
`rc.decision_log` and the effects that `rc.next_effects` calls for, each performed by `rc.effects.handlers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from rc.admission import Admission
from rc.commands import JoinEngine, StartController
from rc.decision_log import DecisionLog
from rc.effect_loop import EffectLoop
from rc.effects.handlers import EffectHandlers
from rc.effects.protocol import EngineAdapter, EngineFacts, WeightSource, WeightTransfer
from rc.errors import JournalClosed, JournalError
from rc.events.journal import Journal
from rc.events.sqlite import SqliteJournal
from rc.events.types import Event
from rc.lifecycle import IN_FLIGHT, Phase
from rc.opening import adapter_for, check_suitable, default_transfer, manifest_at, monotone_clock, random_id
from rc.projections.control import ControlState, Publication, evolve, state_digest
from rc.rollout import Rollout
from rc.task_group import BackgroundTasks, background_tasks
from rc.update_watch import Commit
from rc.updates import Updates, WhenBusy
from rc.versions import Manifest, WeightIdentity

__all__ = ("Controller",)

DEFAULT_LEASE_S = 600.0
"""How long a rollout may go without a sign of life from its owner; longer than any sensible pause between two turns."""

CLOSE_DEADLINE_S = 120.0
"""How long closing waits for an update that is mutating. One that takes longer is left to the next opening, which looks
at the engine and goes on only if it can be shown to be complete."""


class Controller:
    """Rollouts and weight updates over one journal. Use `open`; valid inside its ``async with`` block."""

    def __init__(
        self,
        journal: Journal,
        state: ControlState,
        engines: dict[str, EngineAdapter],
        transfer: WeightTransfer | None,
        tasks: BackgroundTasks,
        *,
        expects: Manifest | None,
        clock: Callable[[], float],
        new_id: Callable[[str], str],
    ) -> None:
        self._log = DecisionLog(journal, state, self._on_event)
        self._engines = engines
        self._expects = expects
        self._tasks = tasks
        self._clock = clock
        self._new_id = new_id
        handlers = EffectHandlers(engines, transfer)
        self._effects = EffectLoop(self._log, handlers, tasks, self.now)
        self._admission = Admission(self._log, engines, tasks, now=self.now, check_open=self._check_open)
        self._updates = Updates(
            self._log,
            engines,
            handlers,
            transfer,
            tasks,
            now=self.now,
            new_id=new_id,
            check_open=self._check_open,
            look_for_loss=self._admission.engine_failed,
        )
        self._started = False
        self._closing = False

    # ------------------------------------------------------------------ opening and closing

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        journal: str | Path | Journal,
        *,
        engine: str | EngineAdapter,
        transfer: WeightTransfer | None = None,
        identity: WeightIdentity | None = None,
        expects: Manifest | None = None,
        api_key: str | None = None,
        takeover: bool = False,
        controller_id: str | None = None,
        clock: Callable[[], float] | None = None,
        new_id: Callable[[str], str] | None = None,
    ) -> AsyncIterator[Controller]:
        """Open a journal, join an engine, settle what an earlier controller left behind, and be ready for rollouts.

        Args:
            journal: Path of the SQLite file, created if it does not exist, or a journal that is open already.
            engine: URL of a vLLM server, or an adapter.
            transfer: How weights travel. Default: vLLM's weight transfer, with the backend that the engine has.
            identity: What the engine loaded at its start, recorded as rc-0 when the journal is new.
            expects: The parameters that the engine loads. Default: read from its checkpoint, if it is on this machine.
            api_key: The engine's API key, if it has one.
            takeover: Fence out a controller that still holds the journal but hangs.
            controller_id: Name of this controller in the journal.
            clock: Gives Unix seconds, never backwards. Default: the system's clock, advanced monotonically.
            new_id: Makes an id from a prefix. Default: random.

        Raises:
            EngineUnreachable: Nothing usable answers at the URL; the journal was not touched.
            EngineUnsuitable: It lacks something rc needs, or belongs to another journal.
            JournalLocked, JournalUnusable, JournalCorrupt: The journal cannot be opened.
        """
        clock = clock or monotone_clock()
        new_id = new_id or random_id
        name = controller_id or new_id("controller")
        async with AsyncExitStack() as stack:
            adapter = adapter_for(engine, api_key)
            stack.push_async_callback(adapter.aclose)
            facts = await adapter.probe()
            check_suitable(adapter.name, facts)
            if isinstance(journal, str | Path):
                journal = await stack.enter_async_context(
                    SqliteJournal.open(journal, controller=name, takeover=takeover)
                )
            state = ControlState()
            async for record in journal.records():
                state = evolve(state, record.event)
            tasks = await stack.enter_async_context(background_tasks())
            control = cls(
                journal,
                state,
                {adapter.name: adapter},
                transfer or default_transfer(),
                tasks,
                expects=expects,
                clock=clock,
                new_id=new_id,
            )
            try:
                await control._start(name, journal.epoch, adapter.name, identity)
                yield control
            finally:
                failure = await control._close()
            if failure is not None:
                raise JournalClosed(f"the controller had stopped before it was closed: {failure}") from failure

    async def _start(self, name: str, epoch: int, engine: str, identity: WeightIdentity | None) -> None:
        await self._log.submit(StartController(at=self.now(), controller=name, epoch=epoch))
        facts = await self._join(engine)
        self._started = True
        self._tasks.start_soon(self._effects.run)
        self._tasks.start_soon(self._admission.reap_overdue)
        await self._until_settled()
        if self.state.published is None and self.state.engine(engine).phase is Phase.JOINED:
            loaded = WeightIdentity(run="initial", step=0, checkpoint=facts.model_root or None)
            await self._updates.adopt(identity or loaded)

    async def join(self, engine: str | None = None) -> None:
        """Probe an engine and record what is found: a first sight, a restart, or the same process as before.

        Call it after restarting an engine's server, then publish with `update`.

        Raises:
            EngineUnreachable: Nothing usable answers.
            EngineUnsuitable: It lacks something rc needs, or belongs to another journal.
        """
        await self._join(engine or next(iter(self._engines)))
        await self._until_settled()

    async def _join(self, name: str) -> EngineFacts:
        adapter = self._engines[name]
        facts = await adapter.probe()
        check_suitable(name, facts)
        expected = self._expects or await anyio.to_thread.run_sync(manifest_at, facts.model_root)
        found = JoinEngine(
            at=self.now(),
            engine=name,
            observed=await adapter.observe(),
            profile=facts.profile,
            vllm=facts.vllm,
            model=facts.model,
            max_model_len=facts.max_model_len,
            manifest_digest=expected.digest if expected else None,
        )
        await self._log.submit(found)
        if self._log.state.engine(name).phase is Phase.ABSENT:
            # The process that was known is gone, which is on record now; asking again says why this one cannot join.
            await self._log.submit(found)
        if expected:
            self._updates.expected[name] = expected
        return facts

    async def _until_settled(self) -> None:
        while any(engine.phase in IN_FLIGHT for engine in self._log.settled.engines.values()):
            self._log.check_running()
            await self._log.changed()

    async def _close(self) -> BaseException | None:
        """End what is under way and refuse the rest; give what had stopped the controller, if anything had."""
        self._closing = True
        with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            try:
                await self._admission.abort(tuple(self._log.state.rollouts.active), "its controller was closed")
                if self._started and self._log.state.update is not None:
                    await self._updates.abandon(self._log.state.update.update, "its controller was closed")
                if self._started:
                    await self._until_settled()
                while self._log.unsettled:
                    self._log.check_running()
                    await self._log.changed()
            except JournalError:
                pass  # the journal is as far as it got
        failure = self._log.failure
        self._log.close()
        return failure

    # ------------------------------------------------------------------ looking

    @property
    def state(self) -> ControlState:
        """The state as far as it is on disk."""
        return self._log.settled

    @property
    def digest(self) -> str:
        """Digest of `state`; `rc replay-journal` computes the same from the file."""
        return state_digest(self.state)

    @property
    def published(self) -> Publication | None:
        """The version that rollouts are admitted under, with its declared identity."""
        return self.state.published

    @property
    def serving(self) -> bool:
        """Whether some engine serves the published version now. False after a restart of it: call `update` then."""
        published, engines = self.published, self.state.engines.values()
        return published is not None and any(
            engine.phase is Phase.READY and engine.version == published.version for engine in engines
        )

    def now(self) -> float:
        """The controller's time in Unix seconds, as it goes into the journal."""
        return self._clock()

    # ------------------------------------------------------------------ rollouts

    @asynccontextmanager
    async def rollout(
        self, rollout_id: str | None = None, *, lease_s: float = DEFAULT_LEASE_S, wait: bool = True
    ) -> AsyncIterator[Rollout]:
        """Admit a rollout under the published version; leaving the block ends it.

        A block that ends normally records the trajectory; one left by an exception or a cancellation records an abort.

        Args:
            rollout_id: Its id in the journal. Default: random.
            lease_s: After so many seconds without a sign of life it is aborted, so that it cannot hold up updates.
            wait: Whether to wait while an update is in progress, instead of raising `NotAdmitted`.

        Raises:
            NotAdmitted: No engine serves a published version, and waiting cannot help or was not wanted.
            EngineTainted, EngineLost: The engine is out of service.
            VersionMismatch: On leaving: the engine attested another version; it was tainted, the rollout aborted.
        """
        async with self._admission.rollout(rollout_id or self._new_id("rollout"), lease_s, wait=wait) as rollout:
            yield rollout

    # ------------------------------------------------------------------ updates

    async def update(
        self,
        identity: WeightIdentity,
        weights: WeightSource,
        *,
        when_busy: WhenBusy = "queue",
    ) -> Commit:
        """Publish weights: drain, pause, install, invalidate, validate, resume, commit.

        Cancelling it before mutation begins abandons the update; after that it completes or taints without its caller.

        Args:
            identity: What the weights are declared to be.
            weights: The weights, e.g. `rc.ModuleWeights(model)`.
            when_busy: Whether to run after an update that is in progress, or to raise `UpdateInProgress`.

        Raises:
            InvalidIdentity: The identity is older than what is published.
            InvalidWeights: Parameters are missing, unexpected, NaN, or of another dtype or shape.
            EngineUnsuitable: The engine cannot receive weights, e.g. it was started without rc's backend.
            UpdateAbandoned: It ended with nothing mutated; the old version goes on.
            UpdateTainted: Mutation began and could not be shown to be complete; the engine is out of service.
        """
        self._check_open()
        identity.check_follows(self.published.identity if self.published else None)
        return await self._updates.publish(identity, weights, when_busy)

    # ------------------------------------------------------------------ behind them

    def _check_open(self) -> None:
        self._log.check_running()
        if self._closing:
            raise JournalClosed("this controller is closing; open another one")

    def _on_event(self, event: Event) -> None:
        self._admission.note(event)
        self._updates.note(event)
