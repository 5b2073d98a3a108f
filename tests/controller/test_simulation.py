"""Many seeds of `tests.controller.simulation`: no invariant breaks, everybody was told the truth, and it heals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest

from rc import decide, judge
from rc.effect_loop import EffectLoop
from rc.effects.fake import FakeEngine
from rc.effects.protocol import Ok, Outcome
from rc.errors import RolloutCoreError
from rc.events.journal import Record
from rc.events.types import Event, UpdateAbandoned
from rc.evidence import LookReport, Observation
from rc.lifecycle import Phase
from rc.projections import control
from rc.projections.control import ControlState
from rc.projections.engines import EngineState
from rc.replay import replay
from rc.rollout import Rollout
from tests.controller.checker import Violation, check
from tests.controller.deterministic import run
from tests.controller.simulation import Simulation

SEEDS = 60
"""How many lives a run of the tests simulates: some ten seconds of one core."""


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)


def without_threads(patch: pytest.MonkeyPatch) -> None:
    """Virtual time would race with them."""

    async def run_sync(function: Any, *args: Any, **options: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return function(*args)

    patch.setattr(anyio.to_thread, "run_sync", run_sync)


def simulate(seed: int) -> Simulation:
    simulation = Simulation(seed)
    run(seed, simulation.run)
    return simulation


def check_simulation(simulation: Simulation) -> None:
    records = simulation.store.records
    checker = check(records)
    assert not checker.active
    assert simulation.met["healed"], f"it did not heal: {records[-1].body}"
    assert simulation.engine.violations == []
    assert not simulation.engine.paused
    bodies = [(record.kind, json.loads(record.body)) for record in records]
    assert simulation.finished <= {body["rollout"] for kind, body in bodies if kind == "finish_rollout"}
    assert simulation.committed <= {
        (body["version"], body["identity"]["step"]) for kind, body in bodies if kind == "committed"
    }
    result = replay(records)
    assert result.problems == ()
    assert result.digest != ""


def rare_things(records: list[Record]) -> Counter[str]:
    """What should happen now and then in a campaign: if it never does, the simulation tests less than it seems."""
    seen: Counter[str] = Counter(record.kind for record in records)
    for record in records:
        body = json.loads(record.body)
        evidence = body.get("evidence") or {}
        if record.kind == "abort_rollout":
            seen[f"abort: {body['reason'][:20]}"] += 1
        if record.kind in ("installed", "tainted", "update_abandoned"):
            seen[f"{record.kind} after {evidence.get('report')}"] += 1
    return seen


@pytest.mark.timeout(600)
def test_many_lives_end_well() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        simulation = simulate(seed)
        try:
            check_simulation(simulation)
        except (AssertionError, Violation) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += rare_things(simulation.store.records) + simulation.met
    for thing in (
        "committed",
        "tainted",
        "tainted after look",
        "tainted after install",
        "update_abandoned after pause",
        "update_abandoned after look",
        "engine_lost",
        "finish_rollout",
        "abort: its owner was cancel",
        "abort: its lease ran out wi",
        "abort: its controller ended",
        "abort: engine lost: its ser",
        "abort: version mismatch: th",
        "UpdateTainted",
        "UpdateAbandoned",
        "UpdateInProgress",
        "EngineTainted",
        "closed",
        "Oops",
    ):
        assert seen[thing], f"never happened: {thing}"


def test_a_seed_is_the_same_life_in_every_process() -> None:
    command = "from tests.controller.test_simulation import print_hash; print_hash(7)"
    root = Path(__file__).parents[2]
    hashes = {
        subprocess.run(
            [sys.executable, "-c", command],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(hashes) == 1
    assert len(hashes.pop()) == 65


def print_hash(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_threads(patch)
        print(simulate(seed).store.head.hash)


def test_another_seed_is_another_life() -> None:
    assert len({simulate(seed).store.head.hash for seed in range(5)}) == 5


def test_another_seed_is_another_order_of_tasks() -> None:
    async def order() -> tuple[int, ...]:
        seen: list[int] = []

        async def note(number: int) -> None:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                seen.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(note, number)
        return tuple(seen)

    orders = [run(seed, order) for seed in range(50)]
    assert orders == [run(seed, order) for seed in range(50)]
    assert len(set(orders)) == 50


# --------------------------------------------------------------------------------------- it finds what there is to find


def believe_everything(patch: pytest.MonkeyPatch) -> None:
    """Status codes instead of evidence."""
    patch.setattr(judge, "_mismatch", lambda *_, **__: None)


def resume_on_failure(patch: pytest.MonkeyPatch) -> None:
    """The pattern of many trainers: whatever happened, go on with the old version."""

    def abandon(state: ControlState, engine: EngineState, at: float, reason: str, *_: Any) -> tuple[Event, ...]:
        if state.update is None or engine.phase is not Phase.UPDATING:
            return taint(state, engine, at, reason)
        return (UpdateAbandoned(at=at, update=state.update.update, reason=reason),)

    taint = judge.taint
    patch.setattr(judge, "taint", abandon)


def hope_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    """An install that was under way when the controller died is taken to have succeeded."""

    def hope(state: ControlState, engine: EngineState, at: float, observed: Observation) -> tuple[Event, ...]:
        if engine.phase is not Phase.UPDATING or state.update is None:
            return reconcile(state, engine, at, observed)
        return judge._installed(state.update, engine, at, LookReport(observed=observed))

    reconcile = judge.reconcile
    patch.setattr(judge, "reconcile", hope)
    patch.setattr(decide, "reconcile", hope)


def serve_stale_prefixes(patch: pytest.MonkeyPatch) -> None:
    """No salt, and a reset that does nothing."""

    async def reset(engine: FakeEngine) -> Outcome[bool]:
        return Ok(True)

    patch.setattr(FakeEngine, "reset_prefix_cache", reset)
    patch.setattr(Rollout, "version_label", "salt")


def reuse_numbers(patch: pytest.MonkeyPatch) -> None:
    """A version number that a tainted update had is given to the next."""
    drop = control._drop_member

    def forgetful(state: ControlState, name: str) -> ControlState:
        return msgspec.structs.replace(drop(state, name), next_version=state.next_version)

    patch.setattr(control, "_drop_member", forgetful)


def resume_while_a_call_is_outstanding(patch: pytest.MonkeyPatch) -> None:
    class Never(set[str]):
        def __contains__(self, _: object) -> bool:
            return False

    init = EffectLoop.__init__

    def careless(self: EffectLoop, *args: Any) -> None:
        init(self, *args)
        self._busy = Never()

    patch.setattr(EffectLoop, "__init__", careless)


@pytest.mark.parametrize(
    "bug",
    [
        believe_everything,
        resume_on_failure,
        hope_after_a_crash,
        serve_stale_prefixes,
        reuse_numbers,
        resume_while_a_call_is_outstanding,
    ],
)
def test_a_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(60):
        try:
            check_simulation(simulate(seed))
        except (AssertionError, Violation, BaseExceptionGroup, RolloutCoreError, TimeoutError):
            return
    pytest.fail("no seed found it")
