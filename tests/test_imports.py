"""What an import costs and brings: nothing heavy in the core, no I/O in its pure part, every public name declared."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

import rc

PACKAGE = Path(rc.__file__).parent

HEAVY = ("torch", "vllm", "transformers", "safetensors", "numpy", "matplotlib", "pyarrow")
"""What extras bring. The core must import where none of it is installed."""

NOT_YET = ("aiohttp", "rich", "argparse", "multiprocessing", "trio")
"""What `import rc` leaves for later: the HTTP client is for an engine that is opened, the rest for the command line."""

EXTRAS = ("rc.vllm_plugin", "rc.demo")
"""Packages that need an extra; all others are the core."""

PURE = (
    "rc.errors",
    "rc.versions",
    "rc.evidence",
    "rc.commands",
    "rc.events.types",
    "rc.events.codec",
    "rc.lifecycle",
    "rc.trajectory_rules",
    "rc.projections",
    "rc.judge",
    "rc.decide",
    "rc.next_effects",
)

IMPURE = (
    *("aiohttp", "aiosqlite", "anyio", "asyncio", "os", "random", "secrets", "socket", "sqlite3", "subprocess"),
    *("threading", "time", "torch", "trio", "uuid", "vllm"),
)


def module_name(path: Path) -> str:
    """Name the module of a file under the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_private(name: str) -> bool:
    """Say whether a part of a dotted name has a leading underscore (``__main__`` included)."""
    return any(part.startswith("_") for part in name.split("."))


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PUBLIC = [name for name in MODULES if not is_private(name)]
CORE = [name for name in MODULES if not name.startswith(EXTRAS) and not name.endswith("__main__")]


def run_fresh(code: str) -> list[str]:
    """Run code in an interpreter that has imported nothing of ours, and return the lines it prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_rc_loads_nothing_that_it_does_not_need() -> None:
    loaded = run_fresh("import sys, rc; print(*sys.modules, sep='\\n')")
    assert "rc" in loaded
    assert [name for name in (*HEAVY, *NOT_YET) if name in loaded] == []


def test_every_module_of_the_core_imports_where_no_extra_is_installed() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        f"for name in {CORE!r}: importlib.import_module(name); print(name)\n"
    )
    assert run_fresh(code) == CORE


@cache
def import_graph() -> grimp.ImportGraph:
    """Build the graph of imports, those inside functions included and those for type checkers left out."""
    return grimp.build_graph("rc", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)


@pytest.mark.parametrize("module", PURE)
def test_the_pure_core_reaches_no_clock_no_randomness_no_waiting_and_no_io(module: str) -> None:
    graph = import_graph()
    as_packages = bool(graph.find_children(module))
    chains = [
        chain
        for impure in IMPURE
        if impure in graph.modules
        for chain in graph.find_shortest_chains(importer=module, imported=impure, as_packages=as_packages)
    ]
    assert chains == []


def test_the_impure_parts_are_seen_so_that_the_test_above_can_fail() -> None:
    assert import_graph().find_shortest_chain(importer="rc.controller", imported="anyio")


def bound_names(target: ast.expr) -> Iterator[str]:
    """Yield the plain names that an assignment binds."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from bound_names(element)


def assigned(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns to."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    for target in [statement.target] if isinstance(statement, ast.AnnAssign) else targets:
        yield from bound_names(target)


class Names:
    """The names of one module, read from its source: it may need an extra that is not installed here.

    Attributes:
        made: Functions and classes.
        assigned: Constants, aliases and whatever else it assigns.
        taken: What it imports from elsewhere, as (module, name).
        declared: Its ``__all__``; None if there is none.
    """

    def __init__(self, path: Path) -> None:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        makers = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self.made = {part.name for part in body if isinstance(part, makers) and not is_private(part.name)}
        self.assigned = {name for part in body for name in assigned(part)}
        self.taken = {
            (part.module, alias.name) for part in body if isinstance(part, ast.ImportFrom) for alias in part.names
        }
        self.declared: object = None
        for part in body:
            if isinstance(part, ast.Assign) and "__all__" in assigned(part):
                self.declared = ast.literal_eval(part.value)


NAMES = {module: Names(path) for module, path in MODULES.items()}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_declares_exactly_what_it_offers(module: str) -> None:
    names = NAMES[module]
    used_elsewhere = {
        name for other in NAMES.values() for source, name in other.taken if source == module and name in names.assigned
    }
    needed = names.made | used_elsewhere
    if names.declared is None:
        assert not needed, f"{module} offers names and has no __all__"
        return
    assert isinstance(names.declared, tuple), f"{module}.__all__ is not a tuple"
    declared = set(names.declared)
    assert len(declared) == len(names.declared), f"{module}.__all__ repeats a name"
    assert needed <= declared, f"{module}.__all__ lacks {sorted(needed - declared)}"
    own = names.made | names.assigned
    offered = own | {name for _, name in names.taken} if MODULES[module].name == "__init__.py" else own
    assert declared <= offered, f"{module}.__all__ has {sorted(declared - offered)}, which it does not define"
