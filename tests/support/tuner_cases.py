"""Small traces for the tuner, made up at random: chats that grow, branch, and share a beginning."""

from __future__ import annotations

import json
import random

from headstart.index import Index
from headstart.policies import make_policy
from headstart.tuner.recorded import record
from headstart.units import PAGE_NBYTES

SIZE = 4


def chats(seed, num_requests=120):
    """Mooncake's lines; the last block of some is shorter."""
    rng = random.Random(seed)
    ids = iter(range(1, 1 << 20))
    common = [next(ids), next(ids)]
    said = [list(common)]
    rows = []
    for number in range(num_requests):
        before = rng.choice(said[-8:])
        start = before[: rng.randint(min(rng.choice((0, 2)), len(before)), len(before))]
        prompt = start + [next(ids) for _ in range(rng.randint(not start, 3))]
        said.append(prompt)
        rows.append(
            {
                "timestamp": number * 10,
                "input_length": len(prompt) * SIZE - rng.choice((0, 0, 3)),
                "output_length": 1,
                "hash_ids": prompt,
            }
        )
    return rows


def many_chats(seed, num_chats, *, num_turns=8, pause=6.0, num_systems=2):
    """Mooncake's lines of chats that run beside each other, behind one of a few system prompts.

    A chat starts each second; it has up to `num_turns` turns, with pauses of `pause` seconds, and
    some turns ask the same once more.
    """
    rng = random.Random(seed)
    ids = iter(range(100, 1 << 30))
    rows = []
    for number in range(num_chats):
        at = number + rng.random()
        system = rng.randrange(num_systems)
        prompt = [10 * system + part for part in range(1, 4)]
        for turn in range(rng.randint(1, num_turns)):
            prompt = prompt + [next(ids) for _ in range(rng.randint(not turn, 4))]
            row = {"timestamp": 1000 * at, "input_length": len(prompt) * SIZE, "output_length": 1}
            rows.append({**row, "hash_ids": prompt})
            at += rng.expovariate(1 / pause)
    return sorted(rows, key=lambda row: row["timestamp"])


def recorded(tmp_path, rows, **options):
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return record(path, trace_block_size=SIZE, **options)


def prompts(recorded):
    """The blocks of each request, as lists."""
    return [
        recorded.blocks[start:end].tolist()
        for start, end in zip(recorded.starts[:-1], recorded.starts[1:], strict=True)
    ]


def hits_of_the_store(recorded, name, capacity):
    """Drives the index of the store: pin what is held, reserve, publish, unpin."""
    now = [0.0]
    index = Index(
        capacity_nbytes=capacity * PAGE_NBYTES,
        slab_nbytes=PAGE_NBYTES,
        policy=make_policy(name, clock=lambda: now[0]),
        slot_nbytes=lambda nbytes: nbytes,
    )
    index.block_tokens[0] = recorded.block_size
    found = []
    for blocks, at_s in zip(prompts(recorded), recorded.at_s.tolist(), strict=True):
        now[0] = at_s
        keys = [block.to_bytes(32, "little") for block in blocks]
        pinned = index.pin(keys, namespace=0, block_nbytes=PAGE_NBYTES)
        found.append(len(pinned))
        rest = keys[len(pinned) :]
        slots = index.reserve(PAGE_NBYTES, len(rest))
        index.publish(
            rest[: len(slots)],
            slots,
            parent=keys[len(pinned) - 1] if pinned else None,
            namespace=0,
            block_nbytes=PAGE_NBYTES,
        )
        index.unpin(pinned)
    index.check_invariants()
    return found
