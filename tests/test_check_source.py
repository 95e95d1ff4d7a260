"""scripts/check_source.py finds what it says it finds, and nothing else."""

from textwrap import dedent

import pytest

import check_source


@pytest.fixture
def findings(tmp_path):
    """A function that writes modules of the package and returns the messages about them."""

    def check(module, source):
        path = tmp_path / "src" / "headstart" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return [str(finding) for finding in check_source.check(tmp_path)]

    return check


@pytest.mark.parametrize(
    "source",
    [
        "import os\nX = os.environ['X']\n",
        "from os import environ\nX = environ.get('X')\n",
        "from os import environ as settings\nX = settings['X']\n",
        "import os\ndef f():\n    return os.getenv('X')\n",
    ],
)
def test_environment_outside_config(findings, source):
    (message,) = findings("a.py", source)
    assert message.startswith("src/headstart/a.py:")
    assert "the environment is read in config.py only" in message


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nT = threading.Thread(target=print)\n",
        "from threading import Thread as T\nclass Mine(T):\n    pass\n",
        "import concurrent.futures\nE = concurrent.futures.ThreadPoolExecutor(2)\n",
        "from concurrent import futures\nE = futures.ThreadPoolExecutor(2)\n",
        "from concurrent.futures import ThreadPoolExecutor\nE = ThreadPoolExecutor(2)\n",
    ],
)
def test_threads_outside_transfer(findings, source):
    (message,) = findings("store.py", source)
    assert "threads are started in transfer.py" in message


@pytest.mark.parametrize(
    "source",
    ["import time\nNOW = time.monotonic()\n", "from time import sleep\nsleep(1)\n"],
)
def test_clock_called_outside_its_modules(findings, source):
    (message,) = findings("tiers/file.py", source)
    assert "take a clock as an argument" in message


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.py", "import os\nX = os.environ\n"),
        (
            "transfer.py",
            "import threading, time\nthreading.Thread(target=time.sleep)\ntime.time()\n",
        ),
        ("node/server.py", "import threading\nthreading.Thread(target=print)\n"),
        ("store.py", "import threading\nLOCK = threading.Lock()\n"),
        ("store.py", "import time\ndef f(clock=time.monotonic):\n    return clock()\n"),
        ("store.py", "import threading\ndef f(thread: threading.Thread) -> None: ...\n"),
        ("store.py", "def time(): ...\ntime.time()\n"),
    ],
)
def test_allowed_uses(findings, module, source):
    assert findings(module, source) == []


@pytest.mark.parametrize("kind", ["", " Exception", " BaseException as e", " (OSError, Exception)"])
def test_catching_everything(findings, kind):
    source = f"try:\n    f()\nexcept{kind}:\n    pass\n"
    (message,) = findings("store.py", source)
    assert "catches every exception" in message


def test_catching_everything_where_it_is_raised_again_or_a_top(findings):
    assert findings("store.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n") == []
    assert findings("transfer.py", "try:\n    f()\nexcept Exception:\n    g()\n") == []


@pytest.mark.parametrize(("num_lines", "hard"), [(50, None), (51, False), (70, False), (71, True)])
def test_function_length(tmp_path, num_lines, hard):
    source = "def f():\n" + "    x = 1\n" * (num_lines - 1)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(source)
    assert [each.hard for each in check_source.check(tmp_path)] == ([] if hard is None else [hard])


@pytest.mark.parametrize(
    ("num_lines", "hard"), [(400, None), (401, False), (600, False), (601, True)]
)
def test_file_length(tmp_path, num_lines, hard):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("X = 1\n" * num_lines)
    assert [each.hard for each in check_source.check(tmp_path)] == ([] if hard is None else [hard])


def test_public_methods_of_a_class(findings):
    methods = "".join(f"    def m{index}(self): ...\n" for index in range(12))
    others = """\
    def _private(self): ...
    @property
    def value(self): ...
    @value.setter
    def value(self, value): ...
    def test_it(self): ...
    def check_invariants(self): ...
"""
    assert findings("a.py", f"class A:\n{methods}{others}") == []
    (message,) = findings("a.py", f"class A:\n{methods}    def m12(self): ...\n")
    assert "A has 13 public methods (limit 12)" in message


@pytest.mark.parametrize("name", ["utils.py", "common.py", "store_v2.py"])
def test_drawers_and_generations(findings, name):
    (message,) = findings(name, "X = 1\n")
    assert "name the file after the one thing" in message
