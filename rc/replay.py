"""Replay: rebuild the state from a journal's records and prove on the way that they say what was decided.

Three proofs: every event folds, every stored state digest is met, and deciding each recorded command again gives the
very bytes that were stored. Whatever fails is collected as a `Problem`, and replay goes on with the events as stored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

import msgspec

from rc.decide import decide
from rc.errors import RolloutCoreError
from rc.events.codec import UnreadableEvent, encode_event
from rc.events.journal import Record
from rc.events.types import Event
from rc.lifecycle import Phase
from rc.projections.control import CHECKPOINTS, ControlState, Publication, Update, evolve, state_digest
from rc.projections.engines import EngineState
from rc.versions import version_label

__all__ = ("Problem", "Replay", "Replayer", "recovery_plan", "replay")

_PROBLEMS_KEPT: Final = 100
"""The first divergence matters; those behind it are mostly its consequences, and a journal may have millions."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that does not hold. ``seq`` is the record at which it shows."""

    seq: int
    what: str


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found.

    Attributes:
        seq: The last record replayed; 0 for an empty journal.
        state: The state after it.
        digest: Digest of that state; a live controller prints the same.
        digests_checked: How many stored digests were compared.
        decisions_rerun: How many recorded commands were decided again.
        kinds: How many events there are of each kind.
        last_commit: The last committed version and where the journal says so; None if nothing was.
        problems: What does not hold, in order: the first 100.
        problems_left_out: How many more there are.
    """

    seq: int
    state: ControlState
    digest: str
    digests_checked: int
    decisions_rerun: int
    kinds: dict[str, int]
    last_commit: tuple[int, Publication] | None
    problems: tuple[Problem, ...]
    problems_left_out: int = 0


def replay(records: Iterable[Record], at: int | None = None) -> Replay:
    """Replay records from the first one on, up to and including ``at``."""
    replayer = Replayer()
    for record in records:
        if at is not None and record.seq > at:
            break
        replayer.apply(record)
    return replayer.result()


class Replayer:
    """Replays records one by one, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._state = ControlState()
        self._seq = 0
        self._due: deque[Event] = deque()
        self._redeciding = False
        self._kinds: Counter[str] = Counter()
        self._digests_checked = 0
        self._decisions_rerun = 0
        self._last_commit: tuple[int, Publication] | None = None
        self._problems: list[Problem] = []
        self._left_out = 0

    def result(self) -> Replay:
        """Say what was found so far. The last decision may be incomplete: its events so far were compared."""
        return Replay(
            seq=self._seq,
            state=self._state,
            digest=state_digest(self._state),
            digests_checked=self._digests_checked,
            decisions_rerun=self._decisions_rerun,
            kinds=dict(sorted(self._kinds.items())),
            last_commit=self._last_commit,
            problems=tuple(self._problems),
            problems_left_out=self._left_out,
        )

    def apply(self, record: Record) -> None:
        """Replay the next record."""
        if record.seq != self._seq + 1:
            self._problem(record.seq, f"record {self._seq + 1} is missing")
        self._seq = record.seq
        self._kinds[record.kind] += 1
        if record.command is not None:
            self._decide_again(record)
        if self._redeciding:
            self._compare(record)
        self._fold(record)
        self._check_digest(record)

    def _problem(self, seq: int, what: str) -> None:
        if len(self._problems) < _PROBLEMS_KEPT:
            self._problems.append(Problem(seq=seq, what=what))
        else:
            self._left_out += 1

    def _decide_again(self, record: Record) -> None:
        if self._due:
            self._problem(record.seq, f"the decision before lacks {len(self._due)} events: {self._due[0].kind}, ...")
        self._due.clear()
        self._redeciding = False
        try:
            command = record.decoded_command()
            if command is None:
                return
            decided = decide(self._state, command)
        except UnreadableEvent as error:
            self._problem(record.seq, str(error))
        except RolloutCoreError as error:
            self._problem(record.seq, f"its command, decided again, is refused: {error}")
        else:
            self._due.extend(decided)
            self._decisions_rerun += 1
            self._redeciding = True

    def _compare(self, record: Record) -> None:
        if not self._due:
            self._problem(record.seq, f"its command, decided again, causes no {record.kind} here")
            return
        event = self._due.popleft()
        if event.schema == record.schema:
            same = event.kind == record.kind and encode_event(event) == record.body
        else:
            same = event.kind == record.kind and event == self._decoded(record)
        if not same:
            self._problem(record.seq, f"its command, decided again, causes {encode_event(event)}, not {record.body}")

    def _decoded(self, record: Record) -> Event | None:
        try:
            return record.event
        except UnreadableEvent:
            return None  # folding the record says why

    def _fold(self, record: Record) -> None:
        try:
            self._state = evolve(self._state, record.event)
        except RolloutCoreError as error:
            self._problem(record.seq, str(error))
            return
        published = self._state.published
        if record.kind == "committed" and published is not None:
            self._last_commit = (record.seq, published)

    def _check_digest(self, record: Record) -> None:
        if record.state_digest is None:
            if record.kind in CHECKPOINTS:
                self._problem(record.seq, f"a {record.kind} without a state digest")
            return
        self._digests_checked += 1
        digest = state_digest(self._state)
        if digest != record.state_digest:
            self._problem(record.seq, f"the state's digest is {digest}, not {record.state_digest} as stored")


# ------------------------------------------------------------------------------------------------------------ recovery


def recovery_plan(state: ControlState) -> tuple[str, ...]:
    """Say, a line each, what a controller that opens this journal would do, and what may come of it."""
    lines: list[str] = []
    active = sorted(state.rollouts.active)
    if active:
        named = ", ".join(active[:5]) + (", ..." if len(active) > 5 else "")
        lines.append(f"abort {len(active)} unfinished rollout(s): {named}")
    lines += [_plan(state, state.engines[name]) for name in sorted(state.engines)]
    return tuple(lines) or ("start afresh: no engine has joined",)


def _plan(state: ControlState, engine: EngineState) -> str:
    where = f"engine {engine.engine} ({engine.phase.name})"
    match engine.phase:
        case Phase.ABSENT:
            return f"{where}: join it if it answers; it serves nothing until an update commits to it"
        case Phase.JOINED:
            return f"{where}: look at it; it serves nothing until an update commits to it{_adoption(state)}"
        case Phase.READY:
            return (
                f"{where}: look at it; the same process, attesting {engine.label!r} and not paused, goes on serving; a "
                f"restarted one needs an update; anything else is TAINTED"
            )
        case Phase.TAINTED:
            return f"{where}: leave it out of service until its process is another one ({engine.taint})"
        case _:
            return f"{where}: {_flight_plan(state.update, engine)}"


def _adoption(state: ControlState) -> str:
    return "" if state.published else f", so what it loaded is adopted as {version_label(state.next_version)}"


def _flight_plan(update: Update | None, engine: EngineState) -> str:
    old = f"back to {engine.label!r}"
    if update is None:
        return f"resume it again, {old}; if it does not show that, it counts as lost"
    target = version_label(update.target)
    commit, burned = f"to the commit of {target}", f"{target} is never used again"
    on = f"{commit}; if evidence fails, TAINTED, and {burned}"
    match engine.phase:
        case Phase.UPDATING:
            adopting = f"; still {engine.label!r}: {old}, nothing was mutated" if update.path == "adopt" else ""
            return (
                f"look at it; the same process, paused and attesting {target!r}: go on {commit}{adopting}; "
                f"anything else: TAINTED, and {burned}"
            )
        case Phase.INVALIDATING:
            return f"reset its caches again, validate, resume and go on {on}"
        case Phase.VALIDATING:
            return f"validate it again, resume and go on {on}"
        case Phase.RESUMING:
            return f"resume it again and go on {on}"
        case _:
            return (
                f"look at it; the same process: update {update.update} is abandoned, nothing was mutated, {old}; "
                f"another process: abandoned and lost; another label: TAINTED"
            )
