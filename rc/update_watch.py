"""One update as its caller waits for it."""

from __future__ import annotations

import msgspec

from rc.decision_log import DecisionLog
from rc.errors import UpdateAbandoned, UpdateError, UpdateTainted
from rc.events import types as events
from rc.versions import WeightIdentity, version_label

__all__ = ("Commit", "UpdateWatch")


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A published version and what it took, by the journal's own times.

    Attributes:
        drain_s: From the request until no rollout was active.
        gap_s: From the start of the pause until the engine generated again: how long it could not serve.
        install_s: Sending and applying the weights, within the gap.
        sent_bytes: Bytes of weights sent.
    """

    version: int
    identity: WeightIdentity
    update: str
    drain_s: float
    gap_s: float
    install_s: float
    sent_bytes: int

    @property
    def label(self) -> str:
        """The version as engines attest it, e.g. ``"rc-7"``."""
        return version_label(self.version)


class UpdateWatch:
    """Follows the durable events of one update until it ends."""

    def __init__(self, update: str) -> None:
        self.update = update
        self.ended = False
        self._target = ""
        self._commit: Commit | None = None
        self._error: UpdateError | None = None
        self._requested_at = self._paused_at = self._resumed_at = 0.0
        self._install_s = 0.0
        self._sent_bytes = 0

    def note(self, event: events.Event) -> None:
        """Take in a durable event; one that is not of this update changes nothing."""
        if getattr(event, "update", None) != self.update:
            return
        match event:
            case events.RequestUpdate():
                self._target, self._requested_at = version_label(event.target), event.at
            case events.Quiesced():
                self._paused_at = event.at - event.evidence.took_s
            case events.Installed():
                self._install_s = event.evidence.took_s
                self._sent_bytes = getattr(event.evidence, "sent_bytes", 0)
            case events.Resumed():
                self._resumed_at = event.at
            case events.Committed():
                self._end(commit=self._commit_of(event))
            case events.UpdateAbandoned():
                self._end(error=UpdateAbandoned(self.update, self._target, event.reason))
            case events.Tainted():
                self._end(error=UpdateTainted(self.update, self._target, event.reason))

    def _end(self, *, commit: Commit | None = None, error: UpdateError | None = None) -> None:
        self.ended, self._commit, self._error = True, commit, error

    def _commit_of(self, event: events.Committed) -> Commit:
        return Commit(
            version=event.version,
            identity=event.identity,
            update=event.update,
            drain_s=self._paused_at - self._requested_at,
            gap_s=self._resumed_at - self._paused_at,
            install_s=self._install_s,
            sent_bytes=self._sent_bytes,
        )

    async def outcome(self, log: DecisionLog) -> Commit:
        """Wait for the end.

        Raises:
            UpdateAbandoned, UpdateTainted: It did not end in a commit.
            JournalClosed: The controller stopped meanwhile; the journal tells how far it got.
        """
        while not self.ended:
            log.check_running()
            await log.changed()
        if self._error is not None:
            raise self._error
        assert self._commit is not None
        return self._commit
