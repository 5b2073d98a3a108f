"""Exit codes, for scripts. They are part of the interface: a code never changes its meaning."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from rc.errors import CallerError, EngineError, JournalError, RolloutCoreError

__all__ = ("EXIT_CODES_HELP", "ExitCode", "exit_code_of")


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FOUND_PROBLEMS = 1
    USAGE = 2
    JOURNAL = 3
    ENGINE = 4
    FAILED = 5
    INTERRUPTED = 130


EXIT_CODES_HELP: Final = """\
exit codes:
  0    done, and nothing is wrong
  1    done, and the check that was asked for found problems
  2    the command line or an input is wrong; nothing was changed
  3    the journal cannot be opened or read
  4    the engine cannot be reached, started or driven
  5    an update or the run failed
  130  interrupted (Ctrl-C)"""


def exit_code_of(error: RolloutCoreError) -> ExitCode:
    """Give the exit code that an error ends a command with."""
    match error:
        case CallerError():
            return ExitCode.USAGE
        case JournalError():
            return ExitCode.JOURNAL
        case EngineError():
            return ExitCode.ENGINE
        case _:
            return ExitCode.FAILED
