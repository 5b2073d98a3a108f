"""A vLLM server as a child process: started, watched until it is healthy, and ended with everything it started.

A server is an API process, an engine core and its workers. They share a process group of their own: Ctrl-C at the terminal
does not reach them before rc has closed, and ending the group ends them all, also where the API process no longer listens to
signals.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
import msgspec

from rc.errors import EngineStartFailed

__all__ = ("EngineProcess", "ProcessIdentity", "free_port", "leaders_with", "port_taken", "vllm_command", "vllm_environment")

START_DEADLINE_S: Final = 300.0
"""A small model on two cores takes 30 s; large ones load for minutes: raise it for those."""

_TERM_GRACE_S: Final = 5.0
"""How long SIGTERM may take. A server whose engine died may ignore it for ever."""

_KILL_GRACE_S: Final = 10.0

_POLL_S: Final = 0.1

_LOG_LINES: Final = 25
"""Lines of the server's log that an error shows."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that can be told from a later one of the same id.

    Attributes:
        pid: Process id, which is also its process group's.
        started: The kernel's start time of the process, in clock ticks since boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identify a live process; None if there is none."""
        started = _start_ticks(pid)
        return None if started is None else cls(pid=pid, started=started)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_ticks(self.pid) == self.started

    async def kill_group(self) -> None:
        """End the process and its group, if it is still the same; a recycled id is left alone.

        Raises:
            EngineStartFailed: Something of the group survived SIGKILL.
        """
        if not self.alive:
            return
        for sent, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
            _signal_group(self.pid, sent)
            with anyio.move_on_after(grace_s):
                while _group_alive(self.pid):
                    await anyio.sleep(_POLL_S)
                return
        raise EngineStartFailed(f"process group {self.pid} survives SIGKILL; look at it with `ps -g {self.pid}`")


def vllm_command(
    model: str | Path,
    *,
    port: int,
    host: str = "127.0.0.1",
    served_name: str = "policy",
    backend: str = "rc_gloo",
    dtype: str = "bfloat16",
    max_model_len: int = 1024,
    tensor_parallel_size: int = 1,
    extra: Sequence[str] = (),
) -> list[str]:
    """Give the command line of a vLLM server that rc can drive by the stock profile."""
    return [
        # `vllm serve` looks up the distribution named vllm, which the CPU build is not; this is the same server.
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model), "--served-model-name", served_name),
        *("--host", host, "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(max_model_len)),
        *("--tensor-parallel-size", str(tensor_parallel_size)),
        "--enforce-eager",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        # Logprobs of the distribution that is sampled from, temperature included: what an importance ratio needs.
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", f'{{"backend": "{backend}"}}'),
        *extra,
    ]


def vllm_environment(*, tensor_parallel_size: int = 1, kv_cache_gb: int = 1) -> dict[str, str]:
    """Give the environment for `vllm_command`, on top of this process's own."""
    binding = "nobind" if tensor_parallel_size == 1 else "|".join(str(core) for core in range(tensor_parallel_size))
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class EngineProcess:
    """One server process that this process started.

    Args:
        command: Command line, e.g. from `vllm_command`.
        environment: Its whole environment.
        url: Where it will listen.
        log: File that its output is appended to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        identity = ProcessIdentity.of(self._process.pid)
        if identity is None:
            raise EngineStartFailed(f"the server ended at once; its log is {log}")
        self.identity = identity

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        return self._process.pid

    async def until_healthy(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait for ``/health`` to answer 200.

        Raises:
            EngineStartFailed: It ended first, or the deadline passed; it is ended then. The message shows the log's end.
        """
        try:
            with anyio.fail_after(deadline_s):
                async with aiohttp.ClientSession() as session:
                    while not await _healthy(session, self.url):
                        if self._process.poll() is not None:
                            raise EngineStartFailed(
                                f"the vLLM server ended with code {self._process.returncode} before it was healthy. "
                                f"{self._log_tail()}"
                            )
                        await anyio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineStartFailed(
                f"the vLLM server was not healthy within {deadline_s:g} s. {self._log_tail()}"
            ) from None

    async def stop(self) -> None:
        """End the server and everything in its process group."""
        with anyio.CancelScope(shield=True):
            await self.identity.kill_group()
            # The group may have outlived its leader, which `kill_group` then takes for gone.
            _signal_group(self.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(self._process.wait)

    def _log_tail(self) -> str:
        with self.log.open("rb") as stream:
            stream.seek(self._log_start)
            lines = stream.read().decode(errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-_LOG_LINES:])
        return f"The end of its log ({self.log}):\n{tail}"


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """Give a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def leaders_with(variable: str, value: str) -> tuple[ProcessIdentity, ...]:
    """Find process group leaders that were started with a variable in their environment."""
    wanted = f"{variable}={value}".encode()
    found: list[ProcessIdentity] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            leads = os.getpgid(pid) == pid and wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        identity = ProcessIdentity.of(pid) if leads else None
        if identity is not None:
            found.append(identity)
    return tuple(found)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _signal_group(group: int, sent: signal.Signals) -> None:
    try:
        os.killpg(group, sent)
    except (ProcessLookupError, PermissionError):
        pass


def _group_alive(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in ("Z", "X"):
            return True
    return False
