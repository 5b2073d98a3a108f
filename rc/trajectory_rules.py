"""What a trajectory must satisfy before it is recorded as finished."""

from __future__ import annotations

from rc.errors import InvalidTrajectory
from rc.events.types import Turn

__all__ = ("check_shape", "contradiction", "fully_attested")

_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes where a logprob is NaN or minus infinity."""


def check_shape(rollout: str, turns: tuple[Turn, ...]) -> None:
    """Check that tokens, logprobs and spans fit together.

    Raises:
        InvalidTrajectory: Naming the turn and what does not fit.
    """
    if not turns:
        raise InvalidTrajectory(f"rollout {rollout} has no turn: generate at least once, or let it abort")
    for number, turn in enumerate(turns):
        where = f"rollout {rollout}, turn {number}"
        if turn.logprobs and len(turn.logprobs) != len(turn.token_ids):
            raise InvalidTrajectory(f"{where}: {len(turn.logprobs)} logprobs for {len(turn.token_ids)} tokens")
        if not all(_UNKNOWN_LOGPROB < logprob <= 0.0 for logprob in turn.logprobs):
            raise InvalidTrajectory(f"{where}: a logprob is positive, not finite, or vLLM's stand-in for NaN")


def contradiction(label: str, turns: tuple[Turn, ...]) -> str | None:
    """Say how the engine's attestation contradicts a binding to ``label``, or None if it does not.

    A turn without spans attests nothing, which is recorded as such and is no contradiction.
    """
    for number, turn in enumerate(turns):
        end = 0
        for span in turn.spans:
            if span.label != label:
                where = f"tokens {span.start} to {span.end} of turn {number}"
                return f"the engine attests {span.label!r} for {where}, not {label!r}"
            if span.start != end or span.end < span.start:
                return f"the engine's spans of turn {number} have a gap or an overlap at token {end}"
            end = span.end
        if turn.spans and end != len(turn.token_ids):
            return f"the engine's spans of turn {number} cover {end} of {len(turn.token_ids)} tokens"
    return None


def fully_attested(turns: tuple[Turn, ...]) -> bool:
    """Whether the engine itself said, for every sampled token, which weights sampled it."""
    return bool(turns) and all(turn.spans or not turn.token_ids for turn in turns)
