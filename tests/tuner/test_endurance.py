"""What an SSD may be written: ratings by hand, and what is no rating."""

from __future__ import annotations

import pytest

from headstart.errors import ConfigError
from headstart.tuner.endurance import a_day, parse_endurance


@pytest.mark.parametrize(
    ("text", "file_nbytes", "budget"),
    [
        ("1dwpd", 10**12, 1e12),
        ("0.3 DWPD", 2 * 10**12, 6e11),
        ("3dwpd:7.68TB", 10**12, 3 * 7.68e12),
        ("600TBW:5y", 10**12, 600e12 / 1825),
        ("600tbw: 2.5y", 1, 600e12 / 912.5),
    ],
)
def test_ratings(text, file_nbytes, budget):
    assert parse_endurance(text).budget_nbytes_a_day(file_nbytes) == pytest.approx(budget)


def test_a_rated_drive_has_both_forms():
    # 15 TB, 5 years: the vendor's 26,700 TBW are about 1 DWPD (blocksandfiles.com, 2022-04-24).
    one = parse_endurance("1dwpd:15TB").budget_nbytes_a_day(0)
    assert parse_endurance("26700TBW:5y").budget_nbytes_a_day(0) == pytest.approx(one, rel=0.03)


@pytest.mark.parametrize(
    "text",
    ["", "1", "dwpd", "0dwpd", "1dwpd:", "600TBW", "600TBW:0y", "600TBW:5", "-1dwpd", "1e9y"],
)
def test_what_is_no_rating_is_refused(text):
    with pytest.raises(ConfigError, match="is no rating above 0; write 1dwpd "):
        parse_endurance(text)


def test_a_drive_has_a_size():
    with pytest.raises(ConfigError, match="'large' is not a quantity"):
        parse_endurance("1dwpd:large")


def test_a_day():
    assert a_day(500, 43_200.0) == 1000.0
    assert a_day(500, 0.0) is None
