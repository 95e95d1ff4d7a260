"""Metrics of a running server: one GET of a page of Prometheus text."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from headstart.errors import ConfigError

MAX_NBYTES = 64 << 20
# Straight to the server: a proxy would answer for one that is down.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def check_url(url: str) -> None:
    """Find out whether `url` can be one of metrics. Raises ConfigError."""
    wanted = "write http://HOST:PORT/metrics"
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError(f"{url!r} is no address; {wanted}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise ConfigError(f"{url!r} is no address of a web server; {wanted}")
    if parts.username or parts.password:
        raise ConfigError(f"an address with a user or a password is not supported; {wanted}")
    if not url.isprintable() or " " in url:
        raise ConfigError(f"{url!r} has characters that no address has; {wanted}")


def fetch(url: str, *, timeout_s: float) -> str:
    """The text at `url`; a wait for the server is at most `timeout_s`.

    Raises ConfigError: not an address, not reachable, no answer in time, an error, too much.
    """
    check_url(url)
    try:
        with _open(url, timeout=timeout_s) as answer:
            body = answer.read(MAX_NBYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(
                f"{url} answers {error.code}; metrics are often at /metrics"
            ) from None
    except TimeoutError:
        raise ConfigError(f"{url} does not answer within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ConfigError(f"{url} does not answer within {timeout_s:g} s") from None
        raise ConfigError(f"{url} cannot be reached: {_reason(error.reason)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"{url} cannot be read: {_reason(error)}") from None
    if len(body) > MAX_NBYTES:
        raise ConfigError(f"{url} gives over {MAX_NBYTES >> 20} MiB, which are no metrics")
    return str(body, "utf-8", "replace")


def _reason(error: object) -> str:
    """In words, without numbers of the system."""
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(told)
