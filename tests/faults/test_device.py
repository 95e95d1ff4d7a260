"""Payload on a raw block device: a loop device stands in for an NVMe namespace."""

import pytest

from headstart.errors import ConfigError, RootLockedError, TierUnavailableError
from headstart.journal import Journal
from headstart.testing import Ending
from headstart.tiers import FileTier, FileTierOptions
from headstart.tiers.volume import DEVICE_RESERVED_NBYTES

pytestmark = pytest.mark.root

MIB = 1 << 20
SLAB = 4 * 12288
CAPACITY = 16 * SLAB


@pytest.fixture
def device(media):
    return media.loop_device(8 * MIB)


def open_tier(root, device, **options):
    options = {"capacity_nbytes": CAPACITY, "slab_nbytes": SLAB} | options
    return FileTier(FileTierOptions(root=root, device=device, **options))


@pytest.mark.parametrize("direct", [True, False])
def test_round_trip_and_reopening(make_rig, device, direct):
    rig = make_rig(device=device, direct=direct, capacity_nbytes=CAPACITY)
    assert list((rig.harness.root / "slabs").iterdir()) == []
    chain = rig.chain("abcdefgh")
    rig.store(chain, *rig.roots(100))
    rig.expect(*rig.roots(100)[-50:])
    rig.store(chain)
    rig.reopen(Ending.CLOSE)
    rig.expect(chain)
    assert rig.tier.verify().good
    assert rig.tier.volume.direct is direct


def test_blocks_lie_behind_the_superblock(make_rig, device):
    rig = make_rig(device=device, capacity_nbytes=CAPACITY)
    rig.store(rig.chain("a"))
    (held,) = rig.tier.index.held()
    rig.tier.close()
    with open(device, "rb") as file:
        assert file.read(8) == b"HSTDEVIC"
        file.seek(DEVICE_RESERVED_NBYTES + int(held["offset"]))
        head = file.read(4096)
    assert (head[8:16], head[72:104]) == (b"HSTBLOCK", rig.chain("a").keys[0])


def test_damage_on_a_device_is_dropped(make_rig, device):
    rig = make_rig(device=device, capacity_nbytes=CAPACITY)
    rig.store(rig.chain("abc"))

    def harm(root):
        with open(device, "r+b") as file:
            file.seek(DEVICE_RESERVED_NBYTES + 12288 + 5000)
            file.write(b"\xff\x00")

    rig.harness.between = harm
    rig.reopen(Ending.CLOSE)
    assert [outcome.value for outcome in rig.read(rig.chain("abc"))] == ["done", "dropped", "done"]


@pytest.mark.parametrize("position", [0, 1080, DEVICE_RESERVED_NBYTES - 1])
def test_a_device_with_data_is_refused_and_untouched(tmp_path, device, position):
    with open(device, "r+b") as file:
        file.seek(position)
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"holds data and would be overwritten; .* dd if="):
        open_tier(tmp_path / "cache", device)
    with open(device, "rb") as file:
        content = file.read(2 * MIB)
    assert content[position : position + 1] == b"x"
    assert content.count(0) == len(content) - 1
    assert list(tmp_path.iterdir()) == []


def test_the_device_of_another_directory_is_refused(tmp_path, device):
    open_tier(tmp_path / "one", device).close()
    with pytest.raises(ConfigError, match="holds another cache directory"):
        open_tier(tmp_path / "two", device)
    open_tier(tmp_path / "one", device).close()


def test_a_mounted_device_is_refused(tmp_path, media, device):
    media.command("mkfs.ext4", "-q", "-O", "^has_journal", device)
    media.mount("mounted", device)
    with pytest.raises(RootLockedError, match=f"device {device}: .*busy"):
        open_tier(tmp_path / "cache", device)
    assert list(tmp_path.iterdir()) == []


def test_a_device_in_use_is_refused(tmp_path, device):
    tier = open_tier(tmp_path / "one", device)
    with pytest.raises(RootLockedError, match=r"device .*: .*busy"):
        open_tier(tmp_path / "two", device)
    tier.close()


def test_a_device_that_is_too_small(tmp_path, device):
    room = 8 * MIB - DEVICE_RESERVED_NBYTES
    with pytest.raises(ConfigError, match=r"is more than the 7 MiB of .*; set a smaller"):
        open_tier(tmp_path / "cache", device, capacity_nbytes=room + 4096, slab_nbytes=None)
    open_tier(tmp_path / "cache", device, capacity_nbytes=room, slab_nbytes=MIB).close()


def test_another_slab_size_empties_the_device(make_rig, device):
    rig = make_rig(device=device, capacity_nbytes=CAPACITY)
    rig.store(rig.chain("abcd"))
    rig.harness.options["slab_nbytes"] = 2 * SLAB
    rig.reopen(Ending.CLOSE)
    assert rig.tier.stats().num_blocks == 0
    rig.store(rig.chain("abcd"))
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("abcd"))


def test_a_first_start_that_fails_after_the_claim_can_be_repeated(tmp_path, device, monkeypatch):
    def refuse(journal):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "read", refuse)
        with pytest.raises(TierUnavailableError, match="No space left"):
            open_tier(tmp_path / "cache", device)
    open_tier(tmp_path / "cache", device).close()


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_block_device_is_refused(tmp_path, name):
    (tmp_path / "file").write_bytes(bytes(8 * MIB))
    with pytest.raises((ConfigError, TierUnavailableError), match=f"device:? .*{name}"):
        open_tier(tmp_path / "cache", tmp_path / name)
    assert not (tmp_path / "cache").exists()
