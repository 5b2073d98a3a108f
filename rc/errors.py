"""The errors that rc raises, one class per situation that a caller handles.

::

    RolloutCoreError
    ├── CallerError                 your call is wrong; nothing was changed
    │   ├── IllegalTransition       an event that its state does not allow
    │   ├── UnknownRollout          no active rollout of that id
    │   ├── InvalidIdentity         an identity that is malformed or goes backwards
    │   ├── InvalidWeights          parameters missing, unexpected, of another dtype or shape, NaN
    │   ├── InvalidTrajectory       tokens, logprobs and spans that do not fit together
    │   ├── PromptTooLong           the engine's context cannot hold the prompt and the completion
    │   ├── UpdateInProgress        another update has not ended
    │   └── NotAdmitted             no engine can take a rollout now
    ├── EngineError                 the engine is wrong, or cannot be reached
    │   ├── EngineUnreachable       nothing answers, or what answers is not a vLLM
    │   ├── EngineUnsuitable        a vLLM, but without what rc needs
    │   ├── EngineTainted           its weights are in doubt; only a restart clears that
    │   ├── EngineLost              it died or was restarted under rc
    │   ├── EngineStartFailed       the server process did not become healthy
    │   ├── GenerationFailed        the engine did not return a usable sample
    │   └── VersionMismatch         the engine attested another version than the rollout's
    ├── UpdateError                 an update that did not end in a commit
    │   ├── UpdateAbandoned         nothing was mutated; the old version goes on
    │   └── UpdateTainted           mutation failed; the engine is out of service
    └── JournalError                the journal, not the engine
        ├── JournalLocked           another live controller owns it
        ├── JournalFenced           a newer controller took over; this one may not write
        ├── JournalUnusable         cannot be opened or written: not a journal, read-only, full, newer schema
        ├── JournalCorrupt          a record whose chain, order or content is broken
        └── JournalClosed           it was closed, or stopped by an earlier append error

Every message says what is wrong, where, and what to do; the facts stay on the instance as attributes.
"""

from __future__ import annotations

__all__ = (
    "CallerError",
    "EngineError",
    "EngineLost",
    "EngineStartFailed",
    "EngineTainted",
    "EngineUnreachable",
    "EngineUnsuitable",
    "GenerationFailed",
    "IllegalTransition",
    "InvalidIdentity",
    "InvalidTrajectory",
    "InvalidWeights",
    "JournalClosed",
    "JournalCorrupt",
    "JournalError",
    "JournalFenced",
    "JournalLocked",
    "JournalUnusable",
    "NotAdmitted",
    "PromptTooLong",
    "RolloutCoreError",
    "UnknownRollout",
    "UpdateAbandoned",
    "UpdateError",
    "UpdateInProgress",
    "UpdateTainted",
    "VersionMismatch",
)


class RolloutCoreError(Exception):
    """Root of every error that rc raises on purpose."""


class CallerError(RolloutCoreError):
    """The call cannot be carried out as made; nothing was changed."""


class IllegalTransition(CallerError):
    """An event that the state it meets does not allow."""

    def __init__(self, kind: str, state: str, subject: str) -> None:
        super().__init__(f"{kind} is not allowed while {subject} is {state}")
        self.kind = kind
        self.state = state
        self.subject = subject


class UnknownRollout(CallerError):
    """No rollout of that id is active: never admitted, already ended, or reaped after its lease."""

    def __init__(self, rollout: str) -> None:
        super().__init__(
            f"rollout {rollout} is not active: it was never admitted, has ended, or outlived its lease "
            f"(the journal's abort_rollout event gives the reason)"
        )
        self.rollout = rollout


class InvalidIdentity(CallerError):
    """A weight identity that is malformed, or older than what is already published."""


class InvalidWeights(CallerError):
    """Weights that the engine cannot take: parameters missing, unexpected, NaN, of another dtype or shape."""


class InvalidTrajectory(CallerError):
    """A trajectory whose tokens, logprobs and spans do not fit together; it is not recorded."""


class PromptTooLong(CallerError):
    """Prompt plus requested completion exceed the engine's context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"a prompt of {prompt_tokens} tokens and a completion of up to {max_tokens} exceed the engine's context "
            f"of {max_model_len} tokens; shorten the prompt, lower max_tokens, or start vLLM with a larger "
            f"--max-model-len"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class UpdateInProgress(CallerError):
    """Another update has not ended; wait for it, or call with ``when_busy="queue"``."""

    def __init__(self, update: str, target: str) -> None:
        super().__init__(
            f"update {update} towards {target} is still in progress; await it, or pass when_busy='queue' to run "
            f"after it"
        )
        self.update = update
        self.target = target


class NotAdmitted(CallerError):
    """No engine can take a rollout now. ``transient`` tells whether waiting can help."""

    def __init__(self, reason: str, *, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


class EngineError(RolloutCoreError):
    """The engine did not do what was asked, or cannot be asked."""


class EngineUnreachable(EngineError):
    """Nothing answers at the engine's URL, or what answers is not a vLLM server."""


class EngineUnsuitable(EngineError):
    """A vLLM server that lacks something rc needs, or that belongs to somebody else."""


class EngineTainted(EngineError):
    """The engine's weights are in doubt. It serves nothing until its process is restarted and joined again."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(
            f"engine {engine} is TAINTED ({reason}); restart its server process and join it again, then publish "
            f"weights with update()"
        )
        self.engine = engine
        self.reason = reason


class EngineLost(EngineError):
    """The engine died, or its process was restarted, while rc was using it."""


class EngineStartFailed(EngineError):
    """The server process ended, or did not become healthy before its deadline."""


class GenerationFailed(EngineError):
    """The engine answered a generation request with an error, an abort, or something unusable."""


class VersionMismatch(EngineError):
    """The engine attested another weight version than the one the rollout is bound to."""


class UpdateError(RolloutCoreError):
    """An update that did not end in a commit."""

    def __init__(self, update: str, target: str, reason: str) -> None:
        super().__init__(f"update {update} towards {target} {self._outcome}: {reason}")
        self.update = update
        self.target = target
        self.reason = reason

    _outcome = "failed"


class UpdateAbandoned(UpdateError):
    """The update ended before anything was mutated; the engine goes on with the version it had."""

    _outcome = "was abandoned before anything was mutated"


class UpdateTainted(UpdateError):
    """Mutation began and evidence could not show that it completed; the engine is out of service."""

    _outcome = "left the engine TAINTED"


class JournalError(RolloutCoreError):
    """The journal cannot do what was asked."""


class JournalLocked(JournalError):
    """Another live controller holds the journal."""


class JournalFenced(JournalError):
    """A controller of a newer epoch took the journal over; this one may never write again."""


class JournalUnusable(JournalError):
    """The file cannot serve as a journal: missing, foreign, read-only, full, or of a newer schema."""


class JournalCorrupt(JournalError):
    """A record that is altered, missing or out of order. ``seq`` is the first bad sequence number."""

    def __init__(self, path: str, seq: int, problem: str) -> None:
        super().__init__(
            f"{path}: record {seq} {problem}; the journal is intact up to {seq - 1}. Keep the file, restore a copy "
            f"whose chain verifies, or inspect it with `rc verify-journal`"
        )
        self.path = path
        self.seq = seq
        self.problem = problem


class JournalClosed(JournalError):
    """The journal was closed, or an earlier append error stopped it until it is reopened."""
