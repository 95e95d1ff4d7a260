"""What is refused when an engine starts, and the node that it starts by itself."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]

REFUSED = {
    "nodee is unknown; did you mean 'node'?": ((), {"nodee": "auto"}),
    "start vLLM with --enable-prefix-caching": (("--no-enable-prefix-caching",), {}),
}


def test_what_is_refused_at_start(make_engine, tmp_path):
    engines = {
        sentence: make_engine(tmp_path / "no.sock", *options, extra=extra)
        for sentence, (options, extra) in REFUSED.items()
    }
    for sentence, engine in engines.items():
        assert engine.process.wait(180.0) != 0
        lines = [line for line in engine.process.text().splitlines() if sentence in line]
        assert lines, engine.process.tail()
        assert any("Error: " in line for line in lines), lines


def test_an_engine_runs_without_a_node(kit, make_engine, reference, tmp_path, make_node):
    """Until there is one."""
    folder = tmp_path / "late"
    engine = make_engine(folder / "node.sock").wait_ready()
    prompt = kit.tokens(1000, "no node")
    for _ in range(2):
        answer = reference.check(engine.ask(prompt), prompt)
        engine.forget()
        assert answer.told["outcome"] == "no node"
    node = make_node(folder=folder)

    def is_hit():
        engine.forget()
        return engine.ask(prompt).hit

    kit.wait_for(is_hit, "a hit", 90.0)
    reference.check(engine.ask(prompt), prompt)
    node.idle()
    engine.kill()


def nodes(folder):
    """Processes of nodes whose socket is in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "node" in words and "run" in words and any(str(folder) in word for word in words):
                found.append(int(process.name))
    return found


def test_engines_start_one_node_that_outlives_them(kit, make_engine, reference, tmp_path):
    config = tmp_path / "node.toml"
    config.write_text(
        '[memory]\ncapacity = "128MiB"\n[[tiers]]\nkind = "file"\n'
        f'root = "{tmp_path}/blocks"\ncapacity = "256MiB"\n'
        'durable = false\ninflight_nbytes = "4MiB"\nthreads = 4\n[node]\nmetrics_port = 0\n'
    )
    (tmp_path / "run").mkdir(mode=0o700)
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    extra = {"config": str(config), "idle_exit": "5min"}
    try:
        engines = [make_engine("auto", extra=extra, env=env) for _ in range(2)]
        one, other = (engine.wait_ready() for engine in engines)
        (pid,) = nodes(tmp_path)
        assert os.getsid(pid) not in (one.process.pid, other.process.pid)
        assert os.sched_getaffinity(pid) >= os.sched_getaffinity(0)
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert not [line for line in environ if line.startswith(("LD_PRELOAD=", "OMP_", "KMP_"))]
        prompt = kit.tokens(1000, "auto")
        reference.check(one.ask(prompt), prompt)
        assert reference.check(other.ask(prompt), prompt).hit == 7 * kit.BLOCK
        one.kill()
        other.stop()
        assert nodes(tmp_path) == [pid]
        one.start()
        answer = reference.check(one.wait_ready().ask(prompt), prompt)
        assert answer.told["loaded_tokens_by_tier"] == {"memory": 7 * kit.BLOCK}
        assert nodes(tmp_path) == [pid]
        one.stop()
        (socket,) = (tmp_path / "run" / "headstart").glob("*.sock")
        stop = [sys.executable, "-m", "headstart", "node", "stop", "--socket", str(socket)]
        subprocess.run(stop, check=True, timeout=60.0)
        assert not nodes(tmp_path)
    finally:
        for pid in nodes(tmp_path):
            os.kill(pid, signal.SIGKILL)
