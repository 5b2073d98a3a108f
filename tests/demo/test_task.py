"""What the demo's policy is asked, and how it is scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from rc.demo.task import InvalidPrompts, Prompt, built_in_prompts, load_prompts, prompt_batch, reward, sampling_seed


@pytest.mark.parametrize(
    ("rule", "completion", "expected"),
    [
        ("digits", "1234", 1.0),
        ("digits", "12ab", 0.5),
        ("digits", "", 0.0),
        ("UPPERCASE", "abcd", 0.0),
        ("lowercase", "é\ufffdab", 0.5),
    ],
)
def test_the_reward_is_the_share_of_characters_of_the_rules_kind(rule: str, completion: str, expected: float) -> None:
    assert reward(rule, completion, max_tokens=4) == expected


def test_ending_early_earns_less_and_long_tokens_earn_no_more_than_everything() -> None:
    assert reward("digits", "1", max_tokens=8) == 1 / 8
    assert reward("digits", "123456789012", max_tokens=4) == 1.0


def test_no_single_habit_earns_more_than_a_third_of_the_built_in_task() -> None:
    prompts = built_in_prompts()
    assert all(prompt.rule in prompt.text for prompt in prompts)
    for habit in ("a" * 32, "A" * 32, "1" * 32):
        assert sum(reward(prompt.rule, habit, 32) for prompt in prompts) / len(prompts) == pytest.approx(1 / 3)


def test_prompts_come_in_shuffled_passes_that_depend_on_seed_and_cursor_alone() -> None:
    prompts = built_in_prompts()
    whole = prompt_batch(prompts, seed=3, cursor=0, count=2 * len(prompts))
    assert set(whole[: len(prompts)]) == set(whole[len(prompts) :]) == set(prompts)
    assert whole[: len(prompts)] != whole[len(prompts) :] != prompts
    assert prompt_batch(prompts, seed=3, cursor=30, count=12) == whole[30:42]
    assert prompt_batch(prompts, seed=4, cursor=0, count=36) != whole[:36]


def test_every_completion_samples_with_a_seed_of_its_own() -> None:
    seeds = {sampling_seed(0, position, sample) for position in range(128) for sample in range(8)}
    assert len(seeds) == 128 * 8
    assert sampling_seed(0, 1, 2) == sampling_seed(0, 1, 2) != sampling_seed(1, 1, 2)


def test_prompts_are_read_from_text_and_from_jsonl(tmp_path: Path) -> None:
    text, jsonl = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("\ufeffone é\n\ntwo\n", encoding="utf-8")
    jsonl.write_text('{"prompt": "one"}\n{"prompt": "two", "rule": "digits"}\n')
    assert load_prompts(text) == (Prompt(text="one é"), Prompt(text="two"))
    assert load_prompts(jsonl) == (Prompt(text="one"), Prompt(text="two", rule="digits"))


@pytest.mark.parametrize(
    ("name", "content", "line", "problem"),
    [
        ("p.txt", b"\n \n", None, "no prompt"),
        ("p.txt", b"caf\xe9\n", None, "not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', 3, "truncated"),
        ("p.jsonl", b'{"text": "a"}\n', 1, "unknown field `text`"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 7}\n', 2, "Expected `str`"),
        ("p.jsonl", b'{"prompt": " "}\n', 1, "empty"),
        ("p.jsonl", b'{"prompt": "a", "rule": "haiku"}\n', 1, "no rule is named 'haiku'"),
    ],
)
def test_a_bad_prompts_file_is_refused_by_file_and_line(
    tmp_path: Path, name: str, content: bytes, line: int | None, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidPrompts, match=problem) as caught:
        load_prompts(path)
    assert (caught.value.path, caught.value.line) == (path, line)
    assert str(path) in str(caught.value)


def test_a_prompts_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompts, match=r"absent\.txt: cannot be read"):
        load_prompts(tmp_path / "absent.txt")
