"""Rules of this source that linters do not know. Exit code 1 when one is broken.

Placement: which modules may read the environment, start threads, read clocks, catch everything.
Size: file, function and class limits; what is over a soft limit is listed, over a hard one fails.
Names: no drawer files such as `utils.py`, no generations such as `store_v2.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/headstart")
MEASURED = ("src", "scripts", "tests", "benchmarks")

FILE_LINES = (400, 600)
FUNCTION_LINES = (50, 70)
CLASS_METHODS = 12
DRAWERS = re.compile(r"(utils?|common|helpers?|misc|.*_v\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken rule, or with `hard` false only a size to keep an eye on."""

    path: Path
    line: int
    message: str
    hard: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Names that only some modules of the package may use.

    With `calls_only` a mention is fine, such as the default of a `clock` argument.
    """

    names: frozenset[str]
    modules: tuple[str, ...]
    reason: str
    calls_only: bool = True


PLACEMENTS = (
    Placement(
        names=frozenset({"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}),
        modules=("config",),
        reason="the environment is read in config.py only, so that every variable is known",
        calls_only=False,
    ),
    Placement(
        names=frozenset(
            {
                "_thread.start_new_thread",
                "asyncio.to_thread",
                "concurrent.futures.ProcessPoolExecutor",
                "concurrent.futures.ThreadPoolExecutor",
                "multiprocessing.Pool",
                "multiprocessing.Process",
                "multiprocessing.pool.ThreadPool",
                "threading.Thread",
                "threading.Timer",
            }
        ),
        # inflight, bench: measured by threads of their own; testing: concurrent callers.
        modules=("transfer", "inflight", "node", "bench", "testing"),
        reason="threads are started in transfer.py and node/ only, so that they are bounded",
    ),
    Placement(
        names=frozenset(
            {
                "datetime.datetime.now",
                "time.monotonic",
                "time.monotonic_ns",
                "time.perf_counter",
                "time.perf_counter_ns",
                "time.sleep",
                "time.time",
                "time.time_ns",
            }
        ),
        modules=("transfer", "inflight", "node", "bench", "demo", "cli", "testing"),
        reason="take a clock as an argument (default: time.monotonic), so that tests can set it",
    ),
)

CATCH_ALL_MODULES = ("transfer", "node", "engines", "testing")
"""Where a thread or an engine hook has its top: there an unknown error is logged, and is a miss.

In `testing` the top of a thread keeps the error for the test that waits for it.
"""

NOT_METHODS = frozenset(
    {"property", "cached_property", "setter", "overload"}
    | {"rule", "initialize", "invariant", "precondition", "fixture"}
)
"""Decorators of functions in a class that nobody calls as a method."""

UNCOUNTED_METHODS = ("_", "test_", "check_invariants")
"""Starts of names that are no part of what a class offers; every stateful class has the last."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(root: Path) -> list[Finding]:
    """All findings in the repository at `root`, in path order."""
    findings: list[Finding] = []
    for top in MEASURED:
        for path in sorted((root / top).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            relative = path.relative_to(root)
            findings += check_sizes(relative, tree, path.read_text(encoding="utf-8"))
            if relative.is_relative_to(PACKAGE):
                findings += check_placement(relative, tree)
                findings += check_excepts(relative, tree)
    return findings


def check_placement(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Uses of names outside the modules they belong to."""
    for line, name, called in _uses(tree):
        for placement in PLACEMENTS:
            if (
                name in placement.names
                and (called or not placement.calls_only)
                and not _within(path, placement.modules)
            ):
                yield Finding(path=path, line=line, message=f"{name}: {placement.reason}")


def check_excepts(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Handlers that catch everything and do not raise it again."""
    if _within(path, CATCH_ALL_MODULES):
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ExceptHandler)
            and _catches_all(node.type)
            and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
        ):
            allowed = ", ".join(CATCH_ALL_MODULES)
            message = f"catches every exception; only the tops of threads and hooks may ({allowed})"
            yield Finding(path=path, line=node.lineno, message=message)


def check_sizes(path: Path, tree: ast.Module, text: str) -> Iterator[Finding]:
    """Files, functions and classes that are too large, and files without a noun."""
    if DRAWERS.fullmatch(path.stem):
        yield Finding(path=path, line=1, message="name the file after the one thing that is in it")
    yield from _over(path, 1, "the file", text.count("\n"), FILE_LINES)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield from _over(path, node.lineno, f"{node.name}()", num_lines, FUNCTION_LINES)
        elif isinstance(node, ast.ClassDef):
            num_methods = sum(_is_public_method(item) for item in node.body)
            if num_methods > CLASS_METHODS:
                message = f"{node.name} has {num_methods} public methods (limit {CLASS_METHODS})"
                yield Finding(path=path, line=node.lineno, message=message)


def _over(
    path: Path, line: int, what: str, num_lines: int, limits: tuple[int, int]
) -> Iterator[Finding]:
    soft, hard = limits
    if num_lines > soft:
        message = f"{what} has {num_lines} lines (aim {soft}, limit {hard})"
        yield Finding(path=path, line=line, message=message, hard=num_lines > hard)


def _within(path: Path, modules: tuple[str, ...]) -> bool:
    return path.relative_to(PACKAGE).with_suffix("").parts[0] in modules


def _catches_all(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        each is None or (isinstance(each, ast.Name) and each.id in {"Exception", "BaseException"})
        for each in kinds
    )


def _is_public_method(node: ast.stmt) -> bool:
    if not isinstance(node, Function) or node.name.startswith(UNCOUNTED_METHODS):
        return False
    if (ast.get_docstring(node) or "").startswith("See `"):
        return False  # an interface asks for it; its own class is where it counts
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    names = {
        each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")
        for each in decorators
    }
    return names.isdisjoint(NOT_METHODS)


def _uses(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, called or inherited from) of everything the module uses from imports."""
    imported = _imported_names(tree)
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called.add(node.func)
        elif isinstance(node, ast.ClassDef):
            called.update(node.bases)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, imported)
            if name is not None:
                yield node.lineno, name, node in called


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What each name bound by an import statement stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value, imported)
        return value and f"{value}.{node.attr}"
    return None


def main() -> int:
    """Print the findings; 1 when one of them is hard."""
    findings = check(ROOT)
    for finding in sorted(findings, key=lambda each: each.hard):
        print(finding if finding.hard else f"{finding}  [note]")
    num_hard = sum(finding.hard for finding in findings)
    print(f"check_source: {num_hard} broken rules, {len(findings) - num_hard} notes")
    return 1 if num_hard else 0


if __name__ == "__main__":
    sys.exit(main())
