"""Readers: each takes a file, says whether it knows it, and yields what it tells.

A new one is a file here and a line in `READERS`. A reader never fails on what it cannot make sense
of: it says what it skipped and goes on.
"""

from __future__ import annotations

from headstart.doctor.readers.base import Document, Reader, Report, load
from headstart.doctor.readers.bench import BenchReader
from headstart.doctor.readers.decisions import DecisionsReader
from headstart.doctor.readers.observations import ObservationsReader
from headstart.doctor.readers.prometheus import PrometheusReader

__all__ = ["READERS", "Document", "Reader", "Report", "load"]

READERS: tuple[Reader, ...] = (
    ObservationsReader(),
    DecisionsReader(),
    BenchReader(),
    PrometheusReader(),
)
"""The first that knows a file reads it; of two facts on one thing, the earlier reader's counts."""
