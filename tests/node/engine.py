"""A scheduler or a worker as a process: answers each line of JSON on its stdin with one on stdout.

engine.py scheduler|worker <socket of the node> <seconds it waits>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headstart.keys import Namespace, keys_from_hashes
from headstart.node.client import ClientLimits, NodeClient
from headstart.node.mapping import ArenaMapping


class Worker:
    """Copies."""

    def __init__(self, path, wait_s):
        self.mapping = ArenaMapping(path, timeout_s=wait_s)

    def attach(self):
        assert self.mapping.attach()
        return self.mapping.token.hex()

    def read(self, offset, nbytes):
        return bytes(self.mapping.memory[offset : offset + nbytes]).hex()

    def write(self, offset, key, nbytes):
        data = bytes.fromhex(key) * (nbytes // 32)
        self.mapping.memory[offset : offset + nbytes] = data
        return True


class Scheduler:
    """Asks."""

    def __init__(self, path, wait_s):
        self.path, self.limits = path, ClientLimits(ask_s=wait_s, open_s=wait_s)
        self.promises = {}

    def open(self, workers, namespace):
        tokens = [bytes.fromhex(token) for token in workers]
        self.client = NodeClient(self.path, tokens, limits=self.limits)
        self.namespace = Namespace.from_json(namespace)
        self.client.open_namespace(self.namespace)
        return self.client.connect()

    def chain(self, names):
        return keys_from_hashes(self.namespace, [name.encode() for name in names])

    def promote(self, names):
        promise = self.client.promote(self.chain(names))
        if promise.ticket is not None:
            self.promises[promise.ticket] = promise
            while not promise.poll()[0]:
                pass
        return {"ticket": promise.ticket, "held": promise.num_held, "ready": promise.poll()[1]}

    def claim(self, ticket):
        return self.promises[ticket].claim().offsets

    def release(self, ticket):
        self.promises.pop(ticket).release()
        return True

    def unclaim(self, ticket):
        self.promises[ticket].unclaim()
        return True

    def reserve(self, names):
        ticket, reserved = self.client.reserve(self.chain(names))
        return {"ticket": ticket, "held": reserved.num_held, "offsets": reserved.offsets}

    def commit(self, ticket):
        self.client.commit(ticket)
        return True

    def drop(self):
        """Lose the connection and come back."""
        self.client._fail(TimeoutError("for the test"))
        self.client._down_until = 0.0
        return self.client.connect()


def main():
    role, path, wait_s = sys.argv[1:]
    side = {"worker": Worker, "scheduler": Scheduler}[role](Path(path), float(wait_s))
    for line in sys.stdin:
        fields = json.loads(line)
        print(json.dumps(getattr(side, fields.pop("question"))(**fields)), flush=True)


if __name__ == "__main__":
    main()
