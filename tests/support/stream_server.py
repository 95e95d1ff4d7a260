"""A server of HTTP that streams prepared answers, well or badly."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading

from aiohttp import web

SOON = 20.0


def chunk(text, **more):
    return {"choices": [{"text": text}], **more}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}
GOOD = [chunk(""), chunk("a"), chunk("b"), chunk("c"), USAGE, "[DONE]"]


class Server:
    """Answers with prepared events, `delay_s` before each, to as many at once as there are `slots`.

    After `num_models_left` questions for its models it is gone.
    """

    def __init__(self):
        self.events, self.status, self.delay_s = GOOD, 200, 0.0
        self.text = "Too Many Requests"
        self.slots = asyncio.Semaphore(10_000)
        self.kind = "text/event-stream"
        self.bodies, self.num_running, self.num_running_max = [], 0, 0
        self.models = {"data": [{"id": "model", "owned_by": "vllm"}]}
        self.can_reset, self.num_resets = False, 0
        self.num_models_left = math.inf
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(SOON)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/reset_prefix_cache", self._reset)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._loop.run_until_complete(web.SockSite(runner, sock).start())
        self._ready.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request):
        self.num_models_left -= 1
        if self.num_models_left < 0:
            return web.Response(status=503, text="gone")
        if self.models == "wait":
            await asyncio.sleep(2 * SOON)
        if isinstance(self.models, int):
            return web.Response(status=self.models, text="busy")
        return web.json_response(self.models)

    async def _reset(self, request):
        self.num_resets += self.can_reset
        return web.Response(status=200 if self.can_reset else 404)

    async def _complete(self, request):
        self.bodies.append(await request.json())
        self.num_running += 1
        self.num_running_max = max(self.num_running_max, self.num_running)
        try:
            if self.status != 200:
                return web.Response(status=self.status, text=self.text)
            response = web.StreamResponse(headers={"Content-Type": self.kind})
            await response.prepare(request)
            async with self.slots:
                for event in self.events:
                    await asyncio.sleep(self.delay_s)
                    if event == "wait":
                        await asyncio.sleep(2 * SOON)
                    if event == "cut":
                        request.transport.close()
                        return response
                    data = event if isinstance(event, str) else json.dumps(event)
                    await response.write(f"data: {data}\n\n".encode())
            return response
        finally:
            self.num_running -= 1

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON)
