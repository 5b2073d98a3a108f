"""The commands that `rc.decide.decide` answers with events.

A command carries everything that its decision depends on besides the state: time, ids and evidence enter here as
data, which is what makes replaying a journal exact. Commands are recorded beside the events they caused.
"""

from __future__ import annotations

import msgspec

from rc.events.types import Turn, UpdatePath
from rc.evidence import Evidence, Observation
from rc.versions import WeightIdentity

__all__ = (
    "AbandonUpdate",
    "AbortRollouts",
    "AdmitRollout",
    "Command",
    "EndRollout",
    "JoinEngine",
    "LoseEngine",
    "ReportEvidence",
    "StartController",
    "StartUpdate",
)


class _Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="command"):
    """What every command has: when it was given, in Unix seconds."""

    at: float


class StartController(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="start_controller"):
    """A controller opened the journal under a new epoch."""

    controller: str
    epoch: int


class JoinEngine(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="join_engine"):
    """A probe found this engine process. Also how a restart of a known engine becomes known."""

    engine: str
    observed: Observation
    profile: str
    vllm: str
    model: str
    max_model_len: int
    manifest_digest: str | None = None


class LoseEngine(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="lose_engine"):
    """The engine process is known to be dead, or to be another one than before."""

    engine: str
    reason: str


class AdmitRollout(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="admit_rollout"):
    """A user wants a rollout at the published version."""

    rollout: str
    lease_s: float


class EndRollout(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="end_rollout"):
    """A rollout's owner hands in its trajectory."""

    rollout: str
    turns: tuple[Turn, ...]


class AbortRollouts(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="abort_rollouts"):
    """Rollouts end without a trajectory: their owner failed, was cancelled, or vanished past the lease."""

    rollouts: tuple[str, ...]
    reason: str
    turns: tuple[Turn, ...] = ()


class StartUpdate(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="start_update"):
    """A user wants these weights published."""

    update: str
    identity: WeightIdentity
    path: UpdatePath
    backend: str | None = None
    manifest_digest: str | None = None
    nbytes: int = 0


class AbandonUpdate(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="abandon_update"):
    """Give the update up, if nothing has mutated yet."""

    update: str
    reason: str


class ReportEvidence(_Command, frozen=True, kw_only=True, omit_defaults=True, tag="report_evidence"):
    """An effect handler saw this at an engine."""

    engine: str
    evidence: Evidence


Command = (
    StartController
    | JoinEngine
    | LoseEngine
    | AdmitRollout
    | EndRollout
    | AbortRollouts
    | StartUpdate
    | AbandonUpdate
    | ReportEvidence
)
