import json
import os
import random

import pytest

from headstart.engines.vllm.weights import (
    MAX_HEADER_NBYTES,
    SAMPLE_NBYTES,
    adapter_fingerprint,
    weights_fingerprint,
)


def safetensors(tensors, *, metadata=None):
    """The bytes of a safetensors file; `tensors` maps a name to its bytes."""
    header, offset = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, data in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, end]}
        offset = end
    return with_header(json.dumps(header).encode(), b"".join(tensors.values()))


def with_header(header, data=b""):
    return len(header).to_bytes(8, "little") + header + data


def noise(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


def rewrite(path, data):
    """Change a file's bytes and keep its time, as the sneakiest update would."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


TENSORS = {"large": noise(200_000, 1), "small": noise(100, 2), "empty": b"", "last": noise(5000, 3)}


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(safetensors(TENSORS))
    (model / "config.json").write_text('{"rms_norm_eps": 1e-6}')
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("about")
    return model


def test_is_stable_and_does_not_depend_on_the_folder(folder, tmp_path):
    before = weights_fingerprint(folder)
    assert len(bytes.fromhex(before)) == 32
    assert weights_fingerprint(folder) == before
    assert weights_fingerprint(folder.rename(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize("name", TENSORS.keys() - {"empty"})
def test_an_update_in_place_is_seen_in_every_tensor(folder, name):
    before = weights_fingerprint(folder)
    tuned = bytes(value ^ 1 for value in TENSORS[name])
    rewrite(folder / "model.safetensors", safetensors({**TENSORS, name: tuned}))
    assert weights_fingerprint(folder) != before


def test_one_changed_byte_of_a_small_tensor_is_seen(folder):
    before = weights_fingerprint(folder)
    for place in (0, 50, 99):
        small = bytearray(TENSORS["small"])
        small[place] ^= 1
        rewrite(folder / "model.safetensors", safetensors({**TENSORS, "small": bytes(small)}))
        assert weights_fingerprint(folder) != before


def test_the_sample_spreads_over_a_tensor(folder):
    before = weights_fingerprint(folder)
    large, seen = TENSORS["large"], 0
    for place in range(0, len(large), 10_000):
        piece = bytes(10_000)
        changed = large[:place] + piece + large[place + 10_000 :]
        rewrite(folder / "model.safetensors", safetensors({**TENSORS, "large": changed}))
        seen += weights_fingerprint(folder) != before
    assert seen >= 7  # of 20 ranges, by 8 pieces


def test_header_size_and_time_count(folder):
    path = folder / "model.safetensors"
    seen = {weights_fingerprint(folder)}
    rewrite(path, safetensors(TENSORS, metadata={"step": "7"}))
    seen.add(weights_fingerprint(folder))
    os.utime(path, ns=(0, 1))
    seen.add(weights_fingerprint(folder))
    path.rename(folder / "other.safetensors")
    seen.add(weights_fingerprint(folder))
    assert len(seen) == 4


def test_configurations_and_code_count_and_tokenizers_do_not(folder):
    before = weights_fingerprint(folder)
    os.utime(folder / "config.json", ns=(0, 1))
    (folder / "tokenizer.json").write_text('{"changed": 1}')
    (folder / "generation_config.json").write_text("{}")
    (folder / "README.md").write_text("more")
    assert weights_fingerprint(folder) == before
    rewrite(folder / "config.json", b'{"rms_norm_eps": 1e-5}')
    changed = weights_fingerprint(folder)
    (folder / "modeling_tiny.py").write_text("pass")
    assert len({before, changed, weights_fingerprint(folder)}) == 3


def test_subfolders_count_one_level_deep(folder):
    (folder / "tower" / "deeper").mkdir(parents=True)
    before = weights_fingerprint(folder)
    (folder / "tower" / "deeper" / "a.bin").write_bytes(b"x")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.bin").write_bytes(b"x")
    assert weights_fingerprint(folder) == before
    (folder / "tower" / "a.bin").write_bytes(b"x")
    assert weights_fingerprint(folder) != before


def test_a_folder_of_links_is_the_files_it_links_to(folder, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = weights_fingerprint(snapshot)
    assert before == weights_fingerprint(folder)
    rewrite(folder / "model.safetensors", safetensors({**TENSORS, "small": noise(100, 9)}))
    assert weights_fingerprint(snapshot) != before


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".gguf"])
def test_other_formats_are_sampled_all_over(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    data = bytearray(noise(5 << 20))
    path.write_bytes(data)
    before = weights_fingerprint(tmp_path)
    for start in range(0, len(data), 1 << 20):
        changed = bytearray(data)
        changed[start : start + (1 << 20)] = bytes(1 << 20)
        rewrite(path, changed)
        assert weights_fingerprint(tmp_path) != before
    rewrite(path, data)
    assert weights_fingerprint(tmp_path) == before


def test_a_single_file_is_a_source(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(noise(3000))
    before = weights_fingerprint(path)
    rewrite(path, noise(3000, 5))
    after = weights_fingerprint(path)
    assert None not in (before, after)
    assert before != after


def test_an_adapter_is_known_by_its_weights_and_settings(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_fingerprint(tmp_path) is None
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": noise(64)}))
    before = adapter_fingerprint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 9}')
    after = adapter_fingerprint(tmp_path)
    assert None not in (before, after)
    assert before != after


def tensor(*, dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DAMAGED = {
    "a pointer instead of the file": b"version https://git-lfs.github.com/spec/v1\n",
    "too short": b"\x02\0\0",
    "no JSON": with_header(b"{]"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "no object": with_header(b"[]"),
    "nested without end": with_header(b"[" * 100_000),
    "header beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "header beyond the limit": (MAX_HEADER_NBYTES + 1).to_bytes(8, "little") + b"{}",
    "a name twice": with_header(b'{"a": %b, "a": %b}' % ((json.dumps(tensor()).encode(),) * 2)),
    "metadata of numbers": with_header(json.dumps({"__metadata__": {"a": 1}}).encode()),
    "no entry": with_header(json.dumps({"a": 1}).encode()),
    "missing fields": with_header(json.dumps({"a": {"dtype": "U8"}}).encode()),
    "backwards": with_header(json.dumps({"a": tensor(offsets=(4, 0))}).encode(), bytes(4)),
    "truncated": with_header(json.dumps({"a": tensor()}).encode(), bytes(3)),
    "bytes behind the last": with_header(json.dumps({"a": tensor()}).encode(), bytes(5)),
    "a gap": with_header(json.dumps({"a": tensor(offsets=(1, 5))}).encode(), bytes(5)),
    "an overlap": with_header(
        json.dumps({"a": tensor(), "b": tensor(offsets=(2, 6))}).encode(), bytes(6)
    ),
    "a wrong shape": with_header(json.dumps({"a": tensor(shape=(2, 3))}).encode(), bytes(4)),
    "a wrong type": with_header(json.dumps({"a": tensor(dtype="F32")}).encode(), bytes(4)),
    "a size that is a truth": with_header(
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', bytes(1)
    ),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_a_damaged_file_is_an_unknown_source(folder, reason):
    (folder / "model.safetensors").write_bytes(DAMAGED[reason])
    assert weights_fingerprint(folder) is None


@pytest.mark.parametrize("shape", [(), (0, 7), (2, 2)])
def test_every_shape_of_the_format_is_read(folder, shape):
    size = {(): 1, (0, 7): 0, (2, 2): 4}[shape]
    header = json.dumps({"a": tensor(shape=shape, offsets=(0, size))}).encode()
    (folder / "model.safetensors").write_bytes(with_header(header, bytes(size)))
    assert weights_fingerprint(folder) is not None


def test_a_type_that_is_not_known_yet_is_read(folder):
    header = json.dumps({"a": tensor(dtype="F3", shape=(8,), offsets=(0, 3))}).encode()
    (folder / "model.safetensors").write_bytes(with_header(header, bytes(3)))
    assert weights_fingerprint(folder) is not None


def test_what_is_not_there_or_not_weights_is_unknown(folder, tmp_path):
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for path in ("missing", "text.txt", "empty", "odd\0name"):
        assert weights_fingerprint(tmp_path / path) is None
    (folder / "more.safetensors").symlink_to(folder / "gone")
    assert weights_fingerprint(folder) is None


def test_a_pipe_does_not_hang(folder):
    os.mkfifo(folder / "pipe.bin")
    assert weights_fingerprint(folder) is None


def test_reads_a_few_kilobytes_of_a_tensor(folder, monkeypatch):
    """Ten gigabytes in 300 tensors must cost what 300 small ones do."""
    header = {
        f"layer{i}": tensor(shape=(32 << 20,), offsets=(i * (32 << 20), (i + 1) * (32 << 20)))
        for i in range(300)
    }
    path = folder / "model.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(with_header(text))
    os.truncate(path, 8 + len(text) + 300 * (32 << 20))
    nbytes = []
    pread = os.pread

    def counted(fd, length, offset):
        nbytes.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert weights_fingerprint(folder) is not None
    assert sum(nbytes) <= 300 * SAMPLE_NBYTES + len(text) + 1000
