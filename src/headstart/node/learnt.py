"""What engines have learnt of their costs, kept for the next ones of the same namespace."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from headstart.costs import EngineCosts
from headstart.errors import ConfigError
from headstart.node.protocol import Costs
from headstart.types import KEY_NBYTES

_log = logging.getLogger(__name__)
_FORMAT = 1
_MAX_SPACES = 256
_MAX_NBYTES = 1 << 20


class LearntCosts:
    """By namespace, the most recently told ones. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """Reads `path` if it is there; what is no such file is ignored, and replaced later."""
        self._path = path
        self._costs: OrderedDict[str, Costs] = OrderedDict()
        self._is_changed = False
        self._saver: threading.Thread | None = None
        self._lock = threading.Lock()
        if path is not None:
            self._read(path)

    def get(self, namespace: bytes) -> Costs | None:
        """What the last engine of a namespace had learnt."""
        with self._lock:
            return self._costs.get(namespace.hex())

    def put(self, namespace: bytes, costs: Costs) -> None:
        """An engine tells its costs. Raises ConfigError for what no engine can cost."""
        _check(costs)
        if len(namespace) != KEY_NBYTES:
            raise ConfigError(f"a namespace's id has {KEY_NBYTES} bytes, not {len(namespace)}")
        with self._lock:
            self._costs[namespace.hex()] = costs
            self._costs.move_to_end(namespace.hex())
            self._is_changed = True
            while len(self._costs) > _MAX_SPACES:
                self._costs.popitem(last=False)

    def save(self) -> None:
        """Write them down, if anything is new. What the disk refuses is lost: they are relearnt."""
        with self._lock:
            if self._path is None or not self._is_changed:
                return
            self._is_changed = False
            data = msgspec.json.encode({"format": _FORMAT, "costs": dict(self._costs)})
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_bytes(data)
            temporary.replace(self._path)
        except OSError as error:
            _log.warning("engines' costs cannot be written down: %s", error)

    def save_aside(self, timeout_s: float = 0.0) -> None:
        """The same on a thread of its own, waited for only so long: the disk may stand still."""
        if self._saver is None or not self._saver.is_alive():
            self._saver = threading.Thread(target=self.save, name="headstart-costs", daemon=True)
            self._saver.start()
        self._saver.join(timeout_s)

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                saved = msgspec.json.decode(file.read(_MAX_NBYTES), type=_Saved)
            if saved.format != _FORMAT:
                raise ConfigError(f"format {saved.format}, not {_FORMAT}")
            for space, costs in saved.costs.items():
                _check(costs)
                self._costs[space] = costs
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, RecursionError, ConfigError) as error:
            _log.warning("%s cannot be used, engines learn anew: %s", path, error)


class _Saved(msgspec.Struct):
    format: int
    costs: dict[str, Costs]


def _check(costs: Costs) -> None:
    EngineCosts(**msgspec.structs.asdict(costs))
