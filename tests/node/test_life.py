"""A node as a process: how it starts, how often, what it leaves, what clients see of its end."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import launch, protocol
from headstart.node.client import ClientLimits, NodeClient, command
from headstart.node.launch import ensure_node, is_running
from headstart.node.mapping import ArenaMapping
from headstart.settings import Settings

SOON = 20.0
MARGIN_S = 5.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
IMPATIENT = ClientLimits(ask_s=0.2, open_s=0.2, retry_s=0.3, max_retry_s=0.6)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


def content(key):
    return key * (BLOCK // len(key))


def ended(promise):
    while not promise.poll()[0]:
        pass
    return promise


def timed(function, *args):
    started = time.monotonic()
    result = function(*args)
    return result, time.monotonic() - started


class OneEngine:
    """A scheduler and a worker in this process."""

    def __init__(self, path, **limits):
        self.mapping = ArenaMapping(path, timeout_s=SOON, retry_s=0.01)
        self.client = NodeClient(
            path, [self.mapping.token], limits=ClientLimits(ask_s=SOON, open_s=SOON, retry_s=0.3)
        )
        self.client.open_namespace(NAMESPACE)

    def follow(self):
        return self.client.connect() and self.mapping.follow(self.client.boot)

    def store(self, path):
        """Blocks of `path` that are stored now."""
        ticket, reserved = self.client.reserve(chain(path))
        for offset, key in zip(
            reserved.offsets, chain(path).keys[reserved.num_held :], strict=True
        ):
            self.mapping.memory[offset : offset + BLOCK] = content(key)
        self.client.commit(ticket)
        return reserved.num_held + len(reserved.offsets)

    def load(self, path):
        """Blocks of `path` that are held, after comparing them."""
        promise = ended(self.client.promote(chain(path)))
        if not promise.poll()[1]:
            return 0
        offsets = promise.claim().offsets
        memory = self.mapping.memory
        read = [bytes(memory[offset : offset + BLOCK]) for offset in offsets]
        assert read == [content(key) for key in chain(path).keys[: len(offsets)]]
        promise.release()
        return len(offsets)

    def close(self):
        self.client.close()
        self.mapping.close()


@pytest.fixture
def engine(node):
    engine = OneEngine(node.path)
    assert engine.follow()
    yield engine
    engine.close()


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stop"])
def test_what_was_stored_is_there_after_an_orderly_end(node, engine, how):
    assert engine.store(range(20)) == 20
    if how == "stop":
        command(node.path, protocol.Stop(SOON), SOON)
    else:
        engine.load("x")  # answered: what was told before is done
        node.signal(getattr(signal, how))
    assert node.wait() == 0
    assert not node.path.exists()
    node.start()
    assert engine.client.promote(chain(range(20))) is None, "the connection was lost"
    time.sleep(0.4)
    assert engine.follow()
    assert engine.load(range(20)) == 20
    assert "Traceback" not in node.errors


def test_kill_and_a_new_node(node, engine):
    """What was on the disk is back, what was only promised is a miss, and nothing waits."""
    assert engine.store(range(10)) == 10
    promise = ended(engine.client.promote(chain(range(10))))
    deadline = time.monotonic() + SOON
    while node.status()["tiers"]["file"]["num_blocks"] < 10:
        assert time.monotonic() < deadline
    time.sleep(1.0)  # the journal is written behind the blocks
    boot = engine.client.boot
    node.kill()
    for ask in (engine.client.promote, engine.client.reserve):
        reply, seconds = timed(ask, chain("ab"))
        assert reply is None
        assert seconds < MARGIN_S
    assert promise.poll() == (True, 0)
    assert promise.claim() is None
    promise.unclaim()
    promise.release()
    engine.client.commit(5)
    assert not engine.client.connect()
    assert node.path.is_socket(), "a killed node leaves its socket"
    node.start()
    time.sleep(0.7)
    assert engine.client.connect()
    assert engine.client.boot != boot
    old = engine.mapping.memory
    assert engine.load(range(10)) == 0, "it maps the arena that is gone"
    assert engine.mapping.follow(engine.client.boot)
    assert engine.mapping.follow(engine.client.boot)
    assert engine.mapping.boot == engine.client.boot
    assert engine.load(range(10)) == 10
    assert len(old) == 16 << 20, "a view of the old memory stays readable"
    assert engine.store("new") == 3
    assert node.status()["gauges"]["workers"] == 1


def test_a_worker_without_a_node_has_no_memory(node):
    mapping = ArenaMapping(node.path, timeout_s=SOON, retry_s=3600.0)
    assert not mapping.follow(b"")
    assert not mapping.follow(b"another run's boot")
    assert mapping.boot == command_boot(node.path)
    node.kill()
    mapping.close()
    assert len(mapping.memory) == 0
    assert not mapping.attach()
    node.start()
    assert not mapping.attach(), "not so soon after it failed"
    mapping.close()


def command_boot(path):
    other = ArenaMapping(path, timeout_s=SOON)
    assert other.attach()
    boot = other.boot
    other.close()
    return boot


def test_a_node_that_hangs_costs_one_short_wait(node):
    client = NodeClient(node.path, (), limits=IMPATIENT)
    client.open_namespace(NAMESPACE)
    ticket, reserved = client.reserve(chain("ab"))
    assert len(reserved.offsets) == 2
    client.commit(ticket)
    promise = ended(client.promote(chain("ab")))
    node.freeze()
    try:
        assert promise.poll() == (True, 2), "a poll asks nobody"
        reply, seconds = timed(promise.claim)
        assert reply is None
        assert 0.15 < seconds < 0.2 + MARGIN_S
        started = time.monotonic()
        num_asked = 0
        while time.monotonic() - started < 1.0:
            assert client.promote(chain("ab")) is None
            assert client.reserve(chain("cd")) is None
            client.commit(7)
            promise.release()
            num_asked += 1
        assert num_asked > 50, "most of these cost nothing"
        assert client.num_failures < 5
    finally:
        node.signal(signal.SIGCONT)
    deadline = time.monotonic() + SOON
    while (again := client.promote(chain("ab"))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert again.num_held == 2
    client.close()
    while node.status()["gauges"]["sessions"]:
        assert time.monotonic() < deadline


def test_it_ends_by_itself_when_no_engine_was_there_for_long(make_node):
    node = make_node("--idle-exit", "500ms")
    engine = OneEngine(node.path)
    assert engine.follow()
    engine.store("abc")
    time.sleep(1.0)
    assert node.status()["gauges"]["engines"] == 1
    engine.close()
    assert node.wait() == 0
    assert ": the node ends" in node.errors
    assert not node.path.exists()


# ----------------------------------------------------------------------------------- the second one


def test_a_second_node_at_a_socket_is_refused(node):
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "node", "run", "--config", node.config],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"headstart: a node is running at {node.path} already"
    assert "Traceback" not in done.stderr
    assert is_running(node.path)


def test_a_second_node_with_the_same_disk_is_refused(node, tmp_path):
    words = ["--config", node.config, "--socket", tmp_path / "other.sock"]
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "node", "run", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "headstart: " in done.stderr.splitlines()[-1]
    assert not (tmp_path / "other.sock").exists()


# -------------------------------------------------------------------------------------- ensure_node

STARTER = """
import sys
from pathlib import Path
from headstart.config import load_settings
from headstart.node.launch import ensure_node
config = Path(sys.argv[1])
print(ensure_node(load_settings(config), ["--config", str(config)]))
"""


@pytest.fixture
def config(tmp_path):
    """Settings of a node that the test starts by `ensure_node`; stopped at the end."""
    path = tmp_path / "node.toml"
    tier = f'kind = "file"\nroot = "{tmp_path}/file"\ncapacity = "64MiB"\ndurable = false\n'
    path.write_text(
        f'[memory]\ncapacity = "16MiB"\nhuge_pages = "off"\n[[tiers]]\n{tier}'
        f'inflight_nbytes = "4MiB"\nthreads = 4\n'
        f'[node]\nsocket = "{tmp_path}/node.sock"\nmetrics_port = 0\n'
    )
    yield path
    socket_path = tmp_path / "node.sock"
    if socket_path.exists():
        pid = command(socket_path, protocol.Status(), SOON).fields["pid"]
        command(socket_path, protocol.Stop(0), SOON)
        deadline = time.monotonic() + SOON
        while launch._lives(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def starter(config, *before, **options):
    return subprocess.Popen(
        [*before, sys.executable, "-c", STARTER, config],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def status_of(path):
    return command(path, protocol.Status(), SOON).fields


def test_of_eight_that_start_a_node_one_does(config, tmp_path):
    starters = [starter(config) for _ in range(8)]
    for process in starters:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, f"{tmp_path}/node.sock\n", "")
    log = (tmp_path / "node.log").read_text()
    assert log.count("ready: socket") == 1
    assert "already" not in log
    pid = status_of(tmp_path / "node.sock")["pid"]
    assert ensure_node(Settings.from_toml(config)) == tmp_path / "node.sock"
    assert status_of(tmp_path / "node.sock")["pid"] == pid


def test_a_node_that_an_engine_starts_is_its_own(config, tmp_path):
    """Neither its cores, its environment, its signals, its folder's modules, nor its child."""
    cores = os.sched_getaffinity(0)
    (tmp_path / "headstart").mkdir()
    (tmp_path / "headstart" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    environ = os.environ | {
        "LD_PRELOAD": "",
        "OMP_NUM_THREADS": "1",
        "GOMP_CPU_AFFINITY": "0",
        "KMP_AFFINITY": "compact",
        "MKL_NUM_THREADS": "1",
        "KEPT": "yes",
    }

    def pinned():
        os.sched_setaffinity(0, {min(cores)})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    process = starter(config, env=environ, preexec_fn=pinned, start_new_session=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    pid = status_of(tmp_path / "node.sock")["pid"]
    proc = Path(f"/proc/{pid}")
    names = {line.partition("=")[0] for line in (proc / "environ").read_text().split("\0")}
    assert "KEPT" in names
    assert not {"LD_PRELOAD", "OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"} & names
    assert not {"KMP_AFFINITY", "MKL_NUM_THREADS"} & names
    assert os.sched_getaffinity(pid) == cores
    status = dict(
        line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["PPid"]) not in (process.pid, os.getpid())
    assert os.getsid(pid) not in (pid, process.pid, os.getsid(0))
    assert int(status["SigBlk"], 16) == 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SOON
    while launch._lives(pid):
        assert time.monotonic() < deadline


def test_a_node_that_outlives_whoever_started_it(config, tmp_path):
    """Also if the starter is killed with its whole process group, as engines end."""
    process = starter(config, start_new_session=True)
    process.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert is_running(tmp_path / "node.sock")


def test_a_node_that_cannot_start_is_told_soon_with_its_reason(config, tmp_path):
    config.write_text(config.read_text().replace('capacity = "16MiB"', 'capacity = "900TiB"'))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"does not come up: .*memory\.capacity.*node\.log"):
        ensure_node(Settings.from_toml(config), ["--config", str(config)])
    assert time.monotonic() - started < 50, "not only when the time is up"
    assert not is_running(tmp_path / "node.sock")


def test_a_node_that_another_starts_meanwhile_is_waited_for(config, tmp_path, monkeypatch):
    """It has the path, and does not answer yet."""
    path = tmp_path / "node.sock"
    monkeypatch.setattr(launch, "_spawn", lambda *args: pytest.fail("there is one"))
    with open(f"{path}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launch.has_owner(path)
        with pytest.raises(ConfigError, match="does not come up: it said nothing"):
            ensure_node(Settings.from_toml(config), timeout_s=0.3)
    assert not launch.has_owner(path)


@pytest.mark.parametrize("name", ["file/node.sock", "x" * 200 + "/node.sock", "x" * 270 + "node"])
def test_a_socket_that_cannot_be_is_told_with_its_path(config, tmp_path, name):
    (tmp_path / "file").write_text("")
    settings = Settings.from_toml(config)
    node = settings.node.model_copy(update={"socket": tmp_path / name})
    with pytest.raises(ConfigError, match=r"the node at .*node"):
        ensure_node(settings.model_copy(update={"node": node}), ["--config", str(config)])


def test_a_stale_socket_and_anothers_file(node, tmp_path):
    node.kill()
    assert node.path.is_socket()
    node.start()
    assert is_running(node.path)
    node.kill()
    node.path.unlink()
    node.path.write_text("precious")
    with pytest.raises(AssertionError, match="there is a file that is no socket"):
        node.start()
    assert node.path.read_text() == "precious"


def test_is_running_asks():
    assert not is_running(Path("/nonexistent/node.sock"))


def test_what_is_no_node_is_not_running(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(os.fspath(tmp_path / "s"))
        sock.listen(1)
        assert not is_running(tmp_path / "s", timeout_s=0.1)


def test_metrics_are_where_it_says(node):
    url = node.ready.split()[-1]
    assert node.ready == f"ready: socket {node.path}, metrics {url}\n"
    with urllib.request.urlopen(url, timeout=SOON) as answer:
        assert b"headstart_tier_capacity_bytes" in answer.read()
