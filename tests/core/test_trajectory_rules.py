"""What a trajectory must satisfy: tokens, logprobs and spans that fit together."""

from __future__ import annotations

import math

import pytest

from rc.errors import InvalidTrajectory
from rc.events.types import Span, Turn
from rc.trajectory_rules import check_shape, contradiction, fully_attested


def sampled(tokens: int = 4, *, spans: tuple[Span, ...] = (), logprobs: tuple[float, ...] = ()) -> Turn:
    """Give a turn of so many tokens."""
    return Turn(prompt_token_ids=(1,), token_ids=tuple(range(tokens)), spans=spans, logprobs=logprobs)


def span(start: int, end: int, label: str = "rc-1") -> Span:
    """Give a span."""
    return Span(label=label, start=start, end=end)


def test_a_trajectory_has_a_turn() -> None:
    with pytest.raises(InvalidTrajectory, match="rollout r1 has no turn"):
        check_shape("r1", ())


@pytest.mark.parametrize("logprobs", [(), (-1.0, -0.5, 0.0, -80.0)])
def test_logprobs_are_absent_or_one_a_token(logprobs: tuple[float, ...]) -> None:
    check_shape("r1", (sampled(logprobs=logprobs),))


@pytest.mark.parametrize(
    ("logprobs", "wrong"),
    [
        ((-1.0,) * 3, "rollout r1, turn 1: 3 logprobs for 4 tokens"),
        ((-1.0,) * 5, "5 logprobs for 4 tokens"),
        ((-1.0, -1.0, 0.1, -1.0), "a logprob is positive, not finite"),
        ((-1.0, math.nan, -1.0, -1.0), "a logprob is positive, not finite"),
        ((-math.inf, -1.0, -1.0, -1.0), "a logprob is positive, not finite"),
        ((-1.0, -1.0, -1.0, -9999.0), "vLLM's stand-in for NaN"),
    ],
)
def test_logprobs_that_cannot_be_are_named_with_their_turn(logprobs: tuple[float, ...], wrong: str) -> None:
    with pytest.raises(InvalidTrajectory, match=wrong):
        check_shape("r1", (sampled(), sampled(logprobs=logprobs)))


@pytest.mark.parametrize("spans", [(), (span(0, 4),), (span(0, 1), span(1, 4)), (span(0, 0), span(0, 4))])
def test_spans_of_the_right_label_that_cover_the_tokens_are_no_contradiction(spans: tuple[Span, ...]) -> None:
    assert contradiction("rc-1", (sampled(spans=spans),)) is None


@pytest.mark.parametrize(
    ("spans", "wrong"),
    [
        ((span(0, 4, "rc-2"),), "attests 'rc-2' for tokens 0 to 4 of turn 1, not 'rc-1'"),
        ((span(0, 2), span(2, 4, "rc-2")), "attests 'rc-2' for tokens 2 to 4 of turn 1"),
        ((span(0, 3),), "cover 3 of 4 tokens"),
        ((span(0, 5),), "cover 5 of 4 tokens"),
        ((span(1, 4),), "a gap or an overlap at token 0"),
        ((span(0, 2), span(1, 4)), "a gap or an overlap at token 2"),
        ((span(0, 1), span(2, 4)), "a gap or an overlap at token 1"),
        ((span(0, -1), span(-1, 4)), "a gap or an overlap at token 0"),
    ],
)
def test_spans_that_contradict_the_binding_are_named_with_their_turn(spans: tuple[Span, ...], wrong: str) -> None:
    found = contradiction("rc-1", (sampled(spans=(span(0, 4),)), sampled(spans=spans)))
    assert found is not None
    assert wrong in found


def test_a_trajectory_is_attested_where_every_turn_with_tokens_has_spans() -> None:
    attested = sampled(spans=(span(0, 4),))
    assert fully_attested((attested, attested))
    assert fully_attested((attested, sampled(0)))
    assert not fully_attested((attested, sampled()))
    assert not fully_attested(())
