"""What vLLM answers, as far as rc reads it: the completion of a generate request, and the message in an error."""

from __future__ import annotations

import msgspec

from rc.effects.protocol import Failed, Generation, Ok, Outcome
from rc.events.types import Span

__all__ = ("error_text", "generation_of")


def generation_of(answer: object) -> Outcome[Generation]:
    """Read the answer of ``/inference/v1/generate``; one that is no single completion with logprobs is a failure."""
    try:
        return msgspec.convert(answer, _Answer).generation()
    except msgspec.ValidationError as error:
        return Failed(f"/inference/v1/generate answered something else than a completion: {error}")


class _TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    """The part of vLLM's generate response that rc reads."""

    choices: list[_Choice]
    usage: _Usage | None = None

    def generation(self) -> Outcome[Generation]:
        if len(self.choices) != 1:
            return Failed(f"/inference/v1/generate answered {len(self.choices)} choices; rollouts have one (n=1)")
        choice = self.choices[0]
        token_ids = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        if [entry.token_id for entry in content] != token_ids:
            wrong = "logprobs of other tokens than it sampled" if content else "no logprobs; rollouts need them"
            return Failed(f"/inference/v1/generate gave {wrong}")
        details = self.usage.prompt_tokens_details if self.usage else None
        return Ok(
            Generation(
                token_ids=tuple(token_ids),
                logprobs=tuple(entry.logprob for entry in content),
                spans=tuple(
                    Span(label=span.version, start=span.start, end=span.end) for span in choice.weight_versions or ()
                ),
                finish_reason=choice.finish_reason,
                cached_tokens=details.cached_tokens if details else None,
            )
        )


def error_text(content: bytes) -> str:
    """The message inside an error body of vLLM or FastAPI, or the body's beginning."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content[:300].decode(errors="replace")
    match body:
        case {"error": {"message": str(message)}} | {"error": str(message)} | {"detail": str(message)}:
            return message
    return content[:300].decode(errors="replace")
