"""What a medium refuses at run time is a miss, counted, and never an exception."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from headstart.testing import BLOCK_NBYTES, Ending, kit_namespace
from headstart.types import Outcome

SLOT = 4096 + BLOCK_NBYTES
FAILED, DONE, ORPHAN = Outcome.FAILED, Outcome.DONE, Outcome.ORPHAN
EIO = OSError(errno.EIO, "Input/output error")


def fails(kind, *, at=lambda offset: True, error=EIO):
    """A fault for one kind of call, at the offsets that `at` chooses."""
    return lambda called, offset: error if called == kind and at(offset) else None


@pytest.mark.parametrize(
    "error",
    [
        EIO,
        OSError(errno.ENOSPC, "No space left"),
        OSError(errno.EROFS, "Read-only file system"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError("?"),
    ],
    ids=["EIO", "ENOSPC", "EROFS", "ESTALE", "no errno"],
)
def test_a_write_error_is_failed_and_counted(rig, faulty, error):
    chain = rig.chain("abcd")
    faulty.fault = fails("write", error=error)
    assert rig.write(chain) == [FAILED] * 4
    stats = rig.tier.stats()
    assert (stats.num_failed, stats.num_stored, stats.used_nbytes) == (4, 0, 0)
    assert rig.tier.lookup(chain.keys) == 0
    faulty.fault = lambda kind, offset: None
    rig.store(chain)
    rig.expect(chain)


def test_a_write_error_in_the_middle_keeps_what_is_before(rig, faulty, monkeypatch):
    monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
    chain = rig.chain("abcd")
    faulty.fault = fails("write", at=lambda offset: offset == 2 * SLOT)
    assert rig.write(chain) == [DONE, DONE, FAILED, ORPHAN]
    rig.expect(chain.run(0, 2))
    assert rig.tier.stats().used_nbytes == 2 * SLOT
    faulty.fault = lambda kind, offset: None
    rig.store(chain)
    rig.expect(chain)


def test_a_write_error_of_a_run_loses_nothing_that_was_held(rig, faulty):
    chain = rig.chain("abcdef")
    rig.store(chain.run(0, 3))
    faulty.fault = fails("write")
    outcomes = rig.write(chain)
    assert outcomes[:3] == [DONE] * 3
    assert FAILED in outcomes[3:]
    assert DONE not in outcomes[3:]
    rig.expect(chain.run(0, 3))


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, SLOT, SLOT + 4096, 3 * SLOT + 8192])
def test_a_short_write_publishes_whole_blocks_only(rig, faulty, nbytes):
    chain = rig.chain("abcd")
    faulty.fault = lambda kind, offset: nbytes if kind == "write" else None
    outcomes = rig.write(chain)
    whole = nbytes // SLOT
    assert outcomes[:whole] == [DONE] * whole
    assert DONE not in outcomes[whole:]
    assert FAILED in outcomes[whole:]
    assert rig.tier.stats().num_failed >= 1
    faulty.fault = lambda kind, offset: None
    rig.expect(chain.run(0, whole))
    assert rig.tier.lookup(chain.keys) == whole
    rig.store(chain)
    rig.expect(chain)


@pytest.mark.parametrize(
    "error", [EIO, OSError(errno.ENXIO, "No such device"), OSError("?")], ids=str
)
def test_a_read_error_is_failed_and_counted_and_the_block_stays(rig, faulty, error):
    chain = rig.chain("abcd")
    rig.store(chain)
    faulty.fault = fails("read", error=error)
    assert rig.read(chain) == [FAILED] * 4
    stats = rig.tier.stats()
    assert (stats.num_failed, stats.num_dropped, stats.num_blocks) == (4, 0, 4)
    faulty.fault = lambda kind, offset: None
    rig.expect(chain)


def test_one_bad_sector_does_not_cost_its_neighbours(rig, faulty):
    chain = rig.chain("abcd")
    rig.store(chain)
    bad = 2 * SLOT
    place = {int(r["offset"]) for r in rig.tier.index.held()}
    assert bad in place

    def fault(kind, offset):
        # A call that touches the bad sector fails as a whole, however much it reads.
        covers = offset <= bad < offset + (4 * SLOT if offset == 0 else SLOT)
        first_call = kind == "read" and faulty.num_calls["read"] == 1
        return EIO if kind == "read" and (first_call or (covers and offset == bad)) else None

    faulty.fault = fault
    assert rig.read(chain) == [DONE, DONE, FAILED, DONE]


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, SLOT + 4096])
def test_a_short_read_is_torn(rig, faulty, nbytes):
    chain = rig.chain("abcd")
    rig.store(chain)
    faulty.fault = lambda kind, offset: nbytes if kind == "read" else None
    whole = nbytes // SLOT
    outcomes = rig.read(chain)
    assert outcomes[:whole] == [DONE] * whole
    assert set(outcomes[whole:]) == {Outcome.DROPPED}
    assert rig.tier.stats().num_dropped == 4 - whole


def test_verify_counts_what_cannot_be_read(rig, faulty):
    rig.store(*rig.roots(5))
    faulty.fault = fails("read", at=lambda offset: offset < 2 * SLOT)
    report = rig.tier.verify()
    assert (report.num_blocks, report.num_damaged, report.num_failed) == (5, 0, 2)
    assert not report.good
    faulty.fault = lambda kind, offset: None
    assert rig.tier.verify().good


def test_errors_leak_neither_room_nor_pins(rig, faulty):
    chain = rig.chain("abcd")
    for number in range(60):
        kind = ("read", "write")[number % 2]
        faulty.fault = fails(
            kind, at=lambda offset, number=number: offset // SLOT % 3 != number % 3
        )
        rig.write(rig.chain([f"{number}a", f"{number}b"]))
        rig.read(chain)
        rig.write(chain)
        rig.tier.check_invariants()
    faulty.fault = lambda kind, offset: None
    roots = rig.roots(16)
    rig.store(*roots)
    rig.expect(*roots)


def test_a_directory_removed_at_run_time(rig):
    """Open slabs go on; what cannot be written down is kept for later; closing is quiet."""
    rig.store(rig.chain("ab"))
    shutil.rmtree(rig.harness.root)
    rig.store(rig.chain("abcd"))
    rig.expect(rig.chain("abcd"))
    rig.tier.open_namespace(rig.namespace)
    rig.discard(rig.chain("abc").keys[2:])
    rig.tier.flush()
    assert rig.tier.verify().good
    rig.tier.close()
    assert not rig.harness.root.exists()


def test_a_namespace_that_cannot_be_written_down_works_for_this_run(rig):
    shutil.rmtree(rig.harness.root / "namespaces")
    space = rig.open_namespace(kit_namespace("other"))
    rig.store(rig.chain("ab", space))
    rig.expect(rig.chain("ab", space))
    rig.reopen(Ending.CLOSE)
    assert rig.tier.lookup(rig.chain("ab", space).keys) == 0
    rig.store(rig.chain("ab", space))


class FullLog:
    """The disk of the bookkeeping is full: every write to the log or its copy fails."""

    def __init__(self, monkeypatch):
        self.full = True
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, fd, data, offset):
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        if self.full and name in ("index.log", "index.tmp"):
            self._pwrite(fd, bytes(data)[: len(data) // 3], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._pwrite(fd, data, offset)


def test_a_log_that_cannot_be_written_is_written_later(rig, monkeypatch):
    rig.store(rig.chain("ab"))
    disk = FullLog(monkeypatch)
    rig.store(rig.chain("abcd"), *rig.roots(14))
    rig.discard(rig.chain("abc").keys[2:])
    rig.expect(rig.chain("ab"))
    assert rig.tier.stats().num_failed > 0
    disk.full = False
    rig.tier.flush()
    rig.reopen(Ending.KILL)
    rig.expect(rig.chain("ab"), *rig.roots(14))
    assert rig.tier.lookup(rig.chain("abcd").keys) == 2


@pytest.mark.parametrize("ending", list(Ending))
def test_a_log_that_can_never_be_written_costs_only_what_came_after(rig, monkeypatch, ending):
    rig.store(rig.chain("ab"))
    rig.tier.flush()
    disk = FullLog(monkeypatch)
    rig.store(*rig.roots(5))
    rig.discard(rig.chain("ab").keys[1:])
    rig.harness.between = lambda root: setattr(disk, "full", False)
    rig.reopen(ending)
    rig.ledger.restore()
    assert rig.tier.stats().num_blocks == 2
    rig.expect(rig.chain("ab"))
    assert rig.tier.verify().good
