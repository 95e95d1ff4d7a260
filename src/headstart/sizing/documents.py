"""Plans as documents for programs: `headstart.plan/1`."""

from __future__ import annotations

import math

from headstart.sizing.plan import Plan


def document(plan: Plan) -> dict[str, object]:
    """The plan for programs: `headstart.plan/1`."""
    return {
        "schema": "headstart.plan/1",
        "model": {
            "name": plan.model.name,
            "active_parameters": plan.model.active_parameters,
            "source": plan.model.source,
            "weights_dtype": plan.model.weights_dtype,
            "kv_dtype": plan.load.kv_dtype or plan.model.dtype,
            "max_tokens": plan.model.max_tokens,
        },
        "machine": {
            "gpu": plan.machine.gpu.name,
            "num_gpus": plan.machine.num_gpus,
            "num_engines": plan.machine.num_engines,
            "mfu": plan.machine.mfu,
            "latency_s": plan.machine.latency_s,
            "sources": list(plan.machine.sources),
        },
        "load": {
            "concurrency": plan.load.concurrency,
            "hit_share": plan.load.hit_share,
            "memory_share": plan.load.memory_share,
            "output_tokens": plan.load.output_tokens,
            "tpot_s": plan.load.tpot_s,
        },
        "contexts": [list(each) for each in plan.load.contexts],
        "answers": [each.document() for each in plan.answers],
        "curve": [
            {
                "tokens": tokens,
                "prefill_s": seconds,
                "break_even_bytes_per_s": rate if math.isfinite(rate) else None,
            }
            for tokens, seconds, rate in plan.curve
        ],
        "flips": [{"tokens": tokens, "concurrency": count} for tokens, count in plan.flips],
        "cells": [
            {
                "tokens": cell.tokens,
                "concurrency": cell.concurrency,
                "load_s": cell.load_s,
                "memory_s": cell.memory_s,
                "recompute_s": cell.recompute_s,
            }
            for cell in plan.cells
        ],
    }
