"""The store: what is stored is loaded, from memory, from lower tiers, after a restart."""

import time
from dataclasses import replace

import numpy as np
import pytest

from headstart.errors import ClosedError, ConfigError
from headstart.keys import BlockLayout, Namespace, block_keys, keys_from_hashes
from headstart.testing import BLOCK_NBYTES, kit_namespace
from headstart.testing.ledger import payload
from headstart.types import Outcome

DONE, FULL, ORPHAN = Outcome.DONE, Outcome.FULL, Outcome.ORPHAN
SOON = 10.0
SLOT = 4096 + BLOCK_NBYTES
NAMESPACE = kit_namespace()
LAYOUT = BlockLayout(block_size=16, axes="head token", shape=(16, 128), dtype="float32")


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [content.encode() for content in path])


def blocks_of(run):
    return [payload(run.namespace, key, 0, run.block_nbytes) for key in run]


# -------------------------------------------------------------------------------------- round trips


def test_round_trip_from_memory(world):
    world.put("abcde")
    with world.store.load(chain("abcde")) as lease:
        world.check(lease)
        assert (lease.ready_blocks, lease.late) == (5, False)
        assert lease.by_tier == {"memory": 5}
        assert lease.seconds >= lease.read_s == 0.0


def test_round_trip_from_the_file_tier(world):
    world.put("abcde")
    world.forget_memory()
    assert world.store.lookup(chain("abcde")).by_tier == {"memory": 0, "file0": 5}
    with world.store.load(chain("abcde")) as lease:
        world.check(lease)
        assert lease.by_tier == {"memory": 0, "file0": 5}
        assert lease.seconds >= lease.read_s > 0.0
    assert world.get("abcde") == 5
    assert world.store.stats().tiers["memory"].num_hits == 5, "promoted: the second is from memory"


def test_a_restart_is_warm(make):
    first = make()
    first.put("abcde")
    first.put("abxy", start=2)
    first.store.close()
    second = make()
    assert second.store.lookup(chain("abcde")).num_blocks == 5
    assert (second.get("abcde"), second.get("abxy"), second.get("abcx")) == (5, 4, 3)


def test_partial_hits(world):
    world.put("abc")
    for path, num_held in [("abcde", 3), ("abx", 2), ("xbc", 0), ("abc", 3), ("a", 1), ("", 0)]:
        assert world.store.lookup(chain(path)).num_blocks == num_held
        assert world.get(path) == num_held


def test_memory_holds_the_start_and_the_file_tier_the_rest(world):
    world.put("abcdef")
    world.store.flush()
    world.memory.discard(chain("abcd").keys[3:])
    with world.store.load(chain("abcdef")) as lease:
        world.check(lease)
        assert lease.by_tier == {"memory": 3, "file0": 3}


def test_two_lower_tiers_add_up(make):
    world = make(num_files=2)
    world.put("abcdef")
    world.forget_memory()
    world.files[0].discard(chain("abcd").keys[3:])
    lookup = world.store.lookup(chain("abcdef"))
    assert (lookup.num_blocks, lookup.by_tier) == (6, {"memory": 0, "file0": 3, "file1": 6})
    with world.store.load(chain("abcdef")) as lease:
        world.check(lease)
        assert lease.by_tier == {"memory": 0, "file0": 3, "file1": 3}
    assert world.get("abcdef") == 6
    world.settled()
    assert world.files[0].lookup(chain("abcdef").keys) == 6, "what a tier lost is written again"


def test_blocks_may_be_arrays_or_bytes(world):
    run = chain("abc")
    blocks = blocks_of(run)
    arrays = [np.frombuffer(blocks[0], np.float32), bytearray(blocks[1]), memoryview(blocks[2])]
    assert world.store.store(run, arrays) == [DONE] * 3
    assert world.get("abc") == 3


def test_storing_again_changes_nothing(world):
    for _ in range(3):
        world.put("abc")
    stats = world.store.stats()
    world.settled()
    assert stats.tiers["memory"].num_blocks == 3
    assert world.file.stats().num_blocks == 3
    assert world.file.stats().num_stored == 3


def test_another_namespace_never_hits(world):
    other = kit_namespace("other")
    world.store.open_namespace(other)
    world.put("abc")
    assert world.store.lookup(chain("abc", other)).num_blocks == 0
    with world.store.load(chain("abc", other)) as lease:
        assert lease.ready_blocks == 0


@pytest.mark.parametrize(
    "other",
    [
        {"layout": replace(LAYOUT, dtype="bfloat16", shape=(16, 256))},
        {"layout": replace(LAYOUT, axes="token head")},
        {"layout": replace(LAYOUT, shape=(128, 16))},
        {"layout": replace(LAYOUT, block_size=32)},
        {"model": "another"},
        {"weights": "finetuned"},
        {"tenant": "somebody else"},
        {"epoch": "after the update"},
        {"isa": "amx"},
    ],
    ids=["dtype", "axes", "shape", "size", "model", "weights", "tenant", "epoch", "isa"],
)
def test_another_dtype_layout_or_model_is_never_a_hit(make, other):
    """Of the same prompt, in blocks of the same length."""
    namespace = Namespace(model="model", weights="original", layout=LAYOUT)
    changed = replace(namespace, **other)
    assert changed.layout.block_nbytes == BLOCK_NBYTES
    prompt = range(128)
    run, foreign = block_keys(namespace, prompt), block_keys(changed, prompt)
    for _ in range(2):  # in the process that stored it, and in the next
        world = make()
        for each in (namespace, changed):
            world.store.open_namespace(each)
        world.store.store(run, blocks_of(run))
        assert world.store.lookup(foreign).num_blocks == 0
        with world.store.load(foreign) as lease:
            assert lease.ready_blocks == 0
        with world.store.load(run) as lease:
            world.check(lease)
            assert lease.ready_blocks == 8
        world.settled()
        world.store.close()


def test_a_namespace_that_is_not_open_is_refused(world):
    foreign = chain("abc", kit_namespace("unknown"))
    for call in (
        lambda: world.store.load(foreign),
        lambda: world.store.reserve(foreign),
        lambda: world.store.store(foreign, blocks_of(foreign)),
    ):
        with pytest.raises(ConfigError, match="not open"):
            call()


def test_a_block_that_no_tier_can_hold_is_refused(world):
    with pytest.raises(ConfigError, match="does not fit"):
        world.store.open_namespace(kit_namespace("large", 1 << 20))


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_wrong_number_of_blocks_is_refused(world, num_blocks):
    with pytest.raises(ValueError, match="3 keys need as many blocks"):
        world.store.store(chain("abc"), [bytes(BLOCK_NBYTES)] * num_blocks)


@pytest.mark.parametrize("nbytes", [0, BLOCK_NBYTES - 1, BLOCK_NBYTES + 1])
def test_a_wrong_length_of_a_block_is_refused(world, nbytes):
    with pytest.raises(ValueError, match="must be 8192 bytes long"):
        world.store.store(chain("ab"), [bytes(BLOCK_NBYTES), bytes(nbytes)])
    assert world.store.lookup(chain("ab")).num_blocks == 0
    world.settled()


# ------------------------------------------------------------------------------------------ storing


def test_an_orphan_is_refused_without_lower_tiers(make):
    world = make(num_files=0)
    run = chain("abcd").run(2, 4)
    assert world.store.store(run, blocks_of(run)) == [ORPHAN, ORPHAN]
    world.settled()
    world.put("ab")
    assert world.store.store(run, blocks_of(run)) == [DONE, DONE]
    assert world.get("abcd") == 4


def test_an_orphan_whose_parent_no_tier_holds_is_stored_nowhere(world):
    run = chain("abcd").run(2, 4)
    assert world.store.store(run, blocks_of(run)) == [ORPHAN, ORPHAN]
    world.settled()
    assert [world.store.lookup(run.run(n, n + 1)).num_blocks for n in range(2)] == [0, 0]


def test_runs_of_a_chain_follow_each_other_through_the_queue(world):
    """The parent of the second run is neither in memory nor written yet: it is queued before."""
    world.put("ab")
    world.forget_memory()
    world.stall()
    for start, stop in ((2, 4), (4, 6)):
        run = chain("abcdef").run(start, stop)
        assert world.store.store(run, blocks_of(run)) == [DONE, DONE]
    world.settled()
    assert world.get("abcdef") == 6


def test_blocks_whose_parent_only_the_file_tier_holds_are_written_there(world):
    world.put("ab")
    world.forget_memory()
    world.put("abcd", start=2)
    world.settled()
    assert world.memory.stats().num_blocks == 0
    assert world.get("abcd") == 4


def test_a_chain_longer_than_memory_is_stored_as_far_as_it_fits(make):
    world = make(memory_blocks=8)
    path = [f"b{number}" for number in range(12)]
    run = chain(path)
    assert world.store.store(run, blocks_of(run)) == [DONE] * 8 + [FULL] * 4
    world.settled()
    assert world.get(path) == 8
    rest = run.run(8, 12)
    assert world.store.store(rest, blocks_of(rest)) == [FULL] * 4, "memory is all prefix"
    world.settled()
    assert world.get(path) == 8


def test_a_full_queue_skips_and_the_next_hit_makes_it_good(make):
    world = make(queue_blocks=2)
    world.stall()
    world.put("ab")
    world.put("wxyz")
    stats = world.store.stats()
    assert (stats.num_writes_skipped, stats.queued_nbytes) == (4, 2 * BLOCK_NBYTES)
    world.settled()
    assert world.file.lookup(chain("wxyz").keys) == 0
    assert world.get("wxyz") == 4
    world.settled()
    assert world.file.lookup(chain("wxyz").keys) == 4


def test_reserving_and_filling_in_place(world):
    run = chain("abc")
    with world.store.reserve(run) as reservation:
        for view, block in zip(reservation.views, blocks_of(run), strict=True):
            assert len(view) == BLOCK_NBYTES
            assert not view.readonly
            view[:] = block
        assert world.store.lookup(run).num_blocks == 0
        assert reservation.commit() == [DONE] * 3
    assert world.get("abc") == 3


def test_a_reservation_without_commit_gives_everything_back(world):
    world.put("ab")
    with world.store.reserve(chain("abcd").run(2, 4)) as reservation:
        assert len(reservation.views) == 2
        assert world.memory.index._reserved
    world.settled()
    assert world.get("abcd") == 2
    with (
        pytest.raises(RuntimeError, match="boom"),
        world.store.reserve(chain("abcd").run(2, 4)),
    ):
        raise RuntimeError("boom")
    world.settled()


def test_a_reservation_is_committed_once(world):
    run = chain("a")
    with world.store.reserve(run) as reservation:
        reservation.views[0][:] = blocks_of(run)[0]
        reservation.commit()
        with pytest.raises(ClosedError):
            reservation.commit()
    with pytest.raises(ClosedError):
        reservation.commit()
    world.settled()


def test_a_reservation_whose_parent_is_discarded(world):
    world.put("ab")
    world.store.flush()
    run = chain("abcd").run(2, 4)
    with world.store.reserve(run) as reservation:
        world.store.discard(chain("a"))
        assert reservation.commit() == [ORPHAN, ORPHAN]
    world.settled()
    assert world.store.lookup(chain("abcd")).num_blocks == 0


def test_storing_what_is_held_evicts_nothing(make):
    world = make(memory_blocks=8)
    world.put("abcdef")
    world.put("xy")
    world.put("abcdef")
    assert world.memory.stats().num_evicted == 0
    assert (world.get("abcdef"), world.get("xy")) == (6, 2)


# ---------------------------------------------------------------------------- discard, flush, close


def test_discard_reaches_every_tier(world):
    world.put("abcd")
    world.put("wx")
    world.store.flush()
    assert world.store.discard(chain("abcd").run(1, 4)) == 3
    assert world.store.lookup(chain("abcd")).by_tier == {"memory": 1, "file0": 1}
    assert world.store.discard(chain("abcd").run(1, 4)) == 0
    assert world.get("wx") == 2


def test_flush_runs_out_of_time(world):
    world.stall()
    world.put("ab")
    started = time.monotonic()
    assert not world.store.flush(0.02)
    assert time.monotonic() - started < 2.0
    world.slow.resume()
    assert world.store.flush(SOON)
    assert world.file.lookup(chain("ab").keys) == 2


def test_verify_reports_every_tier(world):
    world.put("abcd")
    world.store.flush()
    calls = []
    memory, file = world.store.verify(lambda done, total: calls.append((done, total)))
    assert (memory.tier, memory.num_blocks, memory.good) == ("memory", 4, True)
    assert (file.tier, file.num_blocks, file.good) == ("file0", 4, True)
    assert calls[-1] == (4, 4)


def test_verify_finds_damage_and_the_store_goes_on(world):
    world.put("abcd")
    world.forget_memory()
    (place,) = [r for r in world.file.index.held() if bytes(r["key"]) == chain("abc").keys[2]]
    slab = sorted((world.file._root.slabs).iterdir())[int(place["offset"]) // (4 * SLOT)]
    with open(slab, "r+b") as file:
        file.seek(int(place["offset"]) % (4 * SLOT) + 5000)
        file.write(b"\xff")
    assert world.get("abcd") == 2
    assert world.file.stats().num_dropped == 2
    world.put("abcd")
    world.forget_memory()
    assert world.get("abcd") == 4


def test_close_writes_what_is_queued(make):
    world = make()
    world.put("abcdef")
    world.store.close()
    assert make().get("abcdef") == 6


def test_a_closed_store_raises(make):
    world = make()
    world.put("ab")
    with world.store:
        pass
    world.store.close()
    run = chain("ab")
    for call in (
        lambda: world.store.lookup(run),
        lambda: world.store.load(run),
        lambda: world.store.store(run, blocks_of(run)),
        lambda: world.store.reserve(run),
        lambda: world.store.discard(run),
        world.store.flush,
        world.store.verify,
        world.store.stats,
        lambda: world.store.open_namespace(NAMESPACE),
    ):
        with pytest.raises(ClosedError):
            call()


def test_closing_with_an_open_lease_keeps_its_views_readable(make):
    world = make()
    world.put("abc")
    lease = world.store.load(chain("abc"))
    views = lease.views
    world.store.close()
    assert [bytes(view) for view in views] == blocks_of(chain("abc"))
    lease.close()
    assert [bytes(view) for view in views] == blocks_of(chain("abc"))


def test_closing_while_a_device_is_stuck_returns_in_time(make, caplog):
    """What is in flight keeps its memory and its file; nothing is torn from under it."""
    world = make()
    world.put("abcd")
    world.forget_memory()
    world.slow.stall()
    lease = world.store.load(chain("abcd"), timeout_s=0.01)
    started = time.monotonic()
    world.store.close(timeout_s=0.05)
    assert time.monotonic() - started < 3.0
    assert "tier file0 does not return; it is left open" in caplog.text
    world.slow.resume()
    assert world.transfers[0].close(SOON)
    assert "failed unexpectedly" not in caplog.text
    lease.close()
    world.file.close()
