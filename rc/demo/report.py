"""What a run comes to, told from its journal and not from what the run believes of itself."""

from __future__ import annotations

from collections import Counter
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from rc.demo.display import reward_bar
from rc.demo.run_directory import DemoSettings, LearnedStep, RunDirectory
from rc.demo.timeline_plot import RolloutBar, draw_timeline
from rc.events.journal import Record
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import EngineJoined
from rc.projections.timeline import Timeline, advance_timeline
from rc.projections.trajectories import TrajectoryFold
from rc.update_watch import Commit

__all__ = ("Report", "VersionRow", "make_report", "print_report")

_ENDS = 3
"""Steps at each end of a run that its first and last reward are the mean of."""


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One committed version. Times in seconds; ``reward`` is of the step that produced it, None for rc-0."""

    version: str
    step: int
    rollouts: int
    drain_s: float
    gap_s: float
    install_s: float
    reward: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run's result.

    Attributes:
        versions: Committed versions, in order.
        engine_processes: Server processes that the journal has seen; 1 is a run without a restart.
        pid: Process id of the last of them.
        finished, aborted: Rollouts by how they ended.
        mismatched: Finished rollouts of which a token was not attested to their own version.
        gap_s_median: Over all updates but the first, which only labels what the engine loaded.
        restart_s: Seconds from a server's start until it is healthy, on this machine; None if not measured.
        reward_first, reward_last: Means over the first and the last three steps.
        digest: Of the state at shutdown.
    """

    versions: tuple[VersionRow, ...]
    engine_processes: int
    pid: int
    finished: int
    aborted: int
    mismatched: int
    drain_s_median: float
    gap_s_median: float
    restart_s: float | None
    restart_over_gap: float | None
    reward_first: float
    reward_last: float
    digest: str
    journal: str
    timeline: str


class _Fold:
    """What the report needs of a journal, gathered event by event."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.bars: list[RolloutBar] = []
        self.boots: set[str] = set()
        self.aborted = 0
        self.mismatched = 0
        self._trajectories = TrajectoryFold()

    @property
    def commits(self) -> list[Commit]:
        """Committed versions, in order."""
        return [Commit.of(update) for update in self.timeline.updates if update.outcome == "committed"]

    def apply(self, record: Record) -> None:
        event = record.event
        self.timeline = advance_timeline(self.timeline, event)
        if isinstance(event, EngineJoined):
            self.boots.add(event.boot)
        ended = self._trajectories.apply(record.seq, event)
        if ended is None:
            return
        if ended.status == "aborted":
            self.aborted += 1
            return
        self.mismatched += not ended.attested
        self.bars.append(RolloutBar(version=ended.version, began_at=ended.admitted_at, ended_at=ended.ended_at))


async def make_report(
    settings: DemoSettings, directory: RunDirectory, *, digest: str, pid: int, restart_s: float | None
) -> Report:
    """Fold the journal, draw the timeline, write ``report.json``; with that the run is complete."""
    fold = _Fold()
    async with SqliteReader.open(directory.journal) as reader:
        async for record in reader.records():
            fold.apply(record)
    steps = directory.learned_steps(settings.steps)
    draw_timeline(directory.timeline, fold.bars, fold.commits, steps)
    gap_s = median(commit.gap_s for commit in fold.commits[1:])
    report = Report(
        versions=_rows(fold, steps),
        engine_processes=len(fold.boots),
        pid=pid,
        finished=len(fold.bars),
        aborted=fold.aborted,
        mismatched=fold.mismatched,
        drain_s_median=median(commit.drain_s for commit in fold.commits[1:]),
        gap_s_median=gap_s,
        restart_s=restart_s,
        restart_over_gap=restart_s / gap_s if restart_s is not None else None,
        reward_first=_mean(steps[:_ENDS]),
        reward_last=_mean(steps[-_ENDS:]),
        digest=digest,
        journal=str(directory.journal),
        timeline=str(directory.timeline),
    )
    directory.report.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _rows(fold: _Fold, steps: tuple[LearnedStep, ...]) -> tuple[VersionRow, ...]:
    rollouts = Counter(bar.version for bar in fold.bars)
    rewards = {learned.step: learned.reward_mean for learned in steps}
    return tuple(
        VersionRow(
            version=commit.label,
            step=commit.identity.step,
            rollouts=rollouts[commit.version],
            drain_s=commit.drain_s,
            gap_s=commit.gap_s,
            install_s=commit.install_s,
            reward=rewards.get(commit.identity.step),
        )
        for commit in fold.commits
    )


def _mean(steps: tuple[LearnedStep, ...]) -> float:
    return sum(learned.reward_mean for learned in steps) / len(steps)


def print_report(report: Report, directory: RunDirectory) -> None:
    """Print the closing table."""
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("version", "rollouts", "drain", "gap", "install"):
        table.add_column(heading, justify="left" if heading == "version" else "right")
    table.add_column("reward of the step behind it")
    for row in report.versions:
        reward = "" if row.reward is None else f"{row.reward:.3f} {reward_bar(row.reward)}"
        times = (f"{seconds * 1000:.0f} ms" for seconds in (row.drain_s, row.gap_s, row.install_s))
        table.add_row(row.version, str(row.rollouts), *times, reward)
    console.print()
    console.print(table)
    for line in _summary(report, directory):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _summary(report: Report, directory: RunDirectory) -> list[str]:
    processes = (
        "one server process, never restarted"
        if report.engine_processes == 1
        else (f"{report.engine_processes} server processes")
    )
    lines = [
        "",
        f"{len(report.versions)} versions on {processes} (pid {report.pid})",
        f"{report.finished} rollouts finished, {report.aborted} aborted; tokens attested to another version than their "
        f"rollout's: {report.mismatched or 'none'}",
        f"reward: first {_ENDS} steps {report.reward_first:.3f}, last {_ENDS} steps {report.reward_last:.3f}",
        f"median drain {report.drain_s_median * 1000:.0f} ms, median gap {report.gap_s_median * 1000:.0f} ms",
    ]
    if report.restart_s is not None and report.restart_over_gap is not None:
        lines.append(
            f"a restart of the server takes {report.restart_s:.1f} s here: {report.restart_over_gap:.0f} times the gap"
        )
    return [
        *lines,
        f"timeline: {report.timeline}",
        f"journal:  {report.journal}  (rc replay-journal {report.journal})",
        f"state digest: {report.digest}",
    ]
