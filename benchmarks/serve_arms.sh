#!/usr/bin/env bash
# The project's own arms on vLLM (CPU): what docs/benchmarks.md shows.
#
#     benchmarks/serve_arms.sh [FOLDER] [WORKLOAD ...]
#
# SmolLM2-135M in float32, computing on one core, one request at a time: of two that come at once an
# engine takes both into one step, or not, and TTFT is one or the other by chance.
# Arms: vLLM's own prefix cache with a pool that the load does not fit in, against the same with
# Headstart and a node of its own. Writes a file of `headstart bench serve` a workload into FOLDER.
# ROUNDS: pairs, 3 by default. TRACES: the folder of the public traces, without which the two
# workloads made from them are left out.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

folder="${1:-build/serve_arms}"
shift || true
workloads=("$@")
rounds="${ROUNDS:-3}"
traces="${TRACES:-../shared/data/traces}"
bin=.venv-vllm/bin
mkdir -p "$folder"

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0}"
model="$("$bin/python" -c 'from headstart.config import cache_dir
from headstart.engines.smollm2 import prepare_model
print(prepare_model(cache_dir(), "float32"))')"

config="$folder/node.toml"
cat > "$config" <<EOF
[memory]
capacity = "512MiB"
[[tiers]]
kind = "file"
root = "$PWD/$folder/blocks"
capacity = "4GiB"
EOF

# A pool of 2,048 tokens: 64 blocks of 32, and the one that vLLM keeps for itself.
served=(--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 2048 --block-size 32
    --num-gpu-blocks-override 65 --prefix-caching-hash-algo sha256_cbor)

measure() {  # NAME ARMS PHASES OPTIONS...
    local name="$1" arms="$2" phases="$3" arm words=()
    shift 3
    if (( ${#workloads[@]} )) && [[ " ${workloads[*]} " != *" $name "* ]]; then
        return
    fi
    for arm in $arms; do
        words+=(--arm "$arm=$arm")
    done
    echo "== $name"
    "$bin/headstart" bench serve "${words[@]}" --phases "$phases" --rounds "$rounds" "$@" \
        --block-size 32 --concurrency 1 --serve-model "$model" --node-config "$config" \
        --root "$folder/root" --json "$folder/$name.json" -- "${served[@]}"
}

# Ten chats on one system prompt: 3,000 tokens in all, which the pool cannot hold.
measure multi-turn "gpu-prefix headstart" cold,steady,host-cold --workload multi-turn \
    --sessions 10 --turns 2 --shared-tokens 384 --own-tokens 128 --output-tokens 8
# Four documents in another order for each question.
measure rag "gpu-prefix headstart" cold,steady --workload rag \
    --sessions 12 --shared-tokens 512 --documents 4 --own-tokens 64 --output-tokens 8
# Nothing to hit: what does a cache cost?
measure unique "gpu-prefix headstart" cold --workload unique \
    --sessions 12 --shared-tokens 384 --own-tokens 128 --output-tokens 8
# Everything fits in the engine's own pool: nothing is left to gain.
measure fits "gpu-prefix headstart" cold,steady --workload multi-turn \
    --sessions 3 --turns 2 --shared-tokens 384 --own-tokens 128 --output-tokens 8
# Without any reuse: no baseline, as `headstart gate` says; for orientation.
measure none "none gpu-prefix" cold --workload multi-turn \
    --sessions 10 --turns 2 --shared-tokens 384 --own-tokens 128 --output-tokens 8
if [[ -d "$traces" ]]; then
    measure mooncake "gpu-prefix headstart" cold,steady --workload trace \
        --trace "$traces/mooncake_conversation_trace.jsonl.gz" --limit 16 --scale-tokens 0.05 \
        --max-prompt-tokens 1500
    measure weka "gpu-prefix headstart" cold,steady --workload agentic --time-scale 0.001 \
        --trace "$traces/weka_claude_code_sample_39.tar.gz" --limit 1 --scale-tokens 0.02 \
        --max-prompt-tokens 1500
else
    echo "no traces in $traces: the workloads mooncake and weka are left out"
fi
