"""Does a hit ever change an answer? SmolLM2 with the cache against plain `generate()`.

float32: 64 prompts of 20 to 6,000 tokens, half of them text, half random token ids. Each is
answered by `model.generate()`, by the engine over a store that does not hold it, and again over the
store that does. All three must give the same tokens, and the logits of every step must be within
1e-3.

bfloat16: shorter prompts. Equality is demanded up to the first position whose two best
log-probabilities are closer than 0.1. Beside it stands a control without any cache, whose prefill
is split elsewhere: near-ties flip there too.

    python benchmarks/engine_equality.py --json benchmarks/results/engine_equality.json

takes about an hour on two cores. Exit code 1 when an answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.bench.environment import describe
from headstart.config import cache_dir, open_store
from headstart.demo.questions import document
from headstart.engines.compare import Comparison, compare_tokens, tie_gap
from headstart.engines.smollm2 import Dtype, load_model, prepare_model
from headstart.engines.transformers import CachedModel, Generation
from headstart.settings import Settings

SCHEMA = "headstart.engine_equality/1"
NEW_TOKENS = 16
MAX_LOGIT_DIFFERENCE = 1e-3
LENGTHS: dict[Dtype, list[int]] = {
    "float32": [20 + 9 * i for i in range(40)]
    + [400 + 90 * i for i in range(20)]
    + [3000, 4000, 5000, 6000],
    "bfloat16": [20 + 37 * i for i in range(18)] + [1000, 1500],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What plain `generate()` answers: tokens, and the logits from which each was chosen."""

    tokens: list[int]
    logits: list[torch.Tensor]

    @property
    def top2_gaps(self) -> list[float]:
        """The gap between the two best log-probabilities of each step."""
        best = [step.topk(2).values for step in self.logits]
        return [float(first - second) for first, second in best]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt: how the answers over an empty store, a warm one and none compare."""

    kind: str
    prompt_tokens: int
    hit_tokens: int
    cold: Comparison
    warm: Comparison
    control: Comparison
    warm_logit_difference: float
    """The largest difference of a logit, over the steps before the answers part."""
    control_logit_difference: float


def main() -> int:
    """Run the campaigns, write the document, print the summaries."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--dtype", choices=list(LENGTHS), action="append", help="default: both")
    parser.add_argument("--longest", type=int, default=6000, help="leave out longer prompts")
    options = parser.parse_args()
    results = {}
    for dtype in options.dtype or LENGTHS:
        lengths = [length for length in LENGTHS[dtype] if length <= options.longest]
        results[dtype] = _summary(dtype, list(_campaign(dtype, lengths)))
    identical = all(result["identical"] for result in results.values())
    if options.json:
        text = json.dumps(
            {"schema": SCHEMA, "environment": describe(), "identical": identical, **results},
            indent=1,
        )
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    for dtype, result in results.items():
        print(dtype, json.dumps({name: v for name, v in result.items() if name != "rows"}))
    return 0 if identical else 1


def _campaign(dtype: Dtype, lengths: Sequence[int]) -> Iterator[Row]:
    model, tokenizer = load_model(prepare_model(cache_dir(), dtype))
    text = 2 * tokenizer(document())["input_ids"]
    with open_store(Settings.from_mapping({"memory": {"capacity": "1GiB"}})) as store:
        engine = CachedModel(model, store=store)
        for number, length in enumerate(lengths):
            source = random.Random(length)
            if number % 2:
                kind, tokens = "random", [source.randrange(100, 49_000) for _ in range(length)]
            else:
                start = source.randrange(len(text) - length)
                kind, tokens = "text", text[start : start + length]
            yield _row(kind, tokens, model, engine, tie_gap=tie_gap(dtype))
            print(f"{dtype} {number + 1}/{len(lengths)}", file=sys.stderr, flush=True)


def _row(
    kind: str,
    tokens: list[int],
    model: Any,
    engine: CachedModel,
    *,
    tie_gap: float,
) -> Row:
    reference = _plain(model, tokens)

    def compare(answer: Generation) -> Comparison:
        return compare_tokens(
            reference.tokens, answer.tokens, top2_gaps=reference.top2_gaps, tie_gap=tie_gap
        )

    cold = engine.generate(tokens, max_new_tokens=NEW_TOKENS)
    assert cold.hit_tokens == 0, "this prompt was to be new"
    with _last_logits(model) as warm_logits:
        warm = engine.generate(tokens, max_new_tokens=NEW_TOKENS)
    control = CachedModel(model, prefill_tokens=len(tokens) // 2 + 1)
    with _last_logits(model) as control_logits:
        split = control.generate(tokens, max_new_tokens=NEW_TOKENS)
    return Row(
        kind=kind,
        prompt_tokens=len(tokens),
        hit_tokens=warm.hit_tokens,
        cold=compare(cold),
        warm=compare(warm),
        control=compare(split),
        warm_logit_difference=_difference(reference, warm, warm_logits),
        control_logit_difference=_difference(reference, split, control_logits),
    )


def _plain(model: Any, tokens: list[int]) -> Reference:
    prompt = torch.tensor([tokens])
    with _last_logits(model) as logits:
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    answer = output[0, len(tokens) :].tolist()
    return Reference(tokens=answer, logits=logits[-len(answer) :])


@contextmanager
def _last_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """A list to which every forward pass appends the logits of its last token."""
    seen: list[torch.Tensor] = []
    hook = model.register_forward_hook(
        lambda module, args, output: seen.append(output.logits[0, -1].float().clone())
    )
    try:
        yield seen
    finally:
        hook.remove()


def _difference(reference: Reference, answer: Generation, logits: list[torch.Tensor]) -> float:
    """The largest difference of a logit, up to the step at which the answers part."""
    parted = compare_tokens(reference.tokens, answer.tokens).first_difference
    steps = len(reference.tokens) if parted is None else parted + 1
    # The steps of the prefill come first, and only its last one chose a token.
    chosen = logits[-len(answer.tokens) :]
    pairs = zip(reference.logits[:steps], chosen[:steps], strict=False)
    return max(float((theirs - ours).abs().max()) for theirs, ours in pairs)


def _summary(dtype: str, rows: list[Row]) -> dict[str, Any]:
    worst = max(row.warm_logit_difference for row in rows)
    same = all(row.cold.identical and row.warm.identical for row in rows)
    if dtype == "float32":
        same = same and worst <= MAX_LOGIT_DIFFERENCE
    return {
        "identical": same,
        "num_prompts": len(rows),
        "shortest": min(row.prompt_tokens for row in rows),
        "longest": max(row.prompt_tokens for row in rows),
        "num_exact_cold": sum(row.cold.exact for row in rows),
        "num_exact_warm": sum(row.warm.exact for row in rows),
        "num_exact_control": sum(row.control.exact for row in rows),
        "num_identical_warm": sum(row.warm.identical for row in rows),
        "num_identical_control": sum(row.control.identical for row in rows),
        "max_logit_difference_warm": worst,
        "max_logit_difference_control": max(row.control_logit_difference for row in rows),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
