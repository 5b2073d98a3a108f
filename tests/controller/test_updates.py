"""Updates as their callers see them: published, refused, queued, cancelled."""

from __future__ import annotations

import anyio
import pytest

from rc.effects.fake import FakeEngine, FakeTransfer, FakeWeights, Fault
from rc.effects.protocol import EngineAdapter, Failed, Unknown
from rc.errors import (
    EngineUnsuitable,
    InvalidIdentity,
    InvalidWeights,
    JournalClosed,
    UpdateAbandoned,
    UpdateInProgress,
)
from rc.lifecycle import Phase
from rc.update_watch import Commit
from rc.versions import Manifest, ParameterSpec, WeightIdentity
from tests.controller.world import PROMPT, World, publish, step, until, weights

WHOLE_UPDATE = (
    "request_update",
    "drain",
    "quiesced",
    "begin_update",
    "installed",
    "invalidated",
    "validated",
    "resumed",
    "committed",
)


async def test_an_update_takes_every_step_in_order_and_serves_the_new_weights(world: World) -> None:
    async with world.open() as control:
        assert control.published is not None
        assert control.published.version == 0
        async with control.rollout() as rollout:
            before = await rollout.generate(PROMPT, max_tokens=20)
        seen = len(world.kinds)
        commit = await publish(control, 1)
        assert tuple(world.kinds[seen:]) == WHOLE_UPDATE
        assert (commit.version, commit.label, commit.identity) == (1, "rc-1", step(1))
        assert commit.gap_s >= commit.install_s >= 0
        assert commit.drain_s >= 0
        async with control.rollout() as rollout:
            after = await rollout.generate(PROMPT, max_tokens=20)
        assert after.token_ids != before.token_ids
        assert after.cached_tokens == 0
        assert rollout.version == 1
        assert not world.engine.paused
        assert control.digest == world.digest


async def test_the_engine_is_paused_whenever_weights_change(world: World) -> None:
    async with world.open() as control:
        for number in range(1, 4):
            await publish(control, number)
    calls = world.engine.calls
    for index, call in enumerate(calls):
        if call in ("start_weight_update", "update_weights", "finish_weight_update", "set_label"):
            pauses = [earlier for earlier in calls[:index] if earlier in ("pause", "resume")]
            assert pauses[-1] == "pause"
    assert [content for _, content in world.engine.sampled_with if content == "in flux"] == []


async def test_times_are_those_of_the_drain_and_of_the_gap(world: World) -> None:
    async with world.open() as control, anyio.create_task_group() as tasks:
        commits: list[Commit] = []

        async def update() -> None:
            commits.append(await publish(control, 1))

        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)
            tasks.start_soon(update)
            await until(lambda: control.state.engine("fake").phase is Phase.DRAINING)
            world.engine.control_s = 0.05
            await anyio.sleep(0.2)
        await until(lambda: bool(commits))
        (commit,) = commits
        assert commit.drain_s == pytest.approx(0.2, abs=0.15)
        # pause, look, look (preflight), start, update, finish, look, three resets, look, look, resume
        assert commit.gap_s >= 12 * 0.05
        assert commit.install_s >= 4 * 0.05


class TestBadInput:
    async def test_an_identity_must_not_go_backwards(self, world: World) -> None:
        async with world.open() as control:
            await publish(control, 5)
            with pytest.raises(InvalidIdentity, match="behind"):
                await publish(control, 4)
            await publish(control, 5)
            await control.update(WeightIdentity(run="another", step=0), weights(6))
            assert world.kinds.count("committed") == 4

    async def test_weights_that_do_not_fit_are_refused_before_anything_happens(self, world: World) -> None:
        spec = ParameterSpec(name="w", dtype="bfloat16", shape=(2, 2))
        wrong = {
            "dtype": FakeWeights(content="x", parameters=(ParameterSpec(name="w", dtype="float32", shape=(2, 2)),)),
            "shape": FakeWeights(content="x", parameters=(ParameterSpec(name="w", dtype="bfloat16", shape=(2, 3)),)),
            "missing": FakeWeights(content="x", parameters=()),
            "not a parameter": FakeWeights(
                content="x", parameters=(spec, ParameterSpec(name="v", dtype="bfloat16", shape=(1,)))
            ),
            "NaN": FakeWeights(content="x", wrong=("w holds NaN",)),
        }
        async with world.open(expects=Manifest.of([spec])) as control:
            seen, calls = len(world.kinds), len(world.engine.calls)
            for word, bad in wrong.items():
                with pytest.raises(InvalidWeights, match=word):
                    await control.update(step(1), bad)
            assert len(world.kinds) == seen
            assert len(world.engine.calls) == calls
            await publish(control, 1)

    async def test_a_transfer_that_is_not_ready_changes_nothing(self, world: World) -> None:
        async with world.open() as control:
            world.transfer.problem = "no group of 2 ranks within 60 s"
            seen = len(world.kinds)
            with pytest.raises(EngineUnsuitable, match="2 ranks"):
                await publish(control, 1)
            assert len(world.kinds) == seen
            assert control.serving

    async def test_preflight_looks_again(self, world: World) -> None:
        class Fickle(FakeTransfer):
            looks = 0

            async def ready(self, engine: EngineAdapter) -> str | None:
                self.looks += 1
                return "rank 1 has gone" if self.looks == 2 else None

        async with world.open(transfer=Fickle()) as control:
            with pytest.raises(UpdateAbandoned, match="rank 1"):
                await publish(control, 1)
            assert "begin_update" not in world.kinds[world.kinds.index("committed") :]
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=1)
            assert (rollout.version, control.serving) == (0, True)
            assert not world.engine.paused
            await publish(control, 1)


class TestSeveralAtOnce:
    async def test_they_queue_in_the_order_of_their_calls(self, world: World) -> None:
        world.engine.control_s = 0.002
        async with world.open() as control:
            commits: list[Commit] = []

            async def update(number: int) -> None:
                commits.append(await publish(control, number))

            async with anyio.create_task_group() as tasks:
                for number in range(1, 5):
                    tasks.start_soon(update, number)
                    await anyio.sleep(0.001)
            assert [(commit.version, commit.identity.step) for commit in commits] == [(n, n) for n in range(1, 5)]

    async def test_a_queued_update_that_fell_behind_is_refused(self, world: World) -> None:
        world.engine.control_s = 0.002
        async with world.open() as control, anyio.create_task_group() as tasks:
            tasks.start_soon(publish, control, 7)
            await until(lambda: control.state.update is not None)
            with pytest.raises(InvalidIdentity, match="behind"):
                await publish(control, 6)

    async def test_one_that_will_not_wait_is_refused(self, world: World) -> None:
        world.engine.control_s = 0.002
        async with world.open() as control, anyio.create_task_group() as tasks:
            tasks.start_soon(publish, control, 1)
            await until(lambda: control.state.update is not None)
            with pytest.raises(UpdateInProgress):
                await control.update(step(2), weights(2), when_busy="refuse")
            await until(lambda: control.state.update is None)
            commit = await control.update(step(3), weights(3), when_busy="refuse")
            assert commit.version == 2

    async def test_one_that_will_not_wait_is_refused_before_the_other_is_on_record(self, world: World) -> None:
        met = anyio.Event()

        class Slow(FakeTransfer):
            async def ready(self, engine: EngineAdapter) -> str | None:
                await met.wait()
                return None

        async with world.open(transfer=Slow()) as control, anyio.create_task_group() as tasks:
            tasks.start_soon(publish, control, 1)
            await anyio.sleep(0.05)
            assert control.state.update is None
            with pytest.raises(UpdateInProgress):
                await control.update(step(2), weights(2), when_busy="refuse")
            met.set()
        assert world.engine.content == "w1"

    async def test_one_that_queues_behind_an_abandoned_one_runs_when_the_engine_has_resumed(self, world: World) -> None:
        async with world.open() as control:
            world.engine.script("pause", Fault(outcome=Failed("busy", 500), delay_s=0.05))
            world.engine.script("resume", Fault(happens=True, delay_s=0.05))
            async with anyio.create_task_group() as tasks:

                async def first() -> None:
                    with pytest.raises(UpdateAbandoned):
                        await publish(control, 1)

                tasks.start_soon(first)
                await until(lambda: control.state.update is not None)
                commit = await publish(control, 2)
            assert commit.version == 1
            assert world.engine.content == "w2"


class SlowEngine(FakeEngine):
    """Holds one call open until it is let go, and notes what is called meanwhile."""

    def __init__(self, call: str, nth: int = 1) -> None:
        super().__init__()
        self.held = call
        self.nth = nth
        self.entered = anyio.Event()
        self.let_go = anyio.Event()

    async def _call(self, call, effect):  # type: ignore[no-untyped-def]  # a hook below the adapter protocol
        if call == self.held:
            self.nth -= 1
            if self.nth == 0:
                mark = len(self.calls)
                self.entered.set()
                await self.let_go.wait()
                assert self.calls[mark:] == [], "something was called while a call was outstanding"
        return await super()._call(call, effect)


class TestCancelling:
    async def test_while_draining_it_is_abandoned_and_rollouts_go_on(self, world: World) -> None:
        async with world.open() as control:
            async with control.rollout() as rollout:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(publish, control, 1)
                        await until(lambda: control.state.engine("fake").phase is Phase.DRAINING)
                        scope.cancel()
                await until(lambda: control.state.engine("fake").phase is Phase.READY)
                await rollout.generate(PROMPT, max_tokens=1)
            assert world.kinds[-4:] == ["drain", "update_abandoned", "resumed", "finish_rollout"]
            assert "pause" not in world.engine.calls[world.engine.calls.index("resume") + 2 :]
            assert (await publish(control, 1)).version == 1

    @pytest.mark.parametrize(
        ("call", "nth", "ends"),
        [
            ("pause", 1, "update_abandoned"),
            ("observe", 2, "update_abandoned"),
            ("observe", 3, "update_abandoned"),
            ("start_weight_update", 1, "committed"),
            ("update_weights", 1, "committed"),
            ("finish_weight_update", 1, "committed"),
            ("reset_prefix_cache", 1, "committed"),
            ("observe", 6, "committed"),
            ("resume", 1, "committed"),
        ],
    )
    async def test_in_the_middle_of_a_call(self, world: World, call: str, nth: int, ends: str) -> None:
        """Before mutation it is abandoned, afterwards it completes; nothing else is called while the call lasts."""
        engine = SlowEngine("nothing")
        world.engine = engine
        async with world.open() as control:
            engine.held, engine.nth = call, nth
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(publish, control, 1)
                    await engine.entered.wait()
                    scope.cancel()
            await anyio.sleep(0.02)
            before = len(engine.calls)
            engine.let_go.set()
            await until(lambda: control.state.engine("fake").phase is Phase.READY)
            assert len(engine.calls) > before
            outcome = [kind for kind in world.kinds if kind in ("update_abandoned", "committed", "tainted")][-1]
            assert outcome == ends
            assert not engine.paused
            assert engine.content == ("w1" if ends == "committed" else "as loaded")
            commit = await publish(control, 2)
            assert commit.version == (2 if ends == "committed" else 1)
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=2)
        assert control.digest == world.digest

    async def test_a_queued_one_leaves_no_trace(self, world: World) -> None:
        async with world.open() as control, anyio.create_task_group() as tasks, control.rollout() as rollout:
            tasks.start_soon(publish, control, 1)
            await until(lambda: control.state.update is not None)
            with anyio.move_on_after(0.02) as scope:
                await publish(control, 2)
            assert scope.cancelled_caught
            assert world.kinds.count("request_update") == 2
            await rollout.generate(PROMPT, max_tokens=1)
        assert world.engine.content == "w1"

    async def test_weights_are_not_held_on_to(self, world: World) -> None:
        async with world.open() as control:
            await publish(control, 1)
            world.engine.script("update_weights", Fault(outcome=Unknown("no answer")))
            world.engine.script("pause", Fault(outcome=Failed("busy")))
            with pytest.raises(UpdateAbandoned):
                await publish(control, 2)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await publish(control, 3)
            await until(lambda: control.state.engine("fake").phase is Phase.READY)
            assert not control._updates._handlers.weights
            assert not control._updates._watches


class Unready(FakeTransfer):
    """A transfer that breaks its promise never to raise."""

    async def install(self, engine, weights, label):  # type: ignore[no-untyped-def]  # only raises
        raise RuntimeError("a defect in the transfer")


async def test_a_defect_stops_the_controller_with_the_engine_paused(world: World) -> None:

    async def body() -> None:
        async with world.open(transfer=Unready()) as control:
            with pytest.raises(JournalClosed, match="defect"):
                await publish(control, 1)
            with pytest.raises(JournalClosed, match="defect"):
                async with control.rollout():
                    pass

    with pytest.raises(JournalClosed, match="defect"):
        await body()
    assert world.engine.paused
    assert world.kinds[-1] == "begin_update"
