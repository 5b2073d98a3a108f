"""``docs/journal.md`` shows commands with their output, and they are run here.

``RC_REWRITE_DOCS=1`` writes the output anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "journal.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory in which the page's paths exist."""
    golden = tmp_path / "tests" / "golden"
    golden.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "golden" / "journal-v1.db", golden)
    return tmp_path


def run_block(block: str, directory: Path) -> str:
    """Give the block with the output that its commands have now."""
    shown: list[str] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            done = subprocess.run(line[2:], shell=True, cwd=directory, capture_output=True, text=True, check=True)  # noqa: S602
            shown += [line, *done.stdout.splitlines()]
    return "\n".join(shown) + "\n"


def words(page: str) -> list[str]:
    """Give what is said, without the frames that versions of sqlite3 draw differently."""
    return re.findall(r"[^\s│─┌┬┐├┼┤└┴┘╭╮╰╯]+", page)


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs the sqlite3 command")
def test_every_command_prints_what_the_page_shows(directory: Path) -> None:
    page = PAGE.read_text()
    now = BLOCK.sub(lambda block: f"```console\n{run_block(block[1], directory)}```", page)
    if os.environ.get("RC_REWRITE_DOCS"):
        PAGE.write_text(now)
    assert words(now) == words(PAGE.read_text())
    assert page.count("$ sqlite3") >= 6


def test_the_chain_can_be_checked_with_the_page_s_few_lines(directory: Path) -> None:
    shutil.copy(directory / "tests" / "golden" / "journal-v1.db", directory / "run.db")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"head \d+ [0-9a-f]{64}\n", done.stdout)
