"""What only asyncio does: cancel a task from outside, limit its time, interrupt it by Ctrl-C; and journal files."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rc.controller import Controller
from rc.effects.fake import FakeEngine, FakeTransfer
from rc.events.journal import Record
from rc.events.sqlite import SqliteJournal
from rc.replay import replay
from tests.controller.world import World, busy_life, publish


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_no_task_is_left(world: World) -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        with anyio.move_on_after(0.02):
            async with world.open() as control:
                await busy_life(control)
    gc.collect()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_a_task_that_is_cancelled_from_outside_closes_its_controller(world: World, steps: int) -> None:
    async def run() -> None:
        async with world.open() as control:
            await busy_life(control)

    task = asyncio.create_task(run())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not world.folded().rollouts.active
    assert world.folded().update is None
    assert not world.engine.paused
    async with world.open() as control:
        await publish(control, 5000)
    assert replay(world.records).problems == ()


async def test_a_time_limit_around_a_controller(world: World) -> None:
    async def run() -> None:
        async with world.open() as control:
            await busy_life(control)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run(), 0.03)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await run()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_controllers_in_turn_on_a_journal_file(tmp_path: Path) -> None:
    engine = FakeEngine(token_s=0.0005, control_s=0.0005)
    rng = random.Random(1)
    for _ in range(8):
        with anyio.move_on_after(rng.uniform(0.0, 0.1)):
            async with Controller.open(tmp_path / "run.db", engine=engine, transfer=FakeTransfer()) as control:
                await busy_life(control)
        assert not engine.paused
    async with Controller.open(tmp_path / "run.db", engine=engine, transfer=FakeTransfer()) as control:
        await publish(control, 5000)
        digest = control.digest
    async with SqliteJournal.open(tmp_path / "run.db", controller="check") as journal:
        result = replay([record async for record in journal.records()])
    assert result.digest == digest
    assert result.problems == ()


INTERRUPTED = """
import asyncio, sys
from rc.controller import Controller
from rc.effects.fake import FakeEngine, FakeTransfer
from tests.controller.world import busy_life

async def main():
    engine = FakeEngine(token_s=0.001, control_s=0.001)
    try:
        async with Controller.open(sys.argv[1], engine=engine, transfer=FakeTransfer()) as control:
            print("running", flush=True)
            await busy_life(control)
    finally:
        print("paused" if engine.paused else "serving", len(asyncio.all_tasks()), flush=True)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.11])
def test_ctrl_c_closes_cleanly(tmp_path: Path, delay_s: float) -> None:
    path = tmp_path / "run.db"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "running\n"
        anyio.run(anyio.sleep, delay_s)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert errors == ""
    assert output == "serving 1\ninterrupted\n"

    async def reopened() -> list[Record]:
        async with SqliteJournal.open(path, controller="check") as journal:
            return [record async for record in journal.records()]

    result = replay(anyio.run(reopened))
    assert result.problems == ()
    assert not result.state.rollouts.active
    assert result.state.update is None
