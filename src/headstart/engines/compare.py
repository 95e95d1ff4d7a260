"""When two greedy answers count as the same.

Computing a prompt in other steps, with a cache or with another split of the prefill, changes logits
by rounding. In float32 that is far below the gap between the two best tokens, so answers must be
equal. In bfloat16 a near-tie may flip, and everything after it is another answer; what can be
demanded is equality up to the first near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE_GAP = 0.1
"""In half precision, a step whose two best log-probabilities are closer than this may flip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How an answer compares with its reference. Positions count generated tokens from 0."""

    num_tokens: int
    """Tokens of the reference."""
    first_difference: int | None
    """The first position at which the answers differ; None: they are equal."""
    first_near_tie: int | None
    """The first position at which the reference might as well have gone on otherwise."""

    @property
    def exact(self) -> bool:
        """Whether all tokens are equal."""
        return self.first_difference is None

    @property
    def identical(self) -> bool:
        """Whether the answers are equal as far as they have to be: up to the first near-tie."""
        if self.first_difference is None:
            return True
        return self.first_near_tie is not None and self.first_near_tie <= self.first_difference


def tie_gap(dtype: str) -> float:
    """The gap below which a step counts as a near-tie for KV of this dtype; 0: there are none."""
    return 0.0 if dtype in ("float32", "float64") else NEAR_TIE_GAP


def compare_tokens(
    reference: Sequence[int],
    answer: Sequence[int],
    *,
    top2_gaps: Sequence[float] = (),
    tie_gap: float = 0.0,
) -> Comparison:
    """Compare generated tokens with those of a reference.

    `top2_gaps[i]` is the gap between the two best log-probabilities of the reference's step i,
    needed where `tie_gap` is not 0. Raises ValueError when there are fewer gaps than tokens then.
    """
    if tie_gap > 0 and len(top2_gaps) < len(reference):
        raise ValueError(f"{len(reference)} tokens need as many gaps, not {len(top2_gaps)}")
    pairs = zip(reference, answer, strict=False)
    shorter = min(len(reference), len(answer))
    difference = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if difference is None and len(reference) != len(answer):
        difference = shorter
    near_tie = next((i for i, gap in enumerate(top2_gaps[: len(reference)]) if gap < tie_gap), None)
    return Comparison(
        num_tokens=len(reference), first_difference=difference, first_near_tie=near_tie
    )
