"""Rollouts: bound to one committed version, and always ended on the record, however their block is left."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from rc.effects.fake import Fault
from rc.effects.protocol import Failed, Refused, Unknown
from rc.errors import (
    CallerError,
    GenerationFailed,
    InvalidTrajectory,
    JournalClosed,
    NotAdmitted,
    PromptTooLong,
    UnknownRollout,
    VersionMismatch,
)
from rc.events.types import Span, Turn
from rc.lifecycle import Phase
from tests.controller.world import PROMPT, World, publish, until


def a_turn(label: str = "rc-0") -> Turn:
    return Turn(prompt_token_ids=(1, 2), token_ids=(3,), logprobs=(-0.5,), spans=(Span(label=label, start=0, end=1),))


async def test_a_rollout_that_generated_is_finished_with_its_turns(world: World) -> None:
    async with world.open() as control:
        async with control.rollout() as rollout:
            first = await rollout.generate(PROMPT, max_tokens=5, temperature=0.5, top_p=0.9)
            second = await rollout.generate((*PROMPT, *first.token_ids, 7), max_tokens=3)
            assert rollout.turns == (first, second)
            assert (rollout.version, rollout.version_label, rollout.engine) == (0, "rc-0", "fake")
        (finished,) = world.events("finish_rollout")
        assert finished.turns == (first, second)
        assert first.sampling == {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
        assert first.request != second.request
        assert [len(turn.token_ids) for turn in finished.turns] == [5, 3]
        assert all(span.label == "rc-0" for turn in finished.turns for span in turn.spans)
        assert first.started_at is not None
        assert first.finished_at is not None
        assert not control.state.rollouts.active
        assert "abort_rollout" not in world.kinds


async def test_a_rollout_that_generated_nothing_is_aborted(world: World) -> None:
    async with world.open() as control, control.rollout():
        pass
    (aborted,) = world.events("abort_rollout")
    assert "without generating" in aborted.reason


async def test_an_exception_comes_out_as_itself_and_is_recorded(world: World) -> None:
    async with world.open() as control:

        async def owner() -> None:
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=2)
                raise ValueError("reward is not finite")

        with pytest.raises(ValueError, match="reward is not finite"):
            await owner()
        (aborted,) = world.events("abort_rollout")
        assert aborted.reason == "its owner raised ValueError: reward is not finite"


async def test_an_exception_that_no_journal_can_hold_is_recorded_all_the_same(world: World) -> None:
    async with world.open() as control:
        with pytest.raises(ValueError, match="half"):
            async with control.rollout():
                raise ValueError("half a pair: \ud800" + "x" * 100_000)
        (aborted,) = world.events("abort_rollout")
        assert "half a pair" in aborted.reason
        assert len(aborted.reason) < 2000


async def test_an_exception_of_the_body_leaves_the_controller_unwrapped(world: World) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with world.open() as control, control.rollout():
            raise KeyError("mine")
    assert "abort_rollout" in world.kinds


async def test_a_cancelled_rollout_is_aborted(world: World) -> None:
    world.engine.token_s = 1.0
    async with world.open() as control:
        with anyio.move_on_after(0.01) as scope:
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=1000)
        assert scope.cancelled_caught
        (aborted,) = world.events("abort_rollout")
        assert aborted.reason == "its owner was cancelled"
        assert not control.state.rollouts.active


async def test_a_cancelled_admission_leaves_no_rollout_behind(world: World) -> None:
    async with world.open() as control:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with control.rollout():
                await anyio.sleep(1000)
        assert scope.cancelled_caught
        await until(lambda: not control.state.rollouts.active)
        await publish(control, 1)
        ended = len(world.events("abort_rollout")) + len(world.events("finish_rollout"))
        assert len(world.events("admit")) == ended


async def test_admission_waits_during_an_update_and_is_released(world: World) -> None:
    world.engine.control_s = 0.01
    async with world.open() as control:
        versions: list[int] = []

        async def owner() -> None:
            async with control.rollout() as rollout:
                versions.append(rollout.version)
                await rollout.generate(PROMPT, max_tokens=1)

        async with anyio.create_task_group() as tasks, control.rollout() as holder:
            tasks.start_soon(publish, control, 1)
            await until(lambda: control.state.engine("fake").phase is Phase.DRAINING)
            with pytest.raises(NotAdmitted):
                async with control.rollout(wait=False):
                    pass
            for _ in range(20):
                tasks.start_soon(owner)
            await anyio.sleep(0.05)
            assert versions == []
            assert control.state.engine("fake").active == 1
            await holder.generate(PROMPT, max_tokens=1)
            await holder.finish()
            await until(lambda: len(versions) == 20)
        assert versions == [1] * 20
        order = world.kinds[world.kinds.index("admit") :]
        assert (
            order.index("drain") < order.index("finish_rollout") < order.index("quiesced") < order.index("begin_update")
        )


async def test_a_prompt_may_be_any_sequence_of_integers(world: World) -> None:
    class Scalar:
        """As of an array or a tensor."""

        def __index__(self) -> int:
            return 7

    async with world.open() as control, control.rollout() as rollout:
        turn = await rollout.generate([Scalar(), 8], max_tokens=1)  # type: ignore[list-item]  # arrays have their own
        assert turn.prompt_token_ids == (7, 8)
        assert type(turn.prompt_token_ids[0]) is int


async def test_an_id_is_used_by_one_rollout_at_a_time(world: World) -> None:
    async with world.open() as control, control.rollout("mine") as rollout:
        with pytest.raises(NotAdmitted, match="unique"):
            async with control.rollout("mine"):
                pass
        assert list(control.state.rollouts.active) == ["mine"]
        await rollout.generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_lease_that_never_or_always_ends_is_refused(world: World, lease_s: float) -> None:
    async with world.open() as control:
        with pytest.raises(CallerError, match="lease"):
            async with control.rollout(lease_s=lease_s):
                pass
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)


async def test_a_prompt_that_cannot_fit_is_not_sent(world: World) -> None:
    world.engine.max_model_len = 32
    async with world.open() as control, control.rollout() as rollout:
        with pytest.raises(PromptTooLong) as caught:
            await rollout.generate(tuple(range(30)), max_tokens=3)
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.max_model_len) == (30, 3, 32)
        for prompt, max_tokens, stop in (
            ((), 1, []),
            ((1,), 0, []),
            ((1.5,), 1, []),
            ("12", 1, []),
            ((1,), 1, object()),
        ):
            with pytest.raises(InvalidTrajectory):
                await rollout.generate(prompt, max_tokens=max_tokens, stop=stop)  # type: ignore[arg-type]  # wrong input
        assert "generate" not in world.engine.calls
        await rollout.generate(tuple(range(29)), max_tokens=3)


async def test_turns_of_a_client_of_ones_own_are_recorded(world: World) -> None:
    async with world.open() as control, control.rollout() as rollout:
        with pytest.raises(InvalidTrajectory, match="logprobs"):
            await rollout.finish([Turn(prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-0.1,))])
        with pytest.raises(InvalidTrajectory, match="no turn"):
            await rollout.finish([])
        await rollout.finish([a_turn()])
        assert rollout.ended
        with pytest.raises(UnknownRollout):
            await rollout.finish([a_turn()])
        with pytest.raises(UnknownRollout):
            await rollout.generate(PROMPT, max_tokens=1)
    (finished,) = world.events("finish_rollout")
    assert finished.turns == (a_turn(),)
    assert "abort_rollout" not in world.kinds


async def test_turns_that_no_journal_can_hold_are_refused_and_nothing_stops(world: World) -> None:
    async with world.open() as control:
        with pytest.raises(Exception, match="journal") as caught:
            async with control.rollout() as rollout:
                await rollout.finish(
                    [Turn(prompt_token_ids=(1,), token_ids=(2,), logprobs=(-0.1,), sampling={"stop": object()})]
                )
        assert not isinstance(caught.value, JournalClosed)
        assert len(world.events("abort_rollout")) == 1
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)
        assert control.digest == world.digest
    assert world.digest


async def test_a_foreign_label_aborts_the_rollout_and_taints_the_engine(world: World) -> None:
    async with world.open() as control:

        async def owner() -> None:
            async with control.rollout() as rollout:
                world.engine.label = "step-7"
                await rollout.generate(PROMPT, max_tokens=2)

        with pytest.raises(VersionMismatch, match="step-7"):
            await owner()
        assert world.kinds[-2:] == ["abort_rollout", "tainted"]
        assert world.events("abort_rollout")[0].turns != ()
        assert control.state.engine("fake").phase is Phase.TAINTED
        assert not control.serving


@pytest.mark.parametrize(
    "outcome",
    [Refused("bad temperature", 400), Failed("boom", 500), Unknown("no answer")],
    ids=lambda o: type(o).__name__,
)
async def test_a_failed_generation_is_an_error_and_the_rollout_may_go_on(
    world: World, outcome: Refused | Failed | Unknown
) -> None:
    world.engine.script("generate", Fault(outcome=outcome))
    async with world.open() as control:
        async with control.rollout() as rollout:
            with pytest.raises(GenerationFailed, match=outcome.message):
                await rollout.generate(PROMPT, max_tokens=1)
            assert rollout.turns == ()
            await rollout.generate(PROMPT, max_tokens=1)
        assert control.serving
        assert len(world.events("finish_rollout")) == 1


async def test_two_turns_at_once_are_two_requests(world: World) -> None:
    world.engine.token_s = 0.001
    async with world.open() as control:
        async with control.rollout() as rollout, anyio.create_task_group() as tasks:

            async def turn(first: int) -> None:
                await rollout.generate((first, 2, 3), max_tokens=3)

            tasks.start_soon(turn, 1)
            tasks.start_soon(turn, 2)
        (finished,) = world.events("finish_rollout")
        assert len({turn.request for turn in finished.turns}) == 2


class TestNativeCancellation:
    """asyncio's own ``task.cancel()`` reaches through anyio's shields, once."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_a_cancelled_task_aborts_its_rollout(self, world: World) -> None:
        world.engine.token_s = 1.0
        async with world.open() as control:

            async def owner() -> None:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1000)

            task = asyncio.create_task(owner())
            await until(lambda: "generate" in world.engine.calls)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert world.events("abort_rollout")[0].reason == "its owner was cancelled"

    async def test_wait_for_aborts_the_rollout(self, world: World) -> None:
        world.engine.token_s = 1.0
        async with world.open() as control:

            async def owner() -> None:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1000)

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(owner(), 0.02)
            assert len(world.events("abort_rollout")) == 1
            async with asyncio.timeout(5), control.rollout() as rollout:
                world.engine.token_s = 0.0
                await rollout.generate(PROMPT, max_tokens=1)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    @pytest.mark.parametrize("steps", range(12))
    async def test_at_any_step_a_cancelled_rollout_neither_stays_nor_blocks_an_update(
        self, world: World, steps: int
    ) -> None:
        async with world.open() as control:

            async def owner() -> None:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1)

            task = asyncio.create_task(owner())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with anyio.fail_after(5):
                await publish(control, 1)
            assert control.digest == world.digest
        ended = len(world.events("abort_rollout")) + len(world.events("finish_rollout"))
        assert len(world.events("admit")) == ended

    @pytest.mark.parametrize("steps", range(8))
    async def test_finishing_is_cancelled_while_an_update_drains(self, world: World, steps: int) -> None:
        async with world.open() as control:
            generated, finish = asyncio.Event(), asyncio.Event()

            async def owner() -> None:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1)
                    generated.set()
                    await finish.wait()

            task = asyncio.create_task(owner())
            await generated.wait()
            update = asyncio.create_task(publish(control, 1))
            await until(lambda: control.state.engine("fake").phase is Phase.DRAINING)
            finish.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with anyio.fail_after(5):
                await update
            await asyncio.gather(task, return_exceptions=True)
            assert control.digest == world.digest
