"""The demo killed with SIGKILL at random moments: its journal verifies each time, and the next start goes on.

A reader in another process follows the journal all the while. Whatever it has seen was durable, so it must be there,
byte for byte, at the end.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from harness.artifact import Experiment
from rc.errors import JournalUnusable
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import FinishRollout

__all__ = ("crash_recovery",)

KILL_AFTER_S: Final = (1.0, 25.0)
"""When a run is killed, in seconds from when it first appends: from its opening into its third update."""

START_S: Final = 240.0
"""How long a run may take until it appends, its server's start included."""


async def crash_recovery(experiment: Experiment, out: Path, *, kills: int, seed: int, steps: int) -> None:
    """Kill a run ``kills`` times, checking its journal each time, then let it finish."""
    chance = random.Random(seed)
    journal = out / "run.db"
    seen: dict[int, str] = {}
    for number in range(1, kills + 1):
        await _run_and_kill(out, journal, seen, chance.uniform(*KILL_AFTER_S), steps)
        verified = _rc("verify-journal", str(journal), "--json")
        experiment.check(f"kill {number}: the journal verifies", True, verified.get("intact"))
        replayed = _rc("replay-journal", str(journal), "--json")
        experiment.check(f"kill {number}: problems in replay", [], replayed.get("problems"))
        plan = replayed.get("recovery", [])
        engines = {engine["engine"]: engine["phase"] for engine in replayed.get("engines", [])}
        print(f"  kill {number} at event {replayed.get('seq')}, engines {engines}: {'; '.join(plan)}", flush=True)
        experiment.check(f"kill {number}: recovery is explained", True, bool(plan))
    print("  letting it finish", flush=True)
    ended = subprocess.run(_command(out, steps), stdout=subprocess.DEVNULL, check=False)  # noqa: ASYNC221 - alone by now
    experiment.check("the last start finishes the run, exit code", 0, ended.returncode)
    lost, repeated = await _account(journal, seen)
    experiment.check("events that were seen and are gone or altered", 0, lost)
    experiment.check("rollouts that finished twice", 0, repeated)
    experiment.figures |= {"kills": kills, "lost": lost, "repeated": repeated, "events_seen": len(seen)}


def _command(out: Path, steps: int) -> list[str]:
    return [sys.executable, "-m", "rc", "demo", "--json", "--no-restart", "--steps", str(steps), "--out", str(out)]


async def _run_and_kill(out: Path, journal: Path, seen: dict[int, str], after_s: float, steps: int) -> None:
    """Start or continue the run, wait until it has appended something, and kill it a while later."""
    before = max(seen, default=0)
    run = await anyio.open_process(_command(out, steps), stdout=subprocess.DEVNULL, stderr=None)
    try:
        with anyio.fail_after(START_S):
            async with anyio.create_task_group() as tasks:
                appended = anyio.Event()
                tasks.start_soon(_follow, journal, seen, before, appended)
                await appended.wait()
                await anyio.sleep(after_s)
                tasks.cancel_scope.cancel()
    finally:
        run.kill()
        await run.wait()


async def _follow(journal: Path, seen: dict[int, str], after: int, appended: anyio.Event) -> None:
    """Note every event that becomes visible."""
    while True:
        try:
            async with SqliteReader.open(journal) as reader:
                async for record in reader.follow(after=after):
                    seen[record.seq] = record.hash
                    appended.set()
        except JournalUnusable:
            await anyio.sleep(0.1)  # the run has not created it yet


def _rc(*arguments: str) -> dict[str, Any]:
    ended = subprocess.run([sys.executable, "-m", "rc", *arguments], stdout=subprocess.PIPE, check=False)
    report: dict[str, Any] = msgspec.json.decode(ended.stdout) if ended.stdout else {}
    return report


async def _account(journal: Path, seen: dict[int, str]) -> tuple[int, int]:
    kept: dict[int, str] = {}
    finished: Counter[str] = Counter()
    async with SqliteReader.open(journal) as reader:
        async for record in reader.records():
            kept[record.seq] = record.hash
            if isinstance(record.event, FinishRollout):
                finished[record.event.rollout] += 1
    lost = sum(kept.get(seq) != digest for seq, digest in seen.items())
    return lost, sum(count - 1 for count in finished.values())


def main() -> int:
    """Run it in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    experiment = Experiment("crash_recovery", profile="stock")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        options = {"kills": arguments.kills, "seed": arguments.seed, "steps": arguments.steps}
        anyio.run(partial(crash_recovery, experiment, out, **options))
    print(f"{experiment.write()}: {'passed' if experiment.passed else 'FAILED'}")
    return 0 if experiment.passed else 1


if __name__ == "__main__":
    sys.exit(main())
