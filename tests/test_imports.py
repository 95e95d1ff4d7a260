"""What `import headstart` gives, and what it costs."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import headstart

IMPORT_SECONDS_MAX = 0.100
HELP_SECONDS_MAX = 0.300
# The figures are for a quiet machine; these tests are for any, so they allow twice as much.
MARGIN = 2.0
ROUNDS = 5

TIMED = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
json.dump({{"seconds": seconds, "modules": sorted(sys.modules)}}, sys.stdout)
"""

HELP = """
import contextlib, os
from headstart.cli.main import main
with contextlib.redirect_stdout(open(os.devnull, "w")), contextlib.suppress(SystemExit):
    main(["--help"])
"""


def run_timed(statement):
    """Seconds a statement takes in a new process, and the modules that are imported after it."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    return result["seconds"], set(result["modules"])


def best_seconds(statement):
    return min(run_timed(statement)[0] for _ in range(ROUNDS))


@pytest.mark.parametrize("name", headstart.__all__)
def test_every_export_resolves(name):
    assert getattr(headstart, name) is not None
    assert name in dir(headstart)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'PrefixStor'"):
        _ = headstart.PrefixStor


def test_exports_are_what_type_checkers_see():
    tree = ast.parse(inspect.getsource(headstart))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(set(headstart.__all__) - {"__version__"})
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(headstart, name)


def test_version_is_that_of_the_package():
    assert version("headstart") == headstart.__version__


@pytest.mark.parametrize("library", ["numpy", "pydantic", "torch", "typer", "rich", "matplotlib"])
def test_import_brings_no_library(library):
    _, modules = run_timed("import headstart")
    assert library not in modules


@pytest.mark.parametrize(
    "library",
    ["numpy", "pydantic", "torch", "rich", "matplotlib", "msgspec", "prometheus_client"],
)
def test_help_brings_no_heavy_library(library):
    _, modules = run_timed(HELP)
    assert "headstart.cli.main" in modules
    assert library not in modules


def test_import_is_fast(record_property):
    seconds = best_seconds("import headstart")
    record_property("import_seconds", seconds)
    assert seconds <= IMPORT_SECONDS_MAX * MARGIN


def test_help_is_fast(record_property):
    """The whole process: the interpreter's own start counts, as it does for a user."""
    seconds = best_seconds(
        "import subprocess; "
        "subprocess.run([sys.executable, '-m', 'headstart', '--help'], "
        "check=True, stdout=subprocess.DEVNULL)"
    )
    record_property("help_seconds", seconds)
    assert seconds <= HELP_SECONDS_MAX * MARGIN
