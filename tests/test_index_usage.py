"""The index by namespace: how much each holds, and how one is forgotten slice by slice."""

import threading

import pytest

from headstart import index as module
from headstart.index import Index
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import make_policy
from headstart.units import PAGE_NBYTES, align_up

SMALL, LARGE = PAGE_NBYTES, 2 * PAGE_NBYTES
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(SMALL,), dtype="uint8")
NAMESPACE = Namespace(model="index", weights="none", layout=LAYOUT)


@pytest.fixture
def index():
    return Index(
        capacity_nbytes=128 * SMALL,
        slab_nbytes=8 * SMALL,
        policy=make_policy("lru"),
        slot_nbytes=align_up,
    )


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


def store(index, path, *, start=0, namespace=1, block_nbytes=SMALL, pin=False):
    run = chain(path).run(start, len(path))
    slots = index.reserve(block_nbytes, len(run))
    return index.publish(
        run.keys,
        slots,
        parent=run.parent,
        namespace=namespace,
        block_nbytes=block_nbytes,
        pin=pin,
    )


def test_usage_counts_bytes_of_blocks_not_of_slots(index):
    assert index.usage == {}
    store(index, "abc")
    store(index, "xy", namespace=2, block_nbytes=SMALL + 1)
    store(index, "z", namespace=7, block_nbytes=LARGE)
    assert index.usage == {1: 3 * SMALL, 2: 2 * (SMALL + 1), 7: LARGE}
    index.discard(chain("ab").keys[1:])
    assert index.usage == {1: SMALL, 2: 2 * (SMALL + 1), 7: LARGE}


def test_what_is_doomed_is_not_counted(index):
    rows = store(index, "abc", pin=True)
    assert index.discard_namespace(1) == 3
    assert index.usage == {}
    index.check_invariants()
    index.unpin(rows)
    assert index.slots.num_used == 0
    index.check_invariants()


@pytest.mark.parametrize("slice_rows", [1, 2, 3, 7, 40, 4096])
def test_a_namespace_is_forgotten_slice_by_slice(monkeypatch, index, slice_rows):
    monkeypatch.setattr(module, "_SLICE_ROWS", slice_rows)
    store(index, range(20))
    store(index, [*range(10), *"abcdefghij"], start=10)
    store(index, [*"xyz"], namespace=2)
    for number in range(10):
        store(index, [f"root {number}"])
    assert index.discard_namespace(1) == 40
    assert index.counters.num_discarded == 40
    assert index.usage == {2: 3 * SMALL}
    assert index.lookup(chain("xyz").keys) == 3
    assert index.discard_namespace(1) == 0
    assert index.discard_namespace(9) == 0
    index.check_invariants()


@pytest.mark.parametrize("slice_rows", [1, 4, 4096])
def test_pinned_blocks_keep_their_slots(monkeypatch, index, slice_rows):
    monkeypatch.setattr(module, "_SLICE_ROWS", slice_rows)
    store(index, range(10))
    rows = index.pin(chain(range(4)).keys, namespace=1, block_nbytes=SMALL)
    assert index.discard_namespace(1) == 10
    assert index.slots.num_used == 4
    assert index.lookup(chain(range(4)).keys) == 0
    store(index, range(2))
    assert index.usage == {1: 2 * SMALL}
    index.unpin(rows)
    assert index.slots.num_used == 2
    index.check_invariants()


class Between:
    """The index's lock, with something that happens whenever it is free again."""

    def __init__(self, index, happens):
        self.lock, self.happens, self.num_free = index._lock, happens, 0
        self._is_inside = False

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *exc):
        self.lock.release()
        if not self._is_inside:
            self._is_inside = True
            self.num_free += 1
            self.happens(self.num_free)
            self._is_inside = False


def test_others_store_meanwhile_and_it_ends_nevertheless(monkeypatch, index):
    """What comes in while it goes on may go or stay; it must not be waited for."""
    monkeypatch.setattr(module, "_SLICE_ROWS", 4)
    store(index, [f"{n}" for n in range(1)])
    for number in range(10):
        store(index, [f"root {number}"])
    index._lock = Between(index, lambda number: store(index, [f"new {number}"]))
    assert 11 <= index.discard_namespace(1) <= 20
    assert index._lock.num_free <= 5
    for number in range(10):
        assert index.lookup(chain([f"root {number}"]).keys) == 0
    index.check_invariants()


def test_threads_at_once(index, monkeypatch):
    monkeypatch.setattr(module, "_SLICE_ROWS", 3)
    ends = threading.Event()
    failures = []

    def run(name, work):
        try:
            while not ends.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - told by the test
            failures.append((name, error))

    def storing(number):
        def work():
            path = [f"{number} {n}" for n in range(6)]
            store(index, path, namespace=number)
            rows = index.pin(chain(path).keys, namespace=number, block_nbytes=SMALL)
            assert all(index.usage.values())
            index.unpin(rows)

        return work

    works = [storing(1), storing(2), lambda: index.discard_namespace(1), index.check_invariants]
    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    ends.wait(0.3)
    ends.set()
    for thread in threads:
        thread.join(20)
    assert not failures
    index.discard_namespace(1)
    assert set(index.usage) <= {2}
    index.check_invariants()
