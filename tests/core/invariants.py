"""mission.md's invariants as a checker of its own: it reads events alone, and shares no code with the projections."""

from __future__ import annotations

from dataclasses import dataclass, field

from rc.events import types as events
from rc.events.types import Event
from rc.evidence import InstallReport

STEPS = ("begin_update", "installed", "invalidated", "validated", "resumed")
"""What a member of an update must have gone through, in this order, before its version is published."""


_Shown = events.BeginUpdate | events.Installed | events.Invalidated | events.Validated | events.Resumed


class Violation(AssertionError):
    """An invariant that a history of events breaks."""


@dataclass
class _Engine:
    """One engine as its events tell it. ``steps`` are those of its current update."""

    boot: str
    version: int | None = None
    update: str | None = None
    target: int | None = None
    steps: list[str] = field(default_factory=list)
    draining: bool = False
    tainted: bool = False
    was: int | None = None
    doubted: bool = False
    adopts: bool = False


@dataclass
class Checker:
    """Feed it every event in order; it raises `Violation` at the first that breaks an invariant."""

    engines: dict[str, _Engine] = field(default_factory=dict)
    active: dict[str, tuple[str, int]] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    requested: dict[str, int] = field(default_factory=dict)
    open_update: str | None = None
    burned: set[int] = field(default_factory=set)
    tainted_boots: set[tuple[str, str]] = field(default_factory=set)
    admitted: int = 0
    ended: int = 0
    epoch: int = 0
    adopting: bool = False
    sometimes: set[str] = field(default_factory=set)

    def check(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case events.ControllerStarted():
                self.hold(event.epoch > self.epoch, "single writer: epochs grow")
                self.epoch = event.epoch
                for engine in self.engines.values():
                    engine.doubted = True
            case events.EngineJoined():
                self.hold(event.engine not in self.engines, "an engine joins once, until it is lost")
                self.engines[event.engine] = _Engine(boot=event.boot)
            case events.EngineLost():
                self.hold(not self._active_on(event.engine), "nothing lost: rollouts of a lost engine have ended")
                self.hold(
                    not self._mutating(event.engine), "fail closed: a mutating engine is tainted before it is lost"
                )
                del self.engines[event.engine]
            case events.Admit():
                self._admit(event)
            case events.FinishRollout() | events.AbortRollout():
                self._end(event)
            case events.RequestUpdate():
                self._request(event)
            case events.Committed():
                self._commit(event)
            case events.UpdateAbandoned():
                self._abandon(event)
            case events.Tainted():
                self._taint(event)
            case _:
                self._step(event)

    def hold(self, condition: bool, rule: str) -> None:
        """Raise `Violation` unless the condition holds."""
        if not condition:
            raise Violation(rule)

    def _active_on(self, engine: str) -> list[str]:
        return [rollout for rollout, (where, _) in self.active.items() if where == engine]

    def _mutating(self, name: str) -> bool:
        """From `begin_update` until `resumed`, `update_abandoned` or `tainted` the weights are nobody's."""
        engine = self.engines[name]
        return "begin_update" in engine.steps and "resumed" not in engine.steps and not engine.tainted

    def _admit(self, event: events.Admit) -> None:
        engine = self.engines.get(event.engine)
        self.hold(engine is not None, "version-pure: admitted to an engine that is known")
        assert engine is not None
        self.hold(bool(self.published) and event.version == self.published[-1], "version-pure: the published version")
        self.hold(engine.version == event.version, "version-pure: an engine that holds the version")
        self.hold(not engine.draining and not engine.tainted, "drain: nothing is admitted from drain to resumed")
        self.hold((event.engine, engine.boot) not in self.tainted_boots, "TAINTED never serves again under its boot")
        self.hold(event.rollout not in self.active, "nothing lost: a rollout is active once")
        self.active[event.rollout] = (event.engine, event.version)
        self.admitted += 1

    def _end(self, event: events.FinishRollout | events.AbortRollout) -> None:
        bound = self.active.pop(event.rollout, None)
        self.hold(
            bound == (event.engine, event.version), "nothing lost: an admitted rollout ends once, where it was bound"
        )
        self.ended += 1
        if isinstance(event, events.FinishRollout):
            self.sometimes.add("finished")
            labels = {span.label for turn in event.turns for span in turn.spans}
            self.hold(labels <= {f"rc-{event.version}"}, "version-pure: every attested token is of the version")
            attested = all(turn.spans for turn in event.turns if turn.token_ids)
            tainted = self.engines[event.engine].tainted
            self.hold(attested or not tainted, "version-pure: a tainted engine's word is not taken for granted")

    def _request(self, event: events.RequestUpdate) -> None:
        self.hold(self.open_update is None, "one update at a time")
        self.hold(event.target not in self.burned, "fail closed: a burned number is never used again")
        self.hold(not self.published or event.target > self.published[-1], "versions grow")
        self.open_update = event.update
        self.requested[event.update] = event.target
        self.adopting = event.path == "adopt"

    def _step(self, event: Event) -> None:
        assert isinstance(
            event,
            events.Drain
            | events.Quiesced
            | events.BeginUpdate
            | events.Installed
            | events.Invalidated
            | events.Validated
            | events.Resumed,
        )
        engine = self.engines[event.engine]
        self.hold(not engine.tainted, "fail closed: nothing is done to a tainted engine")
        if isinstance(event, events.Drain):
            self.hold(event.update == self.open_update, "a drain is of the update in progress")
            self.hold((event.engine, engine.boot) not in self.tainted_boots, "TAINTED never returns under its boot")
            engine.update, engine.target, engine.draining = event.update, self.requested[event.update], True
            engine.steps, engine.was = [], engine.version
            engine.doubted, engine.adopts = False, self.adopting
            return
        self.hold(engine.draining, f"{event.kind} only after a drain")
        self.hold(event.update == engine.update, f"{event.kind} is of the engine's update")
        if not isinstance(event, events.Resumed):
            self.hold(not self._active_on(event.engine), f"drain before mutation: none active at {event.kind}")
        if isinstance(event, events.Quiesced):
            self.hold(event.evidence.observed.paused is True, "quiesced is paused")
            self.hold(event.evidence.observed.boot == engine.boot, "quiesced is this process")
            return
        if isinstance(event, events.Resumed) and not engine.steps:
            engine.draining, engine.update = False, None
            self.sometimes.add("resumed at the old version")
            return
        self._shown(event, engine)
        engine.steps.append(event.kind)
        self.hold(tuple(engine.steps) == STEPS[: len(engine.steps)], f"steps in order, not {engine.steps}")
        if isinstance(event, events.BeginUpdate):
            engine.version = None
        if isinstance(event, events.Resumed):
            engine.draining, engine.version = False, engine.target

    def _shown(self, event: _Shown, engine: _Engine) -> None:
        """State advances only on evidence: the engine itself showed what the step claims."""
        seen = event.evidence.observed
        label: str | None = f"rc-{engine.target}"
        if isinstance(event, events.BeginUpdate):
            label = None if engine.was is None else f"rc-{engine.was}"
        self.hold(seen.boot == engine.boot, f"{event.kind} is of this process")
        self.hold(label is None or seen.label == label, f"{event.kind} shows {label}")
        self.hold(seen.paused is (event.kind != "resumed"), f"{event.kind} shows the pause state")
        if isinstance(event, events.Invalidated):
            caches = event.evidence
            reset = (caches.prefix, caches.multimodal, caches.encoder, caches.connector is not False)
            self.hold(all(reset) and caches.problem is None, "cache boundary: every cache was reset")
        if isinstance(event, events.Validated):
            self.hold(bool(event.evidence.checks) and event.evidence.problem is None, "a validation that checked")

    def _commit(self, event: events.Committed) -> None:
        self.hold(event.update == self.open_update, "a commit is of the update in progress")
        self.hold(event.version == self.requested[event.update], "a commit is of the requested version")
        self.hold(not self.published or event.version > self.published[-1], "versions grow")
        self.hold(bool(event.engines), "a version is published by somebody")
        for name in event.engines:
            engine = self.engines[name]
            self.hold(tuple(engine.steps) == STEPS, "commit after update, invalidation, validation and resume")
            self.hold(engine.update == event.update and not engine.tainted, "commit of healthy members")
        for name, engine in self.engines.items():
            if engine.update == event.update and name not in event.engines:
                self.hold(engine.tainted, "a member that is left out was tainted or lost")
        self.published.append(event.version)
        self.open_update = None
        self.sometimes.add("committed")

    def _abandon(self, event: events.UpdateAbandoned) -> None:
        self.hold(event.update == self.open_update, "abandoned is the update in progress")
        for engine in self.engines.values():
            if engine.update == event.update and not engine.tainted:
                self.hold(engine.steps in ([], ["begin_update"]), "abandoned only before anything was installed")
                if engine.steps:
                    self._untouched(event, engine)
                engine.steps, engine.version = [], engine.was
        self.open_update = None
        self.sometimes.add("abandoned")

    def _untouched(self, event: events.UpdateAbandoned, engine: _Engine) -> None:
        """After `begin_update` only proof that nothing was sent leads back."""
        shown = event.evidence
        self.hold(shown is not None, "fail closed: abandoned after begin_update without evidence")
        assert shown is not None
        seen, old = shown.observed, "default" if engine.was is None else f"rc-{engine.was}"
        self.hold((seen.boot, seen.paused) == (engine.boot, True), "fail closed: this very process, still paused")
        if isinstance(shown, InstallReport):
            self.hold(shown.mutation == "none" and not engine.doubted, "fail closed: nothing was sent, by anybody")
        else:
            self.hold(engine.adopts and seen.label == old, "fail closed: only a label was due, and it was not set")

    def _taint(self, event: events.Tainted) -> None:
        engine = self.engines[event.engine]
        self.hold(not engine.tainted, "tainted once a boot")
        if "begin_update" in engine.steps and engine.draining and engine.target is not None:
            self.burned.add(engine.target)
        engine.tainted, engine.version = True, None
        self.tainted_boots.add((event.engine, engine.boot))
        self.sometimes.add("tainted")
        members = [e for e in self.engines.values() if e.update == self.open_update and not e.tainted]
        if event.update is not None and not members:
            self.open_update = None

    def check_settled(self) -> None:
        """What must hold between commands."""
        self.hold(self.admitted == self.ended + len(self.active), "nothing lost: every rollout is active or ended")
        for name in self.engines:
            if self._mutating(name):
                self.hold(not self._active_on(name), "drain before mutation: none active while weights mutate")
