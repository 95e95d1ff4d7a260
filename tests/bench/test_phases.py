"""Which phases there are, for whom, and in which order arms are measured."""

import pytest

from headstart.bench.arms import Arm
from headstart.bench.phases import Phase, check_phases, drop_page_cache, parse_phases, rounds_of
from headstart.errors import ConfigError

PLAIN = Arm(name="plain", words=("server", "{port}"))
WITH_NODE = Arm(name="ours", words=("server", "{port}", "{socket}"))


def test_phases_come_in_the_order_in_which_they_are_named():
    assert parse_phases("") == (Phase.ONLY,)
    assert parse_phases(" cold, host-cold ,steady") == (
        Phase.COLD,
        Phase.HOST_COLD,
        Phase.STEADY,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cold,warm", "'warm' is unknown; known: cold, steady, engine-restart, node-restart, host"),
        ("cold,", "'' is unknown"),
        ("cold,steady,cold", "each phase can be there once"),
        ("steady,cold", "begin with cold"),
        ("host-cold", "begin with cold"),
    ],
)
def test_what_is_no_phase_is_refused(text, message):
    with pytest.raises(ConfigError) as refused:
        parse_phases(text)
    assert message in str(refused.value)


def test_what_cannot_be_done_is_found_out_before(tmp_path):
    every = parse_phases("cold,steady,engine-restart,node-restart,host-cold")
    writable = tmp_path / "drop_caches"
    writable.touch()
    check_phases(every, [WITH_NODE], drop_caches=writable)
    check_phases(parse_phases("cold,steady,engine-restart"), [PLAIN])
    check_phases(parse_phases("cold,steady"), [])
    with pytest.raises(ConfigError, match="no sense for the arm plain, which has no node"):
        check_phases(every, [WITH_NODE, PLAIN], drop_caches=writable)
    with pytest.raises(ConfigError, match="engine-restart needs a server that the bench starts"):
        check_phases(parse_phases("cold,engine-restart"), [])
    with pytest.raises(ConfigError, match="only the superuser may"):
        check_phases(every, [WITH_NODE], drop_caches=tmp_path / "none")


def test_each_round_begins_with_the_next_arm():
    assert rounds_of(["a", "b"], 3) == [
        *((0, "a"), (0, "b")),
        *((1, "b"), (1, "a")),
        *((2, "a"), (2, "b")),
    ]
    firsts = [arm for place, (_, arm) in enumerate(rounds_of(["a", "b", "c"], 3)) if not place % 3]
    assert firsts == ["a", "b", "c"]


@pytest.mark.root
def test_the_page_cache_can_be_dropped():
    drop_page_cache()
