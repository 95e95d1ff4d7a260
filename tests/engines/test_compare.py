"""When two answers count as the same."""

from __future__ import annotations

import pytest

from headstart.engines.compare import compare_tokens, tie_gap


def test_equal_answers():
    comparison = compare_tokens([1, 2, 3], [1, 2, 3])
    assert comparison.exact
    assert comparison.identical


def test_without_near_ties_any_difference_counts():
    comparison = compare_tokens([1, 2, 3], [1, 9, 3], top2_gaps=[0.0, 0.0, 0.0])
    assert comparison.first_difference == 1
    assert not comparison.identical


@pytest.mark.parametrize(
    ("gaps", "identical"),
    [
        ([1.0, 0.05, 1.0], True),
        ([0.05, 1.0, 1.0], True),
        ([1.0, 0.1, 1.0], False),
        ([1.0, 1.0, 0.05], False),
    ],
)
def test_a_difference_is_forgiven_from_the_first_near_tie_on(gaps, identical):
    comparison = compare_tokens([1, 2, 3], [1, 9, 3], top2_gaps=gaps, tie_gap=0.1)
    assert not comparison.exact
    assert comparison.identical is identical


@pytest.mark.parametrize(("reference", "answer"), [([1, 2], [1]), ([1], [1, 2]), ([1], [])])
def test_another_length_is_a_difference(reference, answer):
    comparison = compare_tokens(reference, answer)
    assert comparison.first_difference == min(len(reference), len(answer))
    assert not comparison.identical


def test_near_ties_need_gaps():
    with pytest.raises(ValueError, match="gaps"):
        compare_tokens([1, 2], [1, 2], top2_gaps=[1.0], tie_gap=0.1)


def test_full_precision_has_no_near_ties():
    assert tie_gap("float32") == 0
    assert tie_gap("bfloat16") == tie_gap("float16") > 0
