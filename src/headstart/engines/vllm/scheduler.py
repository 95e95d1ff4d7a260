"""The scheduler's half of the connector: what to load for whom, and what to store.

It runs on the thread that schedules every request of the engine, so it does no I/O and waits for
nothing but the node's short answers. A request goes through

    arrival     look up, start to promote                      (on_new_request)
    polls       not yet | so many tokens, claimed               (get_num_new_matched_tokens)
    admission   pair engine blocks with arena slots             (update_state_after_alloc)
    each step   ship the loads; reserve slots for new blocks    (build_connector_meta)
    answers     workers have copied: release, commit            (update_connector_output)

A claim that was not followed by an admission is undone in the same step. This module knows vLLM's
objects only by the attributes it reads.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.engines.vllm.judge import Judge, as_message
from headstart.engines.vllm.options import Options
from headstart.engines.vllm.pace import Pace
from headstart.engines.vllm.record import Record
from headstart.engines.vllm.shape import BlockShape
from headstart.engines.vllm.stats import TIER_TOKENS, Sums
from headstart.engines.vllm.step import Copy, StepMeta, WorkerMeta
from headstart.keys import Namespace
from headstart.node.client import NodeClient
from headstart.types import NamespaceId

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_ATTACH_S = 1.0
_MAX_RESTARTS = 3
_LEARN_STEPS = 16
"""The node is told what was learnt each time that so many steps were."""

Identify = Callable[[str, Any], Namespace]
"""The namespace of an epoch and of a request's adapter (None without)."""


class _Blocks(Protocol):
    """vLLM's `KVCacheBlocks`."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


@dataclass(slots=True, eq=False)
class _Store:
    record: Record
    start: int


class SchedulerSide:
    """See the module. For the scheduler's thread."""

    def __init__(
        self,
        client: NodeClient,
        identify: Identify,
        *,
        shape: BlockShape,
        options: Options,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sums = Sums()
        self._client, self._identify, self._options = client, identify, options
        self._shape, self._clock, self._pace = shape, clock, pace
        self._judge = Judge(pace, options, shape)
        self._block_size, self._block_nbytes = shape.block_size, shape.block_nbytes
        self._epoch = ""
        self._namespaces: dict[tuple[str, Any], NamespaceId] = {}
        self._records: dict[str, Record] = {}
        self._claims: list[Record] = []
        """Claimed since the last step; those that were not admitted are undone with it."""
        self._meta = StepMeta()
        self._loading: dict[int, Record] = {}
        self._storing: dict[int, _Store] = {}
        self._acks: dict[int, int] = {}
        self._failed: set[int] = set()
        self._num_arrived = self._num_learnt = 0
        self._home = self._namespace_of(None)
        """Under which what is learnt of this engine is kept."""

    # -- requests come and go

    def on_new_request(self, request: Any) -> None:
        """Look a prompt up and start to promote what is held of it."""
        if request.resumable:
            return  # its tokens may change under its blocks
        if request.lora_request is not None and request.lora_request.load_inplace:
            return  # its adapter's weights may change under the same name, number and path
        record = Record(request, self._namespace_of(request.lora_request), self._shape)
        record.told = {"prompt_tokens": request.num_tokens, "outcome": "miss"}
        self._records[request.request_id] = record
        record.extend()
        self._num_arrived += 1
        record.arrived = self._num_arrived
        self._judge.admit(record)
        self._promote(record)

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request; what to tell about it."""
        record = self._records.pop(request_id, None)
        if record is None:
            return None
        if not record.is_shipped:
            record.drop()
        self._flush_if_idle()
        return {"headstart": record.told}

    def reset_cache(self) -> None:
        """The weights changed: nothing stored so far may be hit, nothing computed so far stored."""
        self._epoch = secrets.token_hex(16)
        self._namespaces.clear()
        records, self._records = self._records, {}  # none of them loads or stores any more
        for record in records.values():
            if not record.is_shipped:
                record.drop()
        self._namespace_of(None)

    def close(self) -> None:
        """End the session with the node."""
        self._client.close()

    # -- loads

    def num_matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """See `get_num_new_matched_tokens`."""
        record = self._records.get(request.request_id)
        if record is None or request.skip_reading_prefix_cache:
            return 0, False
        if record.num_preemptions != request.num_preemptions and not record.is_shipped:
            record.num_preemptions = request.num_preemptions
            record.drop()
            record.extend()
            self._promote(record)
        if record.promise is None or record.is_shipped:
            if not record.is_shipped:
                record.num_local = num_local  # what is predicted counts it
            return 0, False
        if record.claimed is None:
            waiting = self._claim(record, num_local)
            if waiting or record.claimed is None:
                return (None if waiting else 0), False
        tokens = record.tokens(len(record.claimed.offsets)) - num_local
        if tokens <= 0:
            record.end("local")
            return 0, False
        record.num_local = num_local
        blocks = len(record.claimed.offsets) - num_local // self._block_size
        record.is_async = blocks * self._block_nbytes > self._options.async_load_nbytes
        return tokens, record.is_async

    def admitted(self, request: Any, blocks: _Blocks, num_external: int) -> None:
        """See `update_state_after_alloc`. What it raises means that nothing will be loaded."""
        if num_external == 0:
            return
        record = self._records[request.request_id]
        claimed, promise = record.claimed, record.promise
        assert claimed is not None and promise is not None and promise.ticket is not None
        table = blocks.get_block_ids()[0]
        first = record.num_local // self._block_size
        last = -(-(record.num_local + num_external) // self._block_size)
        load = Copy(
            ticket=promise.ticket,
            request_id=request.request_id,
            boot=record.boot,
            blocks=tuple(zip(table[first:last], claimed.offsets[first:last], strict=True)),
        )
        (self._meta.async_loads if record.is_async else self._meta.loads).append(load)
        self._loading[load.ticket] = record
        record.is_shipped = True
        record.tell_load(first, last, num_external)
        by_tier = record.told["loaded_tokens_by_tier"].items()
        self.sums.add(
            hits=1,
            wait_seconds=record.told["waited_s"],
            read_seconds=claimed.read_s,
            load_bytes=len(load.blocks) * self._block_nbytes,
            **{f"{TIER_TOKENS}{tier}": tokens for tier, tokens in by_tier},
        )

    def lost(self, request_id: str, blocks: Sequence[int], *, is_async: bool) -> None:
        """Have the engine compute blocks that were promised to a request."""
        self._meta.lost_blocks += blocks
        if is_async:
            self._meta.lost_requests.append(request_id)
        for loads in (self._meta.loads, self._meta.async_loads):
            for load in [load for load in loads if load.request_id == request_id]:
                loads.remove(load)
                self._settle(load.ticket, failed=True)

    def sources(self, request: Any, num_external: int) -> dict[str, int]:
        """External tokens of a request by tier."""
        record = self._records.get(request.request_id)
        loaded = {} if record is None else record.told.get("loaded_tokens_by_tier", {})
        return dict(loaded) if sum(loaded.values()) == num_external else {}

    # -- steps

    def step(self, output: Any) -> StepMeta:
        """See `build_connector_meta`. When it raises, `loads` still has what was promised."""
        claims, self._claims = self._claims, []
        for record in claims:
            if record.claimed is not None and not record.is_shipped:
                record.unclaim()
        self._meta.number = self._judge.begin(output, self._records, self._clock())
        self._store(self._meta, output)
        self._client.flush()
        return self.loads()

    def loads(self) -> StepMeta:
        """What this step copies, taken once."""
        meta, self._meta = self._meta, StepMeta()
        meta.boot = self._client.boot
        return meta

    def workers_told(self, told: WorkerMeta) -> None:
        """See `update_connector_output`."""
        for decided in self._judge.end(told, self._clock()):
            self._client.decided(decided)
        if self._pace.num_steps >= self._num_learnt + _LEARN_STEPS:
            self._num_learnt = self._pace.num_steps
            self._client.learnt(self._home, as_message(self._pace.costs))
        self._failed |= told.failed
        for ticket, count in told.done.items():
            acks = self._acks.get(ticket, 0) + count
            self._acks[ticket] = acks
            if acks >= self._shape.world_size:
                del self._acks[ticket]
                failed = ticket in self._failed
                self._failed.discard(ticket)
                self._settle(ticket, failed=failed)
        self._flush_if_idle()

    def _flush_if_idle(self) -> None:
        """Send what the node should know: with no request there may be no next step."""
        if not self._records:
            self._client.flush()

    def _settle(self, ticket: int, *, failed: bool) -> None:
        """No worker holds addresses of a ticket any more."""
        store = self._storing.pop(ticket, None)
        if store is not None:
            store.record.num_storing -= 1
            if failed:
                self._client.abandon(ticket)
                store.record.next_store = min(store.record.next_store, store.start)
                self.sums.add(stores_failed=1)
            else:
                self._client.commit(ticket)
            return
        record = self._loading.pop(ticket, None)
        if record is not None:
            record.is_shipped = False
            if failed:
                self.sums.add(loads_failed=1)
                record.told["outcome"] = "failed"
            record.drop()

    def _store(self, meta: StepMeta, output: Any) -> None:
        """Reserve slots for the blocks that this step completes."""
        now = self._clock()
        left_nbytes = self._options.step_nbytes
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is None or now < record.retry_store_at:
                continue
            if record.num_storing or record.num_restarts > _MAX_RESTARTS:
                continue  # steps overlap: the node has not got what this would continue
            num_computed = record.request.num_computed_tokens + num_scheduled
            if num_computed // self._block_size <= record.next_store:
                continue
            record.extend()
            # A block has a hash only when its tokens are accepted, whatever was scheduled.
            stop = min(num_computed // self._block_size, len(record.keys))
            new = num_scheduled // self._block_size + 1
            stop = min(stop, record.next_store + max(new, left_nbytes // self._block_nbytes))
            if stop > record.next_store:
                table = output.kv_connector_block_state.get_block_ids(request_id)[0]
                copied = self._reserve(meta, record, stop, table)
                left_nbytes = max(0, left_nbytes - copied * self._block_nbytes)

    def _reserve(self, meta: StepMeta, record: Record, stop: int, table: Sequence[int]) -> int:
        """Have blocks [next_store, stop) of a request stored; how many will be copied."""
        start = record.next_store
        answer = self._client.reserve(record.chain(start, stop))
        if answer is None:
            return 0
        ticket, reserved = answer
        if reserved.is_orphan:
            # The tiers lost what this continues; the engine has it still.
            record.num_restarts += 1
            record.next_store = 0
            return 0
        start += reserved.num_held
        count = len(reserved.offsets)
        if len(table) < start + count:
            self._client.abandon(ticket)
            raise IndexError(f"the engine has {len(table)} blocks, not {start + count}")
        record.next_store = start + len(reserved.offsets)
        if record.next_store < stop:
            record.retry_store_at = self._clock() + _RETRY_S
            self.sums.add(store_blocks_refused=stop - record.next_store)
        if not reserved.offsets:
            return 0
        self._storing[ticket] = _Store(record, start)
        record.num_storing += 1
        meta.stores.append(
            Copy(
                ticket=ticket,
                request_id=record.request.request_id,
                boot=self._client.boot,
                blocks=tuple(zip(table[start : record.next_store], reserved.offsets, strict=True)),
            )
        )
        record.told["stored_blocks"] = record.told.get("stored_blocks", 0) + count
        self.sums.add(store_blocks=count, store_bytes=count * self._block_nbytes)
        return count

    # -- promises

    def _promote(self, record: Record, exposed_s: float = 0.0) -> None:
        """Ask the node; the answer is known at once where nothing is held."""
        record.polled_at, record.exposed_s = 0.0, exposed_s
        if not record.keys or not record.may_load:
            return
        if not self._num_learnt:
            self._pace.begin_with(self._client.costs_of(self._home))
        asked = self._judge.ask(record, self._records.values())
        record.promoted_at = self._clock()
        promise = record.found = self._client.promote(
            record.chain(0, len(record.keys)), asked, budget_s=self._judge.lookup_s(record)
        )
        self.sums.add(lookups=1)
        if promise is None:
            record.told["outcome"] = "no node"
            return
        self.sums.add(lookups_late=promise.is_late)
        record.promised(promise)

    def _claim(self, record: Record, num_local: int, *, is_anew: bool = False) -> bool:
        """Claim what is ready, if it is time to; whether to wait on."""
        assert record.promise is not None
        is_over, ready = record.promise.poll()
        now = self._clock()
        record.see((ready, record.promise.pulse), now, self._pace.busy_s)
        waited_s = now - record.polled_at
        if not record.has_claimed:
            record.waited_s = waited_s
        if record.tokens(record.promise.num_planned) <= num_local:
            record.end("local")
            return False
        if not is_over:
            others = self._records.values()
            if self._judge.waits(record, others, num_local=num_local, ready=ready, now=now):
                return True
            # With all of it ready it is only not told yet.
            if ready < record.promise.num_planned and not record.told.get("late"):
                record.told["late"] = True
                self.sums.add(loads_late=1)
        # What was held and could not be read may be damaged and gone, and is computed: offer it.
        record.next_store = min(record.next_store, ready)
        is_useful = record.tokens(ready) > num_local
        if not is_useful or not self._judge.is_worth_it(record, num_local=num_local, ready=ready):
            reason = "declined" if is_useful else "local" if ready else "miss"
            record.end(reason if is_over else "late")
            return False
        claimed = record.promise.claim()
        if claimed is not None and not claimed.attached and waited_s < _ATTACH_S:
            return True  # the workers map the node's memory in the step that follows
        if claimed is not None and claimed.offsets:
            record.claim(claimed, self._client.boot)
            self._claims.append(record)
            return False
        record.end("no node" if claimed is None else "expired")
        return claimed is not None and not is_anew and self._ask_anew(record, num_local)

    def _ask_anew(self, record: Record, num_local: int) -> bool:
        """What was ready waited for room in the engine for longer than leases live: as `_claim`."""
        self._promote(record, record.exposed_s)
        return record.promise is not None and self._claim(record, num_local, is_anew=True)

    # -- keys

    def _namespace_of(self, lora_request: Any) -> NamespaceId:
        adapter = None if lora_request is None else lora_request.lora_int_id
        place = (self._epoch, adapter)
        if place not in self._namespaces:
            namespace = self._identify(self._epoch, lora_request)
            self._client.open_namespace(namespace)
            self._namespaces[place] = namespace.id
        return self._namespaces[place]
