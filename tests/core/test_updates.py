"""Updates: strict drain, what is refused, and until when one can be abandoned."""

from __future__ import annotations

import pytest

from rc.commands import AbandonUpdate
from rc.decide import decide
from rc.errors import (
    CallerError,
    EngineLost,
    EngineTainted,
    EngineUnsuitable,
    IllegalTransition,
    InvalidIdentity,
    InvalidWeights,
    UpdateInProgress,
)
from rc.events import types as events
from rc.evidence import Observation, PauseReport
from rc.lifecycle import Phase
from rc.next_effects import PauseEngine
from tests.core.scenario import ENGINE, FLIGHT, Core, kinds, serving, updating

# -------------------------------------------------------------------------------------------------------- strict drain


def test_an_update_drains_every_engine_and_waits_for_its_rollouts() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    requested, drain = core.update("u1")
    assert isinstance(requested, events.RequestUpdate)
    assert (requested.target, requested.engines) == (1, (ENGINE,))
    assert drain == events.Drain(at=core.at, update="u1", engine=ENGINE, active=2)
    core.end("r1")
    assert not core.effects
    core.abort("r2")
    assert core.effects == (PauseEngine(engine=ENGINE, update="u1"),)


def test_a_pause_proves_nothing_while_rollouts_are_active() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    paused = PauseReport(observed=Observation(boot="e-1", label="rc-0", paused=True))
    with pytest.raises(IllegalTransition, match="PauseReport is not allowed while engine e is DRAINING"):
        core.report(paused)


def test_every_finish_of_a_version_comes_before_the_begin_update_towards_the_next() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    core.end("r1")
    core.settle()
    order = [event.kind for _, caused in core.decisions for event in caused]
    assert order.index("finish_rollout") < len(order) - order[::-1].index("begin_update") - 1
    assert order[-9:] == [
        "drain",
        "finish_rollout",
        "quiesced",
        "begin_update",
        "installed",
        "invalidated",
        "validated",
        "resumed",
        "committed",
    ]


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("phase", FLIGHT)
def test_a_second_update_is_refused_while_one_is_in_progress(phase: Phase) -> None:
    core = updating(phase)
    with pytest.raises(UpdateInProgress, match="update u1 towards rc-1"):
        core.update("u2")


def test_an_update_is_refused_until_the_engines_of_an_abandoned_one_have_resumed() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    with pytest.raises(UpdateInProgress, match="update u1"):
        core.update("u2")
    core.settle()
    assert kinds(core.update("u2")) == ["request_update", "drain"]


def test_an_update_without_an_engine_is_refused() -> None:
    core = Core()
    core.start()
    with pytest.raises(EngineLost, match="no engine is joined"):
        core.update("u1")
    core = serving()
    core.lose()
    with pytest.raises(EngineLost, match="no engine is joined"):
        core.update("u1")


def test_an_update_of_a_tainted_engine_is_refused() -> None:
    core = serving()
    core.join(boot="e-1", label="rc-9")
    with pytest.raises(EngineTainted, match="restart its server process"):
        core.update("u1")


@pytest.mark.parametrize(("run", "step", "allowed"), [("r", 5, True), ("r", 6, True), ("r", 4, False), ("s", 0, True)])
def test_an_identity_never_goes_backwards_within_a_run(run: str, step: int, *, allowed: bool) -> None:
    core = serving()
    core.publish("u1", step=5)
    if allowed:
        assert kinds(core.update("u2", run=run, step=step)) == ["request_update", "drain"]
        return
    with pytest.raises(InvalidIdentity, match="step 4 of run 'r' is behind the published step 5"):
        core.update("u2", run=run, step=step)
    assert core.state.update is None


@pytest.mark.parametrize(("loads", "sends", "allowed"), [
    ("aaaa", "aaaa", True), ("aaaa", "bbbb", False), (None, "bbbb", True), ("aaaa", None, True),
])  # fmt: skip
def test_weights_of_another_manifest_are_refused(loads: str | None, sends: str | None, *, allowed: bool) -> None:
    core = Core()
    core.start()
    core.join(manifest=loads)
    if allowed:
        assert kinds(core.update("u1", manifest=sends)) == ["request_update", "drain"]
        return
    with pytest.raises(InvalidWeights, match=r"manifest bbbb is not what engine e loads \(aaaa\)"):
        core.update("u1", manifest=sends)


def test_only_what_an_engine_loaded_at_its_start_is_adopted() -> None:
    core = serving()
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


def test_a_fresh_engine_is_adopted_only_while_nothing_is_published() -> None:
    core = serving()
    core.join(boot="e-2")
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


def test_an_adopted_engine_that_was_tainted_gives_its_number_away() -> None:
    core = Core()
    core.start()
    core.join()
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    core.lose()
    core.join(boot="b2")
    (requested, _) = core.update("u1", path="adopt")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 1


def test_an_engine_that_still_attests_a_burned_number_is_not_adopted() -> None:
    core = Core()
    core.start()
    core.join()
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    core.lose()
    core.join(boot="b2", label="rc-0")
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


# ---------------------------------------------------------------------------------------------------------- abandoning


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
def test_before_mutation_an_update_is_abandoned_and_the_old_version_serves_again(phase: Phase) -> None:
    core = updating(phase)
    assert core.abandon("u1", "cancelled") == (events.UpdateAbandoned(at=core.at, update="u1", reason="cancelled"),)
    assert core.phase() is Phase.RESUMING
    core.settle()
    assert core.phase() is Phase.READY
    (admitted,) = core.admit("r1")
    assert isinstance(admitted, events.Admit)
    assert admitted.version == 0


def test_abandoning_while_draining_leaves_the_active_rollouts_alone() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    core.abandon("u1")
    assert core.phase() is Phase.RESUMING
    assert kinds(core.end("r1")) == ["finish_rollout"]
    core.settle()
    assert core.phase() is Phase.READY


@pytest.mark.parametrize("phase", [Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING, Phase.RESUMING])
def test_after_mutation_began_an_update_cannot_be_abandoned(phase: Phase) -> None:
    core = updating(phase)
    with pytest.raises(IllegalTransition, match=f"update_abandoned is not allowed while engine e is {phase.name}"):
        core.abandon("u1")
    assert core.phase() is phase


def test_only_the_update_in_progress_is_abandoned() -> None:
    core = updating(Phase.QUIESCED)
    with pytest.raises(IllegalTransition, match="update u0 is not in progress"):
        decide(core.state, AbandonUpdate(at=core.now, update="u0", reason="cancelled"))
    core.abandon("u1")
    with pytest.raises(IllegalTransition, match="update u1 is not in progress"):
        core.abandon("u1")


def test_a_number_that_no_engine_ever_saw_is_used_by_the_next_update() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    core.settle()
    (requested, _) = core.update("u2")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 1


def test_a_refused_command_changes_nothing() -> None:
    core = updating(Phase.UPDATING)
    before = core.state
    with pytest.raises(CallerError):
        core.admit("r1")
    with pytest.raises(CallerError):
        core.update("u2")
    with pytest.raises(CallerError):
        core.abandon("u1")
    assert core.state is before
