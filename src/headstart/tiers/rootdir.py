"""The directory of a file tier: who owns it, which format it has, which namespaces it holds.

root/lock                 held by the owning process (open-file-description lock)
root/format.json          format version, uuid and slab size; another version empties the cache
root/index.log            see `headstart.journal`
root/namespaces/N.json    namespace number N in readable form; its mtime is the last use
root/slabs/000000.slab    payload; absent when a block device holds it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
import uuid
from pathlib import Path

from headstart.blockfile import FORMAT_VERSION
from headstart.errors import ConfigError, RootLockedError, TierUnavailableError
from headstart.keys import Namespace
from headstart.types import NamespaceId

_log = logging.getLogger(__name__)
_FORMAT = "headstart file tier"
_VOLATILE = frozenset({"tmpfs", "ramfs"})
_OURS = frozenset(
    {"lock", "slabs", "namespaces", "device.json"}
    | {"format.json", "format.tmp", "index.log", "index.tmp"}
)


class RootDir:
    """Opens, locks and describes a directory. `close()` gives up the lock."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """Creates `path` when its parent exists.

        Raises ConfigError, TierUnavailableError, or RootLockedError when a process owns it.
        """
        path = path.absolute()  # a later chdir must not lead to another directory
        self.path = path
        self.slabs = path / "slabs"
        self.log = path / "index.log"
        self._format = path / "format.json"
        self._namespaces = path / "namespaces"
        self._lock_fd = -1
        self._made: list[Path] = []
        """What a first start made, to be taken back if it fails."""
        _refuse_volatile(path, durable=durable)
        try:
            _refuse_foreign(path)
            self._made += [each for each in (path, path / "lock") if not os.path.lexists(each)]
            path.mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = _lock(path / "lock")
            if not self._format.exists():
                self._made += [self._namespaces, self.slabs, path / "lock", self._format]
            self.slabs.mkdir(mode=0o700, exist_ok=True)
            self._namespaces.mkdir(mode=0o700, exist_ok=True)
        except RootLockedError:
            raise
        except FileNotFoundError as error:
            raise TierUnavailableError(
                error.errno, f"root {path}: its parent directory does not exist; create it first"
            ) from error
        except OSError as error:
            self.abandon()
            raise TierUnavailableError(
                error.errno, f"root {path}: {error.strerror}; it must be a writable directory"
            ) from error

    def describe(self, *, slab_nbytes: int | None, default_slab_nbytes: int) -> tuple[bytes, int]:
        """The directory's (uuid, slab size). `slab_nbytes` None means: keep what is there.

        A directory of another format version or slab size is emptied: its blocks cannot be read.
        Raises OSError.
        """
        path, identity = self._format, uuid.uuid4()
        try:
            found = json.loads(path.read_text())
            version, present = found["version"], int(found["slab_nbytes"])
            identity = uuid.UUID(found["uuid"])  # kept: a block device is claimed under it
            if version == FORMAT_VERSION and slab_nbytes in (None, present):
                return identity.bytes, present
            _log.warning(
                "%s: format version %s with slabs of %s bytes is reclaimed",
                self.path,
                version,
                present,
            )
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            _log.warning("%s is damaged; the cache starts empty", path)
        self._empty()
        fresh = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            "uuid": str(identity),
            "slab_nbytes": slab_nbytes or default_slab_nbytes,
        }
        _write_atomically(path, json.dumps(fresh, indent=2))
        return identity.bytes, int(str(fresh["slab_nbytes"]))

    def namespaces(self) -> dict[int, NamespaceId]:
        """Numbers and ids of the namespaces in the directory; unreadable ones are left out."""
        found = {}
        for path in self._namespaces.glob("*.json"):
            try:
                found[int(path.stem)] = Namespace.from_json(path.read_text()).id
            except (OSError, ValueError):  # ConfigError is a ValueError
                _log.warning("%s is damaged; its blocks are dropped", path)
        return found

    def add_namespace(self, number: int, namespace: Namespace) -> None:
        """Write a namespace under a number that is not in use. Raises OSError."""
        _write_atomically(self._namespaces / f"{number}.json", namespace.to_json())

    def touch_namespace(self, number: int) -> None:
        """Note a use of a namespace. Raises OSError."""
        os.utime(self._namespaces / f"{number}.json")

    def idle_s(self, number: int, now: float) -> float:
        """Seconds since a namespace's last use, by wall clock `now`."""
        return now - (self._namespaces / f"{number}.json").stat().st_mtime

    def remove_namespace(self, number: int) -> None:
        """Forget a namespace. Raises OSError."""
        (self._namespaces / f"{number}.json").unlink(missing_ok=True)

    def settle(self) -> None:
        """Keep what a first start made, whatever comes: something else refers to it now."""
        self._made.clear()

    def abandon(self) -> None:
        """Take back what a first start made, and give up the lock."""
        if self._format in self._made:
            self._empty()
        for path in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir() if path.is_dir() else path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the lock. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _empty(self) -> None:
        for path in (self.log, *self.slabs.glob("*.slab"), *self._namespaces.glob("*.json")):
            path.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """An open-file-description lock: it dies with the process, and threads do not share it."""
    while True:
        fd = _lock_once(path)
        if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            break
        os.close(fd)  # its owner took back a failed first start, and the file with it
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _lock_once(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    whole_file = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise RootLockedError(
            error.errno,
            f"root {path.parent} is in use by process {owner}; one process owns a directory: stop "
            "that one, or give this one a root of its own",
        ) from error
    return fd


def _refuse_foreign(path: Path) -> None:
    """Never take over, let alone empty, a directory that holds something else.

    Without a sound `format.json` it is ours only if it has a lock and nothing that we do not make:
    then its first start was interrupted, or the file was damaged.
    """
    if not path.exists() or _is_ours(path / "format.json"):
        return
    names = {entry.name for entry in path.iterdir()} - {"lost+found"}
    if foreign := sorted(names - _OURS if _is_lock(path / "lock") else names):
        raise ConfigError(
            f"root {path} is not empty ({foreign[0]!r} ...) and not a Headstart directory; "
            "name a new or an empty directory"
        )


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text())["format"] == _FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_lock(path: Path) -> bool:
    """Whether a file holds what a lock holds: a process id, or nothing yet."""
    if path.is_symlink():
        return False
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return not content or content.strip().isdigit()


def _refuse_volatile(path: Path, *, durable: bool) -> None:
    kind = _file_system(path)
    if durable and kind in _VOLATILE:
        raise ConfigError(
            f"root {path} is on {kind}; blocks would not survive a restart of the machine, and "
            "take memory. Use a path on a disk, or set durable = false"
        )


def _file_system(path: Path) -> str:
    """Type of the file system that holds `path`, from the longest mount point above it."""
    where = path.resolve()
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            mount = left.split(" ")[4].encode().decode("unicode_escape")
            if len(mount) >= len(best) and where.is_relative_to(mount):
                best, kind = mount, right.split(" ")[0]
    return kind


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
