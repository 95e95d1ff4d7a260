"""Logs of vLLM, SGLang and LMCache, mixed or not, of any size: read block by block.

All logs that are given are of one situation; for two arms, give their figures in an observations
file.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.doctor.facts import Fact
from headstart.doctor.readers.base import Document, Report
from headstart.doctor.readers.log_lmcache import LmcacheLog
from headstart.doctor.readers.log_sglang import SglangLog
from headstart.doctor.readers.log_vllm import VllmLog
from headstart.doctor.readers.loglines import Parser, scan

_SIGNS = (
    b"Avg prompt throughput: ", b"total_num_cumulative_preemption=", b"KV Transfer metrics: ",
    b"Prefill batch", b"Decode batch", b"ReqTimeStats(rid=", b"LMCache hit tokens: ",
    b"LMCache INFO", b"LMCache WARNING", b"LMCache ERROR",
)  # fmt: skip
"""What no other file has."""
_KNOWN_WITHIN = 64 << 20
"""An engine that writes more before its first request is not known, nor are weights read whole."""
_BINARY_LENGTH = 4096


class LogsReader:
    """See the module."""

    name = "logs of vLLM, SGLang and LMCache"
    is_live = True

    def knows(self, document: Document) -> bool:
        """See `Reader`."""
        is_binary = "\0" in document.head[:_BINARY_LENGTH]
        return not is_binary and document.has(*_SIGNS, within=_KNOWN_WITHIN)

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`."""
        parsers: tuple[Parser, ...] = (LmcacheLog(), SglangLog(), VllmLog())
        by_mark = {mark: parser for parser in parsers for mark in (*parser.marks, *parser.settings)}
        marks = [mark for parser in parsers for mark in parser.marks]
        settings = [mark for parser in parsers for mark in parser.settings]
        skipped: list[str] = []
        for document in documents:
            wrong, first = 0, 0
            for record in scan(document, marks, settings):
                if not by_mark[record.mark].take(record):
                    first = first or record.line
                    wrong += 1
            if wrong:
                skipped.append(
                    f"{document.path}:{first}: {wrong} lines of a form that is not known"
                )
        facts: list[Fact] = [fact for parser in parsers for fact in parser.facts()]
        return Report(facts=tuple(facts), skipped=tuple(skipped))
