"""The documented state machine is the table: nobody edits one without the other."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness import state_diagram, state_machine
from rc.lifecycle import TRANSITIONS, Phase

FILES = state_machine.state_machine_files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.name))
def test_the_committed_file_is_what_the_table_gives(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path], "run python -m harness.state_machine"


def test_every_transition_is_in_the_text() -> None:
    page = FILES[state_machine.DOCS / "state-machine.md"]
    for source, row in TRANSITIONS.items():
        for kind in row:
            assert f"    {source.name} --> " in page
            assert f": {kind}\n" in page


def test_the_picture_is_well_formed_and_names_every_phase() -> None:
    picture = ET.fromstring(FILES[state_machine.DOCS / "state-machine.svg"])  # noqa: S314 - our own text
    names = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "name"]
    assert names == [phase.name for phase in Phase]


def test_a_transition_that_the_picture_cannot_show_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**TRANSITIONS, Phase.ABSENT: {"engine_joined": Phase.READY}}
    monkeypatch.setattr(state_diagram, "TRANSITIONS", more)
    with pytest.raises(KeyError):
        state_diagram.diagram_svg()


def test_another_table_gives_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    less = {**TRANSITIONS, Phase.TAINTED: {}}
    monkeypatch.setattr(state_machine, "TRANSITIONS", less)
    path = state_machine.DOCS / "state-machine.md"
    assert state_machine.state_machine_files()[path] != FILES[path]
