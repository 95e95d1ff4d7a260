"""Small traces of each kind, made up."""

from __future__ import annotations

import json

MOONCAKE = [
    {"timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [7, 8, 9]},
    {"timestamp": 1250, "input_length": 16, "output_length": 0, "hash_ids": [7, 8]},
    {"timestamp": 1250.5, "input_length": 5, "output_length": 1},
]
WEKA = {
    "id": "one",
    "block_size": 4,
    "hash_id_scope": "local",
    "tool_tokens": 4,
    "requests": [
        {"t": 0.0, "type": "s", "in": 9, "out": 2, "hash_ids": [1, 2], "api_time": 1.5},
        {
            "t": 2.0,
            "requests": [{"t": 0.0, "type": "n", "in": 4, "out": 1, "hash_ids": [5]}],
        },
        {"t": 9.0, "type": "n", "in": 13, "out": 5, "hash_ids": [1, 2, 3], "think_time": 6.0},
        {"t": 12.0, "type": "n", "in": 8, "out": 5, "hash_ids": [1, 2]},
    ],
}
TOKEN_IDS = [
    {"input_toks": 20, "output_toks": 4, "arrival_time_ns": 10, "input_tok_ids": [*range(20)]},
    {
        "input_toks": 17,
        "output_toks": 4,
        "arrival_time_ns": 2_000_000_010,
        "input_tok_ids": [*range(16), 99],
    },
]
MLCOMMONS = [
    {"conversation_id": "c", "role": "user", "system": "be good", "content": "x" * 10},
    {"conversation_id": "c", "role": "assistant", "reasoning_content": "hm", "tool_calls": [{}]},
    {"conversation_id": "c", "role": "tool", "tool_results": [{"a": "b"}], "delay_seconds": 1.5},
    {"conversation_id": "c", "role": "assistant", "content": "done"},
    {"conversation_id": "d", "role": "user", "system": "be good", "content": "y"},
    {"conversation_id": "d", "role": "assistant", "content": "no"},
]
SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "human", "value": "x" * 100},
            {"from": "gpt", "value": "y" * 30},
            {"from": "human", "value": "more"},
            {"from": "gpt", "value": "z"},
        ],
    },
    {"id": "a_0", "conversations": [{"from": "gpt", "value": "no question"}]},
    {
        "id": "b",
        "conversations": [
            {"from": "human", "value": "x" * 64 + "other"},
            {"from": "gpt", "value": ""},
        ],
    },
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
