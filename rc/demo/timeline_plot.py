"""The run as a picture: every rollout a bar in the colour of its version, every update a gap, the reward below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

from rc.demo.run_directory import LearnedStep
from rc.update_watch import Commit
from rc.versions import version_label

__all__ = ("RolloutBar", "draw_timeline")

_COLOURS = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]  # ListedColormap has it; the registry's type does not


class RolloutBar(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout; times in Unix seconds."""

    version: int
    began_at: float
    ended_at: float


def draw_timeline(
    path: Path, rollouts: Sequence[RolloutBar], commits: Sequence[Commit], steps: Sequence[LearnedStep]
) -> None:
    """Write the timeline to a file; its suffix (``.svg``, ``.png``) says in which format."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1))
    begin = min((bar.began_at for bar in rollouts), default=0.0)
    for lane, bar in _lanes(rollouts):
        upper.barh(
            lane,
            bar.ended_at - bar.began_at,
            left=bar.began_at - begin,
            height=0.9,
            color=_COLOURS[bar.version % len(_COLOURS)],
            linewidth=0,
        )
    for commit in commits:
        at = commit.committed_at - begin
        if at > 0:
            upper.axvspan(at - commit.gap_s, at, color="black", alpha=0.8, linewidth=0)
            upper.text(
                at,
                1.0,
                f" {version_label(commit.version)}",
                transform=upper.get_xaxis_transform(),
                fontsize=7,
                va="bottom",
            )
    upper.set(ylabel="rollouts at a time", xlabel="seconds")
    upper.set_title("Rollouts by weight version; black: the gap in which the engine was updated", loc="left", pad=16)
    lower.plot(
        [learned.step for learned in steps], [learned.reward_mean for learned in steps], marker="o", color="tab:green"
    )
    lower.set(ylabel="mean reward", xlabel="training step", ylim=(0, 1))
    lower.grid(alpha=0.3)
    figure.savefig(path)


def _lanes(rollouts: Sequence[RolloutBar]) -> list[tuple[int, RolloutBar]]:
    """Stack bars that overlap in time: each takes the lowest lane that is free when it begins."""
    free_at: list[float] = []
    placed: list[tuple[int, RolloutBar]] = []
    for bar in sorted(rollouts, key=lambda bar: bar.began_at):
        lane = next((number for number, at in enumerate(free_at) if at <= bar.began_at), len(free_at))
        if lane == len(free_at):
            free_at.append(0.0)
        free_at[lane] = bar.ended_at
        placed.append((lane, bar))
    return placed
