"""The whole path at once: a journal file, a controller, the HTTP adapter, and a server that answers as vLLM does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import pytest

from rc.controller import Controller
from rc.effects.fake import FakeEngine, FakeWeights, Fault
from rc.effects.fake_server import FakeServer
from rc.effects.protocol import EngineAdapter, Failed, Ok, Outcome, Refused, Unknown, WeightSource
from rc.effects.vllm_http import VllmHttpEngine
from rc.errors import EngineLost, EngineUnreachable, EngineUnsuitable, GenerationFailed, UpdateAbandoned, UpdateTainted
from rc.events.journal import Record
from rc.events.sqlite_reader import SqliteReader
from rc.evidence import InstallReport
from rc.lifecycle import Phase
from rc.replay import replay
from tests.controller.world import PROMPT, publish, until


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class HttpTransfer:
    """Installs `FakeWeights` through the routes of vLLM."""

    backend = "fake"

    async def ready(self, engine: EngineAdapter) -> str | None:
        assert isinstance(engine, VllmHttpEngine)
        size = await engine.world_size()
        return None if isinstance(size, Ok) else size.message

    async def install(self, engine: EngineAdapter, weights: WeightSource, label: str) -> InstallReport:
        assert isinstance(engine, VllmHttpEngine)
        assert isinstance(weights, FakeWeights)
        mutation: Literal["none", "possible", "complete"] = "complete"
        outcome: Outcome[None] = await engine.start_weight_update()
        if isinstance(outcome, Ok):
            outcome = await engine.update_weights({"content": weights.content})
            if isinstance(outcome, Ok):
                outcome = await engine.finish_weight_update(label)
        elif isinstance(outcome, Refused):
            mutation = "none"
        if not isinstance(outcome, Ok) and mutation != "none":
            mutation = "possible"
        problem = None if isinstance(outcome, Ok) else outcome.message
        return InstallReport(observed=await engine.observe(), problem=problem, mutation=mutation)


class Served:
    def __init__(self, engine: FakeEngine, server: FakeServer, path: Path) -> None:
        self.engine = engine
        self.server = server
        self.path = path

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Controller]:
        async with Controller.open(self.path, engine=self.server.url, transfer=HttpTransfer()) as control:
            yield control

    async def records(self) -> list[Record]:
        async with SqliteReader.open(self.path) as reader:
            return [record async for record in reader.records()]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    engine = FakeEngine()
    server = FakeServer(engine)
    async with server.run():
        yield Served(engine, server, tmp_path / "run.db")


async def test_rollouts_and_updates(served: Served) -> None:
    async with served.open() as control:
        for number in range(1, 4):
            async with control.rollout() as rollout:
                turn = await rollout.generate(PROMPT, max_tokens=8)
            assert rollout.engine == served.server.url
            assert {span.label for span in turn.spans} == {f"rc-{number - 1}"}
            assert turn.cached_tokens == 0
            commit = await publish(control, number)
            assert commit.version == number
        digest = control.digest
    result = replay(await served.records())
    assert result.digest == digest
    assert result.problems == ()
    salts = {seen.json["cache_salt"] for seen in served.server.seen if b"cache_salt" in seen.body}
    assert salts == {"rc-0", "rc-1", "rc-2"}
    assert served.engine.content == "w3"
    assert not served.engine.paused


async def test_a_lost_answer_of_the_last_step_is_made_up_for_by_the_label(served: Served) -> None:
    served.engine.script("finish_weight_update", Fault(outcome=Unknown("lost"), happens=True))
    async with served.open() as control:
        assert (await publish(control, 1)).version == 1
        assert control.serving


async def test_a_failed_install_leaves_the_engine_paused_and_tainted_for_the_next_controller_too(
    served: Served,
) -> None:
    served.engine.script("update_weights", Fault(outcome=Failed("worker failed", 500)))
    async with served.open() as control:
        with pytest.raises(UpdateTainted, match="worker failed"):
            await publish(control, 1)
    assert served.engine.paused
    async with served.open() as control:
        assert control.state.engine(served.server.url).phase is Phase.TAINTED
        served.engine.restart()
        await control.join()
        await publish(control, 2)
        assert control.serving


async def test_a_server_that_goes_away(served: Served) -> None:
    served.engine.token_s = 0.01
    async with served.open() as control:
        failures: list[Exception] = []

        async def owner() -> None:
            try:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1000)
            except GenerationFailed as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owner)
            await until(
                lambda: any(seen.path == "/inference/v1/generate" and seen.body != b"{}" for seen in served.server.seen)
            )
            served.engine.die()
            await served.server.stop()
        assert len(failures) == 1
        with pytest.raises((EngineLost, UpdateAbandoned)):
            await publish(control, 1)
        with pytest.raises(EngineUnreachable):
            await control.join()
        served.engine.restart()
        served.engine.token_s = 0.0
        await served.server.listen()
        await control.join()
        await publish(control, 1)
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)


async def test_what_cannot_be_driven_is_refused_and_leaves_no_journal(tmp_path: Path) -> None:
    for options, words in (({"dev_mode": False}, "VLLM_SERVER_DEV_MODE"), ({"scale_out": False}, "--enable-scale-out")):
        async with FakeServer(FakeEngine(), **options).run() as url:  # type: ignore[arg-type]  # switches by name
            with pytest.raises(EngineUnsuitable, match=words):
                async with Controller.open(tmp_path / "run.db", engine=url):
                    pass
    with pytest.raises(EngineUnreachable):
        async with Controller.open(tmp_path / "run.db", engine="http://127.0.0.1:9"):
            pass
    assert not any(path.exists() for path in (tmp_path / "run.db", tmp_path / "run.db.lock"))
