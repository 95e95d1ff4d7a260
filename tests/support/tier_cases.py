"""Two tiers in few words, as the module says what they do: slow, and nothing shared with it."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path

from headstart.tuner.recorded import NO_PARENT, record
from tuner_cases import SIZE, prompts


def of_paths(paths):
    """A trace of prompts given by their contents: equal beginnings are equal blocks."""
    ids = {}
    rows = [
        {
            "timestamp": number * 10,
            "input_length": len(path) * SIZE or SIZE - 1,
            "output_length": 1,
            "hash_ids": [
                ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))
            ],
        }
        for number, path in enumerate(paths)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return record(path, trace_block_size=SIZE)


class Tier:
    """Held blocks and when each was used last."""

    def __init__(self, capacity, parent, policy):
        self.capacity, self.parent, self.policy = capacity, parent, policy
        self.ticks = itertools.count()
        self.held = {}

    def prefix(self, blocks):
        return len(list(itertools.takewhile(self.held.__contains__, blocks)))

    def use(self, blocks):
        for block in blocks if self.policy == "lru" else ():
            self.held[block] = next(self.ticks)

    def take(self, run, kept):
        """Hold a run as far as there is room; returns what it took, and what went for it."""
        gone = []
        while len(self.held) + len(run) > self.capacity:
            above = {self.parent[block] for block in self.held}
            leaves = [b for b in self.held if b not in above and b not in kept]
            if not leaves:
                break
            gone.append(min(leaves, key=self.held.__getitem__))
            del self.held[gone[-1]]
        taken = run[: self.capacity - len(self.held)]
        for block in taken:
            self.held[block] = next(self.ticks)
        return taken, gone


class Model:
    """Replays a trace; `hits` are (memory, files) of each request."""

    def __init__(self, trace, setup):
        self.parent = trace.parent.tolist()
        make = lambda capacity: Tier(capacity, self.parent, setup.policy)  # noqa: E731
        self.memories = [make(setup.memory_blocks) for _ in range(setup.engines)]
        self.files = make(setup.file_blocks)
        self.setup, self.used, self.hits = setup, {}, []
        self.log, self.causes = [], Counter()
        for at_s, session, blocks in zip(trace.at_s, trace.session, prompts(trace), strict=True):
            if setup.ttl_s is not None:
                self.expire(at_s - setup.ttl_s)
            self.request(self.memories[session % setup.engines], blocks)
            self.used.update(dict.fromkeys(blocks, at_s))

    def expire(self, before_s):
        for block in [block for block, at_s in self.used.items() if at_s < before_s]:
            del self.used[block]
            for tier in (*self.memories, self.files):
                tier.held.pop(block, None)

    def request(self, memory, blocks):
        setup, files = self.setup, self.files
        has_memory = setup.memory_blocks > 0
        is_exclusive = has_memory and not setup.inclusive
        here = memory.prefix(blocks)
        there = here + files.prefix(blocks[here:]) if is_exclusive else files.prefix(blocks)
        stored = blocks[: setup.memory_blocks] if has_memory else blocks
        hits = max(here, min(there, len(stored)))
        self.hits.append((here, hits - here))
        memory.use(blocks[:here])
        if is_exclusive:
            for block in blocks[here:hits]:
                del files.held[block]
        else:
            files.use(blocks[:there])  # all of the prefix; the store uses only what it reads
        gone = memory.take(stored[here:], blocks[:here])[1] if has_memory else []
        kept = blocks[:there]
        if setup.write == "second-touch":
            known = [block for block in stored if block in self.used]
            self.write(known[there:], kept, lambda block: "used again")
        elif setup.write == "through" or not has_memory:
            self.write(stored[there:], kept, lambda b: "lost" if b in set(blocks[:here]) else "new")
        elif is_exclusive:
            while gone:  # runs up a prompt, written in the prompt's order
                run = [gone.pop(0)]
                while gone and gone[0] == self.parent[run[0]]:
                    run.insert(0, gone.pop(0))
                self.write([b for b in run if b not in files.held], [], lambda b: "evicted")
        else:
            for block in gone:
                path = self.path(block)
                run = [each for each in path if each not in files.held]
                cause = lambda each: "evicted" if each in gone else "above"  # noqa: E731
                self.write(run, [*path, *kept], cause)

    def path(self, block):
        found = []
        while block != NO_PARENT:
            found.insert(0, block)
            block = self.parent[block]
        return found

    def write(self, run, kept, cause):
        taken, _ = self.files.take(run, kept)
        self.log += taken
        self.causes.update(map(cause, taken))
