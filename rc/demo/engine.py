"""The demo's vLLM server: started once, found again by a run that goes on, ended with the run."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import msgspec

from rc.demo.run_directory import RunDirectory
from rc.effects.process import (
    EngineProcess,
    ProcessIdentity,
    free_port,
    leaders_with,
    port_taken,
    vllm_command,
    vllm_environment,
)
from rc.errors import EngineStartFailed

__all__ = ("DemoEngine",)

_MARK = "RC_DEMO_RUN"
"""Variable in the server's environment that tells which run it belongs to."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the run directory remembers of its server."""

    url: str
    process: ProcessIdentity


class DemoEngine:
    """A server that belongs to a run.

    Attributes:
        url: Where it listens.
        process: Its identity.
        start_s: Seconds from its start until it was healthy; None if an earlier process of the run started it.
    """

    def __init__(self, url: str, process: ProcessIdentity, start_s: float | None) -> None:
        self.url = url
        self.process = process
        self.start_s = start_s

    @classmethod
    async def find(cls, directory: RunDirectory) -> DemoEngine | None:
        """Give the server that an earlier process of this run left running; end remains that no record names."""
        if directory.engine_record.exists():
            record = msgspec.json.decode(directory.engine_record.read_bytes(), type=_Record)
            if record.process.alive:
                return cls(record.url, record.process, None)
        for orphan in leaders_with(_MARK, str(directory.path.resolve())):
            await orphan.kill_group()
        return None

    @classmethod
    async def start(cls, directory: RunDirectory, model: Path, *, port: int, max_model_len: int) -> DemoEngine:
        """Start a server and wait until it is healthy.

        Raises:
            EngineStartFailed: The port is taken, or the server did not come up.
        """
        if port and port_taken(port):
            raise EngineStartFailed(f"port {port} is taken; give another --port, or leave it out to take a free one")
        port = port or free_port()
        url = f"http://127.0.0.1:{port}"
        environment = vllm_environment() | {_MARK: str(directory.path.resolve())}
        command = vllm_command(model, port=port, max_model_len=max_model_len)
        started = time.monotonic()
        server = EngineProcess(command, environment, url, directory.engine_log)
        try:
            directory.engine_record.write_bytes(msgspec.json.encode(_Record(url=url, process=server.identity)))
            await server.until_healthy()
        except BaseException:
            await server.stop()
            raise
        return cls(url, server.identity, time.monotonic() - started)

    async def stop(self) -> None:
        """End the server and everything it started."""
        with anyio.CancelScope(shield=True):
            await self.process.kill_group()
