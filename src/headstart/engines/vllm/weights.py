"""Which weights lie in a local model folder: a fingerprint of its files, in milliseconds.

The scheduler's process never holds the weights, so the files they were loaded from stand for them:

    names        of all weight files, configurations and model code, one level of subfolders deep
    sizes, mtimes of the weight files
    content      safetensors: the header and 4 KiB of every tensor, spread by a golden-ratio
                 sequence, so that no structure of the tensor lines up with the sample
                 other weights: 4 KiB of every MiB, at places spread in the same way
                 configurations and code: every byte

Training changes nearly every element and is seen even where an in-place update keeps size and
mtime. An edit of a few chosen bytes that keeps both may escape the sample.

An unknown source is an answer here, not an error: None where there are no weight files, where one
cannot be read, or where a safetensors header is not one. The caller then shares nothing.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol

SAMPLE_NBYTES = 4096
"""Bytes hashed of every tensor, and of every `_STRIDE_NBYTES` of files without a header."""

MAX_HEADER_NBYTES = 100_000_000
"""Largest safetensors header; the format's own limit."""

_PIECE_NBYTES = 512
_STRIDE_NBYTES = 1 << 20
_GOLDEN_RATIO = 0.6180339887498949
_MAX_TEXT_NBYTES = 64 << 20
_MAX_ENTRIES = 20_000
_PIECES_AT_ONCE = 1024
_MAX_DIMENSIONS = 64

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_TEXT_SUFFIXES = frozenset({".json", ".py"})
# They change which tokens a prompt has, never the KV of a token; block hashes cover the tokens.
_TEXT_WITHOUT_EFFECT = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens_map",
    "added_tokens",
    "chat_template",
    "generation_config",
)
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

Span = tuple[int, int]
"""A half-open range of a file's bytes."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def weights_fingerprint(folder: Path) -> str | None:
    """Hex blake2b-256 of a model folder, or of one weight file; None for an unknown source.

    Stable across processes; independent of the folder's own name. Symlinks are followed, as the
    hub's cache consists of them. Reads 4 KiB a tensor, never a whole weight file. Never raises for
    what lies on the disk; safe from any thread.
    """
    digest = blake2b(digest_size=32)
    try:
        files = _files(folder)
        if not any(_is_weight(name) for name in files):
            return None
        for name, path in sorted(files.items()):
            _add_file(digest, name, path)
    except (OSError, ValueError):
        return None
    return digest.hexdigest()


def adapter_fingerprint(path: Path) -> str | None:
    """The same for a LoRA adapter's folder: its weights and `adapter_config.json`."""
    return weights_fingerprint(path)


def _files(folder: Path) -> dict[str, Path]:
    """The files that count, by their name below `folder`; a weight file stands for itself."""
    if folder.is_file():
        return {folder.name: folder}
    found: dict[str, Path] = {}
    num_entries = 0
    subfolders: list[Path] = []
    for directory in _directories(folder, subfolders):
        with os.scandir(directory) as entries:
            for entry in entries:
                num_entries += 1
                if num_entries > _MAX_ENTRIES:
                    raise ValueError(f"{folder} has over {_MAX_ENTRIES} entries: no model folder")
                path = directory / entry.name
                if _is_weight(entry.name) or _is_text(entry.name):
                    found[str(path.relative_to(folder))] = path
                elif directory == folder and not entry.name.startswith(".") and entry.is_dir():
                    subfolders.append(path)
    return found


def _directories(folder: Path, subfolders: list[Path]) -> Iterator[Path]:
    """The folder, then those found in it meanwhile: some models keep a tower's weights there."""
    yield folder
    yield from subfolders


def _is_weight(name: str) -> bool:
    return Path(name).suffix.lower() in _WEIGHT_SUFFIXES


def _is_text(name: str) -> bool:
    lower = name.lower()
    return Path(lower).suffix in _TEXT_SUFFIXES and not lower.startswith(_TEXT_WITHOUT_EFFECT)


def _add_file(digest: _Digest, name: str, path: Path) -> None:
    """Hash one file. Raises OSError or ValueError when it cannot be."""
    # Non-blocking, so that a pipe named like a weight file cannot hang the engine.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a file")
        size = status.st_size
        weight = _is_weight(name)
        # A touched configuration is the same one: all of its bytes are hashed.
        facts = [name, size, status.st_mtime_ns if weight else 0]
        digest.update(json.dumps(facts).encode())
        if not weight:
            if size > _MAX_TEXT_NBYTES:
                raise ValueError(f"{path} is too large for a configuration")
            digest.update(_read(fd, (0, size)))
            return
        if path.suffix.lower() != ".safetensors":
            _add_spans(digest, fd, _pieces_of_file(size))
            return
        header, tensors = _read_header(fd, size)
        digest.update(header)
        _add_spans(digest, fd, (piece for tensor in tensors for piece in _pieces(tensor)))
    finally:
        os.close(fd)


def _add_spans(digest: _Digest, fd: int, spans: Iterator[Span]) -> None:
    """Hash scattered bytes, asking the device for many of them before waiting for the first."""
    # The kernel's readahead would fetch 32 pages around every piece.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    while batch := list(islice(spans, _PIECES_AT_ONCE)):
        for start, stop in batch:
            os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_WILLNEED)
        for span in batch:
            digest.update(_read(fd, span))


def _read(fd: int, span: Span) -> bytes:
    start, stop = span
    data = os.pread(fd, stop - start, start)
    if len(data) != stop - start:
        raise ValueError("the file became shorter while it was read")
    return data


def _pieces(tensor: Span) -> Iterator[Span]:
    """`SAMPLE_NBYTES` of a tensor in small pieces spread over it, or all of a smaller one."""
    start, stop = tensor
    room = stop - start - _PIECE_NBYTES + 1
    if stop - start <= SAMPLE_NBYTES:
        if stop > start:
            yield tensor
        return
    step = int(room * _GOLDEN_RATIO) | 1
    for index in range(SAMPLE_NBYTES // _PIECE_NBYTES):
        place = start + index * step % room
        yield place, place + _PIECE_NBYTES


def _pieces_of_file(size: int) -> Iterator[Span]:
    """`SAMPLE_NBYTES` of every `_STRIDE_NBYTES` of a file, at varying places in the stride."""
    for index, stride in enumerate(range(0, size, _STRIDE_NBYTES)):
        length = min(_STRIDE_NBYTES, size - stride)
        nbytes = min(SAMPLE_NBYTES, length)
        room = length - nbytes + 1
        place = stride + index * (int(room * _GOLDEN_RATIO) | 1) % room
        yield place, place + nbytes


def _read_header(fd: int, size: int) -> tuple[bytes, list[Span]]:
    """A safetensors header as it lies in the file, and where the tensors lie, in file order.

    Raises ValueError unless header and tensors fill the file exactly, as the format demands.
    """
    length = int.from_bytes(_read(fd, (0, 8)), "little")
    if not 2 <= length <= min(MAX_HEADER_NBYTES, size - 8):
        raise ValueError(f"a safetensors header of {length} bytes in a file of {size}")
    header = _read(fd, (8, 8 + length))
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("the safetensors header is nested without end") from error
    if not isinstance(entries, dict):
        raise ValueError("the safetensors header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the safetensors metadata is not a map of strings")
    spans = sorted(_tensor_span(entry) for entry in entries.values())
    bounds = [(0, 0), *spans, (size - 8 - length, size - 8 - length)]
    if any(stop != start for (_, stop), (start, _) in pairwise(bounds)):
        raise ValueError("the tensors of a safetensors file overlap or leave gaps")
    first = 8 + length
    return header, [(first + start, first + stop) for start, stop in spans]


def _tensor_span(entry: object) -> Span:
    """Where a tensor lies behind the header. Raises ValueError for a malformed entry."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError("a tensor's dtype, shape or data_offsets have the wrong type")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError("a tensor's data_offsets are no range")
    start, stop = offsets
    # A dtype newer than this table is taken as it is: its range still has to fit the file.
    if dtype in _DTYPE_BITS and math.prod(shape) * _DTYPE_BITS[dtype] != 8 * (stop - start):
        raise ValueError("a tensor's shape does not fill its range")
    return start, stop


def _are_sizes(value: object) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice in the safetensors header")
    return fields
