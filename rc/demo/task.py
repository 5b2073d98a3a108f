"""What the demo's policy is asked to do, and how a completion is scored.

A prompt names a kind of character (`UPPERCASE`, `digits`, …); the reward is the share of the completion that is of that
kind. One fixed habit cannot earn it: the policy has to read the prompt. A policy with random weights scores what chance
gives, so there is something to reinforce from the first sample on, and the rule is checked on the decoded text, so any
tokenizer will do.

This module needs no torch: a prompts file is checked before anything slow is imported.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from rc.errors import CallerError

__all__ = (
    "DEFAULT_RULE",
    "RULES",
    "InvalidPrompts",
    "Prompt",
    "built_in_prompts",
    "load_prompts",
    "prompt_batch",
    "reward",
    "sampling_seed",
)

RULES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "lowercase": frozenset(string.ascii_lowercase),
        "UPPERCASE": frozenset(string.ascii_uppercase),
        "digits": frozenset(string.digits),
        "punctuation": frozenset(string.punctuation),
        "vowels": frozenset("aeiouAEIOU"),
    }
)
"""The characters that each rule rewards, by the rule's name."""

DEFAULT_RULE = "UPPERCASE"
"""Scores prompts that name no rule: rare enough in ordinary text, and in noise, that there is room to rise."""

_BUILT_IN_RULES = ("lowercase", "UPPERCASE", "digits")
_BULLETS = "abcdefghijkl"


class InvalidPrompts(CallerError):
    """A prompts file that cannot be used. ``line`` counts from 1, or is None where the whole file is meant."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        where = f"{path}, line {line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the name of the rule (a key of `RULES`) that scores its completions."""

    text: str
    rule: str = DEFAULT_RULE


def built_in_prompts() -> tuple[Prompt, ...]:
    """Give the demo's prompts, such as ``c. digits: ``: a letter that does not matter, and the rule that does."""
    return tuple(Prompt(text=f"{bullet}. {rule}: ", rule=rule) for bullet in _BULLETS for rule in _BUILT_IN_RULES)


def reward(rule: str, completion: str, max_tokens: int) -> float:
    """Score a completion's decoded text between 0 and 1.

    The share is taken of ``max_tokens`` or of the text's length, whichever is more, so that ending early, or emitting
    tokens that decode to nothing, earns less and not more.
    """
    rewarded = RULES[rule]
    return sum(character in rewarded for character in completion) / max(max_tokens, len(completion))


def prompt_batch(prompts: Sequence[Prompt], *, seed: int, cursor: int, count: int) -> tuple[Prompt, ...]:
    """Give the ``count`` prompts that follow position ``cursor`` of an endless sequence.

    The sequence is one shuffled pass over ``prompts`` after another. It is a function of its arguments alone, so the
    cursor is all that a resumed run has to remember.
    """
    return tuple(_prompt_at(prompts, seed, position) for position in range(cursor, cursor + count))


def _prompt_at(prompts: Sequence[Prompt], seed: int, position: int) -> Prompt:
    number, offset = divmod(position, len(prompts))
    order = list(range(len(prompts)))
    random.Random(f"{seed}/{number}").shuffle(order)
    return prompts[order[offset]]


def sampling_seed(seed: int, position: int, sample: int) -> int:
    """Give the engine's seed for one completion: ``sample`` of the prompt at ``position`` of the sequence."""
    return random.Random(f"{seed}/{position}/{sample}").getrandbits(31)


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read prompts, one a line: JSONL for a name ending in ``.jsonl``, plain text for any other.

    A JSONL line is ``{"prompt": "…"}`` with an optional ``"rule"``; blank lines are skipped. Raises `InvalidPrompts`
    naming the file and the line.
    """
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    lines = enumerate(_read_text(path).splitlines(), start=1)
    prompts = tuple(parse(path, number, line) for number, line in lines if line.strip())
    if not prompts:
        raise InvalidPrompts(path, None, "holds no prompt; write one a line")
    return prompts


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidPrompts(path, None, f"cannot be read ({error.strerror}); name a readable file") from error
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise InvalidPrompts(path, None, problem) from error


def _parse_text(path: Path, number: int, line: str) -> Prompt:
    return Prompt(text=line)


class _JsonLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    rule: str = DEFAULT_RULE


def _parse_json(path: Path, number: int, line: str) -> Prompt:
    try:
        parsed = msgspec.json.decode(line, type=_JsonLine)
    except msgspec.DecodeError as error:
        problem = f'{error}; a line reads {{"prompt": "…"}} or {{"prompt": "…", "rule": "digits"}}'
        raise InvalidPrompts(path, number, problem) from error
    if not parsed.prompt.strip():
        raise InvalidPrompts(path, number, "the prompt is empty; write its text or drop the line")
    if parsed.rule not in RULES:
        raise InvalidPrompts(path, number, f"no rule is named {parsed.rule!r}; there are {', '.join(RULES)}")
    return Prompt(text=parsed.prompt, rule=parsed.rule)
