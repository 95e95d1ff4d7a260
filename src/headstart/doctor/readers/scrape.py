"""Metrics of a running server: its URL is read twice, so that counters tell what they grew by."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence

from headstart.doctor.readers.base import Document
from headstart.doctor.readers.exposition import KNOWN
from headstart.errors import ConfigError

_TIMEOUT_S = 10.0
_MAX_NBYTES = 64 << 20
_SCHEMES = ("http://", "https://")


def is_url(text: str) -> bool:
    """Whether it is a URL, and no file."""
    return text.lower().startswith(_SCHEMES)


def scrape(
    urls: Sequence[str], window_s: float, *, sleep: Callable[[float], None]
) -> list[Document]:
    """Two snapshots of each, `window_s` seconds apart; without a path, of `/metrics`.

    Connects directly, without a proxy. Raises ConfigError for what cannot be read or is no metrics.
    """
    if window_s <= 0:
        raise ConfigError("the window has to be longer than zero, such as 30s")
    named = list(dict.fromkeys(map(_with_path, urls)))
    first = [_read(url) for url in named]
    sleep(window_s)
    return [*first, *map(_read, named)]


def _with_path(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(path="/metrics").geturl() if parts.path in ("", "/") else url


def _read(url: str) -> Document:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            content = answer.read(_MAX_NBYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(
                f"{url} answers {error.code} {error.reason}; give the address of its metrics, such "
                "as http://HOST:8000/metrics (SGLang needs --enable-metrics)"
            ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{url} cannot be read: {reason}; is the server up, and reachable from here?"
        ) from error
    if len(content) > _MAX_NBYTES:
        raise ConfigError(f"{url} gives more than {_MAX_NBYTES >> 20} MiB; metrics are smaller")
    text = content.decode("utf-8", errors="replace")
    if KNOWN.search(text) is None:
        raise ConfigError(
            f"{url} has no metrics of vLLM, SGLang, LMCache or Headstart; it starts with "
            f"{text.strip()[:60]!r}"
        )
    return Document(path=url, text=text, origin=url)
