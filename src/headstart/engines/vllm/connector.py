"""`HeadstartConnector`: the interface that vLLM calls, over the two halves that do the work.

vLLM does not catch what a hook raises: the engine would die. So nothing leaves a hook here but what
is raised at start on purpose, for a model or a setting that cannot work. An error is logged,
counted and answered as a miss.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from headstart.engines.vllm import identity, shape
from headstart.engines.vllm.copier import TorchCopier, touch
from headstart.engines.vllm.metrics import ConnectorStats, PromMetrics
from headstart.engines.vllm.options import Options
from headstart.engines.vllm.pace import Pace, prior_costs
from headstart.engines.vllm.scheduler import SchedulerSide
from headstart.engines.vllm.step import StepMeta, WorkerHandshake, WorkerMeta
from headstart.engines.vllm.supported import check_supported
from headstart.engines.vllm.weights import adapter_fingerprint
from headstart.engines.vllm.worker import WorkerSide
from headstart.keys import Namespace
from headstart.node.client import NodeClient
from headstart.node.mapping import ArenaMapping

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.headstart")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_SOURCES = {"memory": CacheHitSource.HOST}


def _hook(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """A hook whose errors are logged, counted and answered by `default()`."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: HeadstartConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an engine hook's top: a bug costs a miss
                self._failed_in(method.__name__, error)
                return default()

        return guarded  # type: ignore[return-value]

    return wrap


class HeadstartConnector(KVConnectorBase_V1):
    """See `KVConnectorBase_V1` for when each hook is called."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError or UnsupportedModelError: the engine does not start."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = Options.from_extra_config(transfer.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._shape = shape.block_shape(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._mapping: ArenaMapping | None = None
        self._live: dict[str, Any] = {}
        """The engine's requests."""
        self._is_async = False
        """Whether the last answer was a load between steps."""
        if role is KVConnectorRole.SCHEDULER:
            self._tell_operator()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is only a later miss."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `KVConnectorBase_V1`. Find the node, or start it; map its memory."""
        _log_to_vllm()
        self._mapping = ArenaMapping(self._options.node_path(), timeout_s=5.0)
        self._mapping.attach()
        pages = shape.layer_pages(self._kv_cache_config)
        copier = TorchCopier(kv_caches, pages, self._kv_cache_config.num_blocks)
        touch(kv_caches)
        self._worker = WorkerSide(
            self._mapping,
            copier,
            shard_start=_rank() * self._shape.shard_stride,
            block_nbytes=self._shape.shard_nbytes,
            step_nbytes=self._options.step_nbytes,
            num_batches=self._vllm_config.max_concurrent_batches,
        )

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """See `KVConnectorBase_V1`. Who this worker is to the node."""
        return None if self._mapping is None else WorkerHandshake(token=self._mapping.token)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`. Copy what the step reads."""
        if self._worker is not None and isinstance(self._connector_metadata, StepMeta):
            meta = self._connector_metadata
            try:
                self._worker.load(meta)
            except Exception as error:  # noqa: BLE001 - an engine hook's top: a bug costs a miss
                self._failed_in("start_load_kv", error)
                self._worker.give_up(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `KVConnectorBase_V1`. Loads are complete before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See `KVConnectorBase_V1`. Blocks are stored whole, after the forward pass."""

    @_hook(lambda: None)
    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`. Copy what the step completed."""
        if self._worker is not None and isinstance(self._connector_metadata, StepMeta):
            self._worker.store(self._connector_metadata)

    @_hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `KVConnectorBase_V1`. Requests whose load between steps is over."""
        return None, None if self._worker is None else self._worker.take_received() or None

    @_hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`. Blocks that the engine must compute after all."""
        return set() if self._worker is None else self._worker.take_lost_blocks()

    @_hook(lambda: None)
    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """See `KVConnectorBase_V1`. What the scheduler must know."""
        return None if self._worker is None else self._worker.take_meta()

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """See `KVConnectorBase_V1`. Every worker has registered its caches: the session begins."""
        workers = [metadata[rank].token for rank in sorted(metadata)]
        if len(workers) != self._shape.world_size:
            logger.error("Headstart is off: %d workers of %d", len(workers), self._shape.world_size)
            return
        self._scheduler = SchedulerSide(
            NodeClient(self._options.node_path(), workers, is_buffered=True),
            self._identify,
            shape=self._shape,
            options=self._options,
            pace=Pace(prior_costs(self._vllm_config)),
        )

    @_hook(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1`. Look it up, and start to promote."""
        self._live[request.request_id] = request
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_hook(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`. Tokens beyond the engine's own that are ready."""
        self._is_async = False
        if self._scheduler is None:
            return 0, False
        tokens, self._is_async = self._scheduler.num_matched(request, num_computed_tokens)
        return tokens, self._is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`. The request was admitted."""
        if self._scheduler is not None:
            try:
                self._scheduler.admitted(request, blocks, num_external_tokens)
            except Exception as error:  # noqa: BLE001 - an engine hook's top: all is computed
                self._failed_in("update_state_after_alloc", error)
                if num_external_tokens:
                    table = blocks.get_block_ids()[0]
                    self._scheduler.lost(request.request_id, table, is_async=self._is_async)

    @_hook(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """See `KVConnectorBase_V1`. The tokens by tier, in vLLM's terms."""
        if self._scheduler is None:
            return {}
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self._scheduler.sources(request, num_external_tokens).items():
            source = _SOURCES.get(tier, CacheHitSource.DISK)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`. What the workers must copy in this step."""
        if self._scheduler is None:
            return StepMeta()
        try:
            return self._scheduler.step(scheduler_output)
        except Exception as error:  # noqa: BLE001 - an engine hook's top: nothing new is stored
            self._failed_in("build_connector_meta", error)
            return self._scheduler.loads()

    @_hook(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """See `KVConnectorBase_V1`. What the workers have copied."""
        told = connector_output.kv_connector_worker_meta
        try:
            if connector_output.invalid_block_ids:
                self._forget(connector_output.invalid_block_ids)
        finally:
            if self._scheduler is not None and isinstance(told, WorkerMeta):
                self._scheduler.workers_told(told)

    @_hook(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`. Its blocks may be freed at once: nothing reads them later."""
        self._live.pop(request.request_id, None)
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.request_finished(request.request_id)

    @_hook(lambda: False)
    def reset_cache(self) -> bool | None:
        """See `KVConnectorBase_V1`. New weights: nothing that any tier holds now is hit again."""
        if self._scheduler is not None:
            self._scheduler.reset_cache()
        return True

    # -- both

    @_hook(lambda: None)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """See `KVConnectorBase_V1`. What was counted since the last call."""
        side = self._worker or self._scheduler
        sums = {} if side is None else side.sums.take()
        return ConnectorStats(data=sums) if sums else None

    @_hook(lambda: None)
    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`. The engine ends."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """See `KVConnectorBase_V1`. The stats that another process has sent."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """See `KVConnectorBase_V1`. Headstart's counters in vLLM's `/metrics`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _identify(self, epoch: str, lora_request: Any) -> Namespace:
        """The namespace of an epoch and an adapter."""
        adapter = ""
        if lora_request is not None:
            # An adapter that cannot be read is told from any other one, in every process.
            fingerprint = adapter_fingerprint(Path(lora_request.lora_path))
            adapter = fingerprint or f"unknown {secrets.token_hex(16)}"
        found = identity.make_namespace(
            self._vllm_config, self._kv_cache_config, epoch=epoch, lora=adapter
        )
        if not found.known:
            logger.warning("Headstart: nothing survives a restart, since %s", found.reason)
        return found.namespace

    def _forget(self, lost: set[int]) -> None:
        """Make sure that blocks which could not be loaded are computed before anything reads them.

        vLLM has put them, and what the step computed on them, into its cache; it has the first
        request that holds them compute them, and lets others rely on that one, though it may end.
        """
        manager, size = self._kv_cache_manager, self._shape.block_size
        manager.evict_blocks(set(range(self._kv_cache_config.num_blocks)))
        for request_id, request in self._live.items():
            (table,) = manager.get_block_ids(request_id)
            good = next((n for n, block in enumerate(table) if block in lost), len(table))
            request.num_computed_tokens = min(request.num_computed_tokens, good * size)

    def _tell_operator(self) -> None:
        """Correct what would hurt, and say what should be set otherwise."""
        _log_to_vllm()
        transfer = self._kv_transfer_config
        # While steps overlap, vLLM 0.32 goes on from tokens that were sampled from lost blocks.
        policy = "recompute" if self._vllm_config.max_concurrent_batches == 1 else "fail"
        if transfer.kv_load_failure_policy != policy:
            # The scheduler reads it after it has made its connector.
            transfer.kv_load_failure_policy = policy
            logger.info("Headstart: kv_load_failure_policy is %s here", policy)
        for sentence in identity.advice(self._vllm_config):
            logger.warning("Headstart: %s", sentence)

    def _failed_in(self, hook: str, error: Exception) -> None:
        logger.error("Headstart: an error in %s, answered as a miss", hook, exc_info=error)
        side = self._worker or self._scheduler
        if side is not None:
            side.sums.add(hook_errors=1)


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def _log_to_vllm() -> None:
    """Let this package's warnings come out where vLLM's own do."""
    ours, theirs = logging.getLogger("headstart"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(logging.INFO)
