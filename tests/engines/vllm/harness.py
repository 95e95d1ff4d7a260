"""vLLM's own scheduler with the connector, over a make-believe model whose KV can be checked.

The model writes for each token bytes that follow from the whole prefix, the layer and the rank. So
a wrong byte that was loaded, stored or reused shows in the step that would attend to it: its tokens
become garbage, as in a real model, and the step is noted in `Engine.bad_reads`.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from headstart.engines import vllm as plugin
from headstart.engines.vllm import connector as connector_module

BLOCK = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 16
BLOCK_NBYTES = LAYERS * HEADS * BLOCK * 2 * HEAD_SIZE * 2
"""Of one rank."""
MAX_LEN = 176
GARBAGE = 63
"""The token that follows from wrong KV."""
_MASK = (1 << 64) - 1
_POISON = np.uint64(0xDEAD)


def make_folder(folder):
    """A random Llama, of which only the configuration and the identity matter here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Prefix:
    """What the model computes of some tokens: a number for each, from all up to it."""

    def __init__(self, identity, tokens):
        seed = blake2b(repr(identity).encode(), digest_size=8).digest()
        self._states, self.tokens = [int.from_bytes(seed)], []
        self.extend(tokens)

    def extend(self, tokens):
        for token in tokens:
            mixed = ((self._states[-1] ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
            self._states.append(mixed ^ mixed >> 29)
            self.tokens.append(token)

    def cut(self, length):
        """Forget all but the first tokens."""
        del self.tokens[length:], self._states[length + 1 :]

    def kv(self, start, stop, layer, rank):
        """Bytes of positions [start, stop): (position, head, 8-byte word)."""
        states = np.array(self._states[start + 1 : stop + 1], dtype=np.uint64)
        words = np.arange(HEADS * HEAD_SIZE // 2, dtype=np.uint64).reshape(HEADS, -1)
        factors = (words + np.uint64(1000 * layer + 100_000 * rank)) * np.uint64(2) + np.uint64(1)
        return states[:, None, None] * factors

    def next_token(self):
        return 1 + self._states[-1] % 60


def answer(identity, prompt, count):
    """The tokens that follow a prompt."""
    prefix = Prefix(identity, prompt)
    for _ in range(count):
        prefix.extend([prefix.next_token()])
    return prefix.tokens[len(prompt) :]


@dataclass
class State:
    """What a worker knows of a request."""

    prefix: Prefix
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class Worker:
    """One rank: KV tensors laid out as vLLM does, the connector, and the forward pass."""

    def __init__(self, engine, kv_config, rank):
        self.engine, self.rank, self.num_blocks = engine, rank, kv_config.num_blocks
        layout = KVCacheLayout[kv_config.kv_cache_layout]
        caches = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
        # As (block, position, head, word).
        self.pages = [
            cache.view(torch.int64).numpy().view(np.uint64).transpose(0, 2, 1, 3)
            for cache in caches.values()
        ]
        config = engine.config
        config.kv_transfer_config.engine_id = "one"
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_config
        )
        rank_of_worker, connector_module._rank = connector_module._rank, lambda: rank
        try:
            self.connector.register_kv_caches(caches)
        finally:
            connector_module._rank = rank_of_worker
        self.states = {}
        self._reported = set()
        """Blocks whose loss the scheduler did not know of when it scheduled this step."""

    def execute(self, output):
        """What `GPUModelRunner.execute_model` does, in its order of calls."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update_states(output)
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.engine.config)
        with (
            set_forward_context(None, self.engine.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as told,
        ):
            bad = self._forward(output.num_scheduled_tokens)
        reported = told.invalid_block_ids | self._reported
        self._reported = told.invalid_block_ids if self.engine.overlap else set()
        self.engine.bad_reads += [(name, block, reported) for name, block in bad.items()]
        names = list(output.num_scheduled_tokens)
        sampled = [
            self._sample(name, count, is_bad=name in bad)
            for name, count in output.num_scheduled_tokens.items()
        ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _update_states(self, output):
        for request_id in output.finished_req_ids:
            self.states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            identity = self.engine.identity(new.req_id, new.lora_request)
            state = State(Prefix(identity, new.prompt_token_ids), len(new.prompt_token_ids))
            state.blocks, state.num_computed = list(new.block_ids[0]), new.num_computed_tokens
            self.states[new.req_id] = state
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self.states[request_id]
            state.num_computed = cached.num_computed_tokens[index]
            state.prefix.cut(state.num_prompt + cached.num_output_tokens[index])
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                # Weights may have changed meanwhile; tokens of a discarded output are not known.
                tokens = cached.all_token_ids.get(request_id, state.prefix.tokens)
                identity = self.engine.identity(request_id, self.engine.loras.get(request_id))
                state.prefix, state.blocks = Prefix(identity, tokens), list(blocks[0])
            elif blocks is not None:
                state.blocks += blocks[0]

    def _forward(self, scheduled):
        """Write KV; the requests that attend to wrong bytes, and the first blocks with some."""
        for request_id, count in scheduled.items():
            state = self.states[request_id]
            self._write(state, state.num_computed, state.num_computed + count)
        bad = {}
        while True:  # what attends to garbage is garbage, also for others in the same step
            found = {
                request_id: block
                for request_id, count in scheduled.items()
                if request_id not in bad
                and (block := self._bad_block(request_id, count)) is not None
            }
            if not found:
                return bad
            bad |= found
            for request_id in found:
                state = self.states[request_id]
                start = state.num_computed
                self._write(state, start, start + scheduled[request_id], garbage=True)

    def _places(self, state, start, stop):
        positions = np.arange(start, stop)
        return np.array(state.blocks)[positions // BLOCK], positions % BLOCK

    def _write(self, state, start, stop, *, garbage=False):
        blocks, slots = self._places(state, start, stop)
        for layer, pages in enumerate(self.pages):
            kv = state.prefix.kv(start, stop, layer, self.rank)
            pages[blocks, slots] = kv ^ _POISON if garbage else kv

    def _bad_block(self, request_id, count):
        """The first block of a request's table that holds other bytes than it should, or None."""
        state = self.states[request_id]
        stop = state.num_computed + count
        blocks, slots = self._places(state, 0, stop)
        good = np.ones(stop, dtype=bool)
        for layer, pages in enumerate(self.pages):
            expected = state.prefix.kv(0, stop, layer, self.rank)
            good &= (pages[blocks, slots] == expected).all(axis=(1, 2))
        return None if good.all() else int(blocks[np.argmin(good)])

    def _sample(self, request_id, count, *, is_bad):
        state = self.states[request_id]
        if state.num_computed + count < len(state.prefix.tokens):
            return []
        token = GARBAGE if is_bad else state.prefix.next_token()
        state.prefix.extend([token])
        return [token]


class Engine:
    """`EngineCore`'s loop around a real scheduler, and the make-believe workers."""

    def __init__(
        self, folder, node, *, blocks=64, ranks=1, overlap=False, extra=None, layout="LBHNC", **args
    ):
        """`overlap`: schedule a step while the one before is computed, as on GPUs."""
        plugin.register()
        transfer = {
            "kv_connector": "HeadstartConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"node": str(node), "load": "always", **(extra or {})},
        }
        options = {
            "skip_tokenizer_init": True,
            "block_size": BLOCK,
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "prefix_caching_hash_algo": "sha256_cbor",
            "num_gpu_blocks_override": blocks,
            "tensor_parallel_size": ranks,
            "kv_transfer_config": transfer,
        }
        self.config = _engine_config(str(folder), repr(options | args), options | args)
        self.overlap = self.config.scheduler_config.async_scheduling = overlap
        kv_configs = _kv_configs(self.config, ranks, layout)
        self.kv_config = kv_cache_utils.generate_scheduler_kv_cache_config(kv_configs)
        self.config.cache_config.num_gpu_blocks = self.kv_config.num_blocks
        self.weights, self.salts, self.loras = 0, {}, {}
        self.bad_reads, self.answers, self.told, self.reasons = [], {}, {}, {}
        self.asked, self.requests, self._aborts = {}, {}, []
        self.stats = []
        self.workers = [Worker(self, kv_config, rank) for rank, kv_config in enumerate(kv_configs)]
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(self.kv_config, self.config)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=self.kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        handshakes = {
            (0, worker.rank): worker.connector.get_handshake_metadata() for worker in self.workers
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.side = self.connector._scheduler
        hasher = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hasher)
        self._hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hasher)
        self._queue = deque()
        self._queue_size = self.config.max_concurrent_batches

    # -- requests

    def add(self, name, prompt, count=1, *, salt=None, lora=None, resumable=False, **sampling):
        """A request arrives."""
        self.salts[name], self.loras[name] = salt, lora
        self.asked[name] = (self.identity(name, lora), list(prompt), count)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=count, temperature=0.0, ignore_eos=True, **sampling
            ),
            pooling_params=None,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        self.answers[name], self.requests[name] = [], request
        self.scheduler.add_request(request)
        return request

    def identity(self, name, lora):
        """What KV depends on beside tokens."""
        return self.weights, self.salts.get(name), lora and (lora.lora_name, lora.lora_path)

    def abort(self, *names, late=False):
        """Abort requests; `late`: while the next step is computed."""
        if late:
            self._aborts += names
        else:
            self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def reset(self, **options):
        """New weights, as `reset_prefix_cache` is told of them once nothing is computed."""
        while self._queue:
            self._finish_step()
        done = self.scheduler.reset_prefix_cache(reset_connector=True, **options)
        if done:
            self.weights += 1
        return done

    # -- steps

    def step(self):
        """`EngineCore.step`, or with `overlap` `step_with_batch_queue`; whether it computed."""
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            executed = output.total_num_scheduled_tokens > 0
            sent = pickle.dumps(output)
            # Pickled, as between processes: vLLM changes an output that it shares as a constant.
            outputs = [
                pickle.loads(pickle.dumps(worker.execute(pickle.loads(sent))))
                for worker in self.workers
            ]
            self._queue.append((output, self._aggregator.aggregate(outputs)))
            if len(self._queue) < self._queue_size and (executed or self.scheduler.has_requests()):
                return executed
        if self._queue:
            self._finish_step()
        return executed

    def _finish_step(self):
        output, told = self._queue.popleft()
        if self._aborts:
            self.abort(*self._aborts)
            self._aborts.clear()
        for results in self.scheduler.update_from_output(output, told).values():
            if results.scheduler_stats is not None:
                self.stats.append(results.scheduler_stats)
            for result in results.outputs:
                self._take(result)

    def steps(self, count):
        for _ in range(count):
            self.step()

    def run(self, *, seconds=20.0, until=None):
        """Step until nothing is left to do, or `until()` holds."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests() or self._queue:
            if until is not None and until():
                return
            assert time.monotonic() < deadline, f"stuck with {self._whereabouts()}"
            if not self.step():
                time.sleep(0.001)
        assert until is None or until(), "it is over, and what was waited for did not happen"

    def _whereabouts(self):
        """What each request waits for."""
        return {
            name: (request.status.name, request.num_computed_tokens)
            for name, request in self.scheduler.requests.items()
        }

    def ask(self, name, prompt, count=1, **options):
        """Run one request to its end; what the connector tells of it."""
        self.add(name, prompt, count, **options)
        self.run()
        return self.told[name]

    def _take(self, result):
        self.answers[result.request_id] += result.new_token_ids
        if result.finish_reason is not None:
            name = result.request_id
            self.reasons[name] = str(result.finish_reason)
            params = result.kv_transfer_params or {}
            self.told[name] = params.get("headstart", {})
            identity, prompt, count = self.asked[name]
            if identity[0] == self.weights and self.reasons[name] == "length":
                assert self.answers[name] == answer(identity, prompt, count), name

    # -- the end

    def check_reads(self):
        """Wrong bytes were attended to only where their loss was reported in the same step."""
        for name, block, reported in self.bad_reads:
            assert block in reported, f"{name} attended to wrong bytes in block {block}"

    def settle(self):
        """Nothing is left over anywhere, once nothing is left to do."""
        self.run()
        self.check_reads()
        self.settle_halves()

    def settle_halves(self):
        """The same, of scheduler and connector alone."""
        scheduler = self.scheduler
        queues = (scheduler.waiting, scheduler.kv_holding_waiting, scheduler.deferred_waiting)
        received = (scheduler.finished_recving_kv_req_ids, scheduler.failed_recving_kv_req_ids)
        assert not any((scheduler.requests, scheduler.running, *queues, *received))
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.kv_config.num_blocks - 1
        assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
        side = self.side
        if side is not None:
            assert not any((side._records, side._loading, side._storing, side._claims))
            assert not any((side._acks, side._failed, side._client._claims))
        for worker in self.workers:
            half = worker.connector._worker
            assert not any((half._pending, half._received, half._lost, half._told.done))
        assert not self.connector._live

    def close(self):
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()


_configs = {}


def _engine_config(folder, key, options):
    """vLLM's configuration; made once for equal options, since that takes half a second."""
    if (folder, key) not in _configs:
        _configs[folder, key] = EngineArgs(model=folder, **options).create_engine_config()
    return copy.deepcopy(_configs[folder, key])


def _kv_configs(config, ranks, layout):
    """What vLLM makes of the layers' specifications, for each rank."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    config.cache_config.kv_cache_layout = layout
    layers = {f"layer.{index}": spec for index in range(LAYERS)}
    made = kv_cache_utils.get_kv_cache_configs(config, [layers] * ranks, [1 << 26] * ranks)
    for each in made:
        each.kv_cache_layout, each.hash_block_size = layout, BLOCK
    return made
