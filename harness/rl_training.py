"""The main job on a real engine: GRPO raises the reward while one vLLM server moves from version to version.

Runs ``rc demo`` for several seeds and checks each run's journal by itself, event by event, not by what the run reports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from harness.artifact import Experiment
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import BeginUpdate, Committed, EngineJoined, FinishRollout
from rc.replay import Replayer
from rc.versions import version_label

__all__ = ("check_journal", "run_demo")

SEEDS: Final = (0, 1, 2)

MIN_VERSIONS: Final = 12

MIN_GAIN: Final = 0.1
"""Reward that the last three steps must have gained over the first three; chance moves such a mean by about 0.02."""


def run_demo(out: Path, *arguments: str) -> dict[str, Any]:
    """Run the demo to its end and give its report; its progress goes to our stderr.

    Raises:
        subprocess.CalledProcessError: It did not end with exit code 0.
    """
    command = [sys.executable, "-m", "rc", "demo", "--json", "--out", str(out), *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = msgspec.json.decode(ended.stdout)
    return report


async def check_journal(experiment: Experiment, journal: Path, digest: str, name: str) -> None:
    """Check a demo's journal: one process, drained before each mutation, attested, replayable to the printed digest."""
    boots: set[str] = set()
    commits = late = unattested = 0
    begun = -1
    replayer = Replayer()
    async with SqliteReader.open(journal) as reader:
        async for record in reader.records():
            replayer.apply(record)
            match record.event:
                case EngineJoined(boot=boot):
                    boots.add(boot)
                case BeginUpdate(target=target):
                    begun = target
                case Committed():
                    commits += 1
                case FinishRollout() as event:
                    # A rollout of N that finishes behind the begin towards N+1 was not drained.
                    late += event.version < begun
                    attested = [[span.label for span in turn.spans] for turn in event.turns]
                    unattested += attested != [[version_label(event.version)]] * len(event.turns)
    replayed = replayer.result()
    experiment.check(f"{name}: server processes", 1, len(boots))
    experiment.check(f"{name}: committed versions", f">= {MIN_VERSIONS}", commits, passed=commits >= MIN_VERSIONS)
    experiment.check(f"{name}: rollouts that finished after the next update began", 0, late)
    experiment.check(f"{name}: finished rollouts whose spans are not exactly their version", 0, unattested)
    experiment.check(f"{name}: problems in replay", [], [problem.what for problem in replayed.problems])
    experiment.check(f"{name}: state digest, live and replayed", digest, replayed.digest)


def main() -> int:
    """Run every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    experiment = Experiment("rl_training", profile="stock")
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            restart = () if not reports else ("--no-restart",)
            out = Path(scratch) / f"seed{seed}"
            report = run_demo(out, "--seed", str(seed), "--steps", str(arguments.steps), *restart)
            reports.append(report)
            name = f"seed {seed}"
            anyio.run(check_journal, experiment, out / "run.db", report["digest"], name)
            gain = report["reward_last"] - report["reward_first"]
            experiment.check(f"{name}: gain of reward", f">= {MIN_GAIN}", round(gain, 3), passed=gain >= MIN_GAIN)
    first = reports[0]
    experiment.figures |= {
        "versions": len(first["versions"]),
        "reward_first": round(first["reward_first"], 3),
        "reward_last": round(first["reward_last"], 3),
        "reward_gain_min": round(min(report["reward_last"] - report["reward_first"] for report in reports), 3),
        "gap_s_median": round(first["gap_s_median"], 3),
        "drain_s_median": round(first["drain_s_median"], 3),
        "restart_s": round(first["restart_s"], 1),
        "restart_over_gap": round(first["restart_over_gap"], 1),
    }
    print(f"{experiment.write()}: {'passed' if experiment.passed else 'FAILED'}")
    return 0 if experiment.passed else 1


if __name__ == "__main__":
    sys.exit(main())
