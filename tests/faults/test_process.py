"""What a process may do to a store around it: fork, change directory, run for months."""

import os

import pytest

from headstart.config import open_store
from headstart.errors import ClosedError, ConfigError, TierUnavailableError
from headstart.keys import BlockLayout, Namespace, block_keys
from headstart.settings import Settings
from headstart.tiers import FileTier, FileTierOptions
from headstart.types import KeyChain, Outcome

LAYOUT = BlockLayout(block_size=4, axes="byte", shape=(4096,), dtype="uint8")
NAMESPACE = Namespace(model="m", weights="w", layout=LAYOUT)
CHAIN = block_keys(NAMESPACE, list(range(16)))
BLOCKS = [bytes([number]) * 4096 for number in range(4)]
DAY_S = 86400.0


def settings(root):
    tier = {"kind": "file", "root": str(root), "capacity": "1MiB", "inflight_nbytes": "1MiB"}
    return Settings.from_mapping({"memory": {"capacity": "1MiB"}, "tiers": [tier]})


def opened(root):
    store = open_store(settings(root))
    store.open_namespace(NAMESPACE)
    return store


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_refused_and_leaves_its_parent_alone(tmp_path):
    store = opened(tmp_path / "root")
    assert store.store(CHAIN, BLOCKS) == [Outcome.DONE] * 4
    with store.load(CHAIN) as lease:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.store(CHAIN, BLOCKS[::-1])
            except ClosedError:
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [bytes(view) for view in lease.views] == BLOCKS
    assert store.flush(10)
    store.close()
    with opened(tmp_path / "root") as again:
        assert again.lookup(CHAIN).by_tier["file"] == 4


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with opened(tmp_path / "b/cache") as other:
        other.store(CHAIN, BLOCKS)
    monkeypatch.chdir(tmp_path / "a")
    store = opened("cache")
    monkeypatch.chdir(tmp_path / "b")
    store.close()
    with opened(tmp_path / "b/cache") as other:
        assert other.lookup(CHAIN).num_blocks == 4


def test_a_root_made_anew_belongs_to_its_new_owner(tmp_path):
    root = tmp_path / "root"
    store = opened(root)
    root.rename(tmp_path / "gone")
    with opened(root) as newer:
        newer.store(CHAIN, BLOCKS)
        newer.flush(10)
        store.close()
    with opened(root) as newer:
        assert newer.lookup(CHAIN).num_blocks == 4


def test_a_link_to_nowhere_is_refused_and_stays(tmp_path):
    (tmp_path / "root").symlink_to(tmp_path / "not mounted")
    with pytest.raises(TierUnavailableError):
        opened(tmp_path / "root")
    assert (tmp_path / "root").is_symlink()


def test_a_namespace_in_use_is_not_reclaimed_however_long_it_runs(tmp_path):
    now = [1e9]
    options = FileTierOptions(root=tmp_path / "root", capacity_nbytes=1 << 20)
    tier = FileTier(options, wall_clock=lambda: now[0])
    tier.open_namespace(NAMESPACE)
    os.utime(tmp_path / "root/namespaces/1.json", (now[0], now[0]))
    now[0] += 40 * DAY_S
    tier.commit()  # as after every store
    touched = (tmp_path / "root/namespaces/1.json").stat().st_mtime
    assert touched > 1e9 + DAY_S
    tier.close()


def test_flush_says_so_when_the_log_cannot_be_written(tmp_path, monkeypatch):
    with opened(tmp_path / "root") as store:
        assert store.store(CHAIN, BLOCKS) == [Outcome.DONE] * 4
        assert store.flush(10)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            store.discard(CHAIN)
            assert not store.flush(10)
        assert store.flush(10)


def test_an_endless_timeout_is_a_long_one(tmp_path):
    with opened(tmp_path / "root") as store:
        store.store(CHAIN, BLOCKS)
        assert store.flush(float("inf"))
        with store.load(CHAIN, timeout_s=float("inf")) as lease:
            assert lease.ready_blocks == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": (bytes(64),)},
        {"parent": b"short"},
        {"namespace": b""},
        {"block_nbytes": 0},
        {"block_nbytes": 1 << 40},
    ],
    ids=("keys", "parent", "namespace", "no bytes", "too many bytes"),
)
def test_a_malformed_chain_does_not_exist(wrong):
    sound = {"namespace": CHAIN.namespace, "block_nbytes": 4096, "keys": CHAIN.keys}
    with pytest.raises(ValueError, match="must be"):
        KeyChain(**{**sound, **wrong})


@pytest.mark.parametrize("content", [b"my own words", b"12 monkeys"])
def test_a_directory_with_a_lock_of_somebody_else_is_not_taken_over(tmp_path, content):
    root = tmp_path / "root"
    (root / "slabs").mkdir(parents=True)
    (root / "lock").write_bytes(content)
    (root / "slabs/000000.slab").write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="not a Headstart directory"):
        opened(root)
    assert (root / "lock").read_bytes() == content
    assert (root / "slabs/000000.slab").read_bytes() == b"theirs"


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    root, target = tmp_path / "root", tmp_path / "target"
    root.mkdir()
    target.write_bytes(b"")
    (root / "lock").symlink_to(target)
    with pytest.raises(ConfigError, match="not a Headstart directory"):
        opened(root)
    assert target.read_bytes() == b""
