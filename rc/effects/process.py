"""A vLLM server as a child process: started, watched until it is healthy, and ended with everything it started.

A server is an API process, an engine core and its workers. They share a process group of their own: Ctrl-C at the
terminal does not reach them before rc has closed, and ending the group ends them all, also where the API process no
longer listens to signals.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.to_thread
import msgspec

from rc.errors import EngineStartFailed

__all__ = (
    "EngineProcess",
    "ProcessIdentity",
    "free_port",
    "leaders_with",
    "port_taken",
    "vllm_command",
    "vllm_environment",
)

START_DEADLINE_S: Final = 300.0
"""A small model on two cores takes 30 s; large ones load for minutes: raise it for those."""

_TERM_GRACE_S: Final = 5.0
"""How long SIGTERM may take. A server whose engine died may ignore it for ever."""

_KILL_GRACE_S: Final = 10.0

_POLL_S: Final = 0.1

_LOG_LINES: Final = 25
"""Lines of the server's log that an error shows."""

_LOG_BYTES: Final = 1 << 20
"""How much of the log's end is read for that; a server that fails to start writes some ten kilobytes."""

_CAUSES: Final = 3
"""Exceptions of the log that an error names before its end, where vLLM only says to look above."""

_EXCEPTION_LINE: Final = re.compile(r"(?:\(\w+ pid=\d+\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)")

_MARK: Final = "RC_SERVER"
"""Variable with a random value in a server's environment; it tells its processes when their leader is gone."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that can be told from a later one of the same id, also after the machine was restarted.

    Attributes:
        pid: Process id, which is also its process group's.
        started: The kernel's start time of the process, in clock ticks since boot.
        boot: The kernel's id of that boot; empty in records that have none.
        mark: What `EngineProcess` put into the environment of the process and so of its children; else empty.
    """

    pid: int
    started: int
    boot: str = ""
    mark: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identify a live process; None if there is none."""
        started = _start_ticks(pid)
        if started is None:
            return None
        return cls(pid=pid, started=started, boot=_boot_id(), mark=_environment_of(pid).get(_MARK, ""))

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return self.boot in ("", _boot_id()) and _start_ticks(self.pid) == self.started

    async def kill_group(self) -> None:
        """End the process and its group, if they are provably the same; a recycled id is left alone.

        A server's children may have outlived it. They are known by the mark in their environment.

        Raises:
            EngineStartFailed: Something of the group survived SIGKILL.
        """
        # While a member lives, the kernel gives its group's id to nobody else.
        if self.alive or any(self.mark and _environment_of(pid).get(_MARK) == self.mark for pid in _members(self.pid)):
            await _end_group(self.pid)


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


def vllm_environment(*, tensor_parallel_size: int = 1, kv_cache_gb: int = 1, threads: int = 1) -> dict[str, str]:
    """Give the environment for `vllm_command` on a CPU, on top of this process's own.

    ``threads`` are a worker's OpenMP threads. More than one gain nothing for a small model, and where a trainer shares
    the cores they wait for each other at every operation.
    """
    binding = "nobind" if tensor_parallel_size == 1 else "|".join(str(core) for core in range(tensor_parallel_size))
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
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

    Raises:
        EngineStartFailed: Something listens at that port already, or the process ended at once.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> None:
        address = urlsplit(url)
        if port_taken(address.port or 80, address.hostname or "127.0.0.1"):
            raise EngineStartFailed(f"something listens at {url} already; end it, or choose another port")
        self.url = url
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**environment, _MARK: secrets.token_hex(8)},
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
            EngineStartFailed: It ended first, or the deadline passed. The message shows what its log says;
                whatever still runs is left for `stop`.
        """
        try:
            with anyio.fail_after(deadline_s):
                async with aiohttp.ClientSession() as session:
                    while not await _healthy(session, self.url):
                        if (code := self._exit_code()) is not None:
                            raise EngineStartFailed(
                                f"the vLLM server ended with code {code} before it was healthy. {self._log_tail()}"
                            )
                        await anyio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineStartFailed(
                f"the vLLM server was not healthy within {deadline_s:g} s. {self._log_tail()}"
            ) from None

    async def stop(self) -> None:
        """End the server and everything in its process group; doing so twice changes nothing.

        Raises:
            EngineStartFailed: Something of the group survived SIGKILL.
        """
        if self._process.returncode is None:
            with anyio.CancelScope(shield=True):
                # Not reaped yet, so that the id is still ours, also where the server ended and its children did not.
                await _end_group(self.pid)
                await anyio.to_thread.run_sync(self._process.wait)

    def _exit_code(self) -> int | None:
        """The server's exit code if it ended, negative for a signal; leaves it unreaped."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _log_tail(self) -> str:
        with self.log.open("rb") as stream:
            stream.seek(max(self._log_start, self.log.stat().st_size - _LOG_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
        raised = dict.fromkeys(match[1] for line in lines if (match := _EXCEPTION_LINE.match(line)))
        causes = "".join(f"\n  ! {cause}" for cause in list(raised)[:_CAUSES])
        tail = "".join(f"\n  | {line}" for line in lines[-_LOG_LINES:])
        return f"Its log names first:{causes or ' nothing'}\nand ends ({self.log}):{tail}"


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
    found = (
        ProcessIdentity.of(pid)
        for pid, group in _groups()
        if pid == group and _environment_of(pid).get(variable) == value
    )
    return tuple(identity for identity in found if identity is not None)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _signal_group(group: int, sent: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, sent)


async def _end_group(group: int) -> None:
    """Ask a process group to end, then kill it; return when nothing of it runs."""
    for sent, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        _signal_group(group, sent)
        with anyio.move_on_after(grace_s):
            while any(_members(group)):  # noqa: ASYNC110 - nothing tells of the end of a process that is no child
                await anyio.sleep(_POLL_S)
            return
    raise EngineStartFailed(f"process group {group} survives SIGKILL; look at it with `ps -g {group}`")


def _members(group: int) -> Iterator[int]:
    return (pid for pid, its_group in _groups() if its_group == group)


def _groups() -> Iterator[tuple[int, int]]:
    """Every live process with its group; zombies are not alive."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in ("Z", "X"):
            yield int(entry.name), int(fields[2])


def _environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone or somebody else's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (os.fsdecode(entry).partition("=") for entry in entries)}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
