"""The hash table of the index, against a dict."""

import hashlib
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.keytable import KeyTable
from headstart.types import KEY_NBYTES, BlockKey


def key_of(number):
    return BlockKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest())


def colliding_key(number):
    """Keys whose hash, their first eight bytes, is one of three: long runs of probes."""
    return BlockKey((number % 3).to_bytes(8, "little") + key_of(number)[8:])


def as_items(keys):
    return np.frombuffer(b"".join(keys), f"V{KEY_NBYTES}") if keys else np.zeros(0, "V32")


class KeyTableStates(RuleBasedStateMachine):
    """A table and a dict get the same calls; rows are handed out as the index does."""

    make_key = staticmethod(key_of)

    def __init__(self):
        super().__init__()
        self.table = KeyTable()
        self.model = {}
        self.free_rows = []
        self.num_rows = 0
        self.gone = set()

    def take_row(self):
        if self.free_rows:
            return self.free_rows.pop()
        self.num_rows += 1
        self.table.grow(self.num_rows)
        return self.num_rows - 1

    def insert_one(self, number):
        key = self.make_key(number)
        if key not in self.model:
            self.model[key] = self.take_row()
            self.table.insert(key, self.model[key])
            self.gone.discard(key)

    def remove_one(self, key):
        row = self.model.pop(key)
        self.table.remove(key, row)
        self.free_rows.append(row)
        self.gone.add(key)

    @rule(first=st.integers(0, 400), count=st.integers(1, 400))
    def insert(self, first, count):
        for number in range(first, first + count):
            self.insert_one(number)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        self.remove_one(data.draw(st.sampled_from(sorted(self.model))))

    @precondition(lambda self: self.model)
    @rule(step=st.integers(1, 3))
    def remove_many(self, step):
        for key in sorted(self.model)[::step]:
            self.remove_one(key)

    @rule(number=st.integers(0, 50))
    def churn(self, number):
        """Tombstones pile up until the table is rebuilt."""
        for _ in range(40):
            self.insert_one(number)
            if (key := self.make_key(number)) in self.model:
                self.remove_one(key)

    @rule()
    def load(self):
        """A new table, filled at once with what the old one holds."""
        table = KeyTable()
        rows = np.array(list(self.model.values()), np.int64)
        table.load(as_items(list(self.model)), rows, num_rows=max(1, self.num_rows))
        self.table = table

    @invariant()
    def equals_the_dict(self):
        assert len(self.table) == len(self.model)
        for key, row in self.model.items():
            assert self.table.find(key) == row
            assert self.table.key(row) == key

    @invariant()
    def does_not_find_what_is_gone(self):
        for key in list(self.gone)[:50]:
            assert self.table.find(key) is None


class CollidingStates(KeyTableStates):
    make_key = staticmethod(colliding_key)

    @rule(first=st.integers(0, 60), count=st.integers(1, 40))
    def insert(self, first, count):
        super().insert(first, count)


few = settings(stateful_step_count=15)
TestKeyTable = KeyTableStates.TestCase
TestKeyTable.settings = few
TestCollidingKeys = CollidingStates.TestCase
TestCollidingKeys.settings = few


def filled(num_keys, make_key=key_of):
    table = KeyTable()
    table.grow(num_keys)
    for row in range(num_keys):
        table.insert(make_key(row), row)
    return table


@pytest.mark.parametrize("num_keys", [0, 1, 511, 512, 513, 682, 683, 684, 5000])
def test_growth_loses_nothing(num_keys):
    table = filled(num_keys)
    assert len(table) == num_keys
    assert [table.find(key_of(row)) for row in range(num_keys)] == list(range(num_keys))
    assert table.find(key_of(num_keys)) is None


@pytest.mark.parametrize("make_key", [key_of, colliding_key])
@pytest.mark.parametrize("num_keys", [0, 1, 700])
def test_load_equals_inserting_one_by_one(num_keys, make_key):
    inserted, loaded = filled(num_keys, make_key), KeyTable()
    keys = [make_key(row) for row in range(num_keys)]
    rows = np.random.default_rng(0).permutation(num_keys)
    loaded.load(as_items([keys[row] for row in rows]), rows, num_rows=max(1, num_keys))
    for row, key in enumerate(keys):
        assert inserted.find(key) == loaded.find(key) == row
        assert loaded.key(row) == key


def test_load_replaces_what_was_there():
    table = filled(10)
    table.load(as_items([key_of(99)]), np.array([3]), num_rows=5)
    assert len(table) == 1
    assert table.find(key_of(99)) == 3
    assert table.find(key_of(3)) is None


def test_equal_halves_are_not_equal_keys():
    key = key_of(1)
    table = KeyTable()
    table.grow(1)
    table.insert(key, 0)
    for position in range(KEY_NBYTES):
        near = bytearray(key)
        near[position] ^= 1
        assert table.find(BlockKey(bytes(near))) is None
    assert table.find(key) == 0


def test_a_removed_key_leaves_no_hole_in_a_run_of_probes():
    table = filled(9, colliding_key)
    table.remove(colliding_key(0), 0)
    assert [table.find(colliding_key(row)) for row in range(9)] == [None, *range(1, 9)]


def test_removing_an_absent_key_is_a_bug_of_the_caller():
    table = filled(2)
    with pytest.raises(AssertionError):
        table.remove(key_of(7), 1)


def test_tombstones_do_not_grow_the_table():
    table = filled(100)
    nbytes = table.nbytes
    for number in range(20_000):
        table.grow(101)
        table.insert(key_of(1000 + number), 100)
        table.remove(key_of(1000 + number), 100)
    assert table.nbytes <= nbytes + KEY_NBYTES
    assert [table.find(key_of(row)) for row in range(100)] == list(range(100))


def test_memory_per_key():
    table = filled(6000)
    assert (table.nbytes - 6000 * KEY_NBYTES) / 6000 <= 16


def test_readers_beside_a_writer():
    """A reader may miss; it never gets a row that its key never had, and it never hangs."""
    table = filled(200)
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            for row in range(200):
                if table.find(key_of(row)) not in (row, None):
                    wrong.append(row)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(200, 4000):
        table.grow(number + 1)
        table.insert(key_of(number), number)
        if number % 2:
            table.remove(key_of(number), number)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
