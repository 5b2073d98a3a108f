"""Writes ``docs/state-machine.md`` and ``docs/state-machine.svg`` from the lifecycle table.

``python -m harness.state_machine`` writes both; a test fails when the committed ones differ from what the table gives.
"""

from __future__ import annotations

from pathlib import Path

from harness.state_diagram import diagram_svg
from rc.events.types import EVENT_TYPES
from rc.lifecycle import IN_FLIGHT, MUTATED, TRANSITIONS, Home, Phase

__all__ = ("DOCS", "state_machine_files")

DOCS = Path(__file__).parent.parent / "docs"

MEANINGS = {
    Phase.ABSENT: "No process of this name is known. What it held is forgotten, but not that it was TAINTED.",
    Phase.JOINED: "A probe found the process. What it holds is only its own word, so it serves nothing.",
    Phase.READY: "It serves rollouts, if the version that it holds is the published one.",
    Phase.DRAINING: "It admits nothing more; its active rollouts may end.",
    Phase.QUIESCED: "No rollout is active and generation is paused.",
    Phase.UPDATING: "From the intent to mutate on, its weights may be neither version.",
    Phase.INVALIDATING: "Its weights are the target's, by evidence; its caches may hold values of others.",
    Phase.VALIDATING: "No cache entry computed under other weights is left; checks are made while it is paused.",
    Phase.RESUMING: "It is made to generate again: at the new version, or at the old one after an abandoned update.",
    Phase.TAINTED: "Its weights are in doubt. It serves nothing for the rest of its process's life.",
}

EFFECTS = {
    Phase.DRAINING: ("pause, once no rollout is active", "look", "abandoned: back to the old version"),
    Phase.QUIESCED: ("preflight", "look", "abandoned: back to the old version"),
    Phase.UPDATING: ("install the weights", "look", "at the target and paused: goes on; else TAINTED"),
    Phase.INVALIDATING: ("reset every cache", "reset again", "goes on; evidence fails: TAINTED"),
    Phase.VALIDATING: ("validate", "validate again", "goes on; evidence fails: TAINTED"),
    Phase.RESUMING: ("resume", "resume again", "goes on; evidence fails: TAINTED, or lost if abandoned"),
}

INTRODUCTION = """\
<!-- Written by `python -m harness.state_machine` from the table in rc/lifecycle.py. Do not edit: a test compares. -->

# The lifecycle of an engine

A live weight update can go wrong half-way, and an engine that generates after that gives samples that nobody can
place. So every engine is in exactly one phase, a phase changes by an event alone, and an event is recorded only on
evidence for it. What the table below does not allow raises `IllegalTransition` and changes nothing.

![Phases of an engine and the events between them](state-machine.svg)

The same as text, where Mermaid is shown:
"""

RULES = """\
`begin_update` is the point of no return: it says that weights may mutate from here on, and it is on disk before they
do. Until then, and after it only with proof that nothing was sent, `update_abandoned` leads back to the version that
the engine had. After it, whatever evidence cannot clear is `tainted`, and TAINTED has one way out: the end of that
process.

Three kinds of event concern no single engine. `controller_started` is legal in every phase and puts what is in flight
in doubt. `request_update` is legal while no update is in progress, under the next version number. `committed` is legal
once every member of the update that was not lost on the way is READY at the target.
"""

CRASHES = """\
A controller that dies leaves an effect in doubt. Its successor asks the same question of the same state; what must not
be repeated is looked at first, and the engine's own attestation decides.
"""


def state_machine_files() -> dict[Path, str]:
    """Give the text of each generated file."""
    return {DOCS / "state-machine.md": _page(), DOCS / "state-machine.svg": diagram_svg()}


def _page() -> str:
    parts = (
        INTRODUCTION,
        _mermaid(),
        "## What each phase means\n",
        _meanings(),
        "## Every phase, every event\n",
        "An empty cell is illegal. *home* is READY where the engine holds a validated version, else JOINED.\n",
        _matrix(),
        RULES,
        "## What each phase calls for, also after a crash\n",
        CRASHES,
        _effects(),
    )
    return "\n".join(parts)


def _mermaid() -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> ABSENT"]
    for source, row in TRANSITIONS.items():
        for kind, target in row.items():
            targets = (Phase.READY, Phase.JOINED) if isinstance(target, Home) else (target,)
            lines += [f"    {source.name} --> {end.name}: {kind}" for end in targets]
    return "\n".join([*lines, "```", ""])


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _meanings() -> str:
    rows = []
    for phase in Phase:
        admits = "yes" if "admit" in TRANSITIONS[phase] else ""
        active = "may be" if "finish_rollout" in TRANSITIONS[phase] else ""
        rows.append([phase.name, MEANINGS[phase], admits, active, "yes" if phase in MUTATED else ""])
    return _table(["Phase", "Meaning", "Admits", "Rollouts active", "Weights may differ from what it served"], rows)


def _matrix() -> str:
    kinds = [kind for kind in EVENT_TYPES if any(kind in row for row in TRANSITIONS.values())]
    rows = [[f"`{kind}`", *(_cell(phase, kind) for phase in Phase)] for kind in kinds]
    return _table(["", *(phase.name for phase in Phase)], rows)


def _cell(phase: Phase, kind: str) -> str:
    target = TRANSITIONS[phase].get(kind)
    if target is None:
        return ""
    if isinstance(target, Home):
        return "*home*"
    return "stays" if target is phase else target.name


def _effects() -> str:
    rows = [[phase.name, *EFFECTS[phase]] for phase in Phase if phase in IN_FLIGHT]
    return _table(["Phase", "Effect", "In doubt", "What may come of it"], rows)


def main() -> None:
    """Write the files."""
    for path, text in state_machine_files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
