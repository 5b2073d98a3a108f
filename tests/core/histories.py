"""Random histories of a core under a checker: what is asked in any order, and engines that show anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rc import commands
from rc import decide as decide_module
from rc.commands import Command
from rc.errors import RolloutCoreError
from rc.events.codec import as_recorded, decode_command, encode_command, encode_event
from rc.events.types import Event, Span, Turn, UpdatePath
from rc.evidence import CacheReport, Evidence, InstallReport, Observation, ValidationReport
from rc.lifecycle import IN_FLIGHT, Phase
from rc.next_effects import next_effects
from rc.projections.control import ControlState, evolve, state_digest
from rc.versions import WeightIdentity, version_label
from tests.core.invariants import Checker
from tests.core.samples import EVIDENCE
from tests.core.scenario import healthy, showing

# ------------------------------------------------------------------------------------------------------- what is asked

ENGINES = ("a", "b", "c")
ROLLOUTS = ("r1", "r2", "r3", "r4")


@dataclass(frozen=True)
class Move:
    """Something that happens. What it means in detail depends on the state that it meets."""

    what: str
    who: int = 0
    how: str = ""
    amount: int = 0


LIES: dict[str, dict[str, object]] = {
    "boot unknown": {"boot": None},
    "label unknown": {"label": None},
    "pause unknown": {"paused": None},
    "nothing known": {"boot": None, "label": None, "paused": None, "gone": True},
    "another process": {"boot": "z-9"},
    "another label": {"label": "rc-77"},
    "target label": {},
    "old label": {},
    "paused": {"paused": True},
    "not paused": {"paused": False},
}
FAILINGS = ("problem", "nothing sent", "perhaps sent", "caches incomplete", "no checks", "refused untouched")


def moves(engines: int) -> st.SearchStrategy[Move]:
    """Give moves; what usually happens is about as likely as all that can go wrong."""
    who = st.integers(0, engines - 1)
    rollout = st.integers(0, len(ROLLOUTS) - 1)
    wrong = st.sampled_from([*LIES, *FAILINGS])
    shown = st.sampled_from(["same", "fresh", "back", "foreign", "paused", "unreadable"])
    usual = [
        st.builds(Move, what=st.just("go on"), who=who, amount=st.sampled_from([1, 2, 3, 6, 6, 6])),
        st.builds(Move, what=st.just("admit"), who=rollout),
        st.builds(Move, what=st.just("end"), who=rollout, how=st.sampled_from(["good", "good", "bare"])),
        st.builds(Move, what=st.just("update"), how=st.just("one_phase"), amount=st.integers(0, 2)),
    ]
    deep = st.integers(0, 6)
    unusual = st.one_of(
        st.builds(Move, what=st.just("update that fails"), who=who, how=wrong, amount=deep),
        st.builds(Move, what=st.just("update that fails"), who=who, how=wrong, amount=deep),
        st.builds(Move, what=st.just("update that crashes"), who=who, how=wrong, amount=deep),
        st.builds(Move, what=st.just("effect"), who=who, how=wrong),
        st.builds(Move, what=st.just("stray report"), who=who, amount=st.integers(0, len(EVIDENCE) - 1)),
        st.builds(Move, what=st.just("end"), who=rollout, how=st.sampled_from(["wrong", "gap"])),
        st.builds(Move, what=st.just("abort"), who=rollout),
        st.builds(Move, what=st.just("update"), how=st.sampled_from(["one_phase", "adopt"]), amount=st.integers(-1, 0)),
        st.builds(Move, what=st.just("abandon")),
        st.builds(Move, what=st.just("controller"), amount=st.integers(0, 1)),
        st.builds(Move, what=st.just("join"), who=who, how=shown),
        st.builds(Move, what=st.just("join"), who=who, how=st.just("fresh")),
        st.builds(Move, what=st.just("lose"), who=who),
    )
    # In a tuple, or `one_of` would take each of its branches for as likely as one of the usual moves.
    rarely = st.tuples(unusual).map(lambda drawn: drawn[0])
    return st.one_of(*usual, rarely)


@dataclass
class History:
    """A core under a checker. Boots count up by engine; ``seen`` are the boots that each engine has had."""

    engines: int
    state: ControlState = field(default_factory=ControlState)
    at: float = 0.0
    updates: int = 0
    boots: int = 0

    def __post_init__(self) -> None:
        self.checker = Checker()
        self.decisions: list[tuple[Command, tuple[Event, ...]]] = []
        self.seen: dict[str, list[str]] = {name: [] for name in ENGINES}
        self.count: Counter[str] = Counter()

    def make(self, move: Move) -> None:
        """Make a move, part by part."""
        for part in self.parts(move):
            self.make_one(part)

    def parts(self, move: Move) -> list[Move]:
        """Take a move that consists of others apart."""
        on = [Move("effect", who=move.who, how="honest")] * move.amount
        begun = [Move("update", how="one_phase"), *(Move("abort", who=1) for _ in ROLLOUTS), *on]
        match move.what:
            case "go on":
                return on
            case "update that fails":
                return [*begun, Move("effect", who=move.who, how=move.how)]
            case "update that crashes":
                return [*begun, Move("controller", amount=1), Move("effect", who=move.who, how=move.how)]
            case _:
                return [move]

    def make_one(self, move: Move) -> None:
        """Turn a move into a command, decide it, and check everything."""
        self.at += 1.0
        command = self.command(move)
        if command is None:
            return
        command = as_recorded(command)
        try:
            events = decide_module.decide(self.state, command)
        except RolloutCoreError:
            return
        for event in events:
            self.state = evolve(self.state, event)
            self.checker.check(event)
            self.count[event.kind] += 1
        self.checker.check_settled()
        if events:
            self.decisions.append((command, events))
        self.check_progress()

    def check_progress(self) -> None:
        """Something can always go on: no phase in flight without an effect, no update without a member in flight."""
        effects = next_effects(self.state)
        busy = [effect.engine for effect in effects]
        assert len(busy) == len(set(busy)), "at most one effect an engine"
        for name, engine in self.state.engines.items():
            waits = engine.phase is Phase.DRAINING and engine.active > 0
            assert (engine.phase in IN_FLIGHT and not waits) == (name in busy), (engine.phase, busy)
            active = [rollout for rollout in self.state.rollouts.active.values() if rollout.engine == name]
            assert engine.active == len(active)
        if self.state.update is not None:
            assert any(self.state.engine(name).phase in IN_FLIGHT for name in self.state.update.engines)

    def command(self, move: Move) -> Command | None:
        """Say what the move is as a command, or None where it makes no sense now."""
        at, name = self.at, ENGINES[move.who % self.engines]
        rollout = ROLLOUTS[move.who]
        if move.what in ("end", "abort") and self.state.rollouts.active and move.who > 0:
            active = sorted(self.state.rollouts.active)
            rollout = active[move.who % len(active)]
        match move.what:
            case "effect":
                return self.report(name, move.how)
            case "stray report":
                return commands.ReportEvidence(at=at, engine=name, evidence=EVIDENCE[move.amount])
            case "admit":
                return commands.AdmitRollout(at=at, rollout=rollout, lease_s=60.0)
            case "end":
                return commands.EndRollout(at=at, rollout=rollout, turns=self.turns(rollout, move.how))
            case "abort":
                return commands.AbortRollouts(at=at, rollouts=(rollout,), reason="cancelled")
            case "update":
                return self.update(move)
            case "abandon":
                update = self.state.update.update if self.state.update else "none"
                return commands.AbandonUpdate(at=at, update=update, reason="cancelled")
            case "controller":
                return commands.StartController(at=at, controller="c", epoch=self.state.epoch + move.amount)
            case "join":
                return self.join(name, move.how)
            case "lose":
                return commands.LoseEngine(at=at, engine=name, reason="killed")
        raise AssertionError(move)

    def report(self, name: str, how: str) -> Command | None:
        effect = next((effect for effect in next_effects(self.state) if effect.engine == name), None)
        if effect is None:
            return None
        evidence = self.distorted(healthy(effect, self.state), how, name)
        return commands.ReportEvidence(at=self.at, engine=name, evidence=evidence)

    def distorted(self, good: Evidence, how: str, name: str) -> Evidence:
        engine, update = self.state.engine(name), self.state.update
        if how in LIES:
            lie = dict(LIES[how])
            if how == "target label":
                lie = {"label": version_label(update.target if update else 0)}
            if how == "old label":
                lie = {"label": engine.label}
            return showing(good, **lie)
        if how == "problem":
            return msgspec.structs.replace(good, problem="HTTP 500")
        if isinstance(good, InstallReport) and how in ("nothing sent", "perhaps sent", "refused untouched"):
            if how == "refused untouched":
                good = msgspec.structs.replace(
                    good, observed=Observation(boot=engine.boot, label=engine.label, paused=True)
                )
            return msgspec.structs.replace(good, mutation="possible" if how == "perhaps sent" else "none")
        if isinstance(good, CacheReport) and how == "caches incomplete":
            return msgspec.structs.replace(good, encoder=False)
        if isinstance(good, ValidationReport) and how == "no checks":
            return msgspec.structs.replace(good, checks=())
        return good

    def turns(self, rollout: str, how: str) -> tuple[Turn, ...]:
        active = self.state.rollouts.active.get(rollout)
        label = version_label(active.version) if active else "rc-0"
        spans = {
            "good": (Span(label=label, start=0, end=2),),
            "bare": (),
            "wrong": (Span(label="rc-99", start=0, end=2),),
            "gap": (Span(label=label, start=1, end=2),),
        }[how]
        return (Turn(prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-1.0, -1.0), spans=spans),)

    def update(self, move: Move) -> Command:
        self.updates += 1
        published = self.state.published
        step = max(0, (published.identity.step if published else 0) + move.amount)
        path: UpdatePath = "adopt" if move.how == "adopt" else "one_phase"
        identity = WeightIdentity(run="r", step=step)
        return commands.StartUpdate(at=self.at, update=f"u{self.updates}", identity=identity, path=path)

    def join(self, name: str, how: str) -> Command:
        engine, seen = self.state.engine(name), self.seen[name]
        boot, label, paused = engine.boot or f"{name}-0", engine.label or "default", False
        if how == "fresh" or (how == "back" and not seen):
            self.boots += 1
            boot, label = f"{name}-{self.boots}", "default"
        elif how == "back":
            self.make(Move("join", who=ENGINES.index(name), how="fresh"))
            boot, label = seen[-2:][0], "rc-0"
        elif how == "foreign":
            label = "rc-88"
        paused = how == "paused"
        seen.append(boot)
        observed = Observation(boot=boot, label=None if how == "unreadable" else label, paused=paused)
        return commands.JoinEngine(
            at=self.at, engine=name, observed=observed, profile="fake", vllm="0", model="m", max_model_len=9
        )


def served(engines: int) -> History:
    """Give a history in which rc-0 is published on all engines."""
    history = History(engines)
    history.make(Move("controller", amount=1))
    for who in range(engines):
        history.make(Move("join", who=who, how="fresh"))
    history.make(Move("update", how="adopt"))
    while history.state.update is not None:
        for who in range(engines):
            history.make(Move("effect", who=who, how="honest"))
    assert history.checker.published == [0]
    return history


def replayed(decisions: list[tuple[Command, tuple[Event, ...]]]) -> ControlState:
    """Decide the recorded commands again, from their text, and hold the events to the text that was recorded."""
    state = ControlState()
    for command, events in decisions:
        again = decide_module.decide(state, decode_command(encode_command(command)))
        assert [encode_event(event) for event in again] == [encode_event(event) for event in events]
        for event in again:
            state = evolve(state, event)
    return state


def campaign(engines: int, *, examples: int, fresh: bool = False, shrink: bool = True) -> Counter[str]:
    """Try so many histories, always the same ones; give how often each kind of event happened."""
    happened: Counter[str] = Counter()
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @given(st.lists(moves(engines), min_size=10, max_size=60))
    def run(history_moves: list[Move]) -> None:
        history = History(engines) if fresh else served(engines)
        setup = Counter(history.count)
        for move in history_moves:
            history.make(move)
        happened.update(history.count - setup)
        assert state_digest(replayed(history.decisions)) == state_digest(history.state)

    run()
    return happened
