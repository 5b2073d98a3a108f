"""Where a demo run keeps its things, and how a run that was cut off is found again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rc.errors import CallerError

__all__ = ("DemoSettings", "RunDirectory", "UnusableRun")


class UnusableRun(CallerError):
    """A directory that this demo cannot run in, or go on in."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What defines a run; going on with it needs the same.

    Attributes:
        steps: Training steps, each published as one version after rc-0.
        seed: Seeds the weights of the small policy, the order of prompts and the sampling.
        model: Directory of a causal language model to train instead of the small one.
        prompts: File of prompts instead of the built-in ones.
        prompts_per_step: Prompts in one step.
        completions: Completions sampled per prompt.
        max_tokens: Tokens per completion.
        learning_rate: AdamW's step size.
    """

    steps: int = 16
    seed: int = 0
    model: str | None = None
    prompts: str | None = None
    prompts_per_step: int = 8
    completions: int = 8
    max_tokens: int = 32
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "completions", "max_tokens"):
            if getattr(self, name) < 1:
                raise UnusableRun(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.completions < 2:
            raise UnusableRun("completions must be at least 2: a group of one has nothing to be compared with")


class RunDirectory:
    """The files of one run below ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "run.db"
        self.policy = path / "policy"
        self.checkpoint = path / "trainer.pt"
        self.engine_record = path / "engine.json"
        self.engine_log = path / "engine.log"
        self.timeline = path / "timeline.svg"
        self.report = path / "report.json"
        self._settings = path / "settings.json"

    @classmethod
    def prepare(cls, path: Path, settings: DemoSettings) -> RunDirectory:
        """Give the directory of the run to begin, or to go on with.

        Raises:
            UnusableRun: It holds something else, a run of other settings, or one that is complete.
        """
        directory = cls(path)
        if not path.exists() or not any(path.iterdir()):
            path.mkdir(parents=True, exist_ok=True)
            _write_atomically(directory._settings, msgspec.json.format(msgspec.json.encode(settings)))
            return directory
        begun = directory.settings()
        if begun != settings:
            raise UnusableRun(
                f"{path} holds a run with other settings ({_difference(begun, settings)}); name another --out, or repeat "
                f"the settings to go on with it"
            )
        if directory.complete:
            raise UnusableRun(f"{path} holds a run that is complete; name another --out, or remove the directory")
        return directory

    @classmethod
    def next_below(cls, parent: Path, settings: DemoSettings) -> RunDirectory:
        """Go on with the last run below ``parent`` if it was cut off and has the same settings; else begin another."""
        number = max((int(p.name[4:]) for p in parent.glob("run-*") if p.name[4:].isdigit()), default=0)
        last = cls(parent / f"run-{number}")
        if number and not last.complete and last._settings.exists() and last.settings() == settings:
            return last
        return cls.prepare(parent / f"run-{number + 1}", settings)

    @property
    def complete(self) -> bool:
        """Whether the run ended with its report."""
        return self.report.exists()

    @property
    def begun(self) -> bool:
        """Whether an earlier process got as far as a journal."""
        return self.journal.exists()

    def settings(self) -> DemoSettings:
        """Read the settings that the run was begun with.

        Raises:
            UnusableRun: There are none, or they cannot be read.
        """
        try:
            return msgspec.json.decode(self._settings.read_bytes(), type=DemoSettings)
        except FileNotFoundError:
            raise UnusableRun(f"{self.path} is not empty and not a demo run; name another --out") from None
        except (OSError, msgspec.DecodeError) as error:
            raise UnusableRun(f"{self._settings} cannot be read ({error}); name another --out") from error


def _difference(begun: DemoSettings, settings: DemoSettings) -> str:
    old, new = msgspec.to_builtins(begun), msgspec.to_builtins(settings)
    return ", ".join(f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name])


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
