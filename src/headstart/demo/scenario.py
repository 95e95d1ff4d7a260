"""The demo's four phases: the same questions, with the KV from four different places.

recompute   no cache: every prompt is computed in full
cold        an empty store: question 1 is computed and stored, the others share its document
memory      the same questions again, in the same process
restart     and again in a new process: the blocks come from the disk
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.config import open_store
from headstart.demo.device import machine_facts
from headstart.demo.restart import run_in_new_process
from headstart.demo.results import Answer, DemoResult, DeviceReads, Phase
from headstart.demo.session import NUM_ANSWERS, Progress, Session, SessionOptions, describe
from headstart.engines.compare import compare_tokens, tie_gap
from headstart.errors import HeadstartError
from headstart.settings import Settings

if TYPE_CHECKING:
    from headstart.engines.transformers import CachedModel

PHASES = ("recompute", "cold", "memory", "restart")
NUM_STEPS = len(PHASES) * NUM_ANSWERS
MEMORY_NBYTES = 1 << 30
FILE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run and where."""

    model_dir: Path
    """A folder of `engines.smollm2.prepare_model`."""
    root: Path
    """An existing directory on the disk to show; a folder in it is made and removed again."""
    block_size: int = 32
    max_new_tokens: int = 20
    memory_nbytes: int = MEMORY_NBYTES
    file_nbytes: int = FILE_NBYTES


def run_demo(options: DemoOptions, progress: Progress | None = None) -> DemoResult:
    """Run all phases and compare their answers. Takes minutes; needs 3 GiB of memory.

    `progress` is called on this thread, before each answer and at the end.
    Raises HeadstartError when the store cannot be opened or the new process fails.
    """
    started = time.monotonic()
    with folder_for_blocks(options.root) as root:
        return _Demo(options, root, progress or _say_nothing).run(started)


class _Demo:
    """One run: its options, its folder, and what it has found so far."""

    def __init__(self, options: DemoOptions, root: Path, progress: Progress) -> None:
        self._options, self._root, self._progress = options, root, progress
        self._settings = _settings(options, root)
        self._session_options = SessionOptions(
            model_dir=options.model_dir,
            block_size=options.block_size,
            max_new_tokens=options.max_new_tokens,
        )
        self._dtype = ""
        self._phases: list[Phase] = []

    def run(self, started: float) -> DemoResult:
        """All phases, in order."""
        self._say("recompute", 0, "loading the model")
        session = Session(self._session_options)
        self._dtype = session.dtype
        self._run_here("recompute", session, session.engine(None))
        with open_store(Settings.from_mapping(self._settings)) as store:
            engine = session.engine(store)
            self._run_here("cold", session, engine)
            self._run_here("memory", session, engine)
            layout = engine.namespace.layout
            if not store.flush(timeout_s=60.0):
                raise HeadstartError("the disk did not take the blocks of one document in 60 s")
        self._run_restarted()
        self._progress("restart", NUM_STEPS, NUM_STEPS, "done")
        return DemoResult(
            model=self._options.model_dir.name,
            dtype=self._dtype,
            block_size=layout.block_size,
            block_nbytes=layout.block_nbytes,
            machine=machine_facts(self._root),
            phases=tuple(self._phases),
            seconds=time.monotonic() - started,
        )

    def _run_here(self, name: str, session: Session, engine: CachedModel) -> None:
        """One phase in this process."""
        started = time.monotonic()
        self._say(name, 0, describe(0))
        answers = []
        for answer in session.answers(engine):
            answers.append(answer)
            if len(answers) < NUM_ANSWERS:
                self._say(name, len(answers), describe(len(answers)))
        self._add(name, answers, started)

    def _run_restarted(self) -> None:
        started = time.monotonic()
        self._say("restart", 0, "starting a new process")

        def on_step(step: int) -> None:
            if step < NUM_ANSWERS:
                self._say("restart", step, describe(step))

        answers, device, startup_s = run_in_new_process(
            self._session_options, self._settings, self._root, on_step
        )
        self._add("restart", answers, started, startup_s=startup_s, device=device)

    def _add(
        self,
        name: str,
        answers: Sequence[Answer],
        started: float,
        *,
        startup_s: float = 0.0,
        device: DeviceReads | None = None,
    ) -> None:
        reference = self._phases[0].answers if self._phases else answers
        self._phases.append(
            Phase(
                name=name,
                answers=tuple(answers),
                differences=tuple(_differences(reference, answers, self._dtype)),
                seconds=time.monotonic() - started,
                startup_s=startup_s,
                device=device,
            )
        )

    def _say(self, phase: str, step: int, message: str) -> None:
        self._progress(phase, PHASES.index(phase) * NUM_ANSWERS + step, NUM_STEPS, message)


def _differences(
    reference: Sequence[Answer], answers: Sequence[Answer], dtype: str
) -> Iterator[int]:
    """Indices of the answers that differ more than `engines.compare` allows for this dtype."""
    for index, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        comparison = compare_tokens(
            expected.tokens,
            answer.tokens,
            top2_gaps=expected.top2_gaps,
            tie_gap=tie_gap(dtype),
        )
        if not comparison.identical:
            yield index


def _settings(options: DemoOptions, root: Path) -> dict[str, Any]:
    tier = {"kind": "file", "root": str(root), "capacity": options.file_nbytes}
    return {"memory": {"capacity": options.memory_nbytes}, "tiers": [tier]}


@contextmanager
def folder_for_blocks(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="headstart-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say_nothing(phase: str, step: int, total: int, message: str) -> None:
    """A `Progress` for nobody."""
