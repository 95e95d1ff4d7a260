"""A storage vendor's published tests, predicted from bandwidths and one context length. Pure.

The main test restarts everything and asks for long prompts whose KV only storage holds, so each row
is one wave: C prompts begin at once, share the bandwidth B equally and are loaded at the same time;
then the engine computes the rest of each prompt that fills no chunk, in one step; then all decode:

    TTFT    = C * (V / B + V / L + T(n - r, n))     V: KV of n - r tokens, L: links, r: half a chunk
    tok/s   = C * o / (TTFT + D)                     o tokens out, D: their decoding
    recompute: prefills in turn, the median of C is (C + 1) / 2 * T(0, n)

`n` is fitted to the TTFT of one row, `FITTED`, and to nothing else. The test does not print three
other numbers. They are taken from its columns of throughput: D from the fitted row's, T from the
recompute row's, and o, 64, since by Little's law (C = X * latency) the rows are consistent with no
other round number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headstart.errors import HeadstartError
from headstart.sizing.architecture import Architecture
from headstart.sizing.configfile import read_model
from headstart.sizing.hardware import Hardware, look_up
from headstart.sizing.prefill import engine_costs

MODEL = "qwen3-coder-480b"
ARRAY_RANGE = (10.2e9, 10.4e9)
"""Bytes/s that the array sustains, as stated."""
BANDWIDTHS = {"array": sum(ARRAY_RANGE) / 2, "local": 6.78e9}
"""Bytes/s."""
PRINTED = {
    ("array", 8): (7.53, 56.6),
    ("array", 16): (11.85, 74.9),
    ("array", 32): (26.35, 71.6),
    ("local", 8): (10.17, 43.9),
    ("local", 16): (17.31, 53.6),
    ("local", 32): (35.73, 53.9),
}
"""TTFT p50 in s, output tok/s."""
RECOMPUTE = (16, 149.48, 4.1)
FITTED = ("array", 32)
OUTPUT_TOKENS = 64
_REST_TOKENS = 128
"""What is left to compute of a full hit: half of LMCache's chunk of 256 tokens, on average."""
_NUM_GPUS = 8
GPU = "mi308x"
PARALLEL_COUNT = 16
_ROUNDS = 60
TTFT_TARGET, RATIO_TARGET = 0.15, 0.05


class Verdict(enum.StrEnum):
    """What a line says about the model."""

    FITTED = "fitted"
    """Nothing."""
    SHOWN = ""
    """There is no target."""
    MET = "met"
    UNDECIDED = "undecided"
    """Met for a part of the bandwidths that are stated."""
    MISSED = "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A printed figure and its prediction. `target`: how far they may be apart."""

    what: str
    unit: str
    printed: float
    predicted: float
    target: float | None
    ends: tuple[float, ...] = ()
    """Predicted from the ends of the array's stated range."""
    fitted: bool = False
    is_points: bool = False
    """Shares, apart by their difference, not by their ratio."""
    why: str = ""

    @property
    def error(self) -> float:
        """Relative, or the difference of shares."""
        return self._error(self.predicted)

    @property
    def errors(self) -> tuple[float, float]:
        """The lowest and the highest over the stated range."""
        found = [self._error(each) for each in (self.predicted, *self.ends)]
        return min(found), max(found)

    @property
    def verdict(self) -> Verdict:
        """By the target, over the stated range."""
        if self.fitted:
            return Verdict.FITTED
        if self.target is None:
            return Verdict.SHOWN
        low, high = self.errors
        if max(-low, high) <= self.target:
            return Verdict.MET
        return Verdict.MISSED if low > self.target or high < -self.target else Verdict.UNDECIDED

    def _error(self, predicted: float) -> float:
        return predicted - self.printed if self.is_points else predicted / self.printed - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """What the test's rows follow from."""

    tokens: float
    """The fitted context length."""
    kv_nbytes: float
    """That are loaded of a prompt."""
    rest_s: float
    """Copied and computed after a load, a prompt."""
    decode_s: float
    prefill_s: float
    """Of a prompt, recomputed."""
    bandwidths: dict[str, float]

    def ttft_s(self, where: str, count: int) -> float:
        """Of all of `count` prompts at once."""
        return count * (self.kv_nbytes / self.bandwidths[where] + self.rest_s)

    def output_tokens_per_s(self, where: str, count: int) -> float:
        """Of the wave."""
        return count * OUTPUT_TOKENS / (self.ttft_s(where, count) + self.decode_s)


def fit(row: tuple[str, int] = FITTED, *, array: float = BANDWIDTHS["array"]) -> Wave:
    """The wave whose TTFT is the printed one in a row."""
    model = read_model(MODEL)
    bandwidths = BANDWIDTHS | {"array": array}
    (where, count), (ttft_s, rate) = row, PRINTED[row]
    decode_s = count * OUTPUT_TOKENS / rate - ttft_s
    others, _, recompute_rate = RECOMPUTE
    prefill_s = (others * OUTPUT_TOKENS / recompute_rate - decode_s) / others
    nbytes_a_token = float(model.token_nbytes("bfloat16"))
    links = look_up(Hardware(gpu=GPU, num_gpus=_NUM_GPUS)).link.bytes_per_s
    tokens, kv_nbytes, rest_s = 32768.0, 0.0, 0.0
    for _ in range(_ROUNDS):  # rest_s hardly depends on the length: this converges at once
        rest_s = _rest_s(model, tokens, prefill_s) + kv_nbytes / links
        kv_nbytes = (ttft_s / count - rest_s) * bandwidths[where]
        tokens = _REST_TOKENS + kv_nbytes / nbytes_a_token
    if kv_nbytes <= 0.0:
        raise HeadstartError(f"row {row} cannot be fitted")
    return Wave(
        tokens=tokens,
        kv_nbytes=kv_nbytes,
        rest_s=rest_s,
        decode_s=decode_s,
        prefill_s=prefill_s,
        bandwidths=bandwidths,
    )


def _rest_s(model: Architecture, tokens: float, prefill_s: float) -> float:
    """The last tokens of a prompt, at the speed of its whole prefill."""
    count = round(tokens)
    speed = model.prefill_flops(0, count) / prefill_s
    return model.prefill_flops(count - _REST_TOKENS, _REST_TOKENS) / speed


def main_lines() -> Iterator[Line]:
    """The main test, over the range of the array's bandwidth."""
    ends = [lines(fit(array=each)) for each in ARRAY_RANGE]
    for line, *others in zip(lines(fit()), *ends, strict=True):
        yield replace(line, ends=tuple(each.predicted for each in others))


def lines(wave: Wave) -> Iterator[Line]:
    """Everything that is printed of the main test, beside what the wave gives."""
    for row, (ttft_s, _) in PRINTED.items():
        where, count = row
        yield Line(
            what=f"TTFT p50, {where}, {count} at once",
            unit="s",
            printed=ttft_s,
            predicted=wave.ttft_s(where, count),
            target=TTFT_TARGET,
            fitted=row == FITTED,
            why=_WHY[row],
        )
    for (where, count), (_, rate) in PRINTED.items():
        yield Line(
            what=f"output, {where}, {count} at once",
            unit="tok/s",
            printed=rate,
            predicted=wave.output_tokens_per_s(where, count),
            target=None,
            fitted=(where, count) == FITTED,
            why=_WHY[(where, count)],
        )
    for count in (8, 16, 32):
        yield Line(
            what=f"TTFT array / local, {count} at once",
            unit="",
            printed=PRINTED["array", count][0] / PRINTED["local", count][0],
            predicted=wave.ttft_s("array", count) / wave.ttft_s("local", count),
            target=RATIO_TARGET,
            is_points=True,
            why=_WHY_RATIO.get(count, _RATIO),
        )
    yield from _recompute(wave)


_RATIO = "between the ratio of the bandwidths, 0.658, and 1: the rest is the same for both"
_WHY_RATIO = {
    8: _RATIO
    + "; both printed times are longer than the bandwidths explain, by 0.9 and 0.6 s, which "
    "moves their ratio towards 1; so would copies as slow as the serial and the parallel row below "
    "leave room for, 13 GB/s a GPU: by 2 points, which is not used, as it is fitted to them",
}
_WHY = {
    ("array", 8): "printed, a prompt takes 0.94 s here, 0.74 at 16 and 0.82 at 32, which no one "
    "length, latency or start explains; at 8 the array is not always busy, its output is 76 % of "
    "that at 16",
    ("array", 16): "as the array at 8, the other way round",
    ("array", 32): "the row that the length is fitted to",
    ("local", 8): "printed, a prompt takes 1.27 s here, 1.08 at 16 and 1.12 at 32: as the array, "
    "whose bandwidth it does not share",
    ("local", 16): "as local at 8, the other way round",
    ("local", 32): "by the fitted length and the bandwidth alone",
}


def _recompute(wave: Wave) -> Iterator[Line]:
    count, ttft_s, rate = RECOMPUTE
    median_s = (count + 1) / 2 * wave.prefill_s
    yield Line(
        what=f"TTFT p50, recomputed, {count} at once",
        unit="s",
        printed=ttft_s,
        predicted=median_s,
        target=TTFT_TARGET,
        why="prefills strictly in turn; in steps shared by several prompts the median is later",
    )
    yield Line(
        what=f"output, recomputed, {count} at once",
        unit="tok/s",
        printed=rate,
        predicted=count * OUTPUT_TOKENS / (count * wave.prefill_s + wave.decode_s),
        target=None,
        fitted=True,
        why="gives the prefill speed, which is not printed",
    )
    yield Line(
        what="recomputed / array, 16 at once",
        unit="times",
        printed=12.6,
        predicted=median_s / wave.ttft_s("array", 16),
        target=None,
        why="both errors at 16 add up",
    )
    machine = look_up(Hardware(gpu=GPU, num_gpus=_NUM_GPUS))
    model = replace(read_model(MODEL), weights_dtype="fp8")
    preset_s = engine_costs(model, machine).prefill_s(0, round(wave.tokens))
    yield Line(
        what=f"the same TTFT, by the preset's peak at MFU {machine.mfu:g}",
        unit="s",
        printed=ttft_s,
        predicted=(count + 1) / 2 * preset_s,
        target=TTFT_TARGET,
        why="missed: mixtures in FP8 reach less on this stack. By what vLLM's were published to "
        "reach on MI300X, 3.6 % of the peak (vLLM pull request 17535), it is 96 s. Measure "
        "prefills (--prefill) before a purchase depends on them",
    )


def other_lines() -> Iterator[Line]:
    """The smaller tests: parallel reads, and checkpoints."""
    yield from _parallel_reads()
    snapshot = 8 * 65.6e9
    for rate, seconds in ((3.26e9, 178.0), (6.40e9, 94.0)):
        yield Line(
            what=f"checkpoint of 8 x 65.6 GB at {rate / 1e9:.2f} GB/s",
            unit="s",
            printed=seconds,
            predicted=snapshot / rate,
            target=TTFT_TARGET,
            why="bytes / bandwidth; what is missing is work before and after the writes",
        )


def _parallel_reads() -> Iterator[Line]:
    """One GPU, 16 prompts at once; the length is fitted to the serial row."""
    model = read_model("qwen2.5-32b")
    costs = engine_costs(model, look_up(Hardware(gpu=GPU)))
    serial, parallel, count, printed_s = 0.98e9, 5.23e9, PARALLEL_COUNT, 37.97
    byte_s = 1.0 / serial + 1.0 / costs.copy_bytes_per_s
    rest_s = costs.token_s * _REST_TOKENS
    nbytes = (printed_s / count - rest_s) / byte_s
    tokens = _REST_TOKENS + nbytes / float(model.token_nbytes("bfloat16"))
    rest_s += nbytes / costs.copy_bytes_per_s
    yield Line(
        what=f"serial reads at 0.98 GB/s, 16 at once, {tokens:.0f} tokens",
        unit="s",
        printed=printed_s,
        predicted=count * (nbytes / serial + rest_s),
        target=TTFT_TARGET,
        fitted=True,
        why="gives the context length of this test; its GPU is not printed: the one that the tests "
        "name is taken, whose 192 GB hold the weights and all 16 prompts, which 80 GB would not",
    )
    yield Line(
        what="parallel reads at 5.23 GB/s",
        unit="s",
        printed=9.30,
        predicted=count * (nbytes / parallel + rest_s),
        target=TTFT_TARGET,
        why="printed, the times differ by a factor of 4.1 and the bandwidths by 5.3: 2.7 s of both "
        "are not reads; copies take 0.7 s of them, the computed rest 0.8 at the preset's MFU, and "
        "this engine computes slower (see the main test)",
    )


def sensitivity() -> list[tuple[str, float, float, float]]:
    """Fitted to each row in turn: the row, its context length, the worst TTFT and ratio errors."""
    found = []
    for row in PRINTED:
        wave = fit(row)
        worst = max(
            abs(wave.ttft_s(*other) / ttft_s - 1.0) for other, (ttft_s, _) in PRINTED.items()
        )
        ratio = max(abs(line.error) for line in lines(wave) if line.is_points)
        found.append((f"{row[0]}, {row[1]} at once", wave.tokens, worst, ratio))
    return found
