"""`/metrics` and `/healthz` on the loopback interface."""

from __future__ import annotations

import logging
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headstart.errors import ConfigError
from headstart.metrics import CONTENT_TYPE, Metrics

_log = logging.getLogger(__name__)
DEFAULT_PORT = 9465
_REQUEST_S = 5.0
_MAX_REQUESTS = 16
_POLL_S = 0.1


class HttpServer:
    """Serves until `close()`."""

    def __init__(self, metrics: Metrics, port: int | None) -> None:
        """`port` None is `DEFAULT_PORT`, or a free one if that is taken; 0 is a free one.

        Raises ConfigError when the port cannot be had.
        """
        self._server = _bind(_handler(metrics), port)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="headstart-http",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Bounded(ThreadingHTTPServer):
    """At most `_MAX_REQUESTS` at once: anybody on the machine may connect. The rest are closed."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.Semaphore(_MAX_REQUESTS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for the host's name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request failed", exc_info=True)


def _bind(handler: type[BaseHTTPRequestHandler], port: int | None) -> ThreadingHTTPServer:
    wanted = (DEFAULT_PORT, 0) if port is None else (port,)
    reason: str | None = None
    for number in wanted:
        try:
            return _Bounded(("127.0.0.1", number), handler)
        except OSError as error:
            reason = error.strerror
    raise ConfigError(f"node.metrics_port {port}: {reason}; choose another, or 0 for a free one")


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._send(HTTPStatus.OK, CONTENT_TYPE, metrics.text())
                case "/healthz":
                    self._send(HTTPStatus.OK, "text/plain", b"ok\n")
                case _:
                    self._send(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics or /healthz\n")

        def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            _log.debug(format, *args)

    return Handler
