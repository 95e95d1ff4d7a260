"""Small numbers for namespaces, as the rows of an index hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headstart.errors import ConfigError
from headstart.types import NamespaceId


class NamespaceNumbers(Mapping[NamespaceId, int]):
    """Number of each open namespace, from 1. Adding is for one thread at a time."""

    def __init__(self, known: Mapping[NamespaceId, int]) -> None:
        self._numbers = dict(known)

    def __getitem__(self, namespace: NamespaceId) -> int:
        """Raises ConfigError for a namespace that was never opened."""
        number = self._numbers.get(namespace)
        if number is None:
            raise ConfigError("this namespace is not open; call open_namespace() with it first")
        return number

    def __iter__(self) -> Iterator[NamespaceId]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, namespace: object) -> bool:
        return namespace in self._numbers

    def add(self, namespace: NamespaceId) -> int:
        """Number a new namespace."""
        number = max(self._numbers.values(), default=0) + 1
        self._numbers[namespace] = number
        return number
