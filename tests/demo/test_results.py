"""The demo's findings and their JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headstart.demo.results import Answer, DeviceReads


def test_the_json_has_the_promised_fields(make_result):
    document = json.loads(make_result().dumps())
    assert document["schema"] == "headstart.demo/1"
    assert document["identical"] is True
    assert document["speedup_restart"] == pytest.approx(40.0)
    assert document["device_verified"] is True
    assert [phase["name"] for phase in document["phases"]] == [
        "recompute",
        "cold",
        "memory",
        "restart",
    ]
    restart = document["phases"][3]
    assert restart["ttft_s"] == 0.5
    assert restart["prompt_tokens"] == 5600
    assert restart["hit_tokens"] == 5568
    assert restart["load_s"] == 0.25
    assert restart["load_bytes_per_s"] == pytest.approx(1e9)


def test_one_answer_that_differs_spoils_the_whole(make_result):
    result = make_result(differences=(1,))
    assert not result.identical
    restart = result.to_json()["phases"][3]
    assert [answer["same_as_recompute"] for answer in restart["answers"]] == [True, False]


@pytest.mark.parametrize(
    "device",
    [
        None,
        DeviceReads(process_nbytes=None, device_nbytes=None),
        DeviceReads(process_nbytes=0, device_nbytes=10**9),
        DeviceReads(process_nbytes=249_000_000, device_nbytes=None),
    ],
)
def test_bytes_that_were_not_counted_are_not_verified(make_result, device):
    assert not make_result(device=device).device_verified


def test_answers_survive_json(make_result):
    answer = make_result().phase("restart").first
    assert Answer.from_mapping(json.loads(json.dumps(asdict(answer)))) == answer
