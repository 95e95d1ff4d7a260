"""Small traces for the tuner, made up at random: chats that grow, branch, and share a beginning."""

from __future__ import annotations

import json
import random

from headstart.tuner.recorded import record

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
