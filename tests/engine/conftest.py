"""One real vLLM server for all tests of this folder that leave it in good health."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rc.demo.policy import build_small_policy
from rc.effects.process import EngineProcess, free_port, vllm_command, vllm_environment
from rc.effects.protocol import Ok
from rc.effects.vllm_http import VllmHttpEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a real engine, and the time to start it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(600))
            # vLLM and torch warn about themselves when they are imported.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The engine's adapter is aiohttp, which runs on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with random weights."""
    directory = tmp_path_factory.mktemp("qwen3") / "policy"
    build_small_policy(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def server(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The shared server."""
    port = free_port()
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    command = vllm_command(policy_directory, port=port)
    engine = EngineProcess(command, vllm_environment(), f"http://127.0.0.1:{port}", log)
    try:
        anyio.run(engine.until_healthy)
        yield engine
    finally:
        anyio.run(engine.stop)


@pytest.fixture
async def engine_url(server: EngineProcess) -> str:
    """The shared server, looking as if nobody had labelled it: each test has a journal of its own."""
    adapter = VllmHttpEngine(server.url)
    try:
        assert isinstance(await adapter.resume(), Ok)
        assert isinstance(await adapter.set_label("default"), Ok)
        assert isinstance(await adapter.reset_prefix_cache(), Ok)
    finally:
        await adapter.aclose()
    return server.url


@pytest.fixture
def model(policy_directory: Path) -> PreTrainedModel:
    """The trainer's side of the shared server's model."""
    loaded = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.bfloat16)
    assert isinstance(loaded, PreTrainedModel)
    return loaded
