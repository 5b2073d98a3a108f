"""One update as its caller waits for it."""

from __future__ import annotations

import msgspec

from rc.decision_log import DecisionLog
from rc.errors import UpdateAbandoned, UpdateTainted
from rc.events.types import Event
from rc.projections.timeline import Timeline, UpdateTimes, advance_timeline
from rc.versions import WeightIdentity, version_label

__all__ = ("Commit", "UpdateWatch")


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A published version and what it took, by the journal's own times.

    Attributes:
        drain_s: From the end of admission until no rollout was active.
        gap_s: From then until the engine generated again: how long it could not serve.
        install_s: Sending and applying the weights, within the gap.
        committed_at: Unix seconds.
    """

    version: int
    identity: WeightIdentity
    update: str
    drain_s: float
    gap_s: float
    install_s: float
    committed_at: float

    @property
    def label(self) -> str:
        """The version as engines attest it, e.g. ``"rc-7"``."""
        return version_label(self.version)

    @classmethod
    def of(cls, times: UpdateTimes) -> Commit:
        """Take it from the timeline of an update that has committed."""
        return cls(
            version=times.target,
            identity=times.identity,
            update=times.update,
            drain_s=times.drain_s or 0.0,
            gap_s=times.gap_s or 0.0,
            install_s=times.install_s or 0.0,
            committed_at=times.ended_at or 0.0,
        )


class UpdateWatch:
    """Follows the durable events of one update until it ends."""

    def __init__(self, update: str) -> None:
        self.update = update
        self._timeline = Timeline()

    def note(self, event: Event) -> None:
        """Take in a durable event; one that is not of this update changes nothing."""
        if getattr(event, "update", None) == self.update:
            self._timeline = advance_timeline(self._timeline, event)

    @property
    def _times(self) -> UpdateTimes | None:
        return self._timeline.by_update.get(self.update)

    @property
    def ended(self) -> bool:
        """Whether it committed, was abandoned, or left no member untainted."""
        return self._times is not None and self._times.outcome != "in_progress"

    async def outcome(self, log: DecisionLog) -> Commit:
        """Wait for the end.

        Raises:
            UpdateAbandoned, UpdateTainted: It did not end in a commit.
            JournalClosed: The controller stopped meanwhile; the journal tells how far it got.
        """
        while not self.ended:
            log.check_running()
            await log.changed()
        return self._commit()

    def _commit(self) -> Commit:
        times = self._timeline.by_update[self.update]
        target, reason = version_label(times.target), times.reason or "no reason given"
        match times.outcome:
            case "abandoned":
                raise UpdateAbandoned(self.update, target, reason)
            case "tainted":
                raise UpdateTainted(self.update, target, reason)
        return Commit.of(times)
