"""Settings from a file and the environment, and what opening them does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.config import cache_dir, inflight_nbytes, load_settings, open_store
from headstart.errors import ConfigError, HeadstartError, RootLockedError, TierUnavailableError
from headstart.keys import block_keys
from headstart.policies import POLICIES
from headstart.settings import FileTierSettings, MemorySettings, Settings
from headstart.testing import FaultyTier, kit_namespace
from headstart.tiers import FileTier, FileTierOptions
from headstart.transfer import DEFAULT_INFLIGHT_NBYTES
from headstart.types import Outcome

MIB = 1 << 20
TIER = '[[tiers]]\nkind = "file"\nroot = "/x"\ncapacity = "1GiB"\n'
FAULTS = f"allow_faults = true\n{TIER}[[tiers.faults]]\n"
DESCRIPTORS = Path("/proc/self/fd")
FULL = """
[memory]
capacity = "64MiB"
policy = "fifo"
slab_nbytes = "4MiB"
huge_pages = "off"

[[tiers]]
kind = "file"
root = "/nvme/headstart"
capacity = "100GiB"

[[tiers]]
kind = "file"
root = "/mnt/slow"
capacity = "1.5TB"
policy = "fifo"
durable = false
device = "/dev/nvme1n1"
direct = "off"
slab_nbytes = "256MiB"
inflight_nbytes = "8MiB"
threads = 4
namespace_ttl = "7d"
"""


def load(text="", **environ):
    """Settings of a file's text and variables without their prefix."""
    path = None
    if text:
        path = Path(os.environ["PYTEST_TMP"]) / "headstart.toml"
        path.write_text(text)
    return load_settings(path, {f"HEADSTART_{name}": value for name, value in environ.items()})


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


# ----------------------------------------------------------------------------------------- reading


def test_nothing_set_is_a_memory_tier_of_1_gib():
    settings = load()
    assert settings == Settings()
    assert settings.memory == MemorySettings(capacity=1 << 30, policy="lru", slab_nbytes=None)
    assert settings.tiers == ()


def test_a_file_sets_everything():
    settings = load(FULL)
    assert settings.memory == MemorySettings(
        capacity=64 * MIB, policy="fifo", slab_nbytes=4 * MIB, huge_pages="off"
    )
    first, second = settings.tiers
    assert first == FileTierSettings(kind="file", root=Path("/nvme/headstart"), capacity=100 << 30)
    assert second == FileTierSettings(
        kind="file",
        root=Path("/mnt/slow"),
        capacity=1_500_000_000_000,
        policy="fifo",
        durable=False,
        device=Path("/dev/nvme1n1"),
        direct="off",
        slab_nbytes=256 * MIB,
        inflight_nbytes=8 * MIB,
        threads=4,
        namespace_ttl=7 * 86400.0,
    )


def test_every_setting_is_in_the_test_above():
    settings = load(FULL)
    for model in (settings.memory, settings.tiers[1]):
        unset = set(type(model).model_fields) - model.model_fields_set - {"faults"}
        assert not unset


def test_the_environment_wins():
    settings = load(
        FULL,
        MEMORY__CAPACITY="2GiB",
        TIERS__1__CAPACITY="10GiB",
        TIERS__1__DURABLE="true",
        TIERS__1__THREADS="7",
        TIERS__1__NAMESPACE_TTL="12h",
    )
    assert settings.memory.capacity == 2 << 30
    assert settings.memory.policy == "fifo", "the rest of the table stays"
    assert settings.tiers[0].capacity == 100 << 30
    second = settings.tiers[1]
    assert (second.capacity, second.durable, second.threads) == (10 << 30, True, 7)
    assert second.namespace_ttl == 43200.0


def test_tiers_by_the_environment_alone():
    settings = load(
        TIERS__0__ROOT="/nvme",
        TIERS__0__CAPACITY="1GiB",
        TIERS__1__CAPACITY="2GiB",
        TIERS__1__KIND="file",
        TIERS__1__ROOT="/slow",
    )
    assert [(tier.root, tier.capacity) for tier in settings.tiers] == [
        (Path("/nvme"), 1 << 30),
        (Path("/slow"), 2 << 30),
    ]


def test_twelve_tiers_by_the_environment():
    variables = {f"TIERS__{n}__ROOT": f"/t{n}" for n in range(12)}
    variables |= {f"TIERS__{n}__CAPACITY": "1GiB" for n in range(12)}
    assert [tier.root for tier in load(**variables).tiers] == [Path(f"/t{n}") for n in range(12)]


def test_a_tier_is_added_to_those_of_the_file():
    settings = load(FULL, TIERS__2__ROOT="/third", TIERS__2__CAPACITY="1GiB")
    assert [str(tier.root) for tier in settings.tiers] == ["/nvme/headstart", "/mnt/slow", "/third"]


def test_the_environment_may_name_the_file(tmp_path):
    (tmp_path / "here.toml").write_text('[memory]\ncapacity = "8MiB"')
    assert load(CONFIG=str(tmp_path / "here.toml")).memory.capacity == 8 * MIB


def test_a_named_file_wins_over_the_variable(tmp_path):
    (tmp_path / "here.toml").write_text('[memory]\ncapacity = "8MiB"')
    assert load(FULL, CONFIG=str(tmp_path / "here.toml")).memory.capacity == 64 * MIB


def test_the_real_environment_is_read(monkeypatch):
    monkeypatch.setenv("HEADSTART_MEMORY__CAPACITY", "5MiB")
    assert load_settings().memory.capacity == 5 * MIB


def test_other_variables_are_left_alone():
    assert load_settings(None, {"HOME": "/root", "headstart_x": "1", "XHEADSTART_Y": "1"})


def test_settings_are_frozen():
    with pytest.raises(ValueError):
        load().memory.capacity = 5


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[memory]\ncapcity = "1GiB"', r"memory\.capcity is unknown; did you mean 'capacity'\?"),
        ("[memroy]\n", r"memroy is unknown; did you mean 'memory'\?"),
        ("[[tier]]\n", r"tier is unknown; did you mean 'tiers'\?"),
        (
            '[[tiers]]\nkind = "file"\nroot = "/x"\ncapacity = "1GiB"\ndurabel = true',
            r"tiers\.0\.durabel is unknown; did you mean 'durable'\?",
        ),
        ('[memory]\ncapacity = "1Gib"', r"memory\.capacity: unit 'Gib' in '1Gib' is unknown"),
        ('[memory]\ncapacity = "much"', r"memory\.capacity: 'much' is not a quantity"),
        ("[memory]\ncapacity = 1.5", r"memory\.capacity: "),
        ("[memory]\ncapacity = true", r"memory\.capacity: True is not a quantity"),
        ("[memory]\ncapacity = 100", r"memory\.capacity: .*4096"),
        ('[memory]\nslab_nbytes = "1Gib"', r"memory\.slab_nbytes: unit 'Gib' in '1Gib' is unknown"),
        ('[memory]\npolicy = "arc"', r"memory\.policy: eviction policy 'arc' is unknown; .*fifo"),
        ("[memory]\npolicy = 3", r"memory\.policy: eviction policy 3 is unknown; allowed: lru"),
        ('[memory]\npolicy = "ttl=soon"', r"memory\.policy: 'soon' is not a quantity"),
        ('[memory]\npolicy = "s3fifo=1"', r"memory\.policy: .* s3fifo has nothing to set; allowed"),
        ('[memory]\npolicy = "cost=-1"', r"memory\.policy: .* '-1' is not a number of tokens"),
        ('[[tiers]]\nkind = "file"\nroot = "/x"', r"tiers\.0\.capacity is missing"),
        ('[[tiers]]\nkind = "file"\ncapacity = "1GiB"', r"tiers\.0\.root is missing"),
        ('[[tiers]]\nroot = "/x"\ncapacity = "1GiB"', r"tiers\.0\.kind is missing"),
        (
            '[[tiers]]\nkind = "valkey"\nroot = "/x"\ncapacity = "1GiB"',
            r"tiers\.0\.kind: .*'file'",
        ),
        (
            '[[tiers]]\nkind = "file"\nroot = "/x"\ncapacity = "1GiB"\nthreads = 0',
            r"tiers\.0\.threads: ",
        ),
        (
            '[[tiers]]\nkind = "file"\nroot = "/x"\ncapacity = "1GiB"\nnamespace_ttl = "1 moon"',
            r"tiers\.0\.namespace_ttl: unit 'moon' in '1 moon' is unknown",
        ),
        (
            '[[tiers]]\nkind = "file"\nroot = "/x"\ncapacity = "1GiB"\ndirect = "on"',
            r"tiers\.0\.direct: ",
        ),
        ('[tiers]\nkind = "file"', r"tiers: .*(tuple|list)"),
        ("memory = 3", r"memory: "),
        (TIER + "[[tiers.faults]]\nlatency = 1", r"toml: tiers.faults .*allow_faults = true"),
        (FAULTS + "latncy = 1", r"tiers\.0\.faults\.0\.latncy is unknown; .* 'latency'\?"),
        (FAULTS + "error_rate = 2", r"tiers\.0\.faults\.0\.error_rate: "),
        (FAULTS + 'after = "-1s"', r"tiers\.0\.faults\.0\.after: "),
    ],
    ids=range(28),
)
def test_a_wrong_file_is_refused_with_path_and_reason(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load(text)
    assert str(tmp_path / "headstart.toml") in str(refused.value)
    assert "function-before" not in str(refused.value), "the library shows through"


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        load('[memory]\ncapacity = "x"\npolicy = "y"\nz = 1')
    assert [name in str(refused.value) for name in ("capacity", "policy", "memory.z")] == [True] * 3


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("MEMORY__CAPCITY", "HEADSTART_MEMORY__CAPACITY"),
        ("MEMORY_CAPACITY", "HEADSTART_MEMORY__CAPACITY"),
        ("CACHEDIR", "HEADSTART_CACHE_DIR"),
        ("CONFIG_FILE", "HEADSTART_CONFIG"),
        ("TIERS__0__ROOTS", "HEADSTART_TIERS__0__ROOT"),
        ("TIERS__X__ROOT", "HEADSTART_TIERS__0__ROOT"),
        ("TIERS__²__ROOT", "HEADSTART_TIERS__0__ROOT"),
        ("TIERS", "HEADSTART_"),
        ("X", "HEADSTART_"),
        ("", "HEADSTART_"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(variable, near):
    with pytest.raises(ConfigError, match=rf"HEADSTART_{variable} is unknown; did you mean {near}"):
        load(**{variable: "1"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MEMORY__CAPACITY": "lots"}, r"HEADSTART_MEMORY__CAPACITY: memory\.capacity: 'lots'"),
        ({"TIERS__0__CAPACITY": "1GiB"}, r"tiers\.0\.root is missing"),
        ({"TIERS__1__ROOT": "/x"}, r"HEADSTART_TIERS__1__ROOT: the settings have only 0 tiers"),
        ({"TIERS__0__DURABLE": "perhaps"}, r"tiers\.0\.durable: "),
    ],
    ids=range(4),
)
def test_a_wrong_variable_is_refused(variables, message):
    with pytest.raises(ConfigError, match=message):
        load(**variables)


def test_a_variable_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match="'memory' is a value in the settings file, not a table"):
        load("memory = 3", MEMORY__CAPACITY="1GiB")


@pytest.mark.parametrize("text", ["[memory", "a = 1\na = 2", "= 3"])
def test_what_is_no_toml_is_refused(text):
    with pytest.raises(ConfigError, match=r"headstart\.toml is not TOML"):
        load(text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"settings file {path} cannot be read"):
            Settings.from_toml(path)
    (tmp_path / "latin.toml").write_bytes(b'[memory]\npolicy = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "latin.toml", {})


# ----------------------------------------------------------------------------------- cache folder


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HEADSTART_CACHE_DIR": "/models", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/models"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/headstart"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/headstart"),
        ({"HOME": "/h"}, "/h/.cache/headstart"),
        ({}, "/tmp/.cache/headstart"),
    ],
    ids=range(5),
)
def test_cache_dir(environ, folder):
    assert cache_dir(environ) == Path(folder)


# ---------------------------------------------------------------------------------------- opening


def settings_of(*roots, **options):
    tiers = [
        {
            "kind": "file",
            "root": root,
            "capacity": "4MiB",
            "inflight_nbytes": "1MiB",
            "threads": 2,
        }
        | options
        for root in roots
    ]
    return Settings.from_mapping({"memory": {"capacity": "4MiB"}, "tiers": tiers})


def test_memory_alone():
    with open_store(Settings.from_mapping({"memory": {"capacity": "4MiB"}})) as store:
        assert list(store.stats().tiers) == ["memory"]


def test_what_is_stored_is_there_after_a_restart(tmp_path):
    namespace = kit_namespace()
    chain = block_keys(namespace, range(64))
    blocks = [bytes([index]) * chain.block_nbytes for index in range(len(chain))]
    for expected in (0, 4):
        with open_store(settings_of(tmp_path / "cache")) as store:
            store.open_namespace(namespace)
            with store.load(chain) as lease:
                assert [bytes(view) for view in lease.views] == blocks[:expected]
            assert store.store(chain, blocks) == [Outcome.DONE] * 4
            assert list(store.stats().tiers) == ["memory", "file"]


def test_tiers_of_one_kind_have_names_of_their_own(tmp_path):
    roots = [tmp_path / name for name in "abc"]
    with open_store(settings_of(*roots)) as store:
        store.open_namespace(kit_namespace())
        assert list(store.stats().tiers) == ["memory", "file", "file2", "file3"]
        chain = block_keys(kit_namespace(), range(32))
        store.store(chain, [bytes(chain.block_nbytes)] * 2)
        store.flush()
        assert store.lookup(chain).by_tier == {"memory": 2, "file": 2, "file2": 2, "file3": 2}
        assert [report.tier for report in store.verify()] == ["memory", "file", "file2", "file3"]


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ({"root": "missing/parent"}, TierUnavailableError),
        ({"root": "first"}, RootLockedError),
        ({"root": "second", "capacity": "8KiB", "slab_nbytes": "1MiB"}, ConfigError),
        ({"root": "second", "device": "nowhere"}, HeadstartError),
    ],
    ids=["parent", "same root", "slab", "device"],
)
def test_an_error_with_the_second_tier_closes_the_first(tmp_path, second, error):
    before = sorted(path.name for path in DESCRIPTORS.iterdir())
    first = {"kind": "file", "root": str(tmp_path / "first"), "capacity": "4MiB"}
    second = first | second | {"root": str(tmp_path / second["root"])}
    settings = Settings.from_mapping({"memory": {"capacity": "4MiB"}, "tiers": [first, second]})
    with pytest.raises(error):
        open_store(settings)
    assert sorted(path.name for path in DESCRIPTORS.iterdir()) == before
    with open_store(settings_of(tmp_path / "first")):
        pass


def test_memory_that_cannot_be_had_closes_the_tiers(tmp_path):
    before = sorted(path.name for path in DESCRIPTORS.iterdir())
    settings = settings_of(tmp_path / "cache")
    large = settings.model_copy(update={"memory": MemorySettings(capacity=1 << 50)})
    with pytest.raises(ConfigError, match=r"memory\.capacity"):
        open_store(large)
    assert sorted(path.name for path in DESCRIPTORS.iterdir()) == before
    with open_store(settings):
        pass


def test_every_policy_is_taken_by_every_tier(tmp_path):
    for policy in (*POLICIES, "ttl=10min", "tlru=4096", "cost=30000"):
        text = f'[memory]\npolicy = "{policy}"\n{TIER}policy = "{policy}"'
        settings = load(text)
        assert (settings.memory.policy, settings.tiers[0].policy) == (policy, policy)
    settings = settings_of(tmp_path / "cache", policy="cost=30000")
    memory = MemorySettings(capacity=4 * MIB, policy="ttl=10min")
    with open_store(settings.model_copy(update={"memory": memory})) as store:
        tiers = (store._memory, store._lower[0].tier)
        assert [tier.index._policy.name for tier in tiers] == ["ttl", "cost"]
        assert tiers[1].index._policy._even_tokens == 30_000


def test_a_directory_may_change_its_policy(tmp_path):
    namespace = kit_namespace()
    chains = [block_keys(namespace, [number] * 32) for number in range(4)]
    for number, policy in enumerate(("lfu-da", "cost", "lru", "ttl=1h")):
        with open_store(settings_of(tmp_path / "cache", policy=policy)) as store:
            store.open_namespace(namespace)
            lower = store._lower[0].tier
            assert [lower.lookup(chain.keys) for chain in chains] == [2] * number + [0] * (
                4 - number
            )
            for chain in chains[: number + 1]:
                store.store(chain, [bytes(chain.block_nbytes)] * 2)
            assert store.flush()
            lower.touch(chains[0].keys)
            lower.check_invariants()


def test_settings_reach_the_tier(tmp_path):
    settings = settings_of(
        tmp_path / "cache", policy="fifo", slab_nbytes="512KiB", direct="off", namespace_ttl="1d"
    )
    with open_store(settings) as store:
        (lower,) = store._lower
        assert lower.tier.index.slots.slab_nbytes == 512 << 10
        assert lower.tier.volume.direct is False
        assert lower.tier._policy.name == "fifo"
        assert (len(lower.transfer._threads), lower.transfer.inflight_nbytes) == (2, MIB)


# ------------------------------------------------------------------------------- bytes in flight


@pytest.fixture
def make_tier(tmp_path):
    tiers = []

    def make(**options):
        tiers.append(FileTier(FileTierOptions(root=tmp_path / "cache", **options)))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize(
    ("capacity", "slab"), [(20 * MIB, None), (8 * MIB, MIB // 4), (6 * MIB, 3 * MIB // 2)]
)
def test_measuring_writes_nothing_beyond_a_slab(make_tier, tmp_path, capacity, slab):
    """The capacity is a hard limit."""
    tier = make_tier(capacity_nbytes=capacity, slab_nbytes=slab)
    measured = inflight_nbytes(tier, tmp_path / "device.json")
    assert measured > 0
    sizes = {path.stat().st_size for path in (tmp_path / "cache" / "slabs").iterdir()}
    assert sizes == {tier.index.slots.slab_nbytes}
    assert len(tier.index) == 0


def test_it_is_measured_once(make_tier, tmp_path, monkeypatch):
    tier, path = make_tier(capacity_nbytes=4 * MIB), tmp_path / "device.json"
    measured = inflight_nbytes(tier, path)
    assert json.loads(path.read_text()) == {"inflight_nbytes": measured}
    monkeypatch.setattr("headstart.config.measure_inflight_nbytes", None)
    assert inflight_nbytes(tier, path) == measured


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"inflight_nbytes": "x"}'], ids=range(5))
def test_a_damaged_measurement_is_measured_again(make_tier, tmp_path, text):
    (tmp_path / "device.json").write_text(text)
    assert inflight_nbytes(make_tier(capacity_nbytes=2 * MIB), tmp_path / "device.json") > 0


def test_a_tier_with_blocks_is_not_measured_over(make_tier, tmp_path):
    """Measuring writes; it must not write over blocks."""
    tier = make_tier(capacity_nbytes=2 * MIB)
    slots = tier.index.reserve(4096, 1)
    tier.index.publish(
        block_keys(kit_namespace(), range(16)).keys,
        slots,
        parent=None,
        namespace=1,
        block_nbytes=4096,
    )
    assert inflight_nbytes(tier, tmp_path / "device.json") == DEFAULT_INFLIGHT_NBYTES
    assert not (tmp_path / "device.json").exists()


def test_a_device_that_cannot_be_measured_has_a_default(make_tier, tmp_path):
    tier = make_tier(capacity_nbytes=2 * MIB)
    volume = tier.volume

    class Broken:
        capacity_nbytes, direct, close = volume.capacity_nbytes, True, staticmethod(volume.close)

        def write(self, offset, buffers):
            raise OSError(5, "Input/output error")

    tier.volume = Broken()
    assert inflight_nbytes(tier, tmp_path / "device.json") == DEFAULT_INFLIGHT_NBYTES


def test_a_tier_is_made_ill_when_that_is_allowed(tmp_path, caplog):
    text = (FAULTS + 'lasts = "1h"\nerror_rate = 1.0').replace("/x", str(tmp_path / "tier"))
    with open_store(load(text)) as store:
        ((tier, _),) = store.lower
        assert isinstance(tier, FaultyTier)
        assert tier.suffer(4096)
        assert tier.name == "file"
    assert "slow and ill on purpose" in caplog.text


def test_faults_need_nothing_that_only_tests_have(tmp_path):
    text = (FAULTS + "latency = 0.001").replace("/x", str(tmp_path / "tier"))
    (tmp_path / "node.toml").write_text(text)
    script = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from headstart.config import load_settings, open_store\n"
        "from pathlib import Path\n"
        f"open_store(load_settings(Path({str(tmp_path / 'node.toml')!r}))).close()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
