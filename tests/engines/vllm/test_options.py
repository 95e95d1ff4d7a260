"""What may be set in `kv_connector_extra_config`."""

from __future__ import annotations

import pytest

from headstart.engines.vllm import options as module
from headstart.engines.vllm.options import Options
from headstart.errors import ConfigError


def test_nothing_needs_to_be_set():
    assert Options.from_extra_config({}) == Options()
    assert Options().node == "auto"


def test_values_have_units():
    options = Options.from_extra_config(
        {"stall": "200ms", "max_wait": 3, "async_load_nbytes": "1GiB", "step_nbytes": 1 << 20}
    )
    assert (options.stall, options.max_wait) == (0.2, 3.0)
    assert (options.async_load_nbytes, options.step_nbytes) == (1 << 30, 1 << 20)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"nod": "x"}, "nod is unknown; did you mean 'node'? allowed: node, config"),
        ({"asynch_load": 1}, "did you mean 'async_load_nbytes'"),
        ({"stall": 0}, "stall: "),
        ({"stall": "soon"}, "stall: "),
        ({"step_nbytes": 100}, "step_nbytes: "),
        ({"node": 7}, "node: "),
        ({1: 2}, "kv_connector_extra_config: "),
    ],
)
def test_mistakes_are_named(extra, text):
    with pytest.raises(ConfigError) as raised:
        Options.from_extra_config(extra)
    assert str(raised.value).startswith("kv_connector_extra_config: ")
    assert text in str(raised.value)


def test_every_mistake_is_named_at_once():
    with pytest.raises(ConfigError, match=r"stall: .*; nod is unknown"):
        Options.from_extra_config({"stall": -1, "nod": "x"})


def test_a_named_node_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ensure_node", None)
    assert Options(node=str(tmp_path / "n.sock")).node_path() == tmp_path / "n.sock"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(f'[node]\nsocket = "{tmp_path}/node.sock"\n')
    return path


def test_auto_starts_a_node(tmp_path, config, monkeypatch):
    asked = []

    def ensure_node(settings, arguments):
        asked.append(arguments)
        return settings.node.socket

    monkeypatch.setattr(module, "ensure_node", ensure_node)
    options = Options(config=config, idle_exit="3s")
    assert options.node_path() == tmp_path / "node.sock"
    assert asked == [["--idle-exit", "3s", "--config", str(config)]]


@pytest.mark.parametrize("error", [ConfigError("no room"), PermissionError("no")])
def test_an_engine_runs_without_a_node_that_cannot_start(tmp_path, config, monkeypatch, error):
    def ensure_node(settings, arguments):
        raise error

    monkeypatch.setattr(module, "ensure_node", ensure_node)
    assert Options(config=config).node_path() == tmp_path / "node.sock"


def test_wrong_settings_of_the_node_are_an_error(config):
    config.write_text("[node]\nsocked = 'x'\n")
    with pytest.raises(ConfigError, match="socked"):
        Options(config=config).node_path()
