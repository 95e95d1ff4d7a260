"""What is known: facts, each with its unit and the line it came from, grouped by what they are of.

A reader makes `Fact`s; `Known` puts them together for the rules. What holds for all arms is asked
of an arm too, unless that arm says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headstart.doctor.vocabulary import LISTS, TOP, Arm, Observations, unit_of

Value = float | bool | str | tuple[float, ...]

_EITHER = {
    "ttft": ("ttft_p50", "ttft_mean"),
    "ttft_tail": ("ttft_p99", "ttft_p95"),
    "prompt": ("prompt_tokens", "prompt_tokens_p50"),
}
"""Names for whichever of several keys is told, the better one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place in a file."""

    path: str
    line: int | None = None

    def __str__(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that was told.

    `scope` is "top" or a list of the vocabulary such as "arms"; `owner` tells its members apart.
    The value is in base units: seconds, bytes, tokens, shares of 1.
    """

    key: str
    value: Value
    source: Source
    scope: str = TOP
    owner: str = ""

    def __post_init__(self) -> None:
        model = Observations if self.scope == TOP else LISTS[self.scope]
        if self.key not in model.model_fields:
            raise ValueError(f"{self.key!r} is no key of {self.scope}")

    def __str__(self) -> str:
        model = Observations if self.scope == TOP else LISTS[self.scope]
        unit = unit_of(model, self.key)
        if unit is None:
            return str(self.value)
        if isinstance(self.value, tuple):
            return ", ".join(unit.show(each) for each in self.value)
        return unit.show(self.value)


class Group:
    """The facts of one arm, tier, worker, sample or log line; or those that hold for all arms."""

    def __init__(
        self, scope: str, name: str, facts: Mapping[str, Fact], top: Group | None = None
    ) -> None:
        self.scope, self.name, self._facts, self._top = scope, name, facts, top
        # What holds for all arms is asked like an arm.
        models = (Observations, Arm) if scope == TOP else (LISTS[scope],)
        self._keys = frozenset(key for model in models for key in model.model_fields)

    def fact(self, key: str) -> Fact | None:
        """What was told of a key, or of whichever of several (`ttft`). KeyError if unknown.

        What an arm says itself comes first, whichever of the several it is.
        """
        names = _EITHER.get(key, (key,))
        for name in names:
            if name not in self._keys:
                raise KeyError(f"{name!r} is no key of {self.scope}")
        own = next((self._facts[name] for name in names if name in self._facts), None)
        return self._top.fact(key) if own is None and self._top is not None else own

    def number(self, key: str) -> float | None:
        """The value of a number that was told."""
        fact = self.fact(key)
        is_number = fact is not None and isinstance(fact.value, int | float)
        return float(fact.value) if is_number else None  # type: ignore[union-attr, arg-type]

    def numbers(self, *keys: str) -> tuple[float, ...] | None:
        """The values of several numbers; None unless all were told."""
        found = [self.number(key) for key in keys]
        return None if None in found else tuple(each for each in found if each is not None)

    def text(self, key: str) -> str:
        """The value of a text, in lower case; empty if not told."""
        fact = self.fact(key)
        return "" if fact is None else str(fact.value).lower()

    def says(self, key: str, value: bool) -> bool:
        """Whether it was told that a flag is `value`."""
        fact = self.fact(key)
        return fact is not None and fact.value is value

    @property
    def own(self) -> Mapping[str, Fact]:
        """The facts told of this group itself."""
        return self._facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A sentence, and where its figures stand."""

    text: str
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        where = ", ".join(dict.fromkeys(str(source) for source in self.sources))
        return f"{self.text} ({where})" if where else self.text


class _Cited:
    """A group inside a template: `{arm.ttft}` is shown with its unit, and its source noted."""

    def __init__(self, group: Group, sources: list[Source]) -> None:
        self._group, self._sources = group, sources

    def __getattr__(self, key: str) -> str:
        if key == "name":
            return self._group.name
        fact = self._group.fact(key)
        if fact is None:
            raise ValueError(f"{key} of {self._group.scope} {self._group.name!r} was not told")
        self._sources.append(fact.source)
        return str(fact)


def say(template: str, **things: Group | str | float) -> Evidence:
    """A line of evidence. `{arm.ttft}` names a fact of a group that is given as `arm`."""
    sources: list[Source] = []
    shown = {
        name: _Cited(thing, sources) if isinstance(thing, Group) else thing
        for name, thing in things.items()
    }
    return Evidence(text=template.format(**shown), sources=tuple(sources))


class Known:
    """All facts, by group. Of two facts on the same thing the first counts."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        grouped: dict[tuple[str, str], dict[str, Fact]] = {}
        self.num_facts = 0
        for fact in facts:
            group = grouped.setdefault((fact.scope, fact.owner), {})
            self.num_facts += fact.key not in group
            group.setdefault(fact.key, fact)
        self.top = Group(TOP, "", grouped.pop((TOP, ""), {}))
        lists: dict[str, list[Group]] = {scope: [] for scope in LISTS}
        for (scope, owner), members in grouped.items():
            name = str(members["name"].value) if "name" in members else owner
            top = self.top if scope == "arms" else None
            lists[scope].append(Group(scope, name, members, top))
        self.arms, self.tiers = tuple(lists["arms"]), tuple(lists["tiers"])
        self.workers, self.reads = tuple(lists["workers"]), tuple(lists["reads"])
        self.log_rates = tuple(lists["log_rates"])

    @property
    def situations(self) -> tuple[Group, ...]:
        """The arms; where there are none, what was told without them."""
        return self.arms or (self.top,)

    @property
    def engine(self) -> str:
        """The engine's name, in lower case; empty if not told."""
        return self.top.text("engine")

    @property
    def connector(self) -> str:
        """The cache layer's name."""
        return self.top.text("connector")
