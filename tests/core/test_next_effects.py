"""What each state calls for."""

from __future__ import annotations

import pytest

from rc.lifecycle import IN_FLIGHT, Phase
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
from tests.core.scenario import ENGINE, Core, serving, updating

EXPECTED: dict[Phase, Effect] = {
    Phase.DRAINING: PauseEngine(engine=ENGINE, update="u1"),
    Phase.QUIESCED: RunPreflight(engine=ENGINE, update="u1", target=1, path="one_phase"),
    Phase.UPDATING: InstallWeights(engine=ENGINE, update="u1", target=1, path="one_phase"),
    Phase.INVALIDATING: ResetCaches(engine=ENGINE, update="u1"),
    Phase.VALIDATING: ValidateEngine(engine=ENGINE, update="u1", target=1),
    Phase.RESUMING: ResumeEngine(engine=ENGINE, update="u1"),
}


def test_every_phase_in_flight_calls_for_something() -> None:
    assert set(EXPECTED) == IN_FLIGHT


@pytest.mark.parametrize(("phase", "effect"), EXPECTED.items())
def test_a_phase_in_flight_calls_for_its_effect(phase: Phase, effect: Effect) -> None:
    assert next_effects(updating(phase).state) == (effect,)


@pytest.mark.parametrize(("phase", "effect"), EXPECTED.items())
def test_in_doubt_what_cannot_be_repeated_is_looked_at(phase: Phase, effect: Effect) -> None:
    core = updating(phase)
    core.start("c2")
    look = phase in (Phase.DRAINING, Phase.QUIESCED, Phase.UPDATING)
    assert core.effects == ((LookAtEngine(engine=ENGINE, update="u1"),) if look else (effect,))


def test_a_draining_engine_waits_for_its_rollouts() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    assert core.effects == ()


def test_settled_engines_call_for_nothing() -> None:
    assert Core().effects == ()
    core = Core()
    core.join()
    assert core.effects == ()
    core = serving()
    assert core.effects == ()
    core.join(boot="e-1", label="rc-9")
    assert core.phase() is Phase.TAINTED
    assert core.effects == ()


def test_an_engine_of_an_abandoned_update_resumes_although_no_update_is_in_progress() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    assert core.state.update is None
    assert core.effects == (ResumeEngine(engine=ENGINE, update="u1"),)


def test_effects_come_one_an_engine_by_name() -> None:
    core = serving("b", "a")
    core.update("u1")
    assert [effect.engine for effect in core.effects] == ["a", "b"]


def test_an_install_leaves_the_label_of_its_target() -> None:
    assert InstallWeights(engine=ENGINE, update="u1", target=7, path="one_phase").label == "rc-7"
