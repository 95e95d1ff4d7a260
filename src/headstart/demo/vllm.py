"""The demo on vLLM: the same four phases, with a node and `vllm serve` as users run them.

recompute   vLLM without Headstart and without its own prefix cache
cold        vLLM with Headstart, empty: question 1 is computed and stored
memory      the engine's own cache emptied before each question: the blocks come from the node
restart     engine and node ended and started again: the blocks come from the disk
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.bench.vllm import VllmServer, serving
from headstart.config import engine_environment
from headstart.demo.device import device_reads, difference, drop_page_cache, machine_facts
from headstart.demo.questions import CHAT, CHAT_CHAPTER, Chat, chapter, prompts
from headstart.demo.results import Answer, DemoResult, DeviceReads, Phase
from headstart.demo.scenario import PHASES, DemoOptions, folder_for_blocks
from headstart.demo.session import Progress
from headstart.engines.vllm.command import headstart_arguments, server_words
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK_SIZE = 128
_NUM_QUESTIONS, _NUM_TURNS = 2, 2
_PER_PHASE = _NUM_QUESTIONS + _NUM_TURNS
_COUNTERS = "headstart:"


def run_vllm_demo(options: DemoOptions, progress: Progress | None = None) -> DemoResult:
    """Run all phases and compare their answers. Takes minutes; needs vLLM and 6 GiB of memory.

    Raises HeadstartError when an engine or the node does not come up.
    """
    from transformers import AutoTokenizer

    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir, local_files_only=True)
    with folder_for_blocks(options.root) as folder:
        return _VllmDemo(options, folder.absolute(), tokenizer, progress).run(started)


class _VllmDemo:
    def __init__(
        self,
        options: DemoOptions,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress | None,
    ) -> None:
        self._options, self._folder, self._tokenizer = options, folder, tokenizer
        self._progress = progress or (lambda phase, done, total, message: None)
        self._socket = folder / "node.sock"
        self._config = folder / "headstart.toml"
        self._config.write_text(
            f'[memory]\ncapacity = "{options.memory_nbytes}B"\n'
            f"[node]\nsocket = {json.dumps(str(self._socket))}\nmetrics_port = 0\n"
            f'[[tiers]]\nkind = "file"\nroot = {json.dumps(str(folder / "blocks"))}\n'
            f'capacity = "{options.file_nbytes}B"\n'
        )
        self._phases: list[Phase] = []
        self._block_nbytes = 0
        self._startup_s = 0.0

    def run(self, started: float) -> DemoResult:
        """All phases, in order."""
        with self._engine("recompute", with_headstart=False) as engine:
            self._phase("recompute", engine)
        with self._node(), self._engine("cold") as engine:
            self._phase("cold", engine)
            self._phase("memory", engine)
            self._block_nbytes = _block_nbytes(self._status())
        drop_page_cache(self._folder)
        with self._node(), self._engine("restart") as engine:
            self._phase("restart", engine, node_pid=int(self._status()["pid"]))
        return DemoResult(
            model=self._options.model_dir.name,
            dtype=self._options.model_dir.name.rpartition("-")[2],
            block_size=BLOCK_SIZE,
            block_nbytes=self._block_nbytes,
            machine=machine_facts(self._folder),
            phases=tuple(self._phases),
            seconds=time.monotonic() - started,
        )

    def _phase(self, name: str, engine: VllmServer, node_pid: int | None = None) -> None:
        started = time.monotonic()
        before = device_reads(self._folder, node_pid)
        device: DeviceReads | None = None
        answers: list[Answer] = []
        for kind, question, tokens, hear in self._questions():
            self._say(name, len(answers), f"{kind} {len(answers) + 1} of {_PER_PHASE}")
            if name == "memory":
                engine.reset_prefix_cache()
            answer = self._ask(engine, kind, question, tokens)
            hear(answer.tokens)
            answers.append(answer)
            if node_pid is not None and device is None:
                device = difference(before, device_reads(self._folder, node_pid))
        reference = self._phases[0].answers if self._phases else answers
        pairs = zip(reference, answers, strict=True)
        self._phases.append(
            Phase(
                name=name,
                answers=tuple(answers),
                differences=tuple(i for i, (a, b) in enumerate(pairs) if a.tokens != b.tokens),
                seconds=time.monotonic() - started,
                startup_s=self._startup_s,
                device=device,
            )
        )
        self._startup_s = 0.0

    def _questions(self) -> Iterator[tuple[str, str, list[int], Callable[[tuple[int, ...]], None]]]:
        """Kind, question, prompt, and who hears the answer."""
        for question, tokens in islice(prompts(self._tokenizer), _NUM_QUESTIONS):
            yield "question", question, tokens, lambda answer: None
        chat = Chat(tokenizer=self._tokenizer, text=chapter(CHAT_CHAPTER))
        for question in CHAT[:_NUM_TURNS]:
            yield "chat", question, chat.ask(question), chat.hear

    def _ask(self, engine: VllmServer, kind: str, question: str, tokens: Sequence[int]) -> Answer:
        before = engine.counters(_COUNTERS)
        reply = engine.ask(tokens, max_tokens=self._options.max_new_tokens, ignore_eos=False)
        after = engine.counters(_COUNTERS)
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        prefix = "loaded_tokens_"
        return Answer(
            kind=kind,
            question=question,
            text=str(self._tokenizer.decode(reply.tokens, skip_special_tokens=True)),
            tokens=reply.tokens,
            top2_gaps=(),
            prompt_tokens=len(tokens),
            hit_tokens=reply.cached_tokens,
            tokens_from={
                name.removeprefix(prefix): int(count)
                for name, count in grown.items()
                if name.startswith(prefix) and count
            },
            loaded_nbytes=int(grown.get("load_bytes", 0)),
            stored_nbytes=int(grown.get("store_bytes", 0)),
            lookup_s=0.0,
            load_s=grown.get("wait_seconds", 0.0) + grown.get("load_copy_seconds", 0.0),
            prefill_s=0.0,
            decode_s=reply.seconds - reply.ttft_s,
            store_s=grown.get("store_copy_seconds", 0.0),
            ttft_s=reply.ttft_s,
            total_s=reply.seconds,
        )

    @contextmanager
    def _engine(self, name: str, *, with_headstart: bool = True) -> Iterator[VllmServer]:
        self._say(name, 0, "starting vLLM")
        started = time.monotonic()
        dtype = self._options.model_dir.name.rpartition("-")[2]
        arguments = ["--dtype", dtype, "--enforce-eager", "--max-model-len", "8192"]
        arguments += ["--block-size", str(BLOCK_SIZE), "--enable-prompt-tokens-details"]
        if with_headstart:
            arguments = headstart_arguments(arguments, config=self._config)
        else:
            arguments.append("--no-enable-prefix-caching")
        command = [*server_words(str(self._options.model_dir)), *arguments]
        with serving(
            command, environ=engine_environment(), log=self._folder / "vllm.log"
        ) as engine:
            engine.ask([100] * 32)  # the first request warms the engine up
            self._startup_s = time.monotonic() - started
            yield engine

    @contextmanager
    def _node(self) -> Iterator[None]:
        self._headstart("start", "--config", str(self._config))
        try:
            yield
        finally:
            self._headstart("stop", "--socket", str(self._socket))

    def _status(self) -> Mapping[str, Any]:
        text = self._headstart("status", "--socket", str(self._socket), "--json", "-")
        fields: Mapping[str, Any] = json.loads(text)
        return fields

    def _headstart(self, *words: str) -> str:
        command = [sys.executable, "-m", "headstart", "node", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HeadstartError(f"the node failed: {done.stderr.strip()}")
        return done.stdout

    def _say(self, phase: str, step: int, message: str) -> None:
        done = PHASES.index(phase) * _PER_PHASE + step
        self._progress(phase, done, len(PHASES) * _PER_PHASE, message)


def _block_nbytes(status: Mapping[str, Any]) -> int:
    memory = status["tiers"]["memory"]
    return int(memory["used_nbytes"]) // max(1, int(memory["num_blocks"]))
