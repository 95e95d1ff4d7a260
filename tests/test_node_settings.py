"""Settings of a node: its table, what holds where nothing is set, its socket, its environment."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.config import load_settings, node_environment, node_settings, node_socket
from headstart.errors import ConfigError
from headstart.settings import NodeSettings, Settings

GIB = 1 << 30
FULL = """
[node]
socket = "/run/headstart/node.sock"
metrics_port = 0
idle_exit = "10min"
lease_ttl = "90s"
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "headstart.toml"
        path.write_text(text)
        return path

    return write


# ---------------------------------------------------------------------------------------- the table


def test_a_file_sets_everything(write):
    node = load_settings(write(FULL), {}).node
    assert node == NodeSettings(
        socket=Path("/run/headstart/node.sock"), metrics_port=0, idle_exit=600.0, lease_ttl=90.0
    )
    assert set(NodeSettings.model_fields) == node.model_fields_set


def test_nothing_set():
    node = Settings().node
    assert (node.socket, node.metrics_port, node.idle_exit, node.lease_ttl) == (
        None,
        None,
        None,
        60.0,
    )


def test_the_environment_wins(write):
    environ = {"HEADSTART_NODE__SOCKET": "/other.sock", "HEADSTART_NODE__LEASE_TTL": "2min"}
    node = load_settings(write(FULL), environ).node
    assert (node.socket, node.lease_ttl, node.metrics_port) == (Path("/other.sock"), 120.0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\nsockt = 'x'", r"node\.sockt is unknown; did you mean 'socket'\?"),
        ("[node]\nmetrics_port = -1", r"node\.metrics_port: "),
        ("[node]\nmetrics_port = 65536", r"node\.metrics_port: "),
        ("[node]\nidle_exit = 0", r"node\.idle_exit: "),
        ("[node]\nidle_exit = 'later'", r"node\.idle_exit: 'later' is not a quantity"),
        ("[node]\nlease_ttl = '0s'", r"node\.lease_ttl: "),
        ("node = 5", r"node: "),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(write(text), {})


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean HEADSTART_NODE__SOCKET"):
        load_settings(None, {"HEADSTART_NODE__SOCKT": "x"})


# ---------------------------------------------------------------------------- where nothing is set


def test_where_nothing_is_set_there_are_settings_to_start_with(tmp_path):
    settings = node_settings(None, {"HOME": str(tmp_path)})
    (tier,) = settings.tiers
    assert tier.root == tmp_path / ".cache" / "headstart" / "blocks"
    assert tier.durable
    for capacity, most in ((settings.memory.capacity, 4 * GIB), (tier.capacity, 16 * GIB)):
        assert 0 < capacity <= most
        assert capacity & (capacity - 1) == 0, "a power of two: the same tomorrow"
    assert settings.node == NodeSettings()
    assert list((tmp_path / ".cache" / "headstart").iterdir()) == [], "nothing is made yet"


def test_they_lie_in_the_cache_folder_that_is_named(tmp_path):
    settings = node_settings(None, {"HEADSTART_CACHE_DIR": str(tmp_path / "cache")})
    assert settings.tiers[0].root == tmp_path / "cache" / "blocks"


def test_room_that_is_used_already_counts_as_free(tmp_path, monkeypatch):
    """Else each start would find less room than the one before."""
    usage = SimpleNamespace(free=4 << 20)
    monkeypatch.setattr("headstart.config.shutil.disk_usage", lambda path: usage)
    environ = {"HEADSTART_CACHE_DIR": str(tmp_path)}
    assert node_settings(None, environ).tiers[0].capacity == 1 << 20
    slabs = tmp_path / "blocks" / "slabs"
    slabs.mkdir(parents=True)
    (slabs / "000000.slab").write_bytes(b"x" * (12 << 20))
    assert node_settings(None, environ).tiers[0].capacity == 4 << 20


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_set_is_taken_and_nothing_else(write, is_file):
    text = "[memory]\ncapacity = '1MiB'\n"
    environ = {"HEADSTART_MEMORY__CAPACITY": "1MiB"}
    settings = node_settings(write(text), {}) if is_file else node_settings(None, environ)
    assert (settings.memory.capacity, settings.tiers) == (1 << 20, ())


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/cache.*HEADSTART_CACHE_DIR"):
        node_settings(None, {"HEADSTART_CACHE_DIR": str(tmp_path / "file" / "cache")})


# ------------------------------------------------------------------------------------- the socket


def settings_of(*roots):
    tiers = [{"kind": "file", "root": str(root), "capacity": "1GiB"} for root in roots]
    return Settings.from_mapping({"tiers": tiers})


def test_the_socket_that_is_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_mapping({"node": {"socket": "my.sock"}})
    assert node_socket(settings, {}) == tmp_path / "my.sock"


def test_one_a_set_of_roots_in_the_runtime_folder(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    sockets = {
        roots: node_socket(settings_of(*roots), environ)
        for roots in ((), ("/a",), ("/b",), ("/a", "/b"), ("/b", "/a"))
    }
    assert len(set(sockets.values())) == 5
    for path in sockets.values():
        assert path.parent == tmp_path / "headstart"
        assert path.suffix == ".sock"
    assert (tmp_path / "headstart").stat().st_mode & 0o777 == 0o700
    larger = Settings.from_mapping(
        {
            "memory": {"capacity": "2GiB"},
            "tiers": [{"kind": "file", "root": "/a", "capacity": "9GiB"}],
        }
    )
    assert node_socket(larger, environ) == sockets["/a",], "capacities do not name a node"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"headstart-{os.geteuid()}"


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}])
def test_without_a_runtime_folder_it_is_in_the_temporary_one(temporary, environ):
    assert node_socket(settings_of("/a"), environ).parent == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("make", ["open", "link", "dangling", "file"])
def test_a_folder_that_others_can_enter_or_made_is_refused(temporary, tmp_path, make):
    if make == "open":
        temporary.mkdir()
        temporary.chmod(0o755)
    elif make == "file":
        temporary.write_text("")
    else:
        if make == "link":
            (tmp_path / "target").mkdir(mode=0o700)
        temporary.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"set node\.socket"):
        node_socket(settings_of("/a"), {})


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(temporary):
    temporary.mkdir(mode=0o700)
    os.chown(temporary, 65534, 65534)
    with pytest.raises(ConfigError, match="must be a directory of this user"):
        node_socket(settings_of("/a"), {})


# ---------------------------------------------------------------------------------- the environment


def test_what_was_meant_for_the_engine_does_not_reach_a_node():
    kept = {"PATH": "/bin", "HEADSTART_CONFIG": "c", "XOMP_": "1", "LD_LIBRARY_PATH": "l"}
    gone = {"LD_PRELOAD": "p", "OMP_PROC_BIND": "1", "GOMP_X": "", "KMP_Y": "", "MKL_Z": ""}
    assert node_environment(kept | gone) == kept


def test_the_real_environment_is_read(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOMETHING", "else")
    environ = node_environment()
    assert environ["SOMETHING"] == "else"
    assert "OMP_NUM_THREADS" not in environ
    assert os.environ["OMP_NUM_THREADS"] == "3", "ours stays"
