"""An invented result, so that reports can be tested without a model."""

from __future__ import annotations

import pytest

from headstart.demo.results import Answer, DemoResult, DeviceReads, Phase


def make_answer(**changes):
    fields = {
        "kind": "question",
        "question": "Why <b>?",
        "text": "Because & so.",
        "tokens": (1, 2, 3),
        "top2_gaps": (1.0, 2.0, 3.0),
        "prompt_tokens": 5600,
        "hit_tokens": 0,
        "tokens_from": {},
        "loaded_nbytes": 0,
        "stored_nbytes": 0,
        "lookup_s": 0.001,
        "load_s": 0.0,
        "prefill_s": 20.0,
        "decode_s": 1.0,
        "store_s": 0.0,
        "ttft_s": 20.0,
        "total_s": 21.0,
    }
    return Answer(**{**fields, **changes})


def make_phase(name, first, **changes):
    chat = make_answer(kind="chat", question="And?", prompt_tokens=900, ttft_s=2.0)
    fields = {"answers": (first, chat), "differences": (), "seconds": 30.0}
    return Phase(name=name, **{**fields, **changes})


@pytest.fixture
def make_result():
    """Makes a result; `restart` changes its restart phase."""

    def make(**restart):
        hit = {"hit_tokens": 5568, "loaded_nbytes": 250_000_000, "load_s": 0.25, "ttft_s": 0.5}
        phases = (
            make_phase("recompute", make_answer()),
            make_phase("cold", make_answer(ttft_s=20.5)),
            make_phase("memory", make_answer(tokens_from={"memory": 5568}, **hit)),
            make_phase(
                "restart",
                make_answer(tokens_from={"file": 5568}, **hit),
                **{
                    "device": DeviceReads(process_nbytes=251_000_000, device_nbytes=260_000_000),
                    "startup_s": 8.0,
                    **restart,
                },
            ),
        )
        return DemoResult(
            model="some-model",
            dtype="float32",
            block_size=32,
            block_nbytes=1 << 20,
            machine={"Processor": "some processor, 2 cores"},
            phases=phases,
            seconds=120.0,
        )

    return make
