"""The lifecycle table as a picture: SVG, from the table and a layout, without any other program."""

from __future__ import annotations

from html import escape

from rc.lifecycle import IN_FLIGHT, MUTATED, TRANSITIONS, Home, Phase

__all__ = ("diagram_svg",)

WIDTH, HEIGHT = 1210, 560
BOX_WIDTH, BOX_HEIGHT = 160, 116
LINE_HEIGHT = 15
TOP, BOTTOM = 130, 380
COLUMNS = (105, 355, 605, 855, 1105)

CENTERS = {
    Phase.ABSENT: (COLUMNS[0], TOP),
    Phase.JOINED: (COLUMNS[1], TOP),
    Phase.READY: (COLUMNS[2], TOP),
    Phase.DRAINING: (COLUMNS[3], TOP),
    Phase.QUIESCED: (COLUMNS[4], TOP),
    Phase.TAINTED: (COLUMNS[0], BOTTOM),
    Phase.RESUMING: (COLUMNS[1], BOTTOM),
    Phase.VALIDATING: (COLUMNS[2], BOTTOM),
    Phase.INVALIDATING: (COLUMNS[3], BOTTOM),
    Phase.UPDATING: (COLUMNS[4], BOTTOM),
}

Point = tuple[int, int]
Route = tuple[tuple[Point, ...], Point]
"""The corners of a line, and where its name stands; (0, 0) where it shares the line of another."""

_HALF = BOX_WIDTH // 2
_ROOF, _FLOOR = TOP - BOX_HEIGHT // 2, TOP + BOX_HEIGHT // 2
_LOWER_ROOF = BOTTOM - BOX_HEIGHT // 2
_OVER = _ROOF - 34
_HOME_RAIL, _BACK_RAIL = 222, 272
_SHARED = (0, 0)


def _beside(source: Phase, target: Phase) -> Route:
    """Run straight from a box to its neighbour."""
    (x, y), (end, _) = CENTERS[source], CENTERS[target]
    step = _HALF if end > x else -_HALF
    return ((x + step, y), (end - step, y)), ((x + end) // 2, y - 8)


def _upright(x: int, start: int, end: int, label: int) -> Route:
    """Run straight up or down."""
    return ((x, start), (x, end)), (x, label)


def _back(x: int, start: int, label: Point = _SHARED) -> Route:
    """Run along the rail that leads back to RESUMING."""
    end = COLUMNS[1] + 55
    return ((x, start), (x, _BACK_RAIL), (end, _BACK_RAIL), (end, _LOWER_ROOF)), label


ROUTES: dict[tuple[Phase, Phase], Route] = {
    **{
        (source, target): _beside(source, target)
        for source, target in (
            (Phase.ABSENT, Phase.JOINED),
            (Phase.READY, Phase.DRAINING),
            (Phase.DRAINING, Phase.QUIESCED),
            (Phase.UPDATING, Phase.INVALIDATING),
            (Phase.INVALIDATING, Phase.VALIDATING),
            (Phase.VALIDATING, Phase.RESUMING),
        )
    },
    (Phase.JOINED, Phase.DRAINING): (
        ((COLUMNS[1], _ROOF), (COLUMNS[1], _OVER), (COLUMNS[3], _OVER), (COLUMNS[3], _ROOF)),
        (COLUMNS[2], _OVER - 7),
    ),
    (Phase.QUIESCED, Phase.UPDATING): _upright(COLUMNS[4] + 40, _FLOOR, _LOWER_ROOF, _HOME_RAIL),
    (Phase.TAINTED, Phase.ABSENT): _upright(COLUMNS[0], _LOWER_ROOF, _FLOOR, _BACK_RAIL),
    (Phase.RESUMING, Phase.JOINED): _upright(COLUMNS[1] - 40, _LOWER_ROOF, _FLOOR, _BACK_RAIL),
    (Phase.RESUMING, Phase.READY): (
        (
            (COLUMNS[1] + 10, _LOWER_ROOF),
            (COLUMNS[1] + 10, _HOME_RAIL),
            (COLUMNS[2], _HOME_RAIL),
            (COLUMNS[2], _FLOOR),
        ),
        ((COLUMNS[1] + COLUMNS[2]) // 2, _HOME_RAIL - 7),
    ),
    (Phase.DRAINING, Phase.RESUMING): _back(COLUMNS[3], _FLOOR, (COLUMNS[2] + 50, _BACK_RAIL - 7)),
    (Phase.QUIESCED, Phase.RESUMING): _back(COLUMNS[4] - 40, _FLOOR),
    (Phase.UPDATING, Phase.RESUMING): _back(COLUMNS[4] - 40, _LOWER_ROOF),
}
STYLE = """
text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2328; }
.name { font-size: 14px; font-weight: 600; }
.edge { fill: none; stroke: #57606a; stroke-width: 1.4; }
.label { text-anchor: middle; paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.settled { fill: #f6f8fa; stroke: #57606a; }
.serving { fill: #dafbe1; stroke: #1a7f37; }
.flight { fill: #ddf4ff; stroke: #0969da; }
.mutated { fill: #fff8c5; stroke: #9a6700; }
.tainted { fill: #ffebe9; stroke: #cf222e; }
"""

LEGEND = (
    ("serving", "admits rollouts"),
    ("flight", "an update is under way, weights untouched or proven"),
    ("mutated", "weights may differ from what it served before"),
    ("tainted", "out of service until the process ends"),
)


def diagram_svg() -> str:
    """Draw the table.

    Raises:
        KeyError: If the table has a transition for which the layout has no route.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        "<title>Phases of an engine and the events between them</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#57606a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    edges = [edge for phase in Phase for edge in _drawn(phase)]
    lines += [_line(ROUTES[source, target][0]) for source, target, _ in edges]
    lines += [_label(kind, *ROUTES[source, target][1]) for source, target, kind in edges]
    for phase in Phase:
        lines += _box(phase)
    for number, (style, meaning) in enumerate(LEGEND):
        x, y = COLUMNS[1] - _HALF + number % 2 * 375, HEIGHT - 76 + number // 2 * 30
        lines.append(f'<rect class="{style}" x="{x}" y="{y}" width="18" height="18" rx="4"/>')
        lines.append(_text(meaning, x + 26, y + 13))
    return "\n".join([*(line for line in lines if line), "</svg>", ""])


def _ends(target: Phase | Home) -> tuple[Phase, ...]:
    return (Phase.READY, Phase.JOINED) if isinstance(target, Home) else (target,)


def _is_exit(source: Phase, target: Phase | Home) -> bool:
    """Whether a transition is named within the box: almost every phase can lose its engine or taint it."""
    if source is Phase.TAINTED:
        return False
    return target in (Phase.TAINTED, Phase.ABSENT)


def _drawn(source: Phase) -> list[tuple[Phase, Phase, str]]:
    row = TRANSITIONS[source].items()
    return [
        (source, end, kind)
        for kind, target in row
        for end in _ends(target)
        if end is not source and not _is_exit(source, target)
    ]


def _style(phase: Phase) -> str:
    if phase is Phase.TAINTED:
        return "tainted"
    if "admit" in TRANSITIONS[phase]:
        return "serving"
    if phase in MUTATED:
        return "mutated"
    return "flight" if phase in IN_FLIGHT else "settled"


def _box(phase: Phase) -> list[str]:
    x, y = CENTERS[phase]
    left, top = x - _HALF, y - BOX_HEIGHT // 2
    row = TRANSITIONS[phase].items()
    notes = [f"{kind}: stays" for kind, target in row if target is phase]
    notes += [f"{kind} → {target.name}" for kind, target in row if _is_exit(phase, target)]
    lines = [
        f'<rect class="{_style(phase)}" x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="10"/>',
        _text(phase.name, left + 12, top + 22, "name"),
    ]
    lines += [_text(note, left + 12, top + 41 + number * LINE_HEIGHT) for number, note in enumerate(notes)]
    return lines


def _line(points: tuple[Point, ...]) -> str:
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="edge" d="{path}" marker-end="url(#head)"/>'


def _label(kind: str, x: int, y: int) -> str:
    return _text(kind, x, y, "label") if (x, y) != _SHARED else ""


def _text(text: str, x: int, y: int, style: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return f'<text{attribute} x="{x}" y="{y}">{escape(text)}</text>'
