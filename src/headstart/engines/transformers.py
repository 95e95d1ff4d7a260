"""Transformers with a prefix cache: `CachedModel.generate()` computes only what no tier holds.

    tokens   [0, hit)          loaded from the store into the request's KV
             [hit, prompt)     computed: the prefill; always at least the prompt's last token
             [prompt, ...)     generated, greedily
    blocks   all full ones of tokens with KV are stored afterwards; the last token has none yet

Whatever the store does, fewer blocks than it promised, none, or no room, only makes the prefill
longer.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache

from headstart.engines.fingerprint import WeightsGuard
from headstart.engines.kv import KvRoom
from headstart.engines.support import cache_argument, kv_shape
from headstart.errors import ConfigError
from headstart.keys import Namespace, block_keys
from headstart.store import PrefixStore
from headstart.types import KeyChain, Outcome

PREFILL_TOKENS = 1024
"""Tokens computed in one forward pass: more need more memory and are not faster."""
STORE_BLOCKS = 64
"""Blocks stored in one go, so that their writing starts before the last one is copied."""
LOAD_TIMEOUT_S = 30.0
"""The longest wait for a load. A measured prefill rate shortens it to what recomputing takes."""
_RATE_TOKENS = 128
"""A prefill of fewer tokens says too little about the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An answer, and where the KV of its prompt came from."""

    tokens: tuple[int, ...]
    """Generated token ids, with the end token if there was one."""
    text: str
    """The tokens as text, without special tokens; empty without a tokenizer."""
    top2_gaps: tuple[float, ...]
    """For each token, the gap between the two best log-probabilities of its step."""
    prompt_tokens: int
    hit_tokens: int
    """Tokens of the prompt that were loaded."""
    tokens_from: dict[str, int]
    """The hit tokens by the tier that served them; tiers that served none are left out."""
    loaded_nbytes: int
    """Bytes of the loaded blocks."""
    stored_blocks: int
    """New blocks that the store accepted."""
    stored_nbytes: int
    lookup_s: float
    """From the call to the number of blocks that are held: tokenizing, hashing, looking up."""
    load_s: float
    """Bringing the blocks into memory and copying them into the model's KV."""
    prefill_s: float
    """Computing the rest of the prompt, up to the first token."""
    decode_s: float
    """Generating the other tokens."""
    store_s: float
    """Copying new blocks into the store."""
    ttft_s: float
    """From the call to the first token."""
    total_s: float

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hit:
    """What was loaded for a prompt."""

    num_tokens: int = 0
    by_tier: dict[str, int]
    nbytes: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What was computed for a prompt."""

    tokens: list[int]
    gaps: list[float]
    first_at: float


class CachedModel:
    """A causal language model of Transformers over a `PrefixStore`. One call at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        store: PrefixStore | None = None,
        *,
        block_size: int = 32,
        tenant: str = "",
        prefill_tokens: int = PREFILL_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Runs two tokens through the model to learn its KV, and opens its namespace in the store.

        Without a tokenizer, prompts are token ids. Without a store, everything is computed.
        Raises UnsupportedModelError for a model without plain full attention in every layer, and
        ConfigError for one in training mode or when a block does not fit the store.
        """
        if prefill_tokens < 1:
            raise ConfigError(f"prefill_tokens={prefill_tokens} must be >= 1")
        self._model, self._tokenizer, self._store = model, tokenizer, store
        self._shape = kv_shape(model)
        self._layout = self._shape.block_layout(block_size)
        self._forward_options = _forward_options(model)
        self._end_tokens = _end_tokens(model)
        self._context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._prefill_tokens = prefill_tokens
        self._prefill_s_per_token: float | None = None
        self._clock = clock
        self._weights = WeightsGuard(model)
        self._namespace = Namespace(
            model=type(model).__name__,
            weights=self._weights.fingerprint,
            layout=self._layout,
            isa=_isa(model, self._shape.device),
            tenant=tenant,
        )
        if store is not None:
            store.open_namespace(self._namespace)

    @property
    def namespace(self) -> Namespace:
        """The namespace of this model's blocks, as of the last call."""
        return self._namespace

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Answer a prompt greedily: the best token at each step, until an end token or the limit.

        `on_token` is called with each token as soon as it is known. Raises ConfigError for an empty
        prompt, or one that does not fit the model's context together with `max_new_tokens`.
        """
        started = self._clock()
        tokens = self._prompt_tokens(prompt, max_new_tokens)
        self._follow_weights()
        room = KvRoom(self._shape, len(tokens) + max_new_tokens)
        hit = self._load(tokens, room, started)
        loaded_at = self._clock()
        answer = self._compute(tokens, hit.num_tokens, room, max_new_tokens, on_token)
        self._learn_rate(len(tokens) - hit.num_tokens, answer.first_at - loaded_at)
        decoded_at = self._clock()
        stored_blocks = self._keep(tokens + answer.tokens[:-1], room)
        done_at = self._clock()
        return Generation(
            tokens=tuple(answer.tokens),
            text=self._text(answer.tokens),
            top2_gaps=tuple(answer.gaps),
            prompt_tokens=len(tokens),
            hit_tokens=hit.num_tokens,
            tokens_from=hit.by_tier,
            loaded_nbytes=hit.nbytes,
            stored_blocks=stored_blocks,
            stored_nbytes=stored_blocks * self._layout.block_nbytes,
            lookup_s=hit.lookup_s,
            load_s=hit.load_s,
            prefill_s=answer.first_at - loaded_at,
            decode_s=decoded_at - answer.first_at,
            store_s=done_at - decoded_at,
            ttft_s=answer.first_at - started,
            total_s=done_at - started,
        )

    def _prompt_tokens(self, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigError("a prompt given as text needs a tokenizer; give token ids")
            tokens = list(self._tokenizer(prompt)["input_ids"])
        else:
            tokens = [int(token) for token in prompt]
        if not tokens:
            raise ConfigError("the prompt is empty: there is nothing to answer")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must be >= 1")
        if self._context is not None and len(tokens) + max_new_tokens > self._context:
            raise ConfigError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={max_new_tokens} do not fit "
                f"the model's context of {self._context} tokens"
            )
        return tokens

    def _follow_weights(self) -> None:
        """Move to a namespace of its own when the weights were changed since the last call."""
        if not self._weights.changed():
            return
        self._weights.refresh()
        # A small edit may escape the sample; blocks from before it must not be found all the same.
        self._namespace = replace(
            self._namespace, weights=self._weights.fingerprint, epoch=secrets.token_hex(16)
        )
        if self._store is not None:
            self._store.open_namespace(self._namespace)

    def _load(self, tokens: list[int], room: KvRoom, started: float) -> _Hit:
        """Fill `room` with the longest prefix that the store gives, short of the last token."""
        if self._store is None:
            return _Hit(by_tier={})
        chain = block_keys(self._namespace, tokens)
        num_held = self._store.lookup(chain).num_blocks
        looked_up_at = self._clock()
        lookup_s = looked_up_at - started
        if num_held == 0:
            return _Hit(by_tier={}, lookup_s=lookup_s)
        block_size = self._layout.block_size
        timeout_s = LOAD_TIMEOUT_S
        if self._prefill_s_per_token is not None:
            timeout_s = min(timeout_s, num_held * block_size * self._prefill_s_per_token)
        with self._store.load(chain.run(0, num_held), timeout_s=timeout_s) as lease:
            num_ready = lease.ready_blocks
            room.fill(lease.views, block_size)
            by_tier = {tier: num * block_size for tier, num in lease.by_tier.items() if num}
        # The last token's KV may be there, but its logits, which choose the next token, are not.
        num_tokens = min(num_ready * block_size, len(tokens) - 1)
        if num_tokens < num_ready * block_size:
            by_tier[list(by_tier)[-1]] -= num_ready * block_size - num_tokens
        return _Hit(
            num_tokens=num_tokens,
            by_tier=by_tier,
            nbytes=num_ready * self._layout.block_nbytes,
            lookup_s=lookup_s,
            load_s=self._clock() - looked_up_at,
        )

    def _compute(
        self,
        tokens: list[int],
        num_loaded: int,
        room: KvRoom,
        max_new_tokens: int,
        on_token: Callable[[int], None] | None,
    ) -> _Answer:
        """Prefill `tokens[num_loaded:]`, then generate. Fills `room` for all but the last token."""
        cache = room.cache(num_loaded)
        # Computed in steps of `prefill_tokens`; the last step alone says how to go on.
        last = (
            num_loaded
            + (len(tokens) - 1 - num_loaded) // self._prefill_tokens * self._prefill_tokens
        )
        for start in range(num_loaded, last, self._prefill_tokens):
            self._forward(tokens[start : start + self._prefill_tokens], cache)
        token, gap = self._forward(tokens[last:], cache)
        first_at = self._clock()
        generated, gaps = [token], [gap]
        if on_token is not None:
            on_token(token)
        while len(generated) < max_new_tokens and token not in self._end_tokens:
            token, gap = self._forward([token], cache)
            generated.append(token)
            gaps.append(gap)
            if on_token is not None:
                on_token(token)
        return _Answer(tokens=generated, gaps=gaps, first_at=first_at)

    def _forward(self, tokens: list[int], cache: Cache) -> tuple[int, float]:
        """Run `tokens` after those in `cache`; the best next token and its lead over the second."""
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens], device=self._shape.device),
                use_cache=True,
                **{self._forward_options.cache: cache},
                **self._forward_options.last_only,
            )
            logits = output.logits[0, -1].float()
            # The normalisation of log-probabilities cancels out in their difference.
            best = logits.topk(2).values
            return int(logits.argmax()), float(best[0] - best[1])

    def _keep(self, tokens: list[int], room: KvRoom) -> int:
        """Store the full blocks of `tokens`, all in `room`, that are not held; returns how many."""
        if self._store is None:
            return 0
        chain = block_keys(self._namespace, tokens)
        num_stored = 0
        for start in range(self._store.lookup(chain).num_blocks, len(chain), STORE_BLOCKS):
            wanted = chain.run(start, min(start + STORE_BLOCKS, len(chain)))
            num_done = self._keep_run(self._store, wanted, room, start)
            num_stored += num_done
            if num_done < len(wanted):
                break
        return num_stored

    def _keep_run(self, store: PrefixStore, chain: KeyChain, room: KvRoom, first: int) -> int:
        with store.reserve(chain) as reservation:
            room.drain(reservation.views, self._layout.block_size, first)
            return reservation.commit().count(Outcome.DONE)

    def _learn_rate(self, num_tokens: int, seconds: float) -> None:
        """Remember the best prefill rate seen: a load must beat it, not a busy moment."""
        if num_tokens >= _RATE_TOKENS:
            rate, known = seconds / num_tokens, self._prefill_s_per_token
            self._prefill_s_per_token = rate if known is None else min(rate, known)

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardOptions:
    """How a model's `forward` wants to be called."""

    cache: str
    """Name of the argument that takes the cache."""
    last_only: dict[str, int]
    """Arguments that keep it from computing logits nobody reads."""


def _forward_options(model: PreTrainedModel) -> _ForwardOptions:
    takes_last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
    return _ForwardOptions(
        cache=cache_argument(model), last_only={"logits_to_keep": 1} if takes_last_only else {}
    )


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)


def _isa(model: PreTrainedModel, device: torch.device) -> str:
    """What computes the KV: other kernels round differently."""
    if device.type == "cpu":
        machine = torch.backends.cpu.get_cpu_capability()
    elif device.type == "cuda":
        machine = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        machine = device.type
    attention = getattr(model.config, "_attn_implementation", None)
    major = transformers_version.split(".")[0]
    return f"{machine} {attention} {model.dtype} transformers{major}"
