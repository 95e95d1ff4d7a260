"""What is wrong at the start is one clear error, and nothing is touched or left behind."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.errors import ConfigError, RootLockedError, TierUnavailableError
from headstart.testing import Ending, kit_namespace
from headstart.tiers import FileTier, FileTierOptions

SLOT = 12288
SLAB = 4 * SLOT
CAPACITY = 4 * SLAB
DESCRIPTORS = Path("/proc/self/fd")


def open_tier(root, **options):
    options = {"capacity_nbytes": CAPACITY, "slab_nbytes": SLAB} | options
    return FileTier(FileTierOptions(root=root, **options))


def tree(root):
    """Everything under a directory: names, sizes and contents."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.fixture(autouse=True)
def _no_descriptor_leaks():
    before = sorted(path.name for path in DESCRIPTORS.iterdir())
    yield
    assert sorted(path.name for path in DESCRIPTORS.iterdir()) == before, "a descriptor leaks"


# --------------------------------------------------------------------------------- the directory


def test_a_missing_root_is_created(tmp_path):
    open_tier(tmp_path / "new").close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_an_empty_root_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    open_tier(tmp_path / "empty").close()
    assert (tmp_path / "empty" / "format.json").exists()


def test_a_missing_parent_is_a_clear_error(tmp_path):
    with pytest.raises(TierUnavailableError, match="parent directory does not exist; create it"):
        open_tier(tmp_path / "none" / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TierUnavailableError, match=r"root .*/file: .*directory"):
        open_tier(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.tex"],
        ["format.json"],
        ["slabs/photo.jpg"],
        ["format.json", "index.log", "slabs/000000.slab", "namespaces/1.json"],
        [".hidden"],
    ],
    ids=lambda names: "+".join(names),
)
def test_a_directory_of_something_else_is_refused_and_untouched(tmp_path, names):
    root = tmp_path / "photos"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"format": "someone else\'s", "version": 1}')
    before = tree(root)
    with pytest.raises(ConfigError, match=r"not a Headstart directory; name a new or an empty"):
        open_tier(root)
    assert tree(root) == before


@pytest.mark.parametrize(
    "left",
    [
        [],
        ["lock"],
        ["lock", "slabs/"],
        ["lock", "slabs/", "namespaces/"],
        ["lock", "slabs/", "namespaces/", "format.tmp"],
        ["lock", "slabs/000000.slab", "namespaces/"],
        ["lost+found/"],
    ],
    ids="+".join,
)
def test_a_first_start_that_was_interrupted_is_taken_up_again(tmp_path, left):
    root = tmp_path / "cache"
    root.mkdir()
    for name in left:
        (root / name).parent.mkdir(exist_ok=True)
        content = b"123" if name == "lock" else b"{"
        (root / name).mkdir() if name.endswith("/") else (root / name).write_bytes(content)
    tier = open_tier(root)
    assert len(tier.index) == 0
    tier.close()


@pytest.mark.root
def test_a_read_only_mount_is_a_clear_error(tmp_path, media):
    open_tier(tmp_path / "used").close()
    before = tree(tmp_path)
    mounted = media.read_only(tmp_path)
    for root in (mounted / "used", mounted / "new"):
        with pytest.raises(TierUnavailableError, match=r"Read-only file system; it must be a writ"):
            open_tier(root)
    assert tree(tmp_path) == before


@pytest.mark.root
def test_a_directory_that_may_not_be_changed_is_a_clear_error(tmp_path, media):
    root = tmp_path / "immutable"
    root.mkdir()
    media.command("chattr", "+i", root)
    try:
        with pytest.raises(TierUnavailableError, match=r"not permitted; it must be a writable"):
            open_tier(root)
        assert list(root.iterdir()) == []
    finally:
        media.command("chattr", "-i", root)


@pytest.mark.root
def test_tmpfs_while_durability_is_wanted_is_refused_with_the_fix(media):
    root = media.tmpfs(64 << 20) / "cache"
    with pytest.raises(ConfigError, match=r"is on tmpfs; .* or set durable = false"):
        open_tier(root)
    assert not root.exists()
    open_tier(root, durable=False).close()
    with pytest.raises(ConfigError, match="durable = false"):
        open_tier(root)


def test_dev_shm_is_tmpfs_too():
    root = Path("/dev/shm") / f"headstart-test-{os.getpid()}"
    if not root.parent.is_dir():
        pytest.skip("no /dev/shm on this machine")
    with pytest.raises(ConfigError, match="is on tmpfs"):
        open_tier(root)
    assert not root.exists()


# ----------------------------------------------------------------------------------- one owner


def test_the_same_process_twice(rig):
    with pytest.raises(RootLockedError, match=f"in use by process {os.getpid()}; .*a root of its"):
        open_tier(rig.harness.root)
    rig.store(rig.chain("ab"))
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("ab"))


def test_another_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from headstart.tiers import *\n"
        "tier = FileTier(FileTierOptions(root=Path(sys.argv[1]), capacity_nbytes=1 << 20))\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "cache"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout.readline() == "open\n"
        before = tree(tmp_path)
        with pytest.raises(RootLockedError, match=f"in use by process {owner.pid}; "):
            open_tier(tmp_path / "cache")
        assert tree(tmp_path) == before, "the loser touches nothing"
    finally:
        owner.kill()
        owner.communicate()
    open_tier(tmp_path / "cache").close()  # the lock died with its process


# ------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("capacity", [0, 1, 4096, 8191])
def test_a_capacity_smaller_than_the_smallest_block(tmp_path, capacity):
    with pytest.raises(ConfigError, match=r"capacity .* is smaller than the smallest block"):
        open_tier(tmp_path / "cache", capacity_nbytes=capacity, slab_nbytes=None)
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_smaller_than_one_block_of_a_model(rig):
    with pytest.raises(ConfigError, match=r"does not fit a slab .* smaller block size"):
        rig.tier.open_namespace(kit_namespace("large", SLAB))
    rig.store(rig.chain("ab"))


@pytest.mark.parametrize("slab", [SLAB + 4096, 5000, 4096, 1 << 40])
def test_a_slab_that_cannot_be_leaves_a_cache_as_it_was(rig, slab):
    root = rig.harness.root
    rig.store(rig.chain("ab"))
    rig.tier.close()
    before = tree(root)
    capacity = CAPACITY if slab != SLAB + 4096 else SLAB
    with pytest.raises(ConfigError, match="slab_nbytes"):
        open_tier(root, slab_nbytes=slab, capacity_nbytes=capacity)
    assert tree(root) == before
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("ab"))


def test_a_capacity_below_one_slab_of_the_directory_leaves_it_as_it_was(rig):
    rig.store(rig.chain("ab"))
    rig.tier.close()
    before = tree(rig.harness.root)
    with pytest.raises(ConfigError, match=r"capacity .* slab"):
        open_tier(rig.harness.root, slab_nbytes=None, capacity_nbytes=SLAB - 4096)
    assert tree(rig.harness.root) == before


def test_an_unknown_policy_leaves_nothing_open(tmp_path):
    with pytest.raises(ConfigError, match="policy 'arc' is unknown"):
        open_tier(tmp_path / "cache", policy="arc")
    open_tier(tmp_path / "cache").close()


def test_a_first_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(28, "No space left on device")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        for root in (tmp_path / "new", tmp_path / "empty"):
            with pytest.raises(TierUnavailableError, match=r"no room for a capacity of 192 KiB"):
                open_tier(root)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_later_start_that_fails_keeps_the_cache(rig, monkeypatch):
    rig.store(rig.chain("ab"))
    rig.tier.close()

    def refuse(fd, offset, length):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            rig.harness.make()
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("ab"))


@pytest.mark.parametrize("name", ["format.json", "index.log"])
def test_bookkeeping_that_cannot_be_written_is_a_clear_error(tmp_path, monkeypatch, name):
    opened, fsync = open, os.fsync

    def refuse(fd):
        if Path(f"/proc/self/fd/{fd}").resolve().name.startswith("format"):
            raise OSError(28, "No space left on device")
        fsync(fd)

    def refuse_write(fd, data, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if name == "format.json":
            patch.setattr(os, "fsync", refuse)
        else:
            patch.setattr(os, "pwrite", refuse_write)
        with pytest.raises(TierUnavailableError, match="No space left"):
            open_tier(tmp_path / "cache")
    assert opened is open
    assert not (tmp_path / "cache" / "format.json").exists()
    open_tier(tmp_path / "cache").close()


# ------------------------------------------------------------------------- from one run to the next


def rewrite_format(root, **changes):
    path = root / "format.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"version": 0}, {"uuid": "?"}, {"slab_nbytes": None}],
    ids=["newer", "older", "uuid", "slab"],
)
def test_a_directory_of_another_format_is_emptied(rig, changes):
    rig.store(rig.chain("abcd"))
    rig.harness.between = lambda root: rewrite_format(root, **changes)
    rig.reopen(Ending.CLOSE)
    assert rig.tier.stats().num_blocks == 0
    assert rig.tier.lookup(rig.chain("abcd").keys) == 0
    rig.store(rig.chain("abcd"))
    rig.harness.between = lambda root: None
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("abcd"))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}"], ids=range(5))
def test_a_damaged_format_file_is_an_empty_cache(rig, text):
    rig.store(rig.chain("abcd"))
    rig.harness.between = lambda root: (root / "format.json").write_text(text)
    rig.reopen(Ending.CLOSE)
    assert rig.tier.stats().num_blocks == 0
    rig.store(rig.chain("abcd"))


def test_another_slab_size_empties_the_cache(rig):
    rig.store(rig.chain("abcd"))
    rig.harness.options["slab_nbytes"] = 2 * SLOT
    rig.reopen(Ending.CLOSE)
    assert rig.tier.stats().num_blocks == 0
    assert len(list((rig.harness.root / "slabs").iterdir())) == 8
    rig.store(rig.chain("abcd"))
    rig.harness.options["slab_nbytes"] = None  # what the directory has
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("abcd"))


def test_a_smaller_capacity_keeps_what_fits_and_frees_the_rest(rig):
    roots = rig.roots(16)
    rig.store(*roots)
    rig.harness.options["capacity_nbytes"] = 2 * SLAB
    rig.reopen(Ending.CLOSE)
    assert len(list((rig.harness.root / "slabs").iterdir())) == 2
    assert rig.tier.stats().num_blocks == 8
    rig.expect(*roots[:8])
    rig.store(*rig.roots(8, "new"))


@pytest.mark.parametrize("ending", list(Ending))
def test_a_capacity_that_shrank_and_grew_again(rig, ending):
    """What did not fit in between must not come back over what was stored since."""
    rig.store(*rig.roots(16), rig.chain(["root0", "leaf"]))
    rig.harness.options["capacity_nbytes"] = 2 * SLAB
    rig.reopen(ending)
    fresh = rig.roots(6, "fresh")
    rig.store(*fresh)
    rig.tier.flush()
    rig.harness.options["capacity_nbytes"] = 4 * SLAB
    rig.reopen(ending)
    rig.expect(*fresh)
    assert rig.tier.stats().num_blocks == 8
    more = rig.roots(8, "more")
    rig.store(*more)
    rig.expect(*more)
    assert rig.tier.verify().good


def test_a_larger_capacity_keeps_everything(rig):
    roots = rig.roots(16)
    rig.store(*roots)
    rig.harness.options["capacity_nbytes"] = 6 * SLAB
    rig.reopen(Ending.CLOSE)
    rig.expect(*roots)
    rig.store(*rig.roots(8, "more"))
    rig.expect(*roots)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_namespace_that_nobody_uses_is_reclaimed(rig, ending):
    day = 86400.0
    now = (rig.harness.root / "namespaces" / "1.json").stat().st_mtime
    other = rig.open_namespace(kit_namespace("other"))
    rig.store(rig.chain("abc"), rig.chain("xyz", other))
    rig.tier.flush()
    rig.harness.options["namespace_ttl_s"] = 30 * day
    rig.harness.clocks["wall_clock"] = lambda: now + 29 * day
    rig.harness.between = lambda root: os.utime(
        root / "namespaces" / "2.json", (now + 10 * day, now + 10 * day)
    )
    rig.reopen(ending)
    assert rig.tier.stats().num_blocks == 6
    rig.harness.clocks["wall_clock"] = lambda: now + 31 * day
    rig.harness.between = lambda root: [
        os.utime(root / "namespaces" / f"{number}.json", (then, then))
        for number, then in ((1, now), (2, now + 10 * day))
    ]
    rig.reopen(ending)
    assert rig.tier.stats().num_blocks == 3
    assert rig.tier.lookup(rig.chain("abc").keys) == 0
    rig.expect(rig.chain("xyz", other))
    fresh = rig.roots(13)
    rig.store(*fresh)
    rig.tier.flush()
    rig.harness.between = lambda root: None
    rig.harness.clocks["wall_clock"] = lambda: now
    rig.reopen(Ending.KILL)
    rig.expect(*fresh, rig.chain("xyz", other))
    assert rig.tier.verify().good


def test_opening_a_namespace_counts_as_using_it(rig):
    path = rig.harness.root / "namespaces" / "1.json"
    os.utime(path, (1, 1))
    rig.tier.open_namespace(rig.namespace)
    assert path.stat().st_mtime > 1e9


def test_two_models_on_a_full_disk(rig):
    """The second model, with blocks of another size, gets room; the first keeps what is hot."""
    rig.store(*rig.roots(16))
    space = rig.open_namespace(kit_namespace("second", 5 * 4096))
    for number in range(6):
        rig.store(rig.chain([f"second{number}", "leaf"], space))
        rig.expect(rig.chain([f"second{number}", "leaf"], space))
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain(["second5", "leaf"], space))
    rig.store(*rig.roots(4, "back"))
    rig.expect(*rig.roots(4, "back"))


def test_a_directory_may_be_moved(make_rig, tmp_path):
    rig = make_rig()
    rig.store(rig.chain("ab"))
    rig.tier.close()
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    rig.harness.root = tmp_path / "moved"
    rig.reopen(Ending.CLOSE)
    rig.expect(rig.chain("ab"))
