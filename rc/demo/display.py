"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rc.demo.run import Progress, StepResult

__all__ = ("Display", "LiveDisplay", "PlainDisplay", "display_for", "reward_bar")

_BAR_WIDTH = 20


class Display(Progress, Protocol):
    """A display is entered before the engine starts and left after it has stopped."""

    def say(self, message: str) -> None:
        """Show something that happened outside of the steps."""
        ...

    def watch(self, active: Callable[[], int]) -> None:
        """Take the number of active rollouts from here from now on."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display_for(*, steps: int, live: bool) -> Display:
    """Choose a display for a run of so many steps; ``live`` redraws a table, where there is a terminal to do it on."""
    console = Console(stderr=True)
    if live and console.is_terminal:
        return LiveDisplay(console, steps)
    return PlainDisplay(console, steps)


def reward_bar(reward: float) -> str:
    """Draw a reward between 0 and 1."""
    filled = round(max(0.0, min(1.0, reward)) * _BAR_WIDTH)
    return "█" * filled + "·" * (_BAR_WIDTH - filled)


class PlainDisplay:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def watch(self, active: Callable[[], int]) -> None:
        """Nothing: lines do not change."""

    def say(self, message: str) -> None:
        """Print it."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def sampling(self, step: int, done: int, of: int) -> None:
        """Nothing: a line a rollout would drown the rest."""

    def learning(self, step: int) -> None:
        """Nothing."""

    def publishing(self, step: int) -> None:
        """Nothing."""

    def stepped(self, result: StepResult) -> None:
        """Print the step."""
        commit, learned = result.commit, result.learned
        self.say(
            f"step {learned.step:>3}/{self._steps}  {commit.label:<6}  reward {learned.reward_mean:.3f} "
            f"{reward_bar(learned.reward_mean)}  drain {commit.drain_s * 1000:5.0f} ms  "
            f"gap {commit.gap_s * 1000:4.0f} ms  "
            f"sampled in {learned.sampling_s:.1f} s, learned in {learned.learning_s:.1f} s"
        )


class LiveDisplay:
    """A table that grows by a row a step, above a line that says what is going on."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._active: Callable[[], int] = lambda: 0
        self._results: list[StepResult] = []
        self._doing = "starting"
        self._version = "nothing yet"
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def watch(self, active: Callable[[], int]) -> None:
        """Show this number of active rollouts."""
        self._active = active

    def say(self, message: str) -> None:
        """Print it above the table."""
        self._console.print(message, highlight=False, markup=False)

    def sampling(self, step: int, done: int, of: int) -> None:
        """Show how many of the step's rollouts have finished."""
        self._doing = f"step {step}/{self._steps}: sampling, {done} of {of} rollouts finished"

    def learning(self, step: int) -> None:
        """Show that the trainer computes."""
        self._doing = f"step {step}/{self._steps}: learning"

    def publishing(self, step: int) -> None:
        """Show that an update is under way."""
        self._doing = f"step {step}/{self._steps}: updating the engine"

    def stepped(self, result: StepResult) -> None:
        """Add the step's row."""
        self._results.append(result)
        self._version = result.commit.label

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading, justify in (
            ("version", "left"),
            ("reward", "right"),
            ("", "left"),
            ("drain", "right"),
            ("gap", "right"),
        ):
            table.add_column(heading, justify="right" if justify == "right" else "left")
        for result in self._results:
            commit, reward = result.commit, result.learned.reward_mean
            table.add_row(
                commit.label,
                f"{reward:.3f}",
                Text(reward_bar(reward), style="green"),
                f"{commit.drain_s * 1000:.0f} ms",
                f"{commit.gap_s * 1000:.0f} ms",
            )
        status = f"serving {self._version}  ·  {self._active()} rollouts active  ·  {self._doing}"
        return Group(table, Text(status, style="bold"))
