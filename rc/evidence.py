"""Evidence: what an effect handler saw at an engine, as plain data.

A handler acts and reports; it never decides. Each report carries an `Observation` taken *after* the action, so that
the core can check the postcondition itself instead of trusting a status code. Unknown values are None and count as
unproven.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = (
    "CacheReport",
    "Evidence",
    "InstallReport",
    "LookReport",
    "Observation",
    "PauseReport",
    "PreflightReport",
    "ResumeReport",
    "ValidationReport",
)


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One look at an engine.

    Attributes:
        boot: Identifies the server process; another value means it was restarted.
        label: The weight version label that the engine attests.
        paused: Whether its scheduler is paused.
        gone: Whether nothing listens at its address any more; False also where that is not known.
        problem: Why something could not be read.
    """

    boot: str | None = None
    label: str | None = None
    paused: bool | None = None
    gone: bool = False
    problem: str | None = None


class _Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="report"):
    """Fields that every report has: the look after the action, seconds it took, and what went wrong, if anything."""

    observed: Observation
    took_s: float = 0.0
    problem: str | None = None


class LookReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="look"):
    """A look without an action: how recovery learns what a dead controller left behind."""


class PauseReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """Generation was paused; requests of strangers that were in flight were aborted."""


class PreflightReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="preflight"):
    """Everything that can be checked before weights mutate was checked; ``problem`` names the first that failed."""


class InstallReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="install"):
    """Weights were sent and applied, or an attempt at it ended.

    Attributes:
        mutation: ``"none"`` if nothing that mutates was ever sent to the engine, ``"complete"`` if every step was
            acknowledged, else ``"possible"``.
        sent_bytes: Bytes of weights sent.
    """

    mutation: Literal["none", "possible", "complete"]
    sent_bytes: int = 0


class CacheReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="caches"):
    """Caches of the old version were reset. A flag is true only where the engine said so.

    ``connector`` is None where the engine has no external KV connector.
    """

    prefix: bool = False
    multimodal: bool = False
    encoder: bool = False
    connector: bool | None = None

    @property
    def complete(self) -> bool:
        """Whether every cache that this engine has was reset."""
        return self.prefix and self.multimodal and self.encoder and self.connector is not False


class ValidationReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="validation"):
    """Checks made while the engine is paused at the new version.

    Attributes:
        checks: Names of the checks that passed; an empty tuple is not a pass.
    """

    checks: tuple[str, ...] = ()


class ResumeReport(_Report, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """Generation was resumed."""


Evidence = LookReport | PauseReport | PreflightReport | InstallReport | CacheReport | ValidationReport | ResumeReport
