"""The index on disk: torn anywhere, refused by the disk, compacted, of somebody else."""

import errno
import os
import struct

import numpy as np
import pytest
import xxhash

from headstart import journal as journal_module
from headstart.index import Index
from headstart.journal import Journal, newest, restorable
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import make_policy
from headstart.rows import NO_PARENT, RECORD
from headstart.units import PAGE_NBYTES, align_up

UUID = bytes(range(16))
SLAB = 4 * PAGE_NBYTES
CAPACITY = 4 * SLAB
HEADER_NBYTES = 40
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(PAGE_NBYTES,), dtype="uint8")
NAMESPACE = Namespace(model="journal", weights="none", layout=LAYOUT)
PLACES = {"capacity_nbytes": CAPACITY, "slab_nbytes": SLAB, "slot_nbytes": align_up}


def make_index(num_slabs=4):
    return Index(
        capacity_nbytes=num_slabs * SLAB,
        slab_nbytes=SLAB,
        policy=make_policy("lru"),
        slot_nbytes=align_up,
        logged=True,
    )


def chain(path):
    return keys_from_hashes(NAMESPACE, [content.encode() for content in path])


def store(index, path, *, start=0):
    run = chain(path).run(start, len(path))
    slots = index.reserve(PAGE_NBYTES, len(run))
    index.publish(
        run.keys[: len(slots)],
        slots,
        parent=run.parent,
        namespace=1,
        block_nbytes=PAGE_NBYTES,
    )


def opened(path, uuid=UUID):
    journal = Journal(path, uuid=uuid)
    return journal, journal.read()


def restored(path, num_slabs=4):
    """The index that a new process would make of the log."""
    journal, records = opened(path)
    journal.close()
    index = make_index(num_slabs)
    index.restore(restorable(records, **PLACES | {"capacity_nbytes": num_slabs * SLAB}))
    index.check_invariants()
    return index


def state(index):
    """What is held where, whatever the rows and priorities."""
    records = index.held()
    keys = dict(zip(records["row"].tolist(), (bytes(k) for k in records["key"]), strict=True))
    return {
        bytes(r["key"]): (int(r["offset"]), int(r["generation"]), keys.get(int(r["parent"])))
        for r in records
    }


def history(path):
    """A short life with every kind of change; the state after each commit, by size of the log."""
    journal, _ = opened(path)
    index = make_index()
    states = {path.stat().st_size: {}}
    steps = [
        lambda: store(index, "abcd"),
        lambda: store(index, "abxy", start=2),
        lambda: index.discard(chain("abc").keys[2:]),
        lambda: [store(index, [f"r{number}"]) for number in range(14)],
        lambda: store(index, "wxy"),
        lambda: index.discard(chain("w").keys),
        lambda: store(index, "pq"),
    ]
    for step in steps:
        step()
        index.check_invariants()
        journal.commit(index)
        states[path.stat().st_size] = state(index)
    journal.close()
    return states


# ------------------------------------------------------------------------------- whole and torn


def test_every_commit_is_read_back(tmp_path):
    path = tmp_path / "index.log"
    states = history(path)
    assert len(states) == 8, "every step changed something"
    assert state(restored(path)) == list(states.values())[-1]


def test_a_log_torn_at_every_byte_is_a_state_the_index_had(tmp_path):
    path, torn = tmp_path / "index.log", tmp_path / "torn.log"
    states, content = history(path), path.read_bytes()
    sizes = sorted(states)
    # Every byte of the last two groups, and around every boundary of the others.
    near = {size + step for size in sizes for step in range(-20, 21)}
    places = {p for p in near if HEADER_NBYTES <= p <= len(content)}
    for size in sorted(places | set(range(sizes[-3], len(content) + 1))):
        torn.write_bytes(content[:size])
        last_whole = max(s for s in sizes if s <= size)
        assert state(restored(torn)) == states[last_whole], f"cut at {size}"
        assert torn.stat().st_size == last_whole, "the torn end is cut off"


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"\xff" * 100, os.urandom(3000), b"GRPP"])
def test_a_garbage_tail_is_cut(tmp_path, garbage):
    path = tmp_path / "index.log"
    states = history(path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(garbage)
    journal, _ = opened(path)
    assert journal.num_cut == len(garbage)
    journal.close()
    assert path.stat().st_size == size
    assert state(restored(path)) == states[size]


def test_a_flipped_bit_cuts_there(tmp_path):
    path = tmp_path / "index.log"
    states, content = history(path), path.read_bytes()
    sizes = sorted(states)
    for position in range(HEADER_NBYTES, len(content), 11):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        last_whole = max(s for s in sizes if s <= position)
        assert state(restored(path)) == states[last_whole]


def test_a_group_is_only_good_where_it_was_written(tmp_path):
    """A whole group of an earlier file, left behind at another offset, is no part of this log."""
    path = tmp_path / "index.log"
    states, content = history(path), path.read_bytes()
    first, second, *_ = sorted(states)
    path.write_bytes(content + content[first:second])
    assert state(restored(path)) == states[len(content)]


def test_appending_goes_on_after_a_cut(tmp_path):
    path = tmp_path / "index.log"
    history(path)
    with path.open("ab") as file:
        file.write(b"torn")
    journal, records = opened(path)
    index = make_index()
    index.restore(restorable(records, **PLACES))
    store(index, "new")
    journal.commit(index)
    journal.close()
    assert state(restored(path)) == state(index)


# ------------------------------------------------------------------------------ somebody else's


@pytest.mark.parametrize("position", [0, 8, 12, 16, 31, 32, 39])
def test_a_header_of_another_format_or_directory_is_an_empty_index(tmp_path, position):
    """Magic, version, record length, uuid, checksum."""
    path = tmp_path / "index.log"
    history(path)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert state(restored(path)) == {}
    assert path.stat().st_size == HEADER_NBYTES


def test_the_log_of_another_directory_is_an_empty_index(tmp_path):
    path = tmp_path / "index.log"
    history(path)
    journal, records = opened(path, uuid=bytes(16))
    journal.close()
    assert len(records) == 0
    assert journal.num_cut > 0


@pytest.mark.parametrize("size", [0, 1, 39, 40])
def test_a_log_without_a_whole_header_is_an_empty_index(tmp_path, size):
    path = tmp_path / "index.log"
    history(path)
    path.write_bytes(path.read_bytes()[:size])
    assert state(restored(path)) == {}


def test_a_missing_log_is_an_empty_index(tmp_path):
    assert state(restored(tmp_path / "index.log")) == {}
    assert (tmp_path / "index.log").stat().st_mode & 0o777 == 0o600


# ----------------------------------------------------------------------------------- compaction


def test_compaction_equals_the_state(tmp_path):
    path = tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    for number in range(100):
        store(index, [f"r{number}"])
        journal.commit(index)
    before = path.stat().st_size
    journal.compact(index)
    assert path.stat().st_size < before / 4
    assert state(restored(path)) == state(index)
    store(index, "after")
    journal.commit(index)
    journal.close()
    assert state(restored(path)) == state(index)
    assert [each.name for each in tmp_path.iterdir()] == ["index.log"]


def test_compaction_of_nothing(tmp_path):
    path = tmp_path / "index.log"
    journal, _ = opened(path)
    journal.compact(make_index())
    journal.close()
    assert state(restored(path)) == {}


def test_the_log_is_compacted_when_most_of_it_is_outdated(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_SLACK_RECORDS", 50)
    path = tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    sizes = []
    for number in range(300):
        store(index, [f"r{number}"])
        journal.commit(index)
        sizes.append(path.stat().st_size)
    journal.close()
    assert max(sizes) < 200 * RECORD.itemsize
    assert state(restored(path)) == state(index)


def test_a_commit_without_changes_writes_nothing(tmp_path):
    path = tmp_path / "index.log"
    journal, _ = opened(path)
    journal.commit(make_index())
    journal.close()
    assert path.stat().st_size == HEADER_NBYTES


# ------------------------------------------------------------------------------ a failing disk


class Disk:
    """Stands in for `os` calls of the journal; `failing` makes every write fail or tear."""

    def __init__(self, monkeypatch):
        self.failing = None
        self.pwrite, self.fsync = os.pwrite, os.fsync
        monkeypatch.setattr(os, "pwrite", self.write)
        monkeypatch.setattr(os, "fsync", self.sync)

    def write(self, fd, data, offset):
        if self.failing == "enospc":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.failing == "torn":
            self.pwrite(fd, bytes(data)[: len(data) // 2], offset)
            raise OSError(errno.EIO, "Input/output error")
        return self.pwrite(fd, bytes(data)[: 1 + len(data) // 2], offset)  # short, but goes on

    def sync(self, fd):
        if self.failing == "sync":
            raise OSError(errno.EIO, "Input/output error")
        self.fsync(fd)


@pytest.mark.parametrize("failure", ["enospc", "torn"])
def test_what_the_disk_refuses_is_written_later_and_in_order(tmp_path, monkeypatch, failure):
    disk, path = Disk(monkeypatch), tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    store(index, "abc")
    journal.commit(index)
    committed = state(index)
    disk.failing = failure
    for step in (
        lambda: index.discard(chain("ab").keys[1:]),
        lambda: store(index, "axyz", start=1),
        lambda: [store(index, [f"r{number}"]) for number in range(14)],
    ):
        step()
        with pytest.raises(OSError):
            journal.commit(index)
        assert state(restored(path)) == committed
        # A reader of the log cut the torn end off; the writer does not rely on it.
    disk.failing = None
    journal.commit(index)
    assert state(restored(path)) == state(index)
    store(index, "later")
    journal.commit(index)
    journal.close()
    assert state(restored(path)) == state(index)


@pytest.mark.parametrize("failure", ["enospc", "torn", "sync"])
def test_a_failed_compaction_loses_no_change(tmp_path, monkeypatch, failure):
    disk, path = Disk(monkeypatch), tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    store(index, "abc")
    journal.commit(index)
    committed = state(index)
    store(index, "abxy", start=2)
    disk.failing = failure
    with pytest.raises(OSError):
        journal.compact(index)
    assert state(restored(path)) == committed, "the old log stays"
    assert [each.name for each in tmp_path.iterdir()] == ["index.log"], "nothing is left behind"
    disk.failing = None
    journal.commit(index)
    journal.close()
    assert state(restored(path)) == state(index)


def test_a_backlog_over_its_limit_is_made_good_by_a_compaction(tmp_path, monkeypatch):
    """Forgetting changes would leave a log that is no state the index ever had."""
    monkeypatch.setattr(journal_module, "_MAX_BACKLOG_NBYTES", 10 * RECORD.itemsize)
    disk, path = Disk(monkeypatch), tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    store(index, "abcd")
    journal.commit(index)
    committed = state(index)
    disk.failing = "enospc"
    for number in range(40):
        store(index, [f"r{number}"])
        with pytest.raises(OSError):
            journal.commit(index)
        assert len(journal._backlog) <= 10 * RECORD.itemsize
        assert state(restored(path)) == committed
    disk.failing = None
    store(index, "wx")
    journal.commit(index)
    assert state(restored(path)) == state(index)
    store(index, "later")
    journal.commit(index)
    journal.close()
    assert state(restored(path)) == state(index)


# ----------------------------------------------------------------------------------- restorable


def record(row, offset, *, parent=NO_PARENT, generation=None, block_nbytes=PAGE_NBYTES):
    key = np.void(bytes([row]) * 32)
    generation = 100 + row if generation is None else generation
    return np.array([(row, parent, 1, block_nbytes, offset, generation, 1, key)], RECORD)


def rows_kept(*records):
    return restorable(np.concatenate(records), **PLACES)["row"].tolist()


def test_sound_records_are_all_restorable():
    assert rows_kept(record(0, 0), record(1, PAGE_NBYTES, parent=0), record(5, SLAB, parent=1)) == [
        0,
        1,
        5,
    ]
    assert len(restorable(np.zeros(0, RECORD), **PLACES)) == 0


def test_of_blocks_that_overlap_the_newest_is_kept():
    assert rows_kept(record(1, 0, generation=7), record(2, 0, generation=9)) == [2]
    assert rows_kept(record(2, 0, generation=9), record(1, 0, generation=7)) == [2]


@pytest.mark.parametrize("offset", [CAPACITY, CAPACITY + SLAB, 1 << 40, (1 << 64) - PAGE_NBYTES])
def test_blocks_outside_the_capacity_are_refused(offset):
    assert rows_kept(record(0, 0), record(1, offset), record(2, SLAB)) == [0, 2]


@pytest.mark.parametrize("offset", [1, 512, PAGE_NBYTES + 1])
def test_blocks_off_the_grid_are_refused(offset):
    assert rows_kept(record(0, 2 * PAGE_NBYTES), record(1, offset)) == [0]


def test_a_block_across_the_end_of_its_slab_is_refused():
    large = 3 * PAGE_NBYTES
    assert rows_kept(
        record(0, SLAB, block_nbytes=large), record(1, 3 * PAGE_NBYTES, block_nbytes=large)
    ) == [0]
    assert rows_kept(record(0, 0), record(1, SLAB, block_nbytes=SLAB + 1)) == [0]


def test_a_slab_has_one_slot_size():
    kept = rows_kept(
        record(0, 0), record(1, 2 * PAGE_NBYTES, block_nbytes=2 * PAGE_NBYTES), record(2, SLAB)
    )
    assert kept in ([0, 2], [1, 2])


def test_orphans_are_refused_with_all_below_them():
    assert rows_kept(
        record(0, 0),
        record(2, PAGE_NBYTES, parent=1),
        record(3, 2 * PAGE_NBYTES, parent=2),
        record(4, 3 * PAGE_NBYTES, parent=0),
        record(5, SLAB, parent=4_000_000),
    ) == [0, 4]


def test_a_block_below_a_refused_one_is_refused():
    assert rows_kept(record(0, CAPACITY), record(1, 0, parent=0), record(2, SLAB)) == [2]


def test_blocks_in_a_cycle_are_refused():
    assert rows_kept(
        record(0, 0, parent=1),
        record(1, PAGE_NBYTES, parent=0),
        record(2, 2 * PAGE_NBYTES, parent=2),
        record(3, 3 * PAGE_NBYTES, parent=1),
        record(4, SLAB),
    ) == [4]


def test_the_newest_record_of_a_row_holds():
    freed = record(1, 0, block_nbytes=0)
    records = np.concatenate([record(1, 0), record(2, SLAB), freed, record(2, 2 * SLAB)])
    kept = newest(records)
    assert kept["row"].tolist() == [2]
    assert kept["offset"].tolist() == [2 * SLAB]
    assert len(newest(records[:0])) == 0
    assert newest(np.concatenate([freed, record(1, SLAB)]))["offset"].tolist() == [SLAB]


def test_the_log_is_what_its_docstring_says(tmp_path):
    path = tmp_path / "index.log"
    journal, _ = opened(path)
    index = make_index()
    store(index, "ab")
    journal.commit(index)
    journal.close()
    content = path.read_bytes()
    assert struct.unpack_from("<8sII16s", content) == (b"HSTINDEX", 1, RECORD.itemsize, UUID)
    assert struct.unpack_from("<Q", content, 32) == (xxhash.xxh3_64_intdigest(content[:32]),)
    count, _, checksum = struct.unpack_from("<IIQ", content, HEADER_NBYTES)
    records = content[HEADER_NBYTES + 16 :]
    assert (count, len(records)) == (2, 2 * RECORD.itemsize)
    assert checksum == xxhash.xxh3_64_intdigest(records, seed=HEADER_NBYTES)
