"""Server processes: watched while they start, and ended with everything they started; nobody else's are touched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import anyio
import msgspec
import pytest

from rc.effects import process
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

SERVER = """
import http.server, os, signal, subprocess, sys, time

mode, port = sys.argv[1], int(sys.argv[2])
print("starting as", mode, flush=True)
if mode == "fails":
    print("(Worker pid=7) ERROR 12-01 05:34:03 [executor.py:9] ValueError: no such backend", flush=True)
    print("\\n".join(f"filler {i}" for i in range(100)), flush=True)
    sys.exit(3)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What a worker blocked in a collective does: outlive its parent, deaf to SIGTERM.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
if mode == "hangs":
    time.sleep(300)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""

Launch = Callable[[str], EngineProcess]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_TERM_GRACE_S", 0.5)


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    launched: list[EngineProcess] = []

    def start(mode: str) -> EngineProcess:
        port = free_port()
        command = [sys.executable, "-c", SERVER, mode, str(port)]
        launched.append(EngineProcess(command, os.environ, f"http://127.0.0.1:{port}", tmp_path / "server.log"))
        return launched[-1]

    yield start
    for server in launched:
        await server.stop()


def group_of(server: EngineProcess) -> list[int]:
    return list(process._members(server.pid))


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in another process
            await anyio.sleep(0.02)


async def test_a_server_is_healthy_in_a_session_of_its_own_and_gone_after_stop(launch: Launch) -> None:
    server = launch("serves")
    await server.until_healthy(20)
    assert os.getsid(server.pid) == os.getpgid(server.pid) == server.pid != os.getsid(0), "Ctrl-C must not reach it"
    identity = server.identity
    assert ProcessIdentity.of(server.pid) == identity
    await server.stop()
    assert not identity.alive
    assert group_of(server) == []
    await server.stop()


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(launch: Launch) -> None:
    server = launch("stubborn")
    await server.until_healthy(20)
    assert len(group_of(server)) == 2
    await server.stop()
    assert group_of(server) == []


async def test_children_that_outlive_their_server_are_ended_too(launch: Launch) -> None:
    server = launch("stubborn")
    await server.until_healthy(20)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: len(group_of(server)) == 1)
    await server.stop()
    assert group_of(server) == []


async def test_a_server_that_fails_is_reported_at_once_with_what_its_log_names(launch: Launch) -> None:
    server = launch("fails")
    began = time.monotonic()
    with pytest.raises(EngineStartFailed) as failure:
        await server.until_healthy(50)
    assert time.monotonic() - began < 20, "it ended long before the deadline"
    message = str(failure.value)
    assert "ended with code 3" in message
    assert "! ValueError: no such backend" in message, "the cause is named though the log's end does not reach it"
    assert "filler 99" in message
    assert "filler 50" not in message
    assert str(server.log) in message


async def test_a_server_killed_by_a_signal_says_which(launch: Launch) -> None:
    with pytest.raises(EngineStartFailed, match="ended with code -9"):
        await launch("killed").until_healthy(20)


async def test_a_server_that_never_becomes_healthy_meets_its_deadline(launch: Launch) -> None:
    server = launch("hangs")
    with pytest.raises(EngineStartFailed, match=r"not healthy within 0\.5 s[\s\S]*names first: nothing"):
        await server.until_healthy(0.5)
    assert server.identity.alive, "whether to wait longer is its owner's decision"


async def test_a_failure_shows_nothing_of_an_earlier_servers_log(launch: Launch) -> None:
    first = launch("fails")
    with pytest.raises(EngineStartFailed):
        await first.until_healthy(20)
    with pytest.raises(EngineStartFailed) as failure:
        await launch("killed").until_healthy(20)
    assert "no such backend" not in str(failure.value)
    assert "starting as killed" in str(failure.value)


async def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port_taken(port)
        with pytest.raises(EngineStartFailed, match=f"listens at http://127.0.0.1:{port} already"):
            EngineProcess([sys.executable, "-c", ""], os.environ, f"http://127.0.0.1:{port}", tmp_path / "log")
    assert not port_taken(port)


# ---------------------------------------------------------------------------------- servers of a dead controller


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process group that is not rc's."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


async def test_a_recorded_server_is_ended_by_its_record_alone(launch: Launch) -> None:
    server = launch("stubborn")
    await server.until_healthy(20)
    record = msgspec.json.decode(msgspec.json.encode(server.identity), type=ProcessIdentity)
    await record.kill_group()
    assert group_of(server) == []


async def test_children_of_a_recorded_server_are_ended_though_it_is_dead(launch: Launch) -> None:
    server = launch("stubborn")
    await server.until_healthy(20)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: len(group_of(server)) == 1)
    assert not server.identity.alive
    await server.identity.kill_group()
    assert group_of(server) == []


@pytest.mark.parametrize("differs", ["start time", "boot"])
async def test_another_process_under_a_recorded_id_is_left_alone(
    stranger: subprocess.Popen[bytes], differs: str
) -> None:
    identity = ProcessIdentity.of(stranger.pid)
    assert identity is not None
    assert identity.alive
    if differs == "start time":
        recorded = msgspec.structs.replace(identity, started=identity.started - 1, mark="a server's")
    else:
        recorded = msgspec.structs.replace(identity, boot="another", mark="a server's")
    assert not recorded.alive
    await recorded.kill_group()
    await anyio.sleep(0.2)
    assert stranger.poll() is None


async def test_a_record_without_a_mark_ends_no_children(launch: Launch) -> None:
    """Where nothing tells whose they are, they are left alone."""
    server = launch("stubborn")
    await server.until_healthy(20)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: len(group_of(server)) == 1)
    await msgspec.structs.replace(server.identity, mark="").kill_group()
    assert len(group_of(server)) == 1


async def test_leaders_are_found_by_their_environment(launch: Launch) -> None:
    server = launch("stubborn")
    await server.until_healthy(20)
    assert leaders_with("RC_SERVER", server.identity.mark) == (server.identity,), "and not the child, which has it too"
    assert leaders_with("RC_SERVER", "another") == ()


def test_a_process_that_does_not_exist_has_no_identity() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert ProcessIdentity.of(child.pid) is None


# ---------------------------------------------------------------------------------- vLLM's settings


def test_the_command_makes_a_server_that_rc_can_drive() -> None:
    command = vllm_command("some/model", port=1234, extra=("--seed", "7"))
    options = dict(pairwise(command))
    assert options["--host"] == "127.0.0.1", "control routes ask for no key: nobody else may reach them"
    assert options["--port"] == "1234"
    assert options["--weight-transfer-config"] == '{"backend": "rc_gloo"}'
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert {"--enable-scale-out", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(command)
    assert command[-2:] == ["--seed", "7"]


def test_two_workers_get_a_core_each() -> None:
    assert vllm_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert vllm_environment(tensor_parallel_size=2)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert vllm_environment()["VLLM_SERVER_DEV_MODE"] == "1"
