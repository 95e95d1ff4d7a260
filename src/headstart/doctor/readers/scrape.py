"""Metrics of a running server: its URL is read twice, so that counters tell what they grew by."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Sequence

from headstart.doctor.readers.base import Document
from headstart.doctor.readers.exposition import KNOWN
from headstart.doctor.scrape import fetch
from headstart.errors import ConfigError

_TIMEOUT_S = 10.0
_SCHEMES = ("http://", "https://")


def is_url(text: str) -> bool:
    """Whether it is a URL, and no file."""
    return text.lower().startswith(_SCHEMES)


def scrape(
    urls: Sequence[str], window_s: float, *, sleep: Callable[[float], None]
) -> list[Document]:
    """Two snapshots of each, `window_s` seconds apart; without a path, of `/metrics`.

    Raises ConfigError for what cannot be read or is no metrics.
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
    text = fetch(url, timeout_s=_TIMEOUT_S)
    if KNOWN.search(text) is None:
        raise ConfigError(
            f"{url} has no metrics of vLLM, SGLang, LMCache or Headstart; it starts with "
            f"{text.strip()[:60]!r}"
        )
    return Document(path=url, text=text, origin=url)
