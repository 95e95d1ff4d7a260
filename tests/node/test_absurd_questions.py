"""Absurd questions: numbers that no engine and no prompt has are refused, and nothing else ends."""

from __future__ import annotations

import math

import msgspec
import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol

BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
COSTS = protocol.Costs(0.0, 1e-2, 0.0, 0.0, 8192, 1e12)
ASKED = protocol.Asked(130, 16, COSTS)
PATH = "abcdefgh"


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


ABSURD = [
    {"step_s": math.nan},
    {"token_s": -1e-3},
    {"pair_s": math.inf},
    {"uncertainty": -0.1},
    {"max_step_tokens": 0},
    {"max_step_tokens": -1},
    {"copy_bytes_per_s": 0.0},
    {"copy_bytes_per_s": math.nan},
]


@pytest.mark.parametrize("fields", ABSURD, ids=str)
def test_costs_that_nothing_has_are_refused_and_the_connection_goes_on(
    world, client, caplog, fields
):
    world.put(PATH)
    asked = protocol.Asked(130, 16, msgspec.structs.replace(COSTS, **fields))
    assert client.promote(chain(PATH), asked) is None
    assert "the node refused Promote" in caplog.text
    assert "must" in caplog.text
    assert client.num_failures == 0
    assert client.promote(chain(PATH), ASKED).poll() == (True, 8)


@pytest.mark.parametrize(("num_tokens", "block_size"), [(0, 16), (-1, 16), (130, 0), (1 << 41, 16)])
def test_counts_that_no_prompt_has_end_at_most_one_connection(
    world, client, clients, num_tokens, block_size
):
    world.put(PATH)
    assert client.promote(chain(PATH), protocol.Asked(num_tokens, block_size, COSTS)) is None
    assert clients(world.path).promote(chain(PATH), ASKED).poll() == (True, 8)


@pytest.mark.parametrize(
    "asked",
    [
        protocol.Asked(1 << 40, 1 << 40, COSTS),
        protocol.Asked(1, 1, COSTS),
        protocol.Asked(130, 16, COSTS, math.nan),
        protocol.Asked(130, 16, COSTS, math.inf),
        protocol.Asked(130, 16, COSTS, -1e300),
        protocol.Asked(1 << 40, 16, msgspec.structs.replace(COSTS, token_s=1e300)),
        protocol.Asked(1 << 40, 16, msgspec.structs.replace(COSTS, pair_s=1e300)),
        protocol.Asked(130, 16, msgspec.structs.replace(COSTS, uncertainty=1e308)),
        protocol.Asked(130, 16, msgspec.structs.replace(COSTS, copy_bytes_per_s=5e-324)),
        protocol.Asked(130, 16, msgspec.structs.replace(COSTS, max_step_tokens=2**63)),
    ],
    ids=[
        "counts",
        "one",
        "nan busy",
        "inf busy",
        "minus busy",
        "token",
        "pair",
        "unsure",
        "copy",
        "step",
    ],
)
def test_a_huge_question_gets_an_answer_in_numbers_or_a_refusal(world, client, asked):
    world.put(PATH)
    world.forget_memory()
    promise = client.promote(chain(PATH), asked)
    assert client.num_failures == 0
    if promise is not None:
        plan = msgspec.structs.asdict(promise.plan)
        assert all(math.isfinite(value) for value in plan.values() if isinstance(value, float))
        promise.release()
