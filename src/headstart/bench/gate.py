"""The verdict on a candidate against a baseline: PASS, FAIL or INCONCLUSIVE, and why.

    TTFT         PASS: the upper bound of the ratio of the medians is <= 1 - drop, by Student's t
                 and by the bootstrap; FAIL: its lower bound is above
    throughput   PASS: the lower bound of the ratio is >= 1 + gain, where every run meets the SLO;
                 FAIL: its upper bound is below

Guard rails veto: whoever computes wrongly, drops requests or is slower where it is not asked, does
not pass. What the runs do not tell is not checked, and listed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from headstart.bench.ratios import (
    Ratio,
    good_share,
    pairs_needed,
    ratio_of,
    resampled_p50_bounds,
)
from headstart.bench.run import Run, pairs_match
from headstart.bench.slo import Slo
from headstart.errors import ConfigError

SCHEMA = "headstart.gate/1"
MIN_PAIRS = 2
_TAILS = ((0.99, 299), (0.9, 29))
"""Quantiles, and how many answers an order statistic needs to bound them at 95 %."""
_MAX_TAIL_RATIO = 1.05
_MAX_TPOT_RATIO = 1.05
_MAX_LENGTH_DRIFT = 0.01
_MAX_HIT_RATE_OFF = 0.02
_MAX_SLACK = 0.5
"""Where so much of a prompt may be hit beyond what is computed, nothing is checked."""


class Verdict(enum.StrEnum):
    """What a gate says."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a candidate has to reach."""

    ttft_drop: float = 0.25
    throughput_gain: float = 0.29
    """0: it is not judged."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Seconds by `ttft`, `tpot`, `latency`; a request meets all of them."""
    slo_share: float = 0.99
    token_match: float = 0.98
    """Share of the requests of all pairs that have to be answered alike."""
    allow_no_reuse: bool = False
    """Whether the baseline may be an engine without its prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found."""

    verdict: Verdict
    ttft_p50: Ratio
    ttft_p50_resampled: tuple[float, float]
    throughput: Ratio
    reasons: tuple[str, ...]
    vetoes: tuple[str, ...]
    not_checked: tuple[str, ...]
    num_pairs: int
    pairs_needed: int | None
    """In all, for another campaign, if things are as they seem; None: more would not help.

    Whoever adds pairs until it passes will pass: the bounds are those of a number fixed before.
    """


def judge(baseline: Sequence[Run], candidate: Sequence[Run], demands: Demands) -> Judgement:
    """Judge runs, the n-th of the candidate against the n-th of the baseline.

    Raises ConfigError where they cannot be compared.
    """
    pairs = _paired(baseline, candidate, demands)
    ttft = ratio_of([other.ttft_s(0.5) / one.ttft_s(0.5) for one, other in pairs])
    resampled = resampled_p50_bounds(pairs)
    throughput = ratio_of(
        [other.output_tokens_per_s / one.output_tokens_per_s for one, other in pairs]
    )
    vetoes, not_checked, unproven = _guard(pairs, demands)
    verdicts, reasons, needed = [], [], []
    bound = 1.0 - demands.ttft_drop
    upper, lower = max(ttft.upper95, resampled[1]), min(ttft.lower95, resampled[0])
    verdict = _decide(passes=upper <= bound, fails=lower > bound)
    verdicts.append(verdict)
    reasons.append(f"TTFT p50: {verdict}: {_told(ttft)}, asked <= {bound:.3f}")
    needed.append(_needed(ttft, bound, verdict, max(upper / ttft.estimate, ttft.estimate / lower)))
    if demands.throughput_gain > 0.0:
        bound = 1.0 + demands.throughput_gain
        verdict = _decide(passes=throughput.lower95 >= bound, fails=throughput.upper95 < bound)
        if any(run.is_open_loop for pair in pairs for run in pair):
            verdict = Verdict.INCONCLUSIVE
            unproven.append("throughput: an open loop sends the same to both; compare closed loops")
        elif not demands.slo:
            unproven.append(
                "throughput: without --slo, nobody knows whether this is a load to have"
            )
        verdicts.append(verdict)
        reasons.append(f"throughput: {verdict}: {_told(throughput)}, asked >= {bound:.3f}")
        needed.append(_needed(throughput, bound, verdict, 1.0))
    reasons += unproven
    return Judgement(
        verdict=_overall(verdicts, vetoes=vetoes, unproven=unproven),
        ttft_p50=ttft,
        ttft_p50_resampled=resampled,
        throughput=throughput,
        reasons=tuple(reasons),
        vetoes=tuple(vetoes),
        not_checked=tuple(not_checked),
        num_pairs=len(pairs),
        pairs_needed=None
        if unproven or None in needed
        else max(n for n in needed if n is not None),
    )


def document(judgement: Judgement, demands: Demands) -> dict[str, object]:
    """What `headstart gate --json` writes."""

    def ratio(each: Ratio) -> dict[str, float]:
        return {
            "estimate": each.estimate,
            "lower95": each.lower95,
            "upper95": each.upper95,
        }

    return {
        "schema": SCHEMA,
        "verdict": judgement.verdict,
        "ttft_p50_ratio": {
            **ratio(judgement.ttft_p50),
            "resampled_lower95": judgement.ttft_p50_resampled[0],
            "resampled_upper95": judgement.ttft_p50_resampled[1],
        },
        "throughput_ratio": ratio(judgement.throughput),
        "demands": {
            "ttft_drop": demands.ttft_drop,
            "throughput_gain": demands.throughput_gain,
            "slo": dict(demands.slo),
            "slo_share": demands.slo_share,
            "token_match": demands.token_match,
        },
        "reasons": list(judgement.reasons),
        "vetoes": list(judgement.vetoes),
        "not_checked": list(judgement.not_checked),
        "pairs": judgement.num_pairs,
        "pairs_needed": judgement.pairs_needed,
    }


def _paired(
    baseline: Sequence[Run], candidate: Sequence[Run], demands: Demands
) -> list[tuple[Run, Run]]:
    if len(baseline) != len(candidate):
        raise ConfigError(
            f"{len(baseline)} runs of the baseline and {len(candidate)} of the candidate: "
            "each run needs its partner, measured right before or after it"
        )
    if len(baseline) < MIN_PAIRS:
        raise ConfigError(
            f"{len(baseline)} pair of runs says nothing of how much runs differ; at least "
            f"{MIN_PAIRS} are needed, 5 are advised"
        )
    tools = sorted({run.tool for run in (*baseline, *candidate)})
    if len(tools) > 1:
        raise ConfigError(f"the runs are of several tools ({', '.join(tools)}): use one for all")
    if not demands.allow_no_reuse and any(run.has_prefix_cache is False for run in baseline):
        raise ConfigError(
            "the baseline is a straw man: its engine ran without its own prefix cache; turn that "
            "on, or say --no-reuse-baseline if you mean it"
        )
    pairs = list(zip(baseline, candidate, strict=True))
    runs = [*baseline, *candidate]
    # Whatever else is said of them: no two runs take the same times.
    times = [[request.ttft_s for request in run.requests] for run in runs]
    if any(one == other for one, other in combinations(times, 2)):
        raise ConfigError("a run is there twice: it says no more the second time")
    for arm in (baseline, candidate):
        salts = [run.salt for run in arm if run.salt]
        if len(set(salts)) < len(salts):
            raise ConfigError(
                "two pairs have the same salt: the second may have hit what the first one stored"
            )
    if len(phases := {run.phase or "(none)" for run in runs}) > 1:
        raise ConfigError(
            f"the runs are of different phases ({', '.join(sorted(phases))}), so the caches held "
            "something else before them: choose one phase for both arms, such as FILE#ARM/steady"
        )
    for number, (one, other) in enumerate(pairs, start=1):
        if found := pairs_match(one, other):
            raise ConfigError(f"the runs of pair {number} do not belong together: {found}")
    return pairs


def _decide(*, passes: bool, fails: bool) -> Verdict:
    return Verdict.PASS if passes else Verdict.FAIL if fails else Verdict.INCONCLUSIVE


def _overall(verdicts: list[Verdict], *, vetoes: list[str], unproven: list[str]) -> Verdict:
    if vetoes or Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if unproven or Verdict.INCONCLUSIVE in verdicts:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


def _needed(ratio: Ratio, bound: float, verdict: Verdict, reach: float) -> int | None:
    """`reach`: from the estimate to the bootstrap's bound, as a factor."""
    if verdict is not Verdict.INCONCLUSIVE:
        return ratio.num_pairs
    count = pairs_needed(ratio, bound)
    if count is None or reach <= 1.0:
        return count
    if ratio.estimate == bound:
        return None
    shrunk = math.log(reach) / abs(math.log(ratio.estimate / bound))
    return max(count, math.ceil(ratio.num_pairs * shrunk * shrunk))


def _told(ratio: Ratio) -> str:
    return f"{ratio.estimate:.3f} ({ratio.lower95:.3f} to {ratio.upper95:.3f})"


def _guard(
    pairs: list[tuple[Run, Run]], demands: Demands
) -> tuple[list[str], list[str], list[str]]:
    """Vetoes, what is not checked, and what is not proved."""
    vetoes: list[str] = []
    not_checked: list[str] = []
    unproven = _tails(pairs, vetoes, not_checked)
    for check in (_errors, _lengths, _tokens, _slo):
        check(pairs, demands, vetoes, not_checked)
    tpots = [(one.tpot_s(0.5), other.tpot_s(0.5)) for one, other in pairs]
    known = [(one, other) for one, other in tpots if one and other]
    if len(known) < len(pairs):
        not_checked.append("TPOT: answers of one token, or no times of later ones")
    elif (tpot := ratio_of([other / one for one, other in known])).lower95 > _MAX_TPOT_RATIO:
        vetoes.append(f"later tokens are slower: TPOT p50 {_told(tpot)}")
    for arm, runs in _arms(pairs):
        for number, run in enumerate(runs, start=1):
            vetoes += _run_vetoes(f"{arm}, run {number}", run)
    not_checked += [
        name
        for name, is_known in _KNOWN.items()
        if not all(is_known(one, other) for one, other in pairs)
    ]
    return vetoes, not_checked, unproven


_KNOWN: dict[str, Callable[[Run, Run], bool]] = {
    "whether both arms asked the same prompts": lambda one, other: (
        None not in (one.prompts, other.prompts)
    ),
    "how the load was sent": lambda one, other: None not in (one.pace, other.pace),
    "whether the baseline has its own prefix cache": lambda one, _: (
        one.has_prefix_cache is not None
    ),
    "hit rate against the simulated one": lambda one, other: (
        None not in (one.hit_rate, one.simulated_hit_rate, other.hit_rate, other.simulated_hit_rate)
        and max(_hit_rate_slack(one), _hit_rate_slack(other)) < _MAX_SLACK
    ),
    "client send lag": lambda one, other: all(
        None not in (request.sent_s, request.intended_s)
        for request in (*one.requests, *other.requests)
    ),
    "bytes of cold devices": lambda _, other: None not in (other.read_nbytes, other.loaded_nbytes),
}


def _arms(pairs: list[tuple[Run, Run]]) -> Iterator[tuple[str, list[Run]]]:
    yield "baseline", [one for one, _ in pairs]
    yield "candidate", [other for _, other in pairs]


def _tails(pairs: list[tuple[Run, Run]], vetoes: list[str], not_checked: list[str]) -> list[str]:
    """The slow end of TTFT: a veto where it has surely risen, unproven where it may have."""
    answers = min(sum(len(run.good) for run in runs) for _, runs in _arms(pairs))
    share = next((share for share, least in _TAILS if answers >= least), None)
    if share != _TAILS[0][0]:
        not_checked.append(f"TTFT p99: it needs {_TAILS[0][1]} answers an arm")
    if share is None:
        return []
    name = f"TTFT p{share * 100:.0f}"
    tail = ratio_of([other.ttft_s(share) / one.ttft_s(share) for one, other in pairs])
    if tail.lower95 > _MAX_TAIL_RATIO:
        vetoes.append(f"the slowest first tokens are slower: {name} {_told(tail)}")
    elif tail.upper95 > _MAX_TAIL_RATIO:
        return [f"{name}: not proved to be no slower: {_told(tail)}"]
    return []


def _errors(pairs: list[tuple[Run, Run]], _: Demands, vetoes: list[str], __: list[str]) -> None:
    for arm, runs in _arms(pairs):
        failed = [r for run in runs for r in run.requests if not r.is_good]
        if failed:
            first = next((r.error for r in failed if r.error), "no first token")
            vetoes.append(f"{arm}: {len(failed)} requests failed, the first with: {first}")


def _lengths(pairs: list[tuple[Run, Run]], _: Demands, vetoes: list[str], __: list[str]) -> None:
    for number, (one, other) in enumerate(pairs, start=1):
        sums = [sum(r.output_tokens for r in run.good) for run in (one, other)]
        if abs(sums[1] - sums[0]) > _MAX_LENGTH_DRIFT * max(1, sums[0]):
            vetoes.append(f"pair {number}: answers of {sums[0]} and {sums[1]} tokens in all")


def _tokens(
    pairs: list[tuple[Run, Run]], demands: Demands, vetoes: list[str], not_checked: list[str]
) -> None:
    matched = compared = answered = 0
    for one, other in pairs:
        for first, second in zip(one.requests, other.requests, strict=True):
            answered += first.is_good and second.is_good
            if first.output is not None and second.output is not None:
                compared += 1
                matched += first.output == second.output
    if compared < answered:
        told = f": only {compared} of {answered} answers are told by both" if compared else ""
        not_checked.append(f"whether both arms answer alike{told}")
    if matched < demands.token_match * compared:
        vetoes.append(f"{compared - matched} of {compared} answers differ between the arms")


def _slo(
    pairs: list[tuple[Run, Run]], demands: Demands, vetoes: list[str], not_checked: list[str]
) -> None:
    if not demands.slo:
        not_checked.append("whether both arms meet an SLO at this load")
        return
    slo = Slo(limits=demands.slo)
    for arm, runs in _arms(pairs):
        least = min(good_share(run, slo.is_met) for run in runs)
        if least < demands.slo_share:
            vetoes.append(
                f"{arm}: only {least:.1%} of a run's requests meet the SLO, not "
                f"{demands.slo_share:.1%}: past that load any ratio can be had"
            )


def _run_vetoes(name: str, run: Run) -> Iterator[str]:
    rate, simulated = run.hit_rate, run.simulated_hit_rate
    if run.is_sent_late:
        yield f"{name}: the client sent late, by {(run.send_lag_s or 0.0) * 1000:.0f} ms (p99)"
    if run.is_counted_late:
        yield f"{name}: times count from after requests were sent: its clocks do not agree"
    if rate is not None and simulated is not None and rate - simulated > _hit_rate_slack(run):
        yield f"{name}: hits {rate:.1%} of the tokens, and the load as sent allows {simulated:.1%}"
    read, loaded = run.read_nbytes, run.loaded_nbytes
    if read is not None and loaded is not None and read < loaded:
        yield (
            f"{name}: devices gave {read} bytes, fewer than the {loaded} that are said to have "
            "come from them: it was not cold"
        )


def _hit_rate_slack(run: Run) -> float:
    """How far a hit rate may lie above the simulated one.

    A block more of each prompt may be hit where the server's blocks are smaller.
    """
    mean = sum(r.prompt_tokens for r in run.good) / len(run.good)
    return _MAX_HIT_RATE_OFF + (run.block_size - 1) / mean
