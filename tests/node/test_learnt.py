"""What engines learnt of their costs: told on, kept in a file, and what is no such file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time

import msgspec
import pytest

from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace
from headstart.node import protocol
from headstart.node.client import NodeClient
from headstart.node.learnt import LearntCosts
from node_process import PATIENT

SOON = 20.0
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(64 << 10,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
OTHER = Namespace(model="other", weights="none", layout=LAYOUT)
COSTS = protocol.Costs(0.02, 3.5e-3, 2.5e-6, 0.07, 8192, 4e9)
WRONG = [
    {"step_s": math.nan},
    {"step_s": -1.0},
    {"token_s": math.inf},
    {"pair_s": -1e-300},
    {"uncertainty": math.nan},
    {"max_step_tokens": 0},
    {"max_step_tokens": -5},
    {"copy_bytes_per_s": 0.0},
    {"copy_bytes_per_s": -1.0},
    {"copy_bytes_per_s": math.nan},
]


def changed(**fields):
    return msgspec.structs.replace(COSTS, **fields)


def served(client):
    """Wait until what was told before is done; whether the connection has gone on."""
    return client._ask(protocol.Claim(0), protocol.Claimed) is not None and not client.num_failures


@pytest.fixture
def path(tmp_path):
    return tmp_path / "costs.json"


# ----------------------------------------------------------------------------------------- told on


def test_the_next_engine_of_a_namespace_is_told_what_the_last_one_learnt(world, clients):
    first = clients(world.serve())
    assert first.costs_of(NAMESPACE.id) is None
    first.learnt(NAMESPACE.id, changed(step_s=9.0))
    first.learnt(NAMESPACE.id, COSTS)
    assert served(first)
    first.close()
    later = clients(world.path)
    later.open_namespace(OTHER)
    assert later.costs_of(NAMESPACE.id) == COSTS
    assert later.costs_of(OTHER.id) is None


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_no_engine_can_cost_is_refused_and_the_connection_goes_on(
    world, client, caplog, fields
):
    assert client.connect()
    client.learnt(NAMESPACE.id, COSTS)
    client.learnt(NAMESPACE.id, changed(**fields))
    assert served(client)
    assert "Learnt was refused" in caplog.text
    assert world.services.learnt.get(NAMESPACE.id) == COSTS


def test_only_the_last_namespaces_are_kept(path):
    learnt = LearntCosts(path)
    for number in range(1000):
        learnt.put(number.to_bytes(32, "big"), COSTS)
    assert learnt.get((999).to_bytes(32, "big")) == COSTS
    assert learnt.get((0).to_bytes(32, "big")) is None
    learnt.save()
    assert len(json.loads(path.read_bytes())["costs"]) <= 256
    assert LearntCosts(path).get((999).to_bytes(32, "big")) == COSTS


def test_a_giant_name_of_a_namespace_costs_the_others_nothing(path):
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    with contextlib.suppress(ConfigError):
        learnt.put(b"n" * (4 << 20), COSTS)
    learnt.save()
    assert path.stat().st_size < 1 << 20
    assert LearntCosts(path).get(NAMESPACE.id) == COSTS


# ---------------------------------------------------------------------------------------- the file


def test_costs_are_read_again_from_their_file(path):
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    learnt.put(OTHER.id, changed(token_s=1.0))
    learnt.save()
    again = LearntCosts(path)
    assert again.get(NAMESPACE.id) == COSTS
    assert again.get(OTHER.id) == changed(token_s=1.0)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_new_is_not_written(path):
    LearntCosts(path).save()
    assert not path.exists()
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    learnt.save()
    path.unlink()
    learnt.save()
    assert not path.exists()


def test_without_a_file_costs_are_kept_for_this_run():
    learnt = LearntCosts(None)
    learnt.put(NAMESPACE.id, COSTS)
    learnt.save()
    assert learnt.get(NAMESPACE.id) == COSTS


def test_costs_that_can_be_told_can_be_read_again(path):
    """Whatever is accepted of one engine must not cost the others what they have learnt."""
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    for fields in [
        *WRONG,
        {"copy_bytes_per_s": math.inf},
        {"step_s": 1e308, "token_s": 0.0},
        {"max_step_tokens": 2**63},
    ]:
        try:
            learnt.put(OTHER.id, changed(**fields))
        except ConfigError:
            continue
        learnt.save()
        assert LearntCosts(path).get(NAMESPACE.id) == COSTS, fields


GOOD = msgspec.json.encode({"format": 1, "costs": {NAMESPACE.id.hex(): COSTS}})
DAMAGED = {
    "empty": b"",
    "cut": GOOD[: len(GOOD) // 2],
    "binary": bytes(range(256)),
    "no utf-8": GOOD.replace(b"format", b"for\xffmat"),
    "another document": b"[1, 2, 3]",
    "no costs": b'{"format": 1}',
    "wrong types": GOOD.replace(b"0.02", b'"fast"'),
    "absurd costs": GOOD.replace(b"0.02", b"-7.0"),
    "another format": GOOD.replace(b'"format":1', b'"format":2'),
    "deep": b'{"more": ' + b"[" * 200_000,
    "long": GOOD[:-1] + b" " * (2 << 20) + b"}",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_told_and_replaced(path, caplog, data):
    path.write_bytes(data)
    learnt = LearntCosts(path)
    assert learnt.get(NAMESPACE.id) is None
    assert "cannot be used, engines learn anew" in caplog.text
    learnt.put(NAMESPACE.id, COSTS)
    learnt.save()
    assert LearntCosts(path).get(NAMESPACE.id) == COSTS


def test_a_folder_in_the_place_of_the_file_costs_the_file_only(path, caplog):
    path.mkdir()
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    learnt.save()
    assert "engines' costs cannot be written down" in caplog.text
    assert learnt.get(NAMESPACE.id) == COSTS


def test_a_disk_that_stands_still_while_costs_are_written_keeps_no_engine_waiting(path):
    """A pipe that nobody reads stands for it: opening it to write waits."""
    pipe = path.with_suffix(".new")
    os.mkfifo(pipe)
    learnt = LearntCosts(path)
    learnt.put(NAMESPACE.id, COSTS)
    saving = threading.Thread(target=learnt.save, daemon=True)
    saving.start()
    time.sleep(0.1)
    asking = threading.Thread(target=lambda: learnt.get(NAMESPACE.id), daemon=True)
    asking.start()
    asking.join(2.0)
    is_answered = not asking.is_alive()
    with open(pipe, "rb") as reader:
        reader.read()
    saving.join(SOON)
    assert is_answered


def test_costs_survive_a_restart_of_the_node_and_a_damaged_file_does_not_stop_it(node, tmp_path):
    def told(costs=None):
        client = NodeClient(node.path, (), limits=PATIENT)
        client.open_namespace(NAMESPACE)
        known = client.costs_of(NAMESPACE.id)
        if costs is not None:
            client.learnt(NAMESPACE.id, costs)
            assert served(client)
        client.close()
        return known

    assert told(COSTS) is None
    assert node.stop() == 0
    node.start()
    assert told() == COSTS
    assert node.stop() == 0
    (tmp_path / "file" / "costs.json").write_bytes(b"\0damage")
    node.start()
    assert told() is None
    assert "costs.json cannot be used" in node.errors
