"""Parse the command line, run one command, turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from rc.errors import RolloutCoreError
from rc.exit_codes import EXIT_CODES_HELP, ExitCode, exit_code_of

__all__ = ("main",)

_DESCRIPTION = """\
RolloutCore updates a policy's weights inside running vLLM engines and records every step in a journal.

start here:
  rc demo                          train a small policy on a real vLLM engine and watch its versions change
  rc status run.db                 what the journal says is going on
  rc tail run.db --follow          watch events as they become durable
  rc replay-journal run.db         rebuild the state, check every digest, say what recovery would do
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``rc`` and give its exit code."""
    arguments = _parser().parse_args(argv)
    # A polite kill ends a command as Ctrl-C does: what it started is ended, what it holds is closed.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return int(arguments.run(arguments))
    except RolloutCoreError as error:
        print(f"rc: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        print("rc: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough. Python would complain once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rc",
        description=_DESCRIPTION,
        epilog=EXIT_CODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rc {version('rolloutcore')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_journal_commands(commands)
    _add_doctor(commands)
    _add_demo(commands)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # argparse has no public name for it


def _command(commands: Commands, name: str, summary: str, detail: str = "") -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "." + (f"\n\n{detail}" if detail else "")
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EXIT_CODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_journal_commands(commands: Commands) -> None:
    from rc.cli import journal_commands

    status = _command(commands, "status", "show engines, active rollouts, the update in progress and the last commit")
    _journal(status)
    _json(status)
    status.set_defaults(run=journal_commands.status)

    tail = _command(
        commands,
        "tail",
        "print events, one aligned line each",
        "With --follow it goes on with new events as they become durable, while a controller writes elsewhere.",
    )
    _journal(tail)
    tail.add_argument("--follow", "-f", action="store_true", help="go on with new events until Ctrl-C")
    tail.add_argument("--after", type=_position, default=0, metavar="SEQ", help="begin behind this sequence number")
    tail.add_argument(
        "--kind", action="append", metavar="KIND", help="only events of this kind, e.g. committed; may be repeated"
    )
    _json(tail, "print one JSON object a line, as recorded")
    tail.set_defaults(run=journal_commands.tail)

    replay = _command(
        commands,
        "replay-journal",
        "rebuild the state from the journal and check it",
        "Folds every event, compares the state with each stored digest, decides every recorded command again and\n"
        "compares the events byte for byte. Then prints the state, its digest, and what a controller would do on\n"
        "opening.",
    )
    _journal(replay)
    replay.add_argument("--at", type=_position, metavar="SEQ", help="stop behind this sequence number")
    _json(replay)
    replay.set_defaults(run=journal_commands.replay_journal)

    verify = _command(
        commands,
        "verify-journal",
        "check the hash chain and every record",
        "Any edit, gap or reordering shows at the first record that it touches.",
    )
    _journal(verify)
    _json(verify)
    verify.set_defaults(run=journal_commands.verify_journal)

    trajectories = _command(
        commands,
        "trajectories",
        "export trajectories with their provenance",
        "One row a rollout: version, declared identity, engine, tokens, logprobs and the engine's own version spans.",
    )
    _journal(trajectories)
    trajectories.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="FILE.jsonl, or FILE.parquet (needs pyarrow)"
    )
    trajectories.add_argument("--aborted", action="store_true", help="include aborted rollouts, marked as such")
    _json(trajectories)
    trajectories.set_defaults(run=journal_commands.trajectories)


def _add_doctor(commands: Commands) -> None:
    from rc.cli import doctor

    parser = _command(
        commands,
        "doctor",
        "tell what an engine can do, what it lacks, and what is unsafe about how it is exposed",
        "Reads only; changes nothing.",
    )
    parser.add_argument("--engine", required=True, metavar="URL", help="e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", default=os.environ.get("RC_API_KEY"), metavar="KEY", help="default: the variable RC_API_KEY"
    )
    _json(parser)
    parser.set_defaults(run=doctor.doctor)


def _add_demo(commands: Commands) -> None:
    from rc.cli import demo

    parser = _command(
        commands,
        "demo",
        "train a small policy by RL while one real vLLM server moves from version to version",
        "Starts a vLLM server, samples rollouts, learns by a group-relative policy gradient, and updates the running\n"
        "server after every step. A run that was cut off goes on where it was: give the same command again.",
    )
    demo.add_arguments(parser)
    _json(parser, "print the report as JSON at the end, progress as plain lines on stderr")
    parser.set_defaults(run=demo.demo)


def _journal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", type=Path, help="the journal file, e.g. run.db")


def _json(parser: argparse.ArgumentParser, summary: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=summary)


def _position(text: str) -> int:
    try:
        position = int(text)
    except ValueError:
        position = -1
    if position < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a sequence number: they count from 1 (0 is before the first)"
        )
    return position
