"""Cost models: what computing, copying and reading take, learnt from what they took. Pure.

    prefill   t(p, s) = step_s*steps + token_s*s + pair_s*(p*s + s*s/2)    s new after p cached
    copy      t(n)    = n / copy_bytes_per_s                              arena -> engine
    read      t(n)    = fixed_s + (ahead + n) / bytes_per_s               tier -> arena

The prefill formula counts what a transformer's forward pass does: weights times tokens, and each
new token attending to all before it (2*params a token and 4*layers*heads*head_dim a pair of them,
the FLOPs of Kaplan et al. 2020, section 2.1, with causal attention). A read waits for the bytes
that were accepted before it, since a device serves them in order at one bandwidth.

All are linear in their coefficients, which are fitted to the relative errors of past observations:
bounded memory, no coefficient below zero, outliers weighed down (Huber's weights).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from headstart.errors import ConfigError

_Array = npt.NDArray[np.float64]

_BUCKET_LENGTH = 12
_NUM_REWEIGHTS = 3
_HUBER = 0.1
"""Relative errors beyond this count by their size, not by its square."""
_PRIOR_WEIGHT = 0.003
"""Of what a model was before it saw anything, against one observation."""
_MIN_SPREAD = 0.02
_PRIOR_SPREAD = 0.5
_NUM_RECENT = 3
_REFIT_SHARE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What it costs an engine to compute and to copy, as far as is known."""

    step_s: float
    token_s: float
    pair_s: float
    uncertainty: float
    """Four times in five the true time is within this share of the predicted one."""
    max_step_tokens: int
    """Tokens that one step computes at most: longer prompts take several."""
    copy_bytes_per_s: float

    def __post_init__(self) -> None:
        numbers = (self.step_s, self.token_s, self.pair_s, self.uncertainty, self.copy_bytes_per_s)
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ConfigError(f"{self} must have finite costs of at least 0")
        if self.max_step_tokens < 1 or not self.copy_bytes_per_s > 0.0:
            raise ConfigError(f"{self} must compute and copy something")

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """Seconds to compute tokens `[num_cached, num_tokens)` of a prompt, alone."""
        new = max(0, num_tokens - num_cached)
        if not new:
            return 0.0
        steps = -(-new // self.max_step_tokens)
        return self.step_s * steps + self.work_s(new, num_pairs(num_cached, new))

    def work_s(self, tokens: int, pairs: float) -> float:
        """Seconds that so many tokens, attending to so many, add to a step."""
        return self.token_s * tokens + self.pair_s * pairs

    def copy_s(self, nbytes: int) -> float:
        """Seconds to copy so many bytes from the arena."""
        return nbytes / self.copy_bytes_per_s


def num_pairs(num_cached: int, num_new: int) -> float:
    """Pairs of tokens that attend when `num_new` are computed after `num_cached`."""
    return num_cached * num_new + num_new * num_new / 2


class LinearFit:
    """`y = coefficients . x`, fitted to relative errors. For one thread.

    It keeps the last observations of each magnitude of work, by the prior, so that many small ones
    do not push out the few large ones, and those of an earlier speed go as new ones come.
    """

    def __init__(
        self,
        prior: Sequence[float],
        typical: Sequence[Sequence[float]],
        *,
        spread: float = _PRIOR_SPREAD,
    ) -> None:
        """`prior`: coefficients to begin with; their ratios matter longer than their size.

        `typical`: some `x` of the range in which predictions are wanted. `spread`: the prior's.
        """
        self._prior = np.asarray(prior, dtype=np.float64)
        self._typical = np.asarray(typical, dtype=np.float64)
        self._buckets: dict[int, deque[tuple[tuple[float, ...], float]]] = {}
        self._coefficients = self._prior
        self._spread = self._prior_spread = spread
        self._num_new = 0
        self.num_observed = 0

    def observe(self, x: Sequence[float], y: float) -> bool:
        """`x` took `y`; ignored, and False, unless `y` and the work in `x` are positive, finite."""
        work = sum(each * float(cost) for each, cost in zip(x, self._prior, strict=True))
        if not (1e-9 < y < math.inf and 0.0 < work < math.inf and min(x) >= 0.0):
            return False
        bucket = self._buckets.setdefault(math.frexp(work)[1], deque(maxlen=_BUCKET_LENGTH))
        bucket.append((tuple(x), y))
        self._num_new += 1
        self.num_observed += 1
        return True

    @property
    def coefficients(self) -> _Array:
        """The fit, of all observations so far."""
        self._refit()
        return self._coefficients

    @property
    def spread(self) -> float:
        """Relative error that four in five observations stay within."""
        self._refit()
        return self._spread

    def _refit(self) -> None:
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        if not self._num_new or self._num_new < len(samples) // _REFIT_SHARE:
            return  # a fit takes up to a millisecond, on the thread that schedules
        self._num_new = 0
        y = np.array([sample[1] for sample in samples])
        x = np.array([sample[0] for sample in samples]) / y[:, None]  # relative errors
        # The prior stays where observations say nothing, at the size that they say.
        scale = 1.0 / float(np.median(x @ self._prior))
        guess = self._typical @ (self._prior * scale)
        anchors, wanted = self._typical / guess[:, None], np.ones(len(guess))
        weights, errors = np.ones(len(y)), np.zeros(len(y))
        for _ in range(_NUM_REWEIGHTS):
            gram = (x * weights[:, None]).T @ x + _PRIOR_WEIGHT * anchors.T @ anchors
            moment = weights @ x + _PRIOR_WEIGHT * wanted @ anchors
            self._coefficients = _solve_non_negative(gram, moment)
            errors = np.abs(x @ self._coefficients - 1.0)
            # An error of the prior counts by what the fit says there, not by the prior's own size.
            fitted = np.maximum(self._typical @ self._coefficients, guess)
            anchors, wanted = self._typical / fitted[:, None], guess / fitted
            weights = _HUBER / np.maximum(errors, _HUBER)
        few = self._prior_spread / (1 + len(y))
        self._spread = max(_MIN_SPREAD, float(np.quantile(errors, 0.8))) + few


def _solve_non_negative(gram: _Array, moment: _Array) -> _Array:
    """The `c >= 0` that minimises `c.gram.c - 2 moment.c`, by trying which of them are zero."""
    size = len(moment)
    best, best_value = np.zeros(size), 0.0
    for count in range(size, 0, -1):
        for some in combinations(range(size), count):
            chosen = list(some)
            try:
                part = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            except np.linalg.LinAlgError:
                continue
            if (part < 0.0).any():
                continue
            value = -float(moment[chosen] @ part)
            if value < best_value:
                best, best_value = np.zeros(size), value
                best[chosen] = part
        if best_value and count == size:
            break  # the unconstrained optimum is allowed
    return best


class EngineModel:
    """An engine's costs, learnt from its steps. For one thread."""

    def __init__(self, prior: EngineCosts) -> None:
        self._prior = prior
        sizes = (32, 256, 2048, 16384)
        typical = [(-(-n // prior.max_step_tokens), n, num_pairs(0, n)) for n in sizes]
        coefficients = (prior.step_s, prior.token_s, prior.pair_s)
        self._steps = LinearFit(coefficients, typical, spread=prior.uncertainty)
        self._copies = LinearFit((1.0 / prior.copy_bytes_per_s,), [(1 << 20,)])
        self._costs: EngineCosts | None = prior

    @property
    def num_observed(self) -> int:
        """Steps that were learnt from."""
        return self._steps.num_observed

    def step(self, tokens: int, pairs: float, seconds: float) -> None:
        """A step computed so many tokens, which attended to so many, in so long."""
        if tokens > 0 and self._steps.observe((1.0, tokens, pairs), seconds):
            self._costs = None

    def copy(self, nbytes: int, seconds: float) -> None:
        """So many bytes were copied from the arena in so long."""
        if self._copies.observe((nbytes,), seconds):
            self._costs = None

    @property
    def costs(self) -> EngineCosts:
        """What is known now."""
        if self._costs is None:
            self._costs = self._make()
        return self._costs

    def _make(self) -> EngineCosts:
        step_s, token_s, pair_s = (float(each) for each in self._steps.coefficients)
        byte_s = float(self._copies.coefficients[0])
        return replace(
            self._prior,
            step_s=step_s,
            token_s=token_s,
            pair_s=pair_s,
            uncertainty=self._steps.spread if self.num_observed else self._prior.uncertainty,
            copy_bytes_per_s=(
                1.0 / byte_s
                if byte_s and self._copies.num_observed
                else self._prior.copy_bytes_per_s
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """What it costs to read from a tier now."""

    fixed_s: float
    bytes_per_s: float
    ahead_nbytes: int = 0
    """Accepted before, and not read yet."""
    lag_nbytes: int = 0
    """What the device has in flight at once."""
    uncertainty: float = 0.0
    """Four reads in five take within this share of the predicted time."""

    def read_s(self, nbytes: int) -> float:
        """Seconds until so many bytes are read; none take none."""
        return self.fixed_s + (self.ahead_nbytes + nbytes) / self.bytes_per_s if nbytes else 0.0


class ReadModel:
    """A tier's costs, learnt from its reads, at the slow end of what was seen. For one thread."""

    def __init__(self, *, fixed_s: float = 2e-3, bytes_per_s: float = 2e8) -> None:
        """The prior. It should be slower than devices are: a wrong hit costs, a miss costs less."""
        self._prior = (fixed_s, 1.0 / bytes_per_s)
        self.reset()

    def reset(self) -> None:
        """Forget everything: the device is not what it was."""
        sizes = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
        self._fit = LinearFit(self._prior, [(1.0, nbytes) for nbytes in sizes])
        self._recent: deque[tuple[int, float]] = deque(maxlen=_NUM_RECENT)

    @property
    def num_observed(self) -> int:
        """Reads that were learnt from."""
        return self._fit.num_observed

    def observe(self, nbytes: int, seconds: float) -> None:
        """A read of so many bytes, those ahead of it included, took so long."""
        if nbytes <= 0 or not 0.0 < seconds < math.inf:
            return
        if self._fit.observe((1.0, nbytes), seconds):
            self._recent.append((nbytes, seconds))

    def ratio(self, nbytes: int, seconds: float) -> float:
        """How many times longer than expected a read took."""
        return seconds / self._plain_s(nbytes)

    def costs(self, ahead_nbytes: int = 0, lag_nbytes: int = 0) -> ReadCosts:
        """What a read costs now, if so many bytes are before it.

        The slowest of the last reads counts: a device that has become slow is believed at once, one
        that has become fast after some reads.
        """
        fixed_s, byte_s = self._fit.coefficients
        slower, apart = 1.0 + self._fit.spread, _PRIOR_SPREAD
        if len(self._recent) > 1:
            # By what is known now: what broke the model is nothing special once it has learnt it.
            ratios = [self.ratio(*each) for each in self._recent]
            slower, apart = max(1.0, *ratios), max(ratios) / min(ratios) - 1.0
        return ReadCosts(
            fixed_s=float(fixed_s) * slower,
            bytes_per_s=1.0 / max(float(byte_s) * slower, 1e-15),
            ahead_nbytes=ahead_nbytes,
            lag_nbytes=lag_nbytes,
            uncertainty=min(_PRIOR_SPREAD, max(self._fit.spread, apart / 2)),
        )

    def _plain_s(self, nbytes: int) -> float:
        fixed_s, byte_s = self._fit.coefficients
        return max(1e-6, float(fixed_s + byte_s * nbytes))
