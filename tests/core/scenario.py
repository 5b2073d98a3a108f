"""A core without a journal: give it commands, look at what it decided. Engines are data here, healthy or not."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rc.commands import (
    AbandonUpdate,
    AbortRollouts,
    AdmitRollout,
    Command,
    EndRollout,
    JoinEngine,
    LoseEngine,
    ReportEvidence,
    StartController,
    StartUpdate,
)
from rc.decide import decide
from rc.events.codec import as_recorded
from rc.events.types import Event, Span, Turn, UpdatePath
from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    Observation,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.lifecycle import Phase
from rc.next_effects import (
    Effect,
    InstallWeights,
    LookAtEngine,
    PauseEngine,
    ResetCaches,
    ResumeEngine,
    RunPreflight,
    ValidateEngine,
    next_effects,
)
from rc.projections.control import ControlState, evolve
from rc.projections.engines import EngineState
from rc.versions import WeightIdentity, version_label

ENGINE = "e"
"""The engine of scenarios that have one."""

FLIGHT = (
    Phase.DRAINING,
    Phase.QUIESCED,
    Phase.UPDATING,
    Phase.INVALIDATING,
    Phase.VALIDATING,
    Phase.RESUMING,
)
"""The phases of an update in the order in which it passes them."""


def turn(label: str | None = "rc-0", tokens: int = 2) -> Turn:
    """One request of three prompt tokens; attested to ``label`` unless that is None."""
    return Turn(
        prompt_token_ids=(1, 2, 3),
        token_ids=tuple(range(10, 10 + tokens)),
        logprobs=(-0.5,) * tokens,
        spans=() if label is None else (Span(label=label, start=0, end=tokens),),
        finish_reason="length",
        sampling={"temperature": 1.0, "max_tokens": tokens},
    )


def healthy(effect: Effect, state: ControlState) -> Evidence:
    """What a healthy engine shows after the effect; a look shows it as the last event left it."""
    engine = state.engine(effect.engine)
    paused = Observation(boot=engine.boot, label=engine.label, paused=True)
    match effect:
        case LookAtEngine():
            return LookReport(observed=msgspec.structs.replace(paused, paused=engine.phase is not Phase.DRAINING))
        case PauseEngine():
            return PauseReport(observed=paused)
        case RunPreflight():
            return PreflightReport(observed=paused)
        case InstallWeights():
            installed = msgspec.structs.replace(paused, label=effect.label)
            return InstallReport(observed=installed, mutation="complete", sent_bytes=1000)
        case ResetCaches():
            return CacheReport(observed=paused, prefix=True, multimodal=True, encoder=True)
        case ValidateEngine():
            return ValidationReport(observed=paused, checks=("boot", "label", "paused"))
        case ResumeEngine():
            return ResumeReport(observed=msgspec.structs.replace(paused, paused=False))


def showing(report: Evidence, **fields: object) -> Evidence:
    """Give the report with another observation."""
    return msgspec.structs.replace(report, observed=msgspec.structs.replace(report.observed, **fields))


def unreadable(effect: Effect, state: ControlState) -> Evidence:
    """What an engine shows that does not answer in time."""
    return showing(healthy(effect, state), boot=None, label=None, paused=None, problem="timed out")


class Core:
    """Decides and evolves; keeps every decision. The clock advances one second a command."""

    def __init__(self, state: ControlState | None = None, *, at: float = 100.0) -> None:
        self.state = state or ControlState()
        self.at = at
        self.decisions: list[tuple[Command, tuple[Event, ...]]] = []

    @property
    def now(self) -> float:
        """The time of the next command."""
        self.at += 1.0
        return self.at

    @property
    def engine(self) -> EngineState:
        """The one engine."""
        return self.state.engine(ENGINE)

    def phase(self) -> Phase:
        """The one engine's phase."""
        return self.engine.phase

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What the state calls for."""
        return next_effects(self.state)

    def give(self, command: Command) -> tuple[Event, ...]:
        """Decide a command, as a journal will give it back, and apply what it caused."""
        command = as_recorded(command)
        events = decide(self.state, command)
        for event in events:
            self.state = evolve(self.state, event)
        if events:
            self.decisions.append((command, events))
        return events

    def start(self, controller: str = "c1", epoch: int | None = None) -> tuple[Event, ...]:
        """A controller opens the journal, by default in the next epoch."""
        epoch = self.state.epoch + 1 if epoch is None else epoch
        return self.give(StartController(at=self.now, controller=controller, epoch=epoch))

    def join(
        self,
        engine: str = ENGINE,
        *,
        boot: str = "b1",
        label: str | None = "default",
        paused: bool | None = False,
        manifest: str | None = None,
    ) -> tuple[Event, ...]:
        """A probe found this process."""
        observed = Observation(boot=boot, label=label, paused=paused)
        return self.give(
            JoinEngine(
                at=self.now,
                engine=engine,
                observed=observed,
                profile="stock",
                vllm="0.32.0",
                model="policy",
                max_model_len=1024,
                manifest_digest=manifest,
            )
        )

    def lose(self, engine: str = ENGINE, reason: str = "exit code -9") -> tuple[Event, ...]:
        """The engine process is known to be dead."""
        return self.give(LoseEngine(at=self.now, engine=engine, reason=reason))

    def admit(self, rollout: str, lease_s: float = 60.0) -> tuple[Event, ...]:
        """A user wants a rollout."""
        return self.give(AdmitRollout(at=self.now, rollout=rollout, lease_s=lease_s))

    def end(self, rollout: str, *turns: Turn) -> tuple[Event, ...]:
        """A rollout's owner hands in its trajectory; by default one turn attested to its version."""
        active = self.state.rollouts.active.get(rollout)
        label = version_label(active.version) if active else "rc-0"
        return self.give(EndRollout(at=self.now, rollout=rollout, turns=turns or (turn(label),)))

    def abort(self, *rollouts: str, reason: str = "cancelled", turns: tuple[Turn, ...] = ()) -> tuple[Event, ...]:
        """Rollouts end without a trajectory."""
        return self.give(AbortRollouts(at=self.now, rollouts=rollouts, reason=reason, turns=turns))

    def update(
        self,
        update: str = "u1",
        *,
        step: int = 1,
        run: str = "r",
        path: UpdatePath = "one_phase",
        manifest: str | None = None,
    ) -> tuple[Event, ...]:
        """A user wants weights published."""
        identity = WeightIdentity(run=run, step=step)
        return self.give(
            StartUpdate(at=self.now, update=update, identity=identity, path=path, manifest_digest=manifest)
        )

    def abandon(self, update: str = "u1", reason: str = "cancelled") -> tuple[Event, ...]:
        """Give an update up."""
        return self.give(AbandonUpdate(at=self.now, update=update, reason=reason))

    def report(self, evidence: Evidence, engine: str = ENGINE) -> tuple[Event, ...]:
        """An effect handler saw this."""
        return self.give(ReportEvidence(at=self.now, engine=engine, evidence=evidence))

    def step(self, engine: str = ENGINE) -> tuple[Event, ...]:
        """Perform the effect that is called for on an engine, which is healthy."""
        (effect,) = (effect for effect in self.effects if effect.engine == engine)
        return self.report(healthy(effect, self.state), engine)

    def advance(self, phase: Phase, engine: str = ENGINE) -> None:
        """Perform effects on an engine until it reaches a phase."""
        while self.state.engine(engine).phase is not phase:
            self.step(engine)

    def settle(self) -> None:
        """Perform effects on healthy engines until none is called for."""
        while self.effects:
            self.step(self.effects[0].engine)

    def publish(self, update: str, *, step: int = 0, path: UpdatePath = "one_phase") -> None:
        """Update all engines to the end."""
        self.update(update, step=step, path=path)
        self.settle()


def serving(*engines: str) -> Core:
    """Give a core whose engines serve rc-0, adopted."""
    core = Core()
    core.start()
    for engine in engines or (ENGINE,):
        core.join(engine, boot=f"{engine}-1")
    core.publish("u0", path="adopt")
    return core


def updating(phase: Phase) -> Core:
    """Give a core whose engine served rc-0 and is in this phase of update u1 towards rc-1."""
    core = serving()
    core.update("u1")
    core.advance(phase)
    return core


def kinds(events: Iterable[Event]) -> list[str]:
    """Give the kinds of events."""
    return [event.kind for event in events]
