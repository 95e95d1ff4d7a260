"""vLLM engines and nodes as processes, and the answers of an engine without a cache.

An engine starts in 25 to 60 s, so engines live for a module, and the one whose answers are the
reference for the whole run. Its model is a random Llama of two layers: 8,000 tokens take it about a
second, and its logits depend on every block of the prompt, which `test_answers` checks.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import node_process
from headstart.engines.compare import compare_tokens
from headstart.engines.vllm.command import server_words
from headstart.errors import HeadstartError
from headstart.node import protocol
from headstart.node.client import command

BLOCK = 128
VOCAB = 1000
START_S = 400.0
SOON = 30.0
CORES = os.sched_getaffinity(0)
TIE_GAP = 1e-3
"""A step of the reference closer than this may flip in float32 on some processor."""
LOGPROB_TOLERANCE = 1e-3
"""Rounding changes log-probabilities by some 1e-5, a wrong block by 1e-2 and more."""

# The kernel ends the process when this one is gone, however it went.
_RUN = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""


def tokens(count, seed):
    """A random prompt."""
    return random.Random(f"prompt {seed}").choices(range(1, VOCAB - 1), k=count)


def wait_for(condition, what="it", timeout_s=SOON):
    """Wait until a condition holds that costs a question to an engine or a node."""
    return node_process.wait_for(condition, what, timeout_s, poll_s=0.05)


def at_once(*calls):
    """Call functions on threads of their own at the same time; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(url):
    """The samples of a Prometheus page: name -> sum over its labels, name{labels} -> value."""
    with urllib.request.urlopen(url, timeout=SOON) as page:
        text = page.read().decode()
    samples = {}
    for line in text.splitlines():
        if found := re.match(r"([\w:]+)(\{.*\})? ([\d.e+-]+)$", line):
            name, labels, value = found.groups()
            samples[name] = samples.get(name, 0.0) + float(value)
            samples[name + (labels or "")] = float(value)
    return samples


class Process:
    """A program in a session of its own, with its output in a file."""

    def __init__(self, words, log, env):
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=log.parent,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def runs(self):
        return self._process.poll() is None

    def text(self):
        return self.log.read_text(errors="replace")

    def tail(self, count=60):
        lines = [line for line in self.text().splitlines() if "Route: " not in line]
        return "\n".join(lines[-count:])

    def send(self, number):
        """Send a signal to all processes of the session's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self):
        """End all of them at once, and wait for the end."""
        self.send(signal.SIGKILL)
        self._process.wait(SOON)
        wait_for(lambda: not session_members(self.pid), "an end of the killed processes")

    def stop(self, timeout_s=SOON):
        """Ask it to end; kill what has not in time."""
        if self.runs:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def wait(self, timeout_s):
        """Its exit code."""
        return self._process.wait(timeout_s)


def session_members(session):
    """Ids of the processes of a session that have not ended."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(folder.name))
    return members


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    """Of each token of the answer."""
    gaps: list[float]
    """Between the two best tokens at each step."""
    told: dict
    """What Headstart says of the request; empty without it."""
    cached_tokens: int
    seconds: float

    @property
    def hit(self):
        """Tokens loaded."""
        return self.told.get("loaded_tokens", 0)


class Engine:
    """`vllm serve` on a port of its own."""

    def __init__(self, folder, model, *options, extra=None, env=None):
        """`extra`: the connector's extra configuration; None: without the connector."""
        self.folder, self.model, self.port = folder, model, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        transfer = {
            "kv_connector": "HeadstartConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        self._words = [
            *(*server_words(model), "--port", self.port),
            *("--host", "127.0.0.1", "--served-model-name", "model", "--skip-tokenizer-init"),
            *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--disable-uvicorn-access-log"),
            *(() if extra is None else ("--kv-transfer-config", json.dumps(transfer))),
            *options,
        ]
        self._env = {name: value for name, value in os.environ.items() if name[:5] != "VLLM_"} | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(min(CORES)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **(env or {}),
        }
        self.start()

    def start(self):
        """Start it; `wait_ready` waits until it answers."""
        self.process = Process(self._words, self.folder / "engine.log", self._env)
        self._started = time.monotonic()
        self.is_ready = False

    def wait_ready(self):
        """Itself, when it answers."""
        while not self.is_ready:
            assert self.process.runs, f"the engine ended:\n{self.process.tail()}"
            late = time.monotonic() - self._started > START_S
            assert not late, f"the engine does not come up:\n{self.process.tail()}"
            time.sleep(0.2)
            self.is_ready = self.is_healthy()
        return self

    def restart(self):
        self.stop()
        self.start()
        return self.wait_ready()

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as page:
                return page.status == http.HTTPStatus.OK
        except OSError:
            return False

    def stop(self):
        self.process.stop()

    def kill(self):
        self.process.kill()

    def ask(self, prompt, max_tokens=8, **body):
        """The greedy answer to a prompt of token ids."""
        started = time.monotonic()
        fields = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            **body,
        }
        reply = self.post("/v1/completions", fields)
        seconds = time.monotonic() - started
        (choice,) = reply["choices"]
        logprobs, details = choice["logprobs"], reply["usage"]["prompt_tokens_details"] or {}
        best = [sorted(top.values())[-2:] for top in logprobs["top_logprobs"]]
        return Answer(
            token_ids=choice["token_ids"],
            logprobs=logprobs["token_logprobs"],
            gaps=[second - first for first, second in best],
            told=(reply.get("kv_transfer_params") or {}).get("headstart", {}),
            cached_tokens=details.get("cached_tokens") or 0,
            seconds=seconds,
        )

    def ask_and_leave(self, prompt, after_s, max_tokens=64):
        """Ask for a stream, and close the connection after so long."""
        fields = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(fields | {"ignore_eos": True, "return_token_ids": True}),
            {"Content-Type": "application/json"},
        )
        time.sleep(after_s)
        connection.sock.close()
        connection.close()

    def post(self, path, fields=None, timeout_s=120.0):
        request = urllib.request.Request(
            self.url + path,
            json.dumps(fields or {}).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as page:
                return json.load(page)
        except urllib.error.HTTPError as error:
            body = error.read().decode()
            raise AssertionError(f"{error}: {body}\n{self.process.tail()}") from None

    def forget(self, *, external=False):
        """Empty the engine's own prefix cache, or that of the connector too."""
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        wait_for(lambda: self.post(path)["success"], "a reset of the prefix cache")

    def metrics(self):
        return scrape(f"{self.url}/metrics")


class Node:
    """`headstart node run`."""

    def __init__(self, folder, *, memory="256MiB", file="512MiB"):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.config = folder / "node.sock", folder / "node.toml"
        self.root = folder / "blocks"
        self.port = free_port()
        self.config.write_text(
            f'[memory]\ncapacity = "{memory}"\n'
            f'[[tiers]]\nkind = "file"\nroot = "{self.root}"\ncapacity = "{file}"\n'
            'durable = false\ninflight_nbytes = "4MiB"\nthreads = 4\n'
            f'[node]\nsocket = "{self.path}"\nmetrics_port = {self.port}\n'
        )
        self.start()

    def start(self):
        self.process = Process(
            [sys.executable, "-m", "headstart", "node", "run", "--config", self.config],
            self.path.with_suffix(".log"),
            dict(os.environ),
        )
        wait_for(self.answers, f"the node:\n{self.process.tail()}")

    def answers(self):
        assert self.process.runs, f"the node ended:\n{self.process.tail()}"
        try:
            return bool(self.status())
        except (OSError, HeadstartError):
            return False

    def status(self):
        reply = command(self.path, protocol.Status(), 5.0)
        assert isinstance(reply, protocol.State)
        return reply.fields

    def gauges(self):
        return self.status()["gauges"]

    def metrics(self):
        return scrape(f"http://127.0.0.1:{self.port}/metrics")

    def written(self):
        """Wait until everything that was stored is in the file tier too."""
        wait_for(lambda: not self.gauges()["reservations"], "an end of stores")
        wait_for(lambda: not self.status()["loads"]["queued_nbytes"], "an end of writes")
        return self

    def idle(self):
        """Wait until nothing is held for any request."""
        names = ("leases", "leases_claimed", "reservations", "promotions_waiting", "pinned_bytes")
        wait_for(lambda: not any(map(self.gauges().get, names)), f"idleness of {self.gauges()}")

    def freeze(self):
        self.process.send(signal.SIGSTOP)

    def thaw(self):
        self.process.send(signal.SIGCONT)

    def stop(self):
        self.process.stop()

    def kill(self):
        self.process.kill()

    def restart(self):
        self.stop()
        self.start()


class Load:
    """Streams that ask one prompt after the other, for as long as the block runs.

    Each prompt is asked once before any is asked again, since the engine has it itself then.
    """

    def __init__(self, engine, prompts, *, streams=8, max_tokens=8, may_fail=False):
        """`may_fail`: the engine will be killed."""
        self._may_fail = may_fail
        self._engine, self._prompts, self._max_tokens = engine, prompts, max_tokens
        self._next, self._ends = itertools.count(), threading.Event()
        self.answers = []
        """(prompt, answer, when it was asked), in the order in which they came."""
        self._pool = ThreadPoolExecutor(streams)
        self._streams = streams

    def __enter__(self):
        self._futures = [self._pool.submit(self._ask) for _ in range(self._streams)]
        return self

    def __exit__(self, *error):
        self._ends.set()
        self._pool.shutdown()
        if error[0] is None and not self._may_fail:
            for future in self._futures:
                future.result()

    def _ask(self):
        while not self._ends.is_set():
            prompt = self._prompts[next(self._next) % len(self._prompts)]
            asked = time.monotonic()
            answer = self._engine.ask(prompt, self._max_tokens)
            self.answers.append((prompt, answer, asked))

    def go_on(self, count, timeout_s=60.0):
        """Wait for so many more answers."""
        wanted = len(self.answers) + count

        def is_there():
            assert not any(f.done() and f.exception() for f in self._futures), "a stream failed"
            return len(self.answers) >= wanted

        wait_for(is_there, f"answer {wanted}", timeout_s)

    def check(self, reference):
        """Every answer is the reference's; the slowest, in seconds."""
        for prompt, answer, _ in self.answers:
            reference.check(answer, prompt, self._max_tokens)
        return max(answer.seconds for _, answer, _ in self.answers)


class Reference:
    """An engine without cache, and the answers it has given."""

    def __init__(self, engine):
        self._engine, self._known, self._lock = engine, {}, threading.Lock()

    def ask(self, prompt, max_tokens=8):
        with self._lock:
            place = (tuple(prompt), max_tokens)
            if place not in self._known:
                self._known[place] = self._engine.wait_ready().ask(prompt, max_tokens)
            return self._known[place]

    def check(self, answer, prompt, max_tokens=8):
        """The answer, which must be the reference's."""
        wanted = self.ask(prompt, max_tokens)
        compared = compare_tokens(
            wanted.token_ids, answer.token_ids, top2_gaps=wanted.gaps, tie_gap=TIE_GAP
        )
        facts = f"{len(prompt)} tokens, {answer.told}"
        assert compared.identical, f"{facts}: {answer.token_ids}, not {wanted.token_ids}"
        same = len(wanted.token_ids) if compared.exact else compared.first_near_tie
        pairs = zip(wanted.logprobs[:same], answer.logprobs[:same], strict=True)
        worst = max((abs(a - b) for a, b in pairs), default=0.0)
        assert worst < LOGPROB_TOLERANCE, f"{facts}: log-probabilities differ by {worst}"
        return answer


def make_model(folder, seed=0):
    """A random Llama of two layers in float32; a block of 128 tokens has 128 KiB."""
    import numpy
    from safetensors.numpy import save_file

    hidden, heads, kv_heads, head, inner, layers = 64, 4, 2, 32, 128, 2
    shapes = {"model.embed_tokens": (VOCAB, hidden), "lm_head": (VOCAB, hidden)}
    for n in range(layers):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (heads * head, hidden),
            f"{layer}.self_attn.k_proj": (kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj": (kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj": (hidden, heads * head),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.post_attention_layernorm": (hidden,),
        }
    shapes["model.norm"] = (hidden,)
    made = numpy.random.default_rng(seed)
    # Wide enough that attention is sharp, so that the answer depends on all of a prompt.
    tensors = {
        f"{name}.weight": (made.normal(0.0, 0.2, shape) if len(shape) > 1 else numpy.ones(shape))
        for name, shape in shapes.items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": head,
        "intermediate_size": inner,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": VOCAB - 1,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.astype(numpy.float32) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session", autouse=True)
def _vllm():
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (`make test-vllm` has it)")


@pytest.fixture(scope="session")
def kit():
    """What tests cannot import from here."""
    from types import SimpleNamespace

    return SimpleNamespace(
        BLOCK=BLOCK, tokens=tokens, wait_for=wait_for, at_once=at_once, Load=Load
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def make_reference(tmp_path_factory):
    """Makes references; the engines start in the background."""
    with contextlib.ExitStack() as stack:

        def make(model, *options, env=None):
            folder = tmp_path_factory.mktemp("reference")
            # A worker spins for a second after each step: on a core with another engine's worker
            # it would make that one's next step last as long.
            env = {"VLLM_CPU_OMP_THREADS_BIND": str(max(CORES))} | (env or {})
            engine = Engine(folder, model, "--no-enable-prefix-caching", *options, env=env)
            stack.callback(engine.kill)
            return Reference(engine)

        yield make


@pytest.fixture(scope="session")
def reference(make_reference, model):
    """Answers of the tiny model without a cache."""
    return make_reference(model)


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory, model):
    """Makes engines with the connector, killed after the module; they start in the background."""
    with contextlib.ExitStack() as stack:

        def make(node, *options, extra=None, model=model, env=None):
            folder = tmp_path_factory.mktemp("engine")
            extra = {"node": str(getattr(node, "path", node)), "load": "always", **(extra or {})}
            engine = Engine(folder, model, *options, extra=extra, env=env)
            stack.callback(lambda: engine.kill())
            return engine

        yield make


@pytest.fixture(scope="module")
def make_node(tmp_path_factory):
    """Makes nodes, killed after the module."""
    with contextlib.ExitStack() as stack:

        def make(folder=None, **options):
            node = Node(folder or tmp_path_factory.mktemp("node"), **options)
            stack.callback(lambda: node.kill())
            return node

        yield make
