"""Sizes and durations as people write them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.units import (
    PAGE_NBYTES,
    align_up,
    format_nbytes,
    format_seconds,
    parse_nbytes,
    parse_seconds,
)

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_whole_sizes_are_exact(number, unit, space):
    assert parse_nbytes(f"{space}{number}{space}{unit}{space}") == number * UNITS[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_decimal_sizes_are_exact_or_refused(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03d}{unit}"
    nbytes = (whole + Fraction(thousandths, 1000)) * UNITS[unit]
    if nbytes.denominator == 1:
        assert parse_nbytes(text) == nbytes
    else:
        with pytest.raises(ConfigError, match="not a whole number of bytes"):
            parse_nbytes(text)


@given(st.integers(0, 2**70))
def test_a_plain_number_is_bytes(nbytes):
    assert parse_nbytes(nbytes) == parse_nbytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    "bad", ["", " ", "GiB", "-1GiB", "1 2", "1,5GiB", "0x10", "1e3", "nan", "inf", "1GiB2", "1.GiB"]
)
def test_an_unreadable_size_is_refused_with_an_example(bad):
    with pytest.raises(ConfigError, match=r"64GiB.*500GB"):
        parse_nbytes(bad)


@pytest.mark.parametrize("bad", ["1gib", "1Gib", "1G", "1Mb", "1bytes", "5s"])
def test_an_unknown_size_unit_is_refused_with_the_known_ones(bad):
    with pytest.raises(ConfigError, match=r"unit .* is unknown; allowed: .*GiB.*GB"):
        parse_nbytes(bad)


@pytest.mark.parametrize("bad", [None, True, False, [], {}, b"1GiB", -1])
def test_what_is_no_quantity_is_refused(bad):
    with pytest.raises(ConfigError):
        parse_nbytes(bad)
    with pytest.raises(ConfigError):
        parse_seconds(bad)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 30 * 86400),
        ("2h", 7200),
        ("5 min", 300),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("7", 7),
        (8, 8),
        (1.5, 1.5),
        (0, 0),
    ],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("seconds", [1e-7, 1e-5, 1e16, 2.5e20])
def test_a_duration_that_python_prints_with_an_exponent(seconds):
    assert parse_seconds(seconds) == seconds


@pytest.mark.parametrize(
    "bad", ["", "d", "-1s", "1 fortnight", "1D", "1e3", -0.5, float("nan"), float("inf")]
)
def test_an_unreadable_duration_is_refused(bad):
    with pytest.raises(ConfigError):
        parse_seconds(bad)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (999 * 1024 + 700, "1000 KiB"),
        (64 << 30, "64 GiB"),
        (3 << 50, "3 PiB"),
        (5000 << 50, "5000 PiB"),
    ],
)
def test_sizes_for_people(nbytes, text):
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**60))
def test_a_printed_size_can_be_read_and_is_close(nbytes):
    number, unit = format_nbytes(nbytes).split()
    assert float(number) * UNITS[unit] == pytest.approx(nbytes, rel=0.006)
    assert "e" not in number
    assert len(number.replace(".", "")) <= 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "1 ns"),
        (12.3e-6, "12.3 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1000 ms"),
        (1.0, "1 s"),
        (59.94, "59.9 s"),
        (1234.5, "1234 s"),
        (86400.0, "86400 s"),
    ],
)
def test_durations_for_people(seconds, text):
    assert format_seconds(seconds) == text


@given(st.integers(0, 2**60), st.sampled_from([1, 2, 512, PAGE_NBYTES]))
def test_align_up(nbytes, alignment):
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


def test_align_up_is_to_pages_by_default():
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
