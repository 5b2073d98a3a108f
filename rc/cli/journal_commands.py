"""Commands that read a journal: ``status``, ``tail``, ``replay-journal``, ``verify-journal``, ``trajectories``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rc.cli.event_lines import LEGEND, event_line
from rc.cli.export import export_trajectories
from rc.errors import CallerError
from rc.events.journal import Record
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import EVENT_TYPES
from rc.events.verify import verify
from rc.exit_codes import ExitCode
from rc.projections.control import ControlState, evolve, state_digest
from rc.replay import Replay, Replayer, recovery_plan
from rc.versions import version_label

__all__ = ("UnknownKind", "replay_journal", "status", "tail", "trajectories", "verify_journal")


class UnknownKind(CallerError):
    """A ``--kind`` that no event has."""

    def __init__(self, kind: str) -> None:
        near = difflib.get_close_matches(kind, EVENT_TYPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EVENT_TYPES)}"
        super().__init__(f"no event is of kind {kind!r}; {hint}")


# --------------------------------------------------------------------------------------------------------------- status


def status(arguments: argparse.Namespace) -> ExitCode:
    """Print what the journal says is going on."""
    state, head = anyio.run(_state, arguments.journal)
    if arguments.json:
        _print_json({"seq": head, "digest": state_digest(state), **_summary(state)})
    else:
        print(f"{arguments.journal}: {head} events")
        _print_state(state)
    return ExitCode.OK


async def _state(journal: Path) -> tuple[ControlState, int]:
    state, head = ControlState(), 0
    async with SqliteReader.open(journal) as reader:
        async for record in reader.records():
            state, head = evolve(state, record.event), record.seq
    return state, head


def _summary(state: ControlState) -> dict[str, Any]:
    return {
        "controller": state.controller,
        "epoch": state.epoch,
        "published": state.published,
        "update": state.update,
        "engines": [state.engines[name] for name in sorted(state.engines)],
        "active": [state.rollouts.active[rollout] for rollout in sorted(state.rollouts.active)],
        "finished": state.rollouts.finished,
        "aborted": state.rollouts.aborted,
    }


def _print_state(state: ControlState) -> None:
    published = state.published
    if published is None:
        print("  published    nothing yet")
    else:
        identity = published.identity
        print(f"  published    {version_label(published.version)} = {identity.run} step {identity.step}")
    for name in sorted(state.engines):
        engine = state.engines[name]
        holds = "no proven version" if engine.version is None else version_label(engine.version)
        doubt = ", in doubt" if engine.in_doubt else ""
        why = f" ({engine.taint})" if engine.taint else ""
        print(f"  engine       {name} is {engine.phase.name}{doubt}{why}, holds {holds}, {engine.active} active")
    if state.update is not None:
        update = state.update
        print(
            f"  update       {update.update} towards {version_label(update.target)} since {_time(update.requested_at)}"
        )
    rollouts = state.rollouts
    print(f"  rollouts     {len(rollouts.active)} active, {rollouts.finished} finished, {rollouts.aborted} aborted")
    print(f"  controller   {state.controller or 'none yet'}, epoch {state.epoch}")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ----------------------------------------------------------------------------------------------------------------- tail


def tail(arguments: argparse.Namespace) -> ExitCode:
    """Print events, and with ``--follow`` go on."""
    kinds = frozenset(arguments.kind or EVENT_TYPES)
    for kind in kinds - EVENT_TYPES.keys():
        raise UnknownKind(kind)
    line: Callable[[Record], str] = _json_line if arguments.json else event_line
    if not arguments.json:
        print(LEGEND, flush=True)
    anyio.run(_tail, arguments, kinds, line)
    return ExitCode.OK


async def _tail(arguments: argparse.Namespace, kinds: frozenset[str], line: Callable[[Record], str]) -> None:
    async with SqliteReader.open(arguments.journal) as reader:
        records = reader.follow if arguments.follow else reader.records
        async for record in records(after=arguments.after):
            if record.kind in kinds:
                print(line(record), flush=arguments.follow)


def _json_line(record: Record) -> str:
    envelope = {"seq": record.seq, "epoch": record.epoch, "schema": record.schema, "hash": record.hash}
    return msgspec.json.encode({**envelope, "event": msgspec.Raw(record.body.encode())}).decode()


# --------------------------------------------------------------------------------------------------------------- replay


def replay_journal(arguments: argparse.Namespace) -> ExitCode:
    """Rebuild the state, check it, and say what recovery would do."""
    replay = anyio.run(_replay, arguments.journal, arguments.at)
    if arguments.at is not None and replay.seq < arguments.at:
        raise CallerError(f"{arguments.journal} ends at {replay.seq}; --at {arguments.at} is behind its end")
    plan = recovery_plan(replay.state)
    if arguments.json:
        report = {
            "seq": replay.seq,
            "digest": replay.digest,
            "digests_checked": replay.digests_checked,
            "decisions_rerun": replay.decisions_rerun,
            "kinds": replay.kinds,
            "problems": replay.problems,
            "recovery": plan,
            **_summary(replay.state),
        }
        _print_json(report)
    else:
        _print_replay(arguments.journal, replay, plan)
    return ExitCode.FOUND_PROBLEMS if replay.problems else ExitCode.OK


async def _replay(journal: Path, at: int | None) -> Replay:
    replayer = Replayer()
    async with SqliteReader.open(journal) as reader:
        async for record in reader.records():
            if at is not None and record.seq > at:
                break
            replayer.apply(record)
    return replayer.result()


def _print_replay(journal: Path, replay: Replay, plan: tuple[str, ...]) -> None:
    print(f"{journal}: {replay.seq} events folded")
    print(
        f"  checked      {replay.digests_checked} stored state digests, {replay.decisions_rerun} decisions made again"
    )
    _print_state(replay.state)
    for rollout in sorted(replay.state.rollouts.active):
        active = replay.state.rollouts.active[rollout]
        print(f"  active       {rollout} at {version_label(active.version)} since {_time(active.admitted_at)}")
    print("opening it with a controller would:")
    for step in plan:
        print(f"  - {step}")
    for problem in replay.problems:
        print(f"PROBLEM at {problem.seq}: {problem.what}")
    print(f"state digest: {replay.digest}")


# --------------------------------------------------------------------------------------------------------------- verify


def verify_journal(arguments: argparse.Namespace) -> ExitCode:
    """Check the chain and every record."""

    async def check() -> tuple[Any, tuple[str, ...]]:
        async with SqliteReader.open(arguments.journal) as reader:
            return await verify(reader), reader.warnings

    report, warnings = anyio.run(check)
    if arguments.json:
        _print_json({**msgspec.structs.asdict(report), "intact": report.intact, "warnings": warnings})
    else:
        print(f"{arguments.journal}: {report.records} records of {report.decisions} decisions verify")
        print(f"  journal      {report.journal_id}")
        print(f"  head         {report.head.seq} {report.head.hash}")
        for span in report.epochs:
            print(f"  epoch {span.epoch:<6} wrote {span.first} to {span.last}")
        if report.torn_tail is not None:
            print(f"  torn tail    {report.torn_tail}")
        for warning in warnings:
            print(f"  note         {warning}", file=sys.stderr)
        print("intact" if report.intact else f"PROBLEM: {report.problem}")
    return ExitCode.OK if report.intact else ExitCode.FOUND_PROBLEMS


# --------------------------------------------------------------------------------------------------------- trajectories


def trajectories(arguments: argparse.Namespace) -> ExitCode:
    """Export trajectories."""
    written = anyio.run(export_trajectories, arguments.journal, arguments.out, arguments.aborted)
    if arguments.json:
        _print_json({"out": str(arguments.out), "trajectories": written})
    else:
        print(f"{written} trajectories written to {arguments.out}")
    return ExitCode.OK


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())
