"""Readers: each takes a file, says whether it knows it, and yields what it tells.

A new one is a file here and a line in `READERS`. A reader never fails on what it cannot make sense
of: it says what it skipped and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.doctor.readers.base import Document, Reader, Report, read_all
from headstart.doctor.readers.bench import BenchReader
from headstart.doctor.readers.decisions import DecisionsReader
from headstart.doctor.readers.files import open_all
from headstart.doctor.readers.logs import LogsReader
from headstart.doctor.readers.observations import ObservationsReader
from headstart.doctor.readers.prometheus import PrometheusReader

__all__ = ["READERS", "Document", "Reader", "Report", "load"]

READERS: tuple[Reader, ...] = (
    ObservationsReader(),
    DecisionsReader(),
    BenchReader(),
    PrometheusReader(),
    LogsReader(),
)
"""The first that knows a file reads it; of two facts on one thing, the earlier reader's counts."""


def load(sources: Sequence[Path | Document], readers: Sequence[Reader] = READERS) -> Report:
    """The facts of files, folders, archives and what was read already.

    Raises ConfigError for a file that cannot be opened, and for one written for the doctor that is
    wrong; not for what lies in a folder or an archive.
    """
    skipped: list[str] = []
    documents: list[Document] = []
    for source in sources:
        documents += [source] if isinstance(source, Document) else open_all([source], skipped)
    report = read_all(documents, readers)
    return Report(facts=report.facts, skipped=(*skipped, *report.skipped))
