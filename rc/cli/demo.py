"""``rc demo``: arguments, and what is checked before anything slow is imported."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from rc.demo.run_directory import DemoSettings, RunDirectory
from rc.exit_codes import ExitCode

__all__ = ("add_arguments", "demo")

_NEEDED = ("torch", "transformers", "vllm", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's arguments."""
    defaults = DemoSettings()
    parser.add_argument("--steps", type=int, default=defaults.steps, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="seed of weights and sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="train this causal language model instead of the small one"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts instead of the built-in ones: one a line, or .jsonl"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the vLLM server (default: a free one)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the run (default: rc-demo/run-N; the last one is continued if it was cut off)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the vLLM server running at the end")
    parser.add_argument(
        "--no-restart", action="store_true", help="do not measure what a restart of the server would have taken"
    )


def demo(arguments: argparse.Namespace) -> ExitCode:
    """Run the demo, or go on with one that was cut off."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"rc: the demo needs {', '.join(missing)}: run `make setup` in the repository, or install "
            f"rolloutcore[trainer] and vLLM",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    settings = DemoSettings(
        steps=arguments.steps,
        seed=arguments.seed,
        model=str(arguments.model.resolve()) if arguments.model else None,
        prompts=str(arguments.prompts.resolve()) if arguments.prompts else None,
    )
    if settings.prompts is not None:
        from rc.demo.task import load_prompts

        load_prompts(Path(settings.prompts))
    if arguments.out is None:
        directory = RunDirectory.next_below(Path("rc-demo"), settings)
    else:
        directory = RunDirectory.prepare(arguments.out, settings)

    from rc.demo.main import run  # imports torch: seconds

    return run(
        settings,
        directory,
        port=arguments.port,
        keep=arguments.keep,
        measure_restart=not arguments.no_restart,
        as_json=arguments.json,
    )
