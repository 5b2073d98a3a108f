"""Small real engines for experiments and tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rc.effects.process import EngineProcess, free_port, vllm_command, vllm_environment

__all__ = ("running_engine",)


@asynccontextmanager
async def running_engine(
    model: Path, log: Path, *, port: int = 0, max_model_len: int = 1024, tensor_parallel_size: int = 1
) -> AsyncIterator[EngineProcess]:
    """Start a vLLM server for a checkpoint, wait until it is healthy, end it afterwards."""
    port = port or free_port()
    command = vllm_command(model, port=port, max_model_len=max_model_len, tensor_parallel_size=tensor_parallel_size)
    environment = vllm_environment(tensor_parallel_size=tensor_parallel_size)
    engine = EngineProcess(command, environment, f"http://127.0.0.1:{port}", log)
    try:
        await engine.until_healthy()
        yield engine
    finally:
        await engine.stop()
