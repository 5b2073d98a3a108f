"""The events: immutable facts, one struct per kind, named as users see them in the journal.

Times are Unix seconds. Versions are integers (7 is ``rc-7``). An event says what happened and carries the evidence
for it; it never says what to do next. A new field always has a default, and one of which there is a single object
(None, False, a small integer, ``""``, ``()``): others are told apart from equal values when they are left out, so
that reading and writing again would give other bytes. A changed meaning is a new schema version with an upcaster in
`rc.events.codec`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.versions import WeightIdentity

__all__ = (
    "EVENT_TYPES",
    "AbortRollout",
    "Admit",
    "BeginUpdate",
    "Committed",
    "ControllerStarted",
    "Drain",
    "EngineJoined",
    "EngineLost",
    "Event",
    "FinishRollout",
    "Installed",
    "Invalidated",
    "Quiesced",
    "RequestUpdate",
    "Resumed",
    "Span",
    "Tainted",
    "Turn",
    "UpdateAbandoned",
    "UpdatePath",
    "Validated",
    "kind_of",
)

UpdatePath = Literal["adopt", "one_phase"]
"""How an update's bytes reach the engine: ``adopt`` keeps what it loaded at start, ``one_phase`` sends while paused."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``start`` to ``end`` (exclusive) of a completion that the engine attests to a label of its own."""

    label: str
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to the engine within a rollout: what went in and what came out.

    Attributes:
        prompt_token_ids: Exact tokens sent.
        token_ids: Exact tokens sampled.
        logprobs: Log-probability of each sampled token under the sampling distribution; empty if none was recorded.
        spans: The engine's own attestation of which weights sampled which tokens; empty if it gave none.
        finish_reason: As the engine gave it: ``"stop"``, ``"length"``, ...
        sampling: Sampling parameters as sent.
        cached_tokens: Prompt tokens served from the prefix cache, where the engine reports it.
        request: Request id as sent to the engine.
        started_at, finished_at: Unix seconds.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    finish_reason: str | None = None
    sampling: dict[str, Any] = {}
    cached_tokens: int | None = None
    request: str | None = None
    started_at: float | None = None
    finished_at: float | None = None


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """What every event has: when it was decided, in Unix seconds."""

    schema: ClassVar[int] = 1

    at: float

    @property
    def kind(self) -> str:
        """The event's name as users see it."""
        return kind_of(type(self))


class ControllerStarted(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="controller_started"):
    """A controller took the journal; every effect of its predecessor without an outcome is in doubt from here on.

    ``rules`` numbers the behaviour of the fold, so that old journals keep folding the way they were written.
    """

    controller: str
    epoch: int
    rules: int = 1


class EngineJoined(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine_joined"):
    """An engine process was probed and is known from now on; it serves nothing until an update commits to it."""

    engine: str
    boot: str
    label: str
    profile: str = ""
    vllm: str = ""
    model: str = ""
    max_model_len: int = 0
    manifest_digest: str | None = None


class EngineLost(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine_lost"):
    """An engine process died, was restarted, or stopped answering."""

    engine: str
    boot: str
    reason: str


class Admit(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="admit"):
    """A rollout was bound to one engine and one committed version; its owner must end it within the lease."""

    rollout: str
    engine: str
    version: int
    lease_s: float


class FinishRollout(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="finish_rollout"):
    """A rollout ended with a trajectory whose every attested token belongs to the rollout's version."""

    rollout: str
    engine: str
    version: int
    turns: tuple[Turn, ...]


class AbortRollout(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="abort_rollout"):
    """A rollout ended without a usable trajectory. Turns that were complete are kept for audit, not for training."""

    rollout: str
    engine: str
    version: int
    reason: str
    turns: tuple[Turn, ...] = ()


class RequestUpdate(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="request_update"):
    """A user asked for new weights. ``engines`` is the membership that the update must reach."""

    update: str
    target: int
    identity: WeightIdentity
    path: UpdatePath
    engines: tuple[str, ...]
    backend: str | None = None
    manifest_digest: str | None = None
    nbytes: int = 0


class Drain(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """From here on the engine admits nothing; its active rollouts may finish."""

    update: str
    engine: str
    active: int


class Quiesced(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="quiesced"):
    """The engine has no active rollout and is paused."""

    update: str
    engine: str
    evidence: PauseReport


class BeginUpdate(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="begin_update"):
    """Intent: from here on the engine's weights may be neither version. ``base`` is what it served before."""

    update: str
    engine: str
    target: int
    evidence: PreflightReport
    base: int | None = None


class Installed(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="installed"):
    """The engine's weights are the target's, by evidence."""

    update: str
    engine: str
    target: int
    evidence: InstallReport | LookReport


class Invalidated(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="invalidated"):
    """No cache entry computed under other weights is left."""

    update: str
    engine: str
    evidence: CacheReport


class Validated(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="validated"):
    """Checks passed while the engine was still paused."""

    update: str
    engine: str
    evidence: ValidationReport


class Resumed(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="resumed"):
    """The engine generates again, after an update that validated or one that was abandoned."""

    update: str
    engine: str
    evidence: ResumeReport | LookReport


class Committed(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="committed"):
    """The target version is published: rollouts may be admitted under it."""

    update: str
    version: int
    identity: WeightIdentity
    engines: tuple[str, ...]


class UpdateAbandoned(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="update_abandoned"):
    """The update ended with nothing mutated; its engines go back to the version they had."""

    update: str
    reason: str
    evidence: Evidence | None = None


class Tainted(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="tainted"):
    """The engine's weights are in doubt: it never serves again under this boot."""

    engine: str
    reason: str
    update: str | None = None
    evidence: Evidence | None = None


Event = (
    ControllerStarted
    | EngineJoined
    | EngineLost
    | Admit
    | FinishRollout
    | AbortRollout
    | RequestUpdate
    | Drain
    | Quiesced
    | BeginUpdate
    | Installed
    | Invalidated
    | Validated
    | Resumed
    | Committed
    | UpdateAbandoned
    | Tainted
)

EVENT_TYPES: dict[str, type[Event]] = {}
"""Every event type by its kind."""


def kind_of(event_type: type[_Event]) -> str:
    """Give the kind that a type is tagged with."""
    return str(event_type.__struct_config__.tag)


EVENT_TYPES.update((kind_of(event_type), event_type) for event_type in Event.__args__)
