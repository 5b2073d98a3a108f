"""Provenance: every trajectory says what sampled it, by whose word, and where the journal has it."""

from __future__ import annotations

import msgspec
import pytest

from rc.errors import IllegalTransition, UnknownRollout
from rc.events import types as events
from rc.events.types import Turn
from rc.projections.trajectories import Trajectory, TrajectoryFold
from rc.versions import WeightIdentity
from tests.core.samples import EVENTS
from tests.core.scenario import ENGINE, Core, serving, turn


def folded(core: Core) -> list[Trajectory]:
    """Fold all that a core decided."""
    fold, found = TrajectoryFold(), list[Trajectory]()
    seq = 0
    for _, caused in core.decisions:
        for event in caused:
            seq += 1
            trajectory = fold.apply(seq, event)
            if trajectory is not None:
                found.append(trajectory)
    assert fold.active == len(core.state.rollouts.active)
    return found


def test_a_finished_rollout_carries_everything_about_its_origin() -> None:
    core = serving()
    core.publish("u1", step=7)
    core.admit("r1")
    admitted_at = core.at
    turns = (turn("rc-1"), turn("rc-1", tokens=5))
    core.end("r1", *turns)
    assert folded(core) == [
        Trajectory(
            rollout="r1",
            status="finished",
            reason=None,
            version=1,
            label="rc-1",
            identity=WeightIdentity(run="r", step=7),
            update="u1",
            attested=True,
            engine=ENGINE,
            boot="e-1",
            vllm="0.32.0",
            model="policy",
            profile="stock",
            turns=turns,
            admitted_at=admitted_at,
            ended_at=core.at,
            admit_seq=21,
            end_seq=22,
        )
    ]


@pytest.mark.parametrize(
    ("turns", "attested"),
    [
        ((turn("rc-0"),), True),
        ((turn("rc-0"), turn("rc-0")), True),
        ((turn(None),), False),
        ((turn("rc-0"), turn(None)), False),
        ((turn("rc-0"), turn(None, tokens=0)), True),
    ],
)
def test_attested_means_that_the_engine_said_so_for_every_token(turns: tuple[Turn, ...], *, attested: bool) -> None:
    core = serving()
    core.admit("r1")
    core.end("r1", *turns)
    (trajectory,) = folded(core)
    assert trajectory.attested is attested
    assert trajectory.status == "finished"


def test_a_rollout_whose_engine_said_otherwise_is_kept_as_aborted_and_unattested() -> None:
    core = serving()
    core.admit("r1")
    core.end("r1", turn("rc-5"))
    (trajectory,) = folded(core)
    assert (trajectory.status, trajectory.attested) == ("aborted", False)
    assert trajectory.reason is not None
    assert trajectory.reason.startswith("version mismatch")
    assert trajectory.turns == (turn("rc-5"),)


def test_an_abort_without_turns_attests_nothing() -> None:
    core = serving()
    core.admit("r1")
    core.abort("r1", reason="its owner was cancelled")
    (trajectory,) = folded(core)
    assert (trajectory.status, trajectory.reason, trajectory.attested) == ("aborted", "its owner was cancelled", False)


def test_a_rollout_that_outlives_a_commit_elsewhere_keeps_its_own_version() -> None:
    core = serving("a", "b")
    core.admit("r1")
    core.join("a", boot="a-1", label="rc-9")
    assert core.state.rollouts.active["r1"].engine == "a"
    core.admit("r2")
    core.end("r2")
    core.join("a", boot="a-2")
    core.publish("u1", step=3)
    core.admit("r3")
    core.end("r3")
    by_id = {trajectory.rollout: trajectory for trajectory in folded(core)}
    assert (by_id["r1"].status, by_id["r1"].version, by_id["r1"].boot) == ("aborted", 0, "a-1")
    assert (by_id["r2"].version, by_id["r2"].update, by_id["r2"].identity.step) == (0, "u0", 0)
    assert (by_id["r3"].version, by_id["r3"].update, by_id["r3"].identity.step) == (1, "u1", 3)
    assert (by_id["r3"].engine, by_id["r3"].boot) == ("a", "a-2")


def test_an_abandoned_update_lends_its_identity_to_nothing() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1", step=9)
    core.abandon("u1")
    core.end("r1")
    (trajectory,) = folded(core)
    assert (trajectory.update, trajectory.identity.step) == ("u0", 0)


def test_only_the_ends_of_rollouts_give_a_trajectory() -> None:
    fold = TrajectoryFold()
    admit = next(event for event in EVENTS if isinstance(event, events.Admit))
    for event in EVENTS:
        if event.kind in ("engine_joined", "controller_started", "request_update", "drain", "tainted"):
            assert fold.apply(1, event) is None
    with pytest.raises(IllegalTransition, match="engine e is not serving rc-0"):
        fold.apply(2, admit)


def test_an_admission_that_the_journal_does_not_explain_is_illegal() -> None:
    core = serving()
    (admit,) = core.admit("r1")
    assert isinstance(admit, events.Admit)
    fold = TrajectoryFold()
    for _, caused in core.decisions[:-1]:
        for event in caused:
            fold.apply(1, event)
    with pytest.raises(IllegalTransition, match="engine stranger is not serving rc-0"):
        fold.apply(2, msgspec.structs.replace(admit, engine="stranger"))
    with pytest.raises(IllegalTransition, match="engine e is not serving rc-4"):
        fold.apply(2, msgspec.structs.replace(admit, version=4))


def test_a_fold_that_missed_the_admission_does_not_guess() -> None:
    finished = next(event for event in EVENTS if isinstance(event, events.FinishRollout))
    with pytest.raises(UnknownRollout, match="r1"):
        TrajectoryFold().apply(5, finished)


def test_the_fold_holds_active_rollouts_only() -> None:
    core, fold = serving(), TrajectoryFold()
    seen = 0

    def catch_up() -> None:
        nonlocal seen
        for _, caused in core.decisions[seen:]:
            for event in caused:
                fold.apply(1, event)
        seen = len(core.decisions)

    for n in range(50):
        core.admit(f"r{n}")
    catch_up()
    assert fold.active == 50
    for n in range(50):
        core.end(f"r{n}")
    catch_up()
    assert fold.active == 0
