"""Folders, archives and gzipped files as input; broken ones are told, never fatal."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest

from headstart.doctor.facts import Known
from headstart.doctor.readers import base, files, load
from headstart.errors import ConfigError

TIMES = 'ttft_p50 = "2 s"\n'
STAGES = 'lookup = "1.5 s"\n'


def archive(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for number, (name, content) in enumerate(members.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), 1000 - number
            tar.addfile(entry, io.BytesIO(content))
    return path


def told(*paths):
    report = load(paths)
    return Known(report.facts).top, report.skipped


def test_all_files_of_a_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "times.toml").write_text(TIMES)
    (tmp_path / "stages.toml.gz").write_bytes(gzip.compress(STAGES.encode()))
    (tmp_path / "empty").touch()
    (tmp_path / "notes.md").write_text("slow\n")
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    top, skipped = told(tmp_path)
    assert top.numbers("ttft", "lookup") == (2.0, 1.5)
    assert str(top.fact("ttft").source) == f"{tmp_path}/a/times.toml:1"
    assert len(skipped) == 1
    assert "notes.md: of no kind that is known" in skipped[0]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_all_files_of_an_archive(tmp_path, mode):
    path = archive(
        tmp_path / "bundle",
        {"x/times.toml": TIMES.encode(), "stages": gzip.compress(STAGES.encode())},
        mode,
    )
    top, skipped = told(path)
    assert top.numbers("ttft", "lookup") == (2.0, 1.5)
    assert str(top.fact("ttft").source) == f"{path}/x/times.toml:1"
    assert skipped == ()
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_large_members_are_read_from_the_archive(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(files, "_MEMBER_NBYTES", 10)
    members = {"t.toml": TIMES.encode(), "s.toml": gzip.compress(STAGES.encode())}
    top, skipped = told(archive(tmp_path / "bundle", members, mode))
    assert top.numbers("ttft", "lookup") == (2.0, 1.5)
    assert skipped == ()


def test_members_come_in_the_order_of_time(tmp_path):
    path = archive(tmp_path / "b.tar", {"new": b"1", "old": b"2"}, "w")
    assert [each.path for each in files.open_all([path], [])] == [f"{path}/old", f"{path}/new"]


def test_a_wrong_file_is_fatal_only_where_it_was_named(tmp_path):
    (tmp_path / "times.toml").write_text(TIMES)
    wrong = tmp_path / "engine.toml"
    wrong.write_text("[server]\nport = 1\n")
    top, skipped = told(tmp_path)
    assert top.number("ttft") == 2.0
    assert len(skipped) == 1
    assert "engine.toml" in skipped[0]
    with pytest.raises(ConfigError, match="is unknown"):
        load([wrong])


def test_what_is_broken_is_told_and_the_rest_is_read(tmp_path):
    times = archive(tmp_path / "cut.tar.gz", {"t.toml": TIMES.encode(), "b.log": os.urandom(9000)})
    times.write_bytes(times.read_bytes()[:5000])
    (tmp_path / "not.gz").write_bytes(b"\x1f\x8bnonsense")
    cut = gzip.compress(STAGES.encode() + os.urandom(9000))
    (tmp_path / "cut.toml.gz").write_bytes(cut[:4000])
    top, skipped = told(tmp_path)
    assert top.number("ttft") == 2.0
    text = "\n".join(skipped)
    assert "cut.tar.gz: broken after 1 files" in text
    assert "not.gz: broken after 0 bytes" in text
    assert "cut.toml.gz: broken after" in text


def test_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILES", 1)
    (tmp_path / "a.toml").write_text(TIMES)
    (tmp_path / "b.toml").write_text(STAGES)
    _, skipped = told(tmp_path)
    assert skipped == (f"{tmp_path}: 2 files; only the oldest 1 were read",)
    path = archive(tmp_path / "b.tar", {"a.toml": TIMES.encode(), "b.toml": STAGES.encode()}, "w")
    _, skipped = told(path)
    assert "only its first 1 files were read" in skipped[0]


def test_too_much(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text(TIMES + "#" * 100)
    monkeypatch.setattr(base, "MAX_NBYTES", 50)
    assert "is over" in told(tmp_path)[1][0]
    with pytest.raises(ConfigError, match="is over"):
        load([tmp_path / "a.toml"])
    monkeypatch.undo()
    monkeypatch.setattr(base, "MAX_STREAM_NBYTES", 50)
    assert "only the first" in told(tmp_path)[1][-1]


def test_a_mark_across_two_blocks(monkeypatch):
    monkeypatch.setattr(base, "_BLOCK_NBYTES", 4)
    document = base.Document(path="x", text="....needle....")
    assert document.has(b"needle")
    assert not document.has(b"other", b"nothing")


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load([tmp_path / "missing"])
    (tmp_path / "gone.toml").symlink_to(tmp_path / "missing")
    assert "gone.toml cannot be read" in told(tmp_path)[1][0]
