"""A server with a prefix cache, as a process: hits make its first token come sooner.

prefix_server.py --port N [--token-s S] [--no-cache] [--no-reset] [--socket PATH]
                 [--die-after N] [--crash] [--hang] [--ignored WORD]

It computes nothing: a token that no cache knows takes `--token-s`, and the answer is made of the
prompt. With `--socket` blocks go to a node and come from it, as an engine's do, and `/metrics` says
how many tokens came from which tier. With `--die-after` it ends after so many completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from hashlib import blake2b
from pathlib import Path

from aiohttp import web

from headstart.keys import BlockLayout, Namespace, block_keys
from headstart.node.client import NodeClient
from headstart.node.mapping import ArenaMapping
from node_process import PATIENT

BLOCK = 16
BLOCK_NBYTES = 64 << 10
LAYOUT = BlockLayout(block_size=BLOCK, axes="byte", shape=(BLOCK_NBYTES,), dtype="uint8")
NAMESPACE = Namespace(model="prefix server", weights="none", layout=LAYOUT)


def content(key):
    return key * (BLOCK_NBYTES // len(key))


class NodeBlocks:
    """Blocks at a node, as a scheduler and a worker of one engine see them."""

    def __init__(self, path):
        self._worker = ArenaMapping(path, timeout_s=PATIENT.ask_s)
        self._client = NodeClient(path, (self._worker.token,), limits=PATIENT)
        self._client.open_namespace(NAMESPACE)
        self.loaded = {"memory": 0, "file": 0}

    def load(self, tokens):
        """How many blocks of a prompt's start came, each looked at."""
        if not self._client.connect() or not self._worker.follow(self._client.boot):
            return 0
        chain = block_keys(NAMESPACE, tokens)
        promise = self._client.promote(chain)
        if promise is None:
            return 0
        while not promise.poll()[0]:
            time.sleep(0.001)
        claimed = promise.claim()
        offsets = () if claimed is None else claimed.offsets
        for key, offset in zip(chain.keys, offsets, strict=False):
            found = self._worker.memory[offset : offset + BLOCK_NBYTES]
            assert found == content(key), "another block's bytes"
        for tier, count in (claimed.by_tier if claimed else {}).items():
            self.loaded[tier] += count * BLOCK
        promise.release()
        return len(offsets)

    def store(self, tokens):
        """Give the node what it does not hold."""
        if not self._client.connect() or not self._worker.follow(self._client.boot):
            return
        chain = block_keys(NAMESPACE, tokens)
        answer = self._client.reserve(chain)
        if answer is None or not answer[1].offsets:
            return
        ticket, reserved = answer
        keys = chain.keys[reserved.num_held :]
        for key, offset in zip(keys, reserved.offsets, strict=False):
            self._worker.memory[offset : offset + BLOCK_NBYTES] = content(key)
        self._client.commit(ticket)

    def close(self):
        self._client.close()
        self._worker.close()


class PrefixServer:
    def __init__(self, options):
        self._options = options
        self._known = set()
        self._node = NodeBlocks(options.socket) if options.socket else None
        self._num_asked = 0
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)
        if not options.no_reset:
            self.app.router.add_post("/reset_prefix_cache", self._reset)

    async def _models(self, request):
        if self._options.hang:
            return web.Response(status=503)
        return web.json_response({"data": [{"id": "model", "owned_by": "test"}]})

    async def _reset(self, request):
        self._known.clear()
        return web.Response()

    async def _metrics(self, request):
        if self._node is None:
            return web.Response(text="# nothing\n")
        lines = ["# TYPE headstart:loaded_tokens counter"] + [
            f'headstart:loaded_tokens_total{{engine="0",tier="{tier}"}} {count}'
            for tier, count in self._node.loaded.items()
        ]
        return web.Response(text="\n".join(lines) + "\n")

    def _hit(self, tokens):
        """Tokens that some cache knows, never the last one; now this one knows all."""
        starts = range(0, len(tokens) - BLOCK, BLOCK)
        blocks = [tokens[: start + BLOCK] for start in starts]
        own = next((i for i, b in enumerate(blocks) if b not in self._known), len(blocks))
        if self._node is not None:
            whole = tokens[: len(blocks) * BLOCK]
            before = dict(self._node.loaded)
            loaded = self._node.load(whole) if own < len(blocks) else 0
            if loaded <= own:
                self._node.loaded = before
            else:  # what the server had itself was not loaded
                first = next(tier for tier in before if self._node.loaded[tier] > before[tier])
                self._node.loaded[first] -= own * BLOCK
            own = max(own, loaded)
            self._node.store(whole)
        if self._options.no_cache:
            return 0
        self._known.update(blocks)
        return own * BLOCK

    async def _complete(self, request):
        if self._num_asked == self._options.die_after:
            print("out of memory, says the server", file=sys.stderr, flush=True)
            os._exit(3)
        self._num_asked += 1
        body = await request.json()
        tokens = tuple(body["prompt"])
        hit = self._hit(tokens)
        await asyncio.sleep(self._options.token_s * (len(tokens) - hit))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text = blake2b(repr(tokens).encode(), digest_size=8).hexdigest()
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        for event in ({"choices": [{"text": text}]}, {"choices": [], "usage": usage}):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--die-after", type=int, default=-1)
    parser.add_argument("--ignored")
    for flag in ("--no-cache", "--no-reset", "--crash", "--hang"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.crash:
        sys.exit("no GPU, says the server")
    web.run_app(PrefixServer(options).app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
