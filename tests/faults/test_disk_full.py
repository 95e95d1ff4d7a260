"""A disk that is too small: clear at the start, and no surprise later."""

import os

import pytest

from headstart.errors import TierUnavailableError
from headstart.tiers import FileTier, FileTierOptions

pytestmark = pytest.mark.root

MIB = 1 << 20


def free_nbytes(folder):
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request, media):
    return getattr(media, request.param)(12 * MIB)


def open_tier(root, capacity, **options):
    return FileTier(FileTierOptions(root=root, capacity_nbytes=capacity, durable=False, **options))


def test_a_capacity_beyond_the_disk_is_a_clear_error_and_leaves_nothing(small_disk):
    before = free_nbytes(small_disk)
    with pytest.raises(TierUnavailableError) as refused:
        open_tier(small_disk / "cache", 64 * MIB)
    message = str(refused.value)
    assert "no room for a capacity of 64 MiB" in message
    assert "are free; set a smaller capacity or free some space" in message
    assert list(small_disk.iterdir()) == []
    assert free_nbytes(small_disk) >= before - 64 * 1024  # a directory's own blocks


def test_after_that_error_a_smaller_capacity_works(small_disk):
    with pytest.raises(TierUnavailableError):
        open_tier(small_disk / "cache", 1 << 30)  # whose slabs would be larger than the disk
    open_tier(small_disk / "cache", 4 * MIB).close()


def test_growing_beyond_the_disk_keeps_the_cache(small_disk, make_rig):
    rig = make_rig(small_disk / "cache", capacity_nbytes=4 * MIB, slab_nbytes=MIB, durable=False)
    rig.store(rig.chain("abcd"))
    rig.tier.close()
    with pytest.raises(TierUnavailableError, match="no room for a capacity of 64 MiB"):
        open_tier(small_disk / "cache", 64 * MIB)
    assert len(list((small_disk / "cache" / "slabs").iterdir())) == 4
    rig.tier = rig.harness.make()
    rig.tier.open_namespace(rig.namespace)
    rig.expect(rig.chain("abcd"))


def test_a_disk_that_fills_up_later_costs_no_block(small_disk, make_rig):
    """Slabs are preallocated: only the log has to wait."""
    rig = make_rig(small_disk / "cache", capacity_nbytes=4 * MIB, slab_nbytes=MIB, durable=False)
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(MIB)):
                pass
        except OSError:
            pass
    rig.store(*rig.roots(400))
    stats = rig.tier.stats()
    assert stats.num_stored == 400
    rig.expect(*rig.roots(400)[-200:])
    rig.tier.flush()
    ballast.unlink()
    rig.tier.flush()
    held = rig.tier.stats().num_blocks
    rig.tier.close()
    rig.tier = rig.harness.make()
    rig.tier.open_namespace(rig.namespace)
    assert rig.tier.stats().num_blocks == held
    rig.expect(*rig.roots(400)[-200:])
