"""The controller: what a trainer embeds.

It owns one journal and the engines of one deployment. Users see rollouts and updates; everything between is the loop of
`rc.decision_log` and the effects that `rc.next_effects` calls for, each performed by `rc.effects.handlers`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import anyio.to_thread

from rc.commands import (
    AbandonUpdate,
    AbortRollouts,
    AdmitRollout,
    EndRollout,
    JoinEngine,
    LoseEngine,
    ReportEvidence,
    StartController,
    StartUpdate,
)
from rc.decision_log import DecisionLog
from rc.effects.handlers import EffectHandlers
from rc.effects.protocol import EngineAdapter, EngineFacts, WeightSource, WeightTransfer
from rc.errors import (
    EngineUnsuitable,
    IllegalTransition,
    InvalidWeights,
    JournalClosed,
    JournalError,
    NotAdmitted,
    UnknownRollout,
    UpdateInProgress,
    VersionMismatch,
)
from rc.events.journal import Journal
from rc.events.sqlite import SqliteJournal
from rc.events.types import AbortRollout, Admit, Event, FinishRollout, Turn, UpdatePath
from rc.leases import Leases
from rc.lifecycle import IN_FLIGHT, Phase
from rc.next_effects import Effect, next_effects
from rc.projections.control import ControlState, Publication, evolve, state_digest
from rc.rollout import Rollout
from rc.task_group import background_tasks
from rc.update_watch import Commit, UpdateWatch
from rc.versions import Manifest, WeightIdentity, version_label
from rc.weights import checkpoint_manifest

__all__ = ("Controller",)

DEFAULT_LEASE_S = 600.0
"""How long a rollout may go without a sign of life from its owner; longer than any sensible pause between two turns."""

CLOSE_DEADLINE_S = 120.0
"""How long closing waits for an update that is mutating; the sum of the effects' own deadlines is below it."""

_MAX_REASON = 1000
"""Characters of an owner's error that are kept in the journal; some libraries put whole tensors into theirs."""


class Controller:
    """Rollouts and weight updates over one journal. Use `open`; valid inside its ``async with`` block."""

    def __init__(
        self,
        journal: Journal,
        state: ControlState,
        engines: dict[str, EngineAdapter],
        transfer: WeightTransfer | None,
        tasks: anyio.abc.TaskGroup,
        *,
        expects: Manifest | None,
        clock: Callable[[], float],
        new_id: Callable[[str], str],
    ) -> None:
        self._log = DecisionLog(journal, state, self._on_event)
        self._engines = engines
        self._facts: dict[str, EngineFacts] = {}
        self._expected: dict[str, Manifest] = {}
        self._expects = expects
        self._transfer = transfer
        self._handlers = EffectHandlers(engines, transfer)
        self._tasks = tasks
        self._clock = clock
        self._new_id = new_id
        self._leases = Leases()
        self._watches: dict[str, UpdateWatch] = {}
        self._update_turn = anyio.Lock()
        self._busy: set[str] = set()
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
        clock = clock or _monotone_clock()
        new_id = new_id or _random_id
        name = controller_id or new_id("controller")
        async with AsyncExitStack() as stack:
            adapter = _adapter(engine, api_key)
            stack.push_async_callback(adapter.aclose)
            facts = await adapter.probe()
            _check_suitable(adapter.name, facts)
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
                transfer or _default_transfer(),
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
        await self.join(engine, effects=False)
        self._started = True
        self._tasks.start_soon(self._run_effects)
        self._tasks.start_soon(self._reap_overdue)
        await self._until_settled()
        if self.state.published is None and self.state.engine(engine).phase is Phase.JOINED:
            root = self._facts[engine].model_root
            await self._run_update(identity or WeightIdentity(run="initial", step=0, checkpoint=root), None, "queue")

    async def join(self, engine: str | None = None, *, effects: bool = True) -> None:
        """Probe an engine and record what is found: a first sight, a restart, or the same process as before.

        Call it after restarting an engine's server, then publish with `update`.

        Raises:
            EngineUnreachable: Nothing usable answers.
            EngineUnsuitable: It lacks something rc needs, or belongs to another journal.
        """
        name = engine or next(iter(self._engines))
        adapter = self._engines[name]
        facts = await adapter.probe()
        _check_suitable(name, facts)
        expected = self._expects or await anyio.to_thread.run_sync(_manifest_at, facts.model_root)
        await self._log.submit(
            JoinEngine(
                at=self.now(),
                engine=name,
                observed=await adapter.observe(),
                profile=facts.profile,
                vllm=facts.vllm,
                model=facts.model,
                max_model_len=facts.max_model_len,
                manifest_digest=expected.digest if expected else None,
            )
        )
        self._facts[name] = facts
        if expected:
            self._expected[name] = expected
        if effects:
            await self._until_settled()

    async def _until_settled(self) -> None:
        while any(engine.phase in IN_FLIGHT for engine in self._log.settled.engines.values()):
            self._log.check_running()
            await self._log.changed()

    async def _close(self) -> BaseException | None:
        """End what is under way and refuse the rest; give what had stopped the controller, if anything had."""
        self._closing = True
        with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            try:
                await self._abort(tuple(self._log.state.rollouts.active), "its controller was closed")
                if self._started and self._log.state.update is not None:
                    await self._abandon(self._log.state.update.update, "its controller was closed")
                if self._started:
                    await self._until_settled()
                while self._log.unsettled:
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
        rollout = await self._admit(rollout_id or self._new_id("rollout"), lease_s, wait=wait)
        try:
            yield rollout
            if not rollout.ended and rollout.turns:
                await rollout.finish()
        except BaseException as error:
            with suppress(JournalError):  # the owner's own error matters more; a stopped controller says so everywhere
                await self._abort((rollout.id,), _reason(error))
            raise
        await self._abort((rollout.id,), "its owner ended it without generating")

    async def _admit(self, rollout: str, lease_s: float, *, wait: bool) -> Rollout:
        while True:
            self._check_open()
            try:
                await self._log.submit(AdmitRollout(at=self.now(), rollout=rollout, lease_s=lease_s))
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
            await self._abort((rollout,), "its owner was cancelled while being admitted")

    async def _abort(self, rollouts: tuple[str, ...], reason: str) -> None:
        active = tuple(rollout for rollout in rollouts if rollout in self._log.state.rollouts.active)
        if active:
            await self._log.submit(AbortRollouts(at=self.now(), rollouts=active, reason=reason))

    def check_active(self, rollout: str) -> None:
        """Raise `UnknownRollout` unless the rollout is active."""
        self._log.check_running()
        if rollout not in self._log.state.rollouts.active:
            raise UnknownRollout(rollout)

    def renew(self, rollout: str) -> None:
        """Extend a rollout's lease by its full length."""
        self._leases.renew(rollout, self.now())

    def lease_held(self, rollout: str) -> AbstractContextManager[None]:
        """Suspend a rollout's lease while a request of its own, which has a deadline, is under way."""
        return self._leases.held(rollout)

    async def end_rollout(self, rollout: str, turns: tuple[Turn, ...]) -> None:
        """Record a rollout's trajectory; see `Rollout.finish`."""
        ended = await self._log.submit(EndRollout(at=self.now(), rollout=rollout, turns=turns))
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
        await self._log.submit(LoseEngine(at=self.now(), engine=engine, reason=reason))

    async def _reap_overdue(self) -> None:
        while self._log.failure is None:
            late = self._leases.overdue(self.now())
            if late:
                try:
                    await self._abort(late, "its lease ran out without a sign of life from its owner")
                except JournalError:
                    return  # the log has stopped and says so to everybody
            deadline = self._leases.next_deadline()
            # A lease that starts while we sleep is never due sooner than we look again, unless it is below a second.
            await anyio.sleep(1.0 if deadline is None else min(1.0, max(0.0, deadline - self.now())))

    # ------------------------------------------------------------------ updates

    async def update(
        self,
        identity: WeightIdentity,
        weights: WeightSource,
        *,
        when_busy: Literal["queue", "refuse"] = "queue",
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
        manifest = await self._check_weights(weights)
        if when_busy == "refuse" and (self._log.state.update is not None or self._update_turn.locked()):
            update, target = self._log.state.update, version_label(self._log.state.next_version)
            raise UpdateInProgress(update.update if update else "that waits its turn", target)
        async with self._update_turn:
            await self._prepare_transfer()
            return await self._run_update(identity, weights, when_busy, manifest)

    async def _prepare_transfer(self) -> None:
        """Meet the engines' workers while they still serve; the gap does not pay for it, and preflight looks again.

        A process that has taken an engine's place is noticed here, before it is paused: afterwards it would look like
        one that somebody else has paused.
        """
        for name, engine in self._log.state.engines.items():
            if engine.phase not in (Phase.JOINED, Phase.READY):
                continue
            await self.engine_failed(name)
            if self._transfer is not None and self._log.state.engine(name).phase is engine.phase:
                problem = await self._transfer.ready(self._engines[name])
                if problem is not None:
                    raise EngineUnsuitable(f"engine {name} cannot receive weights now; nothing was changed: {problem}")

    async def _check_weights(self, weights: WeightSource) -> Manifest:
        problems = list(await anyio.to_thread.run_sync(weights.problems))
        manifest = weights.manifest()
        comparable = manifest
        for name, expected in self._expected.items():
            against = manifest.problems_against(expected, optional=weights.optional())
            problems += [f"{problem} (engine {name})" for problem in against]
            extra = weights.optional() - {spec.name for spec in expected.parameters}
            comparable = Manifest.of(spec for spec in manifest.parameters if spec.name not in extra)
        if problems:
            raise InvalidWeights("these weights cannot be published; nothing was changed:\n  " + "\n  ".join(problems))
        return comparable

    async def _run_update(
        self,
        identity: WeightIdentity,
        weights: WeightSource | None,
        when_busy: Literal["queue", "refuse"],
        manifest: Manifest | None = None,
    ) -> Commit:
        update = self._new_id("update")
        path: UpdatePath = "adopt" if weights is None else "one_phase"
        if weights is not None:
            self._handlers.weights[update] = weights
        watch = self._watches[update] = UpdateWatch(update)
        try:
            while True:
                self._check_open()
                try:
                    await self._log.submit(
                        StartUpdate(
                            at=self.now(),
                            update=update,
                            identity=identity,
                            path=path,
                            backend=self._transfer.backend if weights is not None and self._transfer else None,
                            manifest_digest=manifest.digest if manifest else None,
                            nbytes=manifest.nbytes if manifest else 0,
                        )
                    )
                except UpdateInProgress:
                    if when_busy == "refuse":
                        raise
                    await self._log.lifecycle_changed()
                else:
                    return await watch.outcome(self._log)
        except BaseException:
            current = self._log.state.update
            if current is not None and current.update == update and self._log.failure is None:
                self._tasks.start_soon(self._abandon, update, "its caller was cancelled")
            else:
                self._forget(update)
            raise

    async def _abandon(self, update: str, reason: str) -> None:
        # Illegal where it has ended, or where mutation began and it completes or taints.
        with suppress(IllegalTransition, JournalError):
            await self._log.submit(AbandonUpdate(at=self.now(), update=update, reason=reason))

    def _forget(self, update: str) -> None:
        self._watches.pop(update, None)
        self._handlers.weights.pop(update, None)

    # ------------------------------------------------------------------ the loop behind them

    def _check_open(self) -> None:
        self._log.check_running()
        if self._closing:
            raise JournalClosed("this controller is closing; open another one")

    def _on_event(self, event: Event) -> None:
        match event:
            case Admit():
                self._leases.start(event.rollout, event.lease_s, event.at)
            case FinishRollout() | AbortRollout():
                self._leases.end(event.rollout)
            case _:
                for watch in tuple(self._watches.values()):
                    watch.note(event)
                    if watch.ended:
                        self._forget(watch.update)

    async def _run_effects(self) -> None:
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
                await self._log.submit(ReportEvidence(at=self.now(), engine=effect.engine, evidence=evidence))
        except JournalError:
            pass  # the log has stopped and says so to everybody
        except Exception as error:  # noqa: BLE001 - a defect of ours: stop for good rather than guess
            self._log.fail(error)
        finally:
            self._busy.discard(effect.engine)
            self._log.poke()


def _monotone_clock() -> Callable[[], float]:
    """The system's time at the start, advanced by the monotonic clock: it never goes backwards within a controller."""
    started, monotonic_start = time.time(), time.monotonic()
    return lambda: started + (time.monotonic() - monotonic_start)


def _random_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(6)}"


def _adapter(engine: str | EngineAdapter, api_key: str | None) -> EngineAdapter:
    if not isinstance(engine, str):
        return engine
    from rc.effects.vllm_http import VllmHttpEngine

    return VllmHttpEngine(engine, api_key=api_key)


def _default_transfer() -> WeightTransfer:
    from rc.effects.transfer import VllmWeightTransfer

    return VllmWeightTransfer()


def _check_suitable(engine: str, facts: EngineFacts) -> None:
    if facts.missing:
        missing = "\n  ".join(facts.missing)
        raise EngineUnsuitable(f"engine {engine} (vLLM {facts.vllm}) cannot be driven:\n  {missing}")


def _manifest_at(root: str) -> Manifest | None:
    """The parameters of the checkpoint that the engine loaded, where it lies on this machine."""
    return checkpoint_manifest(root) if Path(root).is_dir() else None


def _reason(error: BaseException) -> str:
    """Why a rollout's owner left its block."""
    if not isinstance(error, Exception):
        return "its owner was cancelled"
    reason = f"its owner raised {type(error).__name__}: {error}".removesuffix(": ")[:_MAX_REASON]
    return reason.encode(errors="replace").decode()
