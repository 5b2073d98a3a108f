"""Whatever is asked, in whatever order, and whatever engines show: the invariants hold after every event."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import subprocess
import sys

import msgspec
import pytest

from rc import decide as decide_module
from rc import judge
from rc.errors import RolloutCoreError
from rc.events.codec import encode_event
from rc.events.types import EVENT_TYPES, Event, Tainted, UpdateAbandoned
from rc.evidence import CacheReport, Observation
from rc.lifecycle import Phase
from rc.projections import control
from rc.projections import engines as engines_module
from rc.projections.control import ControlState, state_digest
from rc.projections.engines import EngineState
from tests.core.histories import Move, campaign, served


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_the_invariants_hold_over_any_history(engines: int) -> None:
    happened = campaign(engines, examples=200)
    never = set(EVENT_TYPES) - set(happened)
    assert not never, "a history that never gets there shows nothing"
    assert happened["committed"] > 20


@pytest.mark.parametrize("engines", [1, 2])
def test_the_invariants_hold_from_the_first_command_on(engines: int) -> None:
    campaign(engines, examples=100, fresh=True)


# ------------------------------------------------------------------------------------------- the same in every process


def trace_digest(seed: int) -> str:
    """Digest of everything that a long history decides, as text, and of its last state."""
    chance, history = random.Random(seed), served(3)
    usual = [Move("go on", amount=6), Move("admit"), Move("end", how="good"), Move("update", how="one_phase", amount=1)]
    rare = [Move("update that crashes", amount=3), Move("join", how="fresh"), Move("lose"), Move("end", how="wrong")]
    for _ in range(400):
        move = chance.choice(usual * 4 + rare)
        history.make(dataclasses.replace(move, who=chance.randrange(3), how=move.how or "honest"))
    text = "\n".join(encode_event(event) for _, caused in history.decisions for event in caused)
    assert history.count["committed"] > 5
    return hashlib.sha256(f"{text} {state_digest(history.state)}".encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_decisions_and_digests_are_the_same_under_any_hash_seed(pytestconfig: pytest.Config, hash_seed: str) -> None:
    program = "from tests.core.test_invariants import trace_digest; print(trace_digest(7))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pytestconfig.rootpath,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == trace_digest(7)


# ----------------------------------------------------------------------------------------------- the checker has teeth


_drop_member = control._drop_member


def _burns_nothing(state: ControlState, name: str) -> ControlState:
    dropped = _drop_member(state, name)
    return msgspec.structs.replace(dropped, next_version=state.next_version)


def _hopes(state: ControlState, engine: EngineState, at: float, observed: Observation) -> tuple[Event, ...]:
    assert state.update is not None
    return (UpdateAbandoned(at=at, update=state.update.update, reason="it will be fine"),)


def _forgets(engine: EngineState, phase: Phase, event: Tainted) -> EngineState:
    return msgspec.structs.replace(engine, phase=phase, version=None, update=None, taint=event.reason)


BUGS: dict[str, tuple[int, object, str, object]] = {
    "evidence is believed unread": (1, judge, "_mismatch", lambda *_, **__: None),
    "a cache that was not reset passes": (1, CacheReport, "complete", True),
    "a contradicting span passes": (1, decide_module, "contradiction", lambda *_: None),
    "a tainted engine's word is taken": (1, decide_module, "fully_attested", lambda _: True),
    "what is in doubt is abandoned in hope": (1, judge, "reconcile", _hopes),
    "a burned number is used again": (1, control, "_drop_member", _burns_nothing),
    "tainted boots are forgotten": (1, engines_module, "_taint", _forgets),
    "an update is abandoned over others that mutate": (2, judge, "_others_untouched", lambda *_: True),
    "an update waits for a member that has left": (2, judge, "_commit_without", lambda *_: ()),
    "one member's resume commits for all": (2, judge, "_all_others_ready", lambda *_: True),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    engines, owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, RolloutCoreError)):
        campaign(engines, examples=3000, shrink=False)
