"""The breaker: what opens it, what does not, and that only probes close it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.breaker import MAX_RATIO, Breaker, Cause

GIGABYTE = 1e9


def read(breaker, *, ratio=1.0, is_good=True, now=0.0):
    return breaker.read(ratio=ratio, is_good=is_good, now=now)


def probe(breaker, *rates, now=0.0):
    """Whether each of these probes closed it."""
    return [breaker.probed(bytes_per_s=rate, now=now) for rate in rates]


def due_after(breaker, now):
    """Seconds until the next probe, to a hundredth."""
    return next(n / 100 for n in range(10_000) if breaker.is_probe_due(now + n / 100))


@pytest.fixture
def breaker():
    return Breaker()


@pytest.fixture
def opened(breaker):
    assert breaker.open(Cause.STALL, now=0.0)
    return breaker


# -------------------------------------------------------------------------------------- closed


def test_a_new_one_is_closed_and_wants_no_probe(breaker):
    assert not breaker.is_open
    assert breaker.cause is None
    assert breaker.num_opened == 0
    assert not breaker.is_probe_due(1e9)


def test_good_reads_keep_it_closed(breaker):
    assert not any(read(breaker, ratio=ratio) for ratio in [0.01, 1.0, 2.0, 9.9] * 10)
    assert not breaker.is_open


def test_a_probe_of_a_closed_one_changes_nothing(breaker):
    assert probe(breaker, GIGABYTE, None, GIGABYTE, GIGABYTE, GIGABYTE) == [False] * 5
    assert not breaker.is_open
    assert not breaker.is_probe_due(1e9)


# ------------------------------------------------------------------------------------- opening


def test_a_read_of_more_than_ten_times_the_expected_time_opens_it(breaker):
    assert MAX_RATIO == 10.0
    assert read(breaker, ratio=10.0) is False
    assert read(breaker, ratio=10.001, now=7.0) is True
    assert (breaker.cause, breaker.opened_at, breaker.num_opened) == (Cause.SLOW, 7.0, 1)


def test_the_second_error_in_a_row_opens_it(breaker):
    assert read(breaker, is_good=False) is False
    assert read(breaker, is_good=False, now=3.0) is True
    assert (breaker.cause, breaker.opened_at, breaker.num_opened) == (Cause.ERRORS, 3.0, 1)


def test_a_good_read_between_errors_forgives_them(breaker):
    assert not any(read(breaker, is_good=is_good) for is_good in [False, True] * 10)
    assert not breaker.is_open


def test_how_long_an_error_took_does_not_matter(breaker):
    assert read(breaker, ratio=1000.0, is_good=False) is False
    assert not breaker.is_open


@pytest.mark.parametrize("cause", Cause)
def test_opening_it_says_whether_it_was_closed(breaker, cause):
    assert breaker.open(cause, now=2.0) is True
    assert (breaker.is_open, breaker.cause, breaker.opened_at) == (True, cause, 2.0)


def test_opening_it_twice_counts_once_and_keeps_the_first_cause(opened):
    assert opened.open(Cause.ERRORS, now=9.0) is False
    assert (opened.cause, opened.opened_at, opened.num_opened) == (Cause.STALL, 0.0, 1)
    assert opened.is_probe_due(0.5), "the second did not put the probe off"


def test_each_time_it_opens_is_counted(breaker):
    for number in range(1, 4):
        assert breaker.open(Cause.STALL, now=float(number))
        probe(breaker, GIGABYTE, GIGABYTE, GIGABYTE)
        assert (breaker.is_open, breaker.num_opened) == (False, number)


# ---------------------------------------------------------------------------------------- open


def test_no_read_closes_or_opens_an_open_one(opened):
    """Those that were under way when it opened still end."""
    outcomes = [read(opened, ratio=r, is_good=g) for r in (0.1, 1.0, 99.0) for g in (True, False)]
    assert outcomes == [False] * 6
    assert (opened.cause, opened.num_opened) == (Cause.STALL, 1)


def test_errors_of_before_do_not_count_once_it_is_closed_again(breaker):
    read(breaker, is_good=False)
    breaker.open(Cause.STALL, now=0.0)
    read(breaker, is_good=False)
    probe(breaker, GIGABYTE, GIGABYTE, GIGABYTE)
    assert read(breaker, is_good=False) is False
    assert read(breaker, is_good=False) is True


def test_the_third_good_probe_closes_it(opened):
    assert probe(opened, GIGABYTE, GIGABYTE, GIGABYTE) == [False, False, True]
    assert not opened.is_open
    assert opened.cause is None
    assert not opened.is_probe_due(1e9)


@pytest.mark.parametrize("rate", [1.0, 1e6, 1e12])
def test_probes_may_agree_at_any_speed(opened, rate):
    assert probe(opened, rate, 3.0 * rate, 2.0 * rate)[-1]


@pytest.mark.parametrize("odd", [0.3, 3.1], ids=["slower", "faster"])
@pytest.mark.parametrize("place", range(3))
def test_probes_that_differ_by_more_than_three_times_do_not_close_it(opened, odd, place):
    rates = [GIGABYTE] * 3
    rates[place] *= odd
    assert not any(probe(opened, *rates))
    assert opened.is_open


def test_only_the_last_three_probes_must_agree(opened):
    rates = [1.0, 10.0, 100.0, 110.0, 120.0]
    assert probe(opened, *rates) == [False, False, False, False, True]


def test_a_failed_probe_begins_the_count_again(opened):
    assert not any(probe(opened, GIGABYTE, GIGABYTE, None, GIGABYTE, GIGABYTE))
    assert probe(opened, GIGABYTE) == [True]


def test_failed_probes_never_close_it(opened):
    assert not any(probe(opened, *[None] * 20))
    assert opened.is_open


def test_probes_of_an_earlier_opening_do_not_count(opened):
    probe(opened, GIGABYTE, GIGABYTE, GIGABYTE)
    opened.open(Cause.SLOW, now=1.0)
    assert probe(opened, GIGABYTE, GIGABYTE, GIGABYTE) == [False, False, True]


# -------------------------------------------------------------------------------------- probes


def test_the_first_probe_is_due_half_a_second_after_it_opened(breaker):
    breaker.open(Cause.STALL, now=100.0)
    assert not breaker.is_probe_due(100.49)
    assert breaker.is_probe_due(100.5)


def test_failures_double_the_time_between_probes_up_to_five_seconds(opened):
    waits = []
    for now in range(0, 70, 10):
        probe(opened, None, now=float(now))
        waits.append(due_after(opened, now))
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]


def test_good_probes_follow_each_other_every_half_second(opened):
    probe(opened, GIGABYTE, now=10.0)
    assert due_after(opened, 10.0) == 0.5
    probe(opened, GIGABYTE, now=20.0)
    assert due_after(opened, 20.0) == 0.5


def test_the_back_off_is_forgotten_when_it_opens_again(opened):
    probe(opened, None, None, None, GIGABYTE, GIGABYTE, GIGABYTE)
    opened.open(Cause.SLOW, now=50.0)
    assert due_after(opened, 50.0) == 0.5


# ---------------------------------------------------------------------------------- any sequence


class BreakerStates(RuleBasedStateMachine):
    """`streak`: the rates since it opened or a probe failed. `errors`: those in a row."""

    def __init__(self):
        super().__init__()
        self.breaker = Breaker()
        self.now = self.since = 0.0
        self.cause = None
        self.streak, self.errors, self.failures, self.openings = [], 0, 0, 0

    def expect_open(self, cause):
        self.cause, self.since = cause, self.now
        self.streak, self.errors, self.failures = [], 0, 0
        self.openings += 1

    @rule(seconds=st.floats(0.0, 6.0))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(cause=st.sampled_from(Cause))
    def open(self, cause):
        was_closed = self.cause is None
        assert self.breaker.open(cause, self.now) is was_closed
        if was_closed:
            self.expect_open(cause)

    @rule(ratio=st.floats(0.0, 30.0), is_good=st.booleans())
    def read(self, ratio, is_good):
        opened = self.breaker.read(ratio=ratio, is_good=is_good, now=self.now)
        if self.cause is not None:
            assert not opened
            return
        self.errors = 0 if is_good else self.errors + 1
        slow = is_good and ratio > 10.0
        assert opened is (slow or self.errors == 2)
        if opened:
            self.expect_open(Cause.SLOW if slow else Cause.ERRORS)

    @precondition(lambda self: self.cause is not None)
    @rule(rate=st.sampled_from([None, 1e6, 2e6, 2.9e6, 4e6, 1e9]))
    def probe(self, rate):
        closed = self.breaker.probed(bytes_per_s=rate, now=self.now)
        self.since = self.now
        self.failures += rate is None
        self.streak = [] if rate is None else [*self.streak, rate]
        last = self.streak[-3:]
        assert closed is (len(last) == 3 and max(last) / min(last) <= 3.0)
        if closed:
            self.cause = None

    @precondition(lambda self: self.cause is None)
    @rule(rate=st.sampled_from([None, 1e9]))
    def probe_ends_late(self, rate):
        assert not self.breaker.probed(bytes_per_s=rate, now=self.now)

    @invariant()
    def it_is_what_its_history_says(self):
        assert self.breaker.cause is self.cause
        assert self.breaker.is_open is (self.cause is not None)
        assert self.breaker.num_opened == self.openings

    @invariant()
    def an_open_one_is_probed_in_time_and_not_too_often(self):
        wait = min(5.0, 0.5 * 2**self.failures)
        assert not self.breaker.is_probe_due(self.since + 0.99 * wait)
        assert self.breaker.is_probe_due(self.since + 1.01 * wait) is self.breaker.is_open


TestBreakerStates = BreakerStates.TestCase
