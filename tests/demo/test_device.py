"""Counters of bytes that came from the device."""

from __future__ import annotations

import os
import socket

from headstart.demo.device import device_reads, difference, drop_page_cache, machine_facts
from headstart.demo.results import DeviceReads


def test_a_difference_needs_both_readings():
    before = DeviceReads(process_nbytes=10, device_nbytes=None)
    after = DeviceReads(process_nbytes=25, device_nbytes=7)
    assert difference(before, after) == DeviceReads(process_nbytes=15, device_nbytes=None)


def test_dropping_the_cache_keeps_the_files(tmp_path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "data"
    path.write_bytes(os.urandom(1 << 16))
    data = path.read_bytes()
    drop_page_cache(tmp_path)
    assert path.read_bytes() == data


def test_reads_after_dropping_the_cache_are_counted(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 << 20))
    drop_page_cache(tmp_path)
    before = device_reads(tmp_path)
    path.read_bytes()
    counted = difference(before, device_reads(tmp_path)).process_nbytes
    # Not every file system has a device behind it that counts.
    assert counted is None or counted >= 0


def test_facts_name_no_host_and_no_place(tmp_path):
    facts = machine_facts(tmp_path)
    assert {"Processor", "Memory", "File system", "System", "Python"} <= set(facts)
    text = " ".join(facts.values())
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text
