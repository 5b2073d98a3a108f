"""The golden scripts, meant to be read. ``pytest tests/core/test_golden_scripts.py --rewrite`` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.golden import rewritten

SCRIPTS = Path(__file__).parent.parent / "golden" / "scripts"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: str(path.stem))
def test_a_script_causes_the_trace_that_it_shows(path: Path, pytestconfig: pytest.Config) -> None:
    expected = path.read_text(encoding="utf-8")
    actual = rewritten(expected)
    if pytestconfig.getoption("rewrite"):
        path.write_text(actual, encoding="utf-8")
        return
    assert actual == expected, "if the new trace is right: pytest --rewrite, and review the difference"


def test_there_are_scripts() -> None:
    assert len(list(SCRIPTS.glob("*.txt"))) >= 16


def test_a_script_whose_trace_is_missing_or_wrong_differs() -> None:
    script = "> start c1\n"
    full = rewritten(script)
    assert full != script
    assert "controller_started" in full
    assert rewritten(full.replace("epoch=1", "epoch=7")) == full


def test_an_unknown_verb_is_no_command() -> None:
    with pytest.raises(KeyError, match="fly"):
        rewritten("> fly e\n")
