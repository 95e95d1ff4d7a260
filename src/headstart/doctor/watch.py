"""What the metrics of a running server say over the last minute or so, scrape by scrape.

Counters grow since the start of the server, so what is looked at is the newest scrape less the
oldest of a window that moves along. The first scrape is all there is since the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Fact, Known, Source
from headstart.doctor.findings import Diagnosis
from headstart.doctor.readers import READERS, Document, Reader
from headstart.doctor.vocabulary import LISTS, TOP
from headstart.errors import ConfigError

WINDOW = 6
"""Intervals between the newest and the oldest scrape that is looked at."""
_ARM = "live"
_HISTORY = 30
_UNMOVED = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A figure that has changed while it was watched."""

    key: str
    now: str
    """For people, with its unit."""
    values: tuple[float, ...]
    """The newest last, in base units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known after a scrape."""

    diagnosis: Diagnosis
    moving: tuple[Moving, ...]
    num_scrapes: int
    is_since_start: bool
    """Whether counters are since the start of the server: there was one scrape yet."""


class Watch:
    """Takes scrapes of one server, in order."""

    def __init__(self, known: Sequence[Fact] = (), *, skipped: Sequence[str] = ()) -> None:
        """`known` was told by files, `skipped` is what was not used of them; they count first."""
        self._known, self._skipped = tuple(known), tuple(skipped)
        self._window: deque[Document] = deque(maxlen=WINDOW + 1)
        self._history: dict[str, deque[float]] = {}
        self._num = 0

    def add(self, document: Document) -> View:
        """Take another scrape. Raises ConfigError where it is of no metrics that are known."""
        reader = _reader(document)
        self._window.append(document)
        self._num += 1
        report = reader.read(list(self._window))
        live = []
        for fact in report.facts:
            if isinstance(fact.value, int | float):
                live.append(fact)
                past = self._history.setdefault(fact.key, deque(maxlen=_HISTORY))
                past.append(float(fact.value))
        facts = (*self._known, *self._placed(report.facts, document.path))
        return View(
            diagnosis=diagnose(Known(facts), skipped=(*self._skipped, *report.skipped)),
            moving=tuple(
                Moving(key=fact.key, now=str(fact), values=tuple(self._history[fact.key]))
                for fact in live
                if _moved(self._history[fact.key])
            ),
            num_scrapes=self._num,
            is_since_start=len(self._window) == 1,
        )

    def _placed(self, live: Sequence[Fact], path: str) -> Sequence[Fact]:
        """What a server says is of no arm of a file, but one of its own where a file has arms."""
        if not any(fact.scope == "arms" for fact in self._known):
            return live
        source = Source(path=path)
        own = [
            Fact(key="name", value=_ARM, source=source, scope="arms", owner=_ARM),
            Fact(key="cache", value="on", source=source, scope="arms", owner=_ARM),
        ]
        of_arms = LISTS["arms"].model_fields
        return [
            *own,
            *(
                replace(fact, scope="arms", owner=_ARM) if fact.key in of_arms else fact
                for fact in live
                if fact.scope == TOP
            ),
            *(fact for fact in live if fact.scope != TOP),
        ]


def _reader(document: Document) -> Reader:
    found = next((each for each in READERS if each.knows(document)), None)
    if found is None:
        raise ConfigError(
            f"{document.path} gives no metrics that are known; vLLM's are at "
            "http://HOST:PORT/metrics of its server"
        )
    return found


def _moved(values: Sequence[float]) -> bool:
    return max(values) - min(values) > _UNMOVED * max(map(abs, values))
