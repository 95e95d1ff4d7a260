"""A node of the bench's own: its settings, its folders, and its life."""

import subprocess

import pytest

from headstart.bench.nodes import OwnNode, settings_for
from headstart.config import own_node_environment
from headstart.errors import ConfigError, HeadstartError
from headstart.node.client import NodeClient
from headstart.node.mapping import ArenaMapping
from headstart.settings import Settings
from node_process import PATIENT, wait_for, write_settings
from prefix_server import NAMESPACE, NodeBlocks

TOKENS = tuple(range(160))


@pytest.fixture
def folder(tmp_path):
    """An arm's folder in one of the campaign's."""
    folder = tmp_path / "serve-x" / "ours"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def config(tmp_path):
    return write_settings(tmp_path)


@pytest.fixture
def node(tmp_path, folder, config):
    node = OwnNode("ours", tmp_path / "own.sock", folder, config)
    yield node
    node.remove()


def test_blocks_lie_in_folders_that_nobody_else_uses(tmp_path, folder, config):
    settings, (root,) = settings_for(folder, config)
    assert root == tmp_path / "file" / "serve-x-ours"
    assert settings.memory.capacity == 16 << 20
    settings, (root,) = settings_for(folder, None)
    assert root.is_relative_to(folder)
    assert 0 < settings.memory.capacity <= 4 << 30


def test_a_node_has_no_settings_but_its_own(tmp_path):
    settings = Settings.from_mapping(
        {
            "memory": {"capacity": "1MiB"},
            "tiers": [{"kind": "file", "root": "/nvme/shared", "capacity": "2MiB"}],
        }
    )
    environ = {"HEADSTART_TIERS__0__ROOT": "/nvme/shared", "HEADSTART_CONFIG": "/x", "PATH": "/bin"}
    found = own_node_environment(settings, [tmp_path], environ)
    assert found == {
        "PATH": "/bin",
        "HEADSTART_NODE__METRICS_PORT": "0",
        "HEADSTART_MEMORY__CAPACITY": f"{1 << 20}B",
        "HEADSTART_TIERS__0__ROOT": str(tmp_path),
        "HEADSTART_TIERS__0__CAPACITY": f"{2 << 20}B",
    }


def test_a_raw_device_is_not_overwritten(folder, tmp_path):
    config = tmp_path / "raw.toml"
    config.write_text(
        '[[tiers]]\nkind = "file"\nroot = "/nvme/h"\ncapacity = "1GiB"\ndevice = "/dev/nvme9"\n'
    )
    with pytest.raises(ConfigError, match="leave out `device`"):
        settings_for(folder, config)


def test_the_life_of_a_node(node, tmp_path):
    root = tmp_path / "file" / "serve-x-ours"
    node.start()
    assert (node.num_engines, node.loaded_nbytes()) == (0, 0)
    blocks = NodeBlocks(tmp_path / "own.sock")
    blocks.store(TOKENS)
    assert node.num_engines == 1
    assert blocks.load(TOKENS) == 10
    node.settle()
    assert node.status()["tiers"]["file"]["num_blocks"] == 10
    pid = node.pid
    node.stop()
    node.start()
    assert node.pid != pid
    wait_for(lambda: blocks.load(TOKENS) == 10, "the blocks from the disk")
    assert blocks.loaded["file"] == 160
    assert node.loaded_nbytes() >= 10 * (64 << 10)
    node.clear()
    assert blocks.load(TOKENS) == 0
    blocks.close()
    assert root.exists()
    node.remove()
    assert not root.exists()
    node.remove()


def test_a_node_that_does_not_come_up_says_why(tmp_path, folder):
    config = tmp_path / "full.toml"
    config.write_text(
        '[memory]\ncapacity = "16MiB"\n'
        f'[[tiers]]\nkind = "file"\nroot = "{tmp_path}"\ncapacity = "9999TiB"\n'
    )
    node = OwnNode("ours", tmp_path / "own.sock", folder, config)
    with pytest.raises(
        HeadstartError, match=r"(?s)the node of arm ours ended .*node.log ends with"
    ):
        node.start()
    node.remove()


def test_a_node_that_died_is_told(node, tmp_path):
    node.start()
    subprocess.run(["kill", "-9", str(node.pid)], check=True)
    with pytest.raises(HeadstartError, match="the node of arm ours"):
        wait_for(lambda: node.status() is None, "an error")
    with pytest.raises(HeadstartError, match="ended with exit code -9"):
        wait_for(lambda: node.check(), "its end")


def test_an_engine_without_a_worker_cannot_copy(node, tmp_path):
    node.start()
    worker = ArenaMapping(tmp_path / "own.sock", timeout_s=PATIENT.ask_s)
    client = NodeClient(tmp_path / "own.sock", (worker.token,), limits=PATIENT)
    client.open_namespace(NAMESPACE)
    assert client.connect()
    assert node.num_engines == 0
    assert worker.attach()
    wait_for(lambda: node.num_engines == 1, "a worker")
    worker.close()
    client.close()
