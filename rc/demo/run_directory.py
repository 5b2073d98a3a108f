"""Where a demo run keeps its things, and how a run that was cut off is found again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rc.errors import CallerError

if TYPE_CHECKING:
    from rc.demo.grpo import StepReport

__all__ = ("DemoSettings", "LearnedStep", "RunDirectory", "UnusableRun")


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
    learning_rate: float = 1.5e-3

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "completions", "max_tokens"):
            if getattr(self, name) < 1:
                raise UnusableRun(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.completions < 2:
            raise UnusableRun("completions must be at least 2: a group of one has nothing to be compared with")


class LearnedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a training step; times in seconds, the rest as `rc.demo.grpo.StepReport` has it."""

    step: int
    reward_mean: float
    reward_std: float
    logprob_gap_mean: float
    groups: int
    sampling_s: float
    learning_s: float

    @classmethod
    def of(cls, report: StepReport, sampling_s: float) -> LearnedStep:
        """Take it from the trainer's report."""
        return cls(
            step=report.step,
            reward_mean=report.reward_mean,
            reward_std=report.reward_std,
            logprob_gap_mean=report.logprob_gap_mean,
            groups=report.groups,
            sampling_s=sampling_s,
            learning_s=report.seconds,
        )


class RunDirectory:
    """The files of one run below ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "run.db"
        self.policy = path / "policy"
        self.checkpoint = path / "trainer.safetensors"
        self.engine_record = path / "engine.json"
        self.engine_log = path / "engine.log"
        self.steps = path / "steps.jsonl"
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
                f"{path} holds a run with other settings ({_difference(begun, settings)}); name another --out, or "
                f"repeat the settings to go on with it"
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

    def append_step(self, learned: LearnedStep) -> None:
        """Remember a step, durably."""
        with self.steps.open("ab") as stream:
            stream.write(msgspec.json.encode(learned) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def learned_steps(self, upto: int) -> tuple[LearnedStep, ...]:
        """Give the steps that count: a step that was cut off before its checkpoint was taken again later."""
        if not self.steps.exists():
            return ()
        last: dict[int, LearnedStep] = {}
        for line in self.steps.read_bytes().splitlines():
            try:
                learned = msgspec.json.decode(line, type=LearnedStep)
            except msgspec.DecodeError:
                continue  # the line that a killed run was writing
            last[learned.step] = learned
        return tuple(last[step] for step in sorted(last) if step <= upto)


def _difference(begun: DemoSettings, settings: DemoSettings) -> str:
    old, new = msgspec.to_builtins(begun), msgspec.to_builtins(settings)
    return ", ".join(f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name])


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
