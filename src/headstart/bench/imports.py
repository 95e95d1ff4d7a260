"""Runs that were written by this project or by other load generators.

    headstart bench serve                                JSON, schema headstart.bench.serve/1
    headstart bench rate                                 JSON, schema headstart.bench.rate/1
    vllm bench serve --save-result --save-detailed       JSON
    sglang.bench_serving --output-file --output-details  JSON lines, one a run
    guidellm, output of kind json                        JSON, a list of runs
    aiperf profile --export-level records                JSON lines, one a request

What only tells averages cannot be compared, and is refused with the option that tells more.

The first may hold the runs of several arms and phases: `file.json#arm` chooses an arm's and
`file.json#arm/phase` those of one phase.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headstart.bench import import_aiperf, import_guidellm
from headstart.bench.phases import Phase
from headstart.bench.rate import SCHEMA as RATE_SCHEMA
from headstart.bench.run import SCHEMA, Request, Run, check
from headstart.errors import ConfigError

_MAX_ERROR = 200


def read_runs(path: Path) -> list[Run]:
    """The runs in a file, in its order. Raises ConfigError.

    One, but for JSON lines and for the campaigns of `bench serve`, of which the path may choose:
    see the module. An arm without a phase is its `steady` one, if it has several.
    """
    file, selector = path, ""
    try:
        is_chosen_from = "#" in str(path) and not path.exists()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if is_chosen_from:
        name, _, selector = str(path).rpartition("#")
        file = Path(name)
    runs = _runs_of(_documents(_text(file), file), file)
    return [check(run, path) for run in (_chosen(runs, selector, path) if selector else runs)]


def parse_runs(text: str, path: Path) -> list[Run]:
    """The runs in a text that was read from `path`, which messages name. Raises ConfigError."""
    return [check(run, path) for run in _runs_of(_documents(text, path), path)]


def read_partners(path: Path) -> list[Run]:
    """The same, where they can be partners of other runs: of one arm in one phase."""
    runs = read_runs(path)
    if len(kinds := {(run.arm, run.phase) for run in runs}) > 1:
        raise ConfigError(
            f"{path} has runs of several arms or phases: choose one, such as "
            f"{path}#{_kind(*sorted(kinds)[0])}; there are: {_kinds(runs)}"
        )
    return runs


def _chosen(runs: list[Run], selector: str, path: Path) -> list[Run]:
    arm, _, phase = selector.partition("/")
    found = [run for run in runs if run.arm == arm and phase in ("", run.phase)]
    if not found:
        raise ConfigError(f"{path}: there is no {selector!r}; there are: {_kinds(runs)}")
    if len({run.phase for run in found}) == 1:
        return found
    steady = [run for run in found if run.phase == Phase.STEADY]
    if not steady:
        raise ConfigError(f"{path}: name one of its phases; there are: {_kinds(found)}")
    return steady


def _kinds(runs: list[Run]) -> str:
    return ", ".join(dict.fromkeys(_kind(run.arm, run.phase) for run in runs))


def _kind(arm: str, phase: str) -> str:
    return f"{arm}/{phase}" if phase else arm or "(no arm)"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _documents(text: str, path: Path) -> list[Any]:
    """What is in a file, one object but for JSON lines."""
    try:
        return [json.loads(text)]
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply for a run") from error
    except ValueError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise ConfigError(f"{path} is not JSON, or cut short: {whole}") from whole
        documents = []
        for number, line in enumerate(lines, start=1):
            try:
                documents.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}, is not JSON: {error}") from error
    return documents


def _runs_of(documents: list[Any], path: Path) -> list[Run]:
    if all(map(import_aiperf.is_record, documents)):
        return [import_aiperf.run(documents, path)]
    return [run for document in documents for run in _runs(document, path)]


def _runs(document: Any, path: Path) -> list[Run]:
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a run is a JSON object, not a {type(document).__name__}")
    if document.get("schema") == RATE_SCHEMA:
        return _trials(document, path)
    if "schema" in document:
        return _own_runs(document, path)
    if "ttfts" in document:
        return [_arrays(document, path)]
    if import_guidellm.is_report(document):
        return import_guidellm.runs(document, path)
    import_aiperf.refuse(document, path)
    if "median_ttft_ms" in document:
        option = "--output-details" if "accept_length" in document else "--save-detailed"
        raise ConfigError(
            f"{path} has averages only; let the load generator write every request: {option}"
        )
    known = ", ".join(sorted(document)[:8])
    raise ConfigError(
        f"{path} is of no known tool (its keys: {known}); known: headstart bench serve, "
        "vllm bench serve --save-detailed, sglang.bench_serving --output-details, guidellm's JSON, "
        "aiperf's profile_export.jsonl"
    )


def _own_runs(document: Mapping[str, Any], path: Path) -> list[Run]:
    """The runs of a campaign, or the one that a document is."""
    if document["schema"] != SCHEMA or "runs" not in document:
        return [_own(document, path)]
    if not isinstance(document["runs"], list):
        raise ConfigError(f"{path}: runs is no list")
    if not document["runs"]:
        raise ConfigError(f"{path}: no run was made")
    return [run for each in document["runs"] for run in _runs(each, path)]


def _trials(document: Mapping[str, Any], path: Path) -> list[Run]:
    """The runs of a rate search in which anything was answered."""
    runs = document.get("runs")
    if not isinstance(runs, list) or not all(isinstance(each, dict) for each in runs):
        raise ConfigError(f"{path}: runs is missing, or no list of runs")
    found = [run for each in runs if (run := _own(each, path)).good]
    if not found:
        raise ConfigError(f"{path}: no request of any trial was answered")
    return found


def _own(document: Mapping[str, Any], path: Path) -> Run:
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"{path} has the schema {document.get('schema')!r}, not {SCHEMA!r}")
    try:
        return msgspec.convert(document, Run)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def _arrays(document: Mapping[str, Any], path: Path) -> Run:
    """vLLM's and SGLang's: an array for each of a request's fields."""
    is_vllm = "endpoint_type" in document
    arrays: dict[str, list[Any]] = {}
    for name in ("ttfts", "itls", "input_lens", "output_lens", "errors"):
        value = document.get(name)
        if not isinstance(value, list):
            raise ConfigError(f"{path}: {name} is missing, or no list")
        arrays[name] = value
    count = len(arrays["ttfts"])
    if any(len(value) != count for value in arrays.values()):
        lengths = {name: len(value) for name, value in arrays.items()}
        raise ConfigError(f"{path}: its lists have different lengths: {lengths}")
    texts = document.get("generated_texts")
    if not isinstance(texts, list) or len(texts) != count:
        texts = [None] * count
    duration = document.get("duration")
    if not isinstance(duration, int | float) or isinstance(duration, bool):
        raise ConfigError(f"{path}: duration is missing, or no number")
    try:
        requests = tuple(
            _request(number, *fields)
            for number, fields in enumerate(zip(*arrays.values(), texts, strict=True))
        )
        pace = {
            # SGLang writes the number, vLLM the word.
            name: None if document.get(key) in (None, "inf", math.inf) else float(document[key])
            for name, key in (("rate", "request_rate"), ("concurrency", "max_concurrency"))
        }
        duration_s = float(duration)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: a request cannot be read: {error}") from error
    return Run(
        tool="vllm" if is_vllm else "sglang",
        duration_s=duration_s,
        requests=requests,
        pace=pace if "request_rate" in document or "max_concurrency" in document else None,
    )


def _request(
    number: int, ttft: Any, itls: Any, prompt: Any, output: Any, error: Any, text: Any
) -> Request:
    failed = str(error)[:_MAX_ERROR] if error else None
    if failed is None and not ttft:
        failed = "no token came"
    gaps = None if failed else tuple(map(float, itls))
    return Request(
        session=str(number),
        prompt_tokens=int(prompt),
        output_tokens=int(output),
        ttft_s=None if failed else float(ttft),
        latency_s=None if gaps is None else float(ttft) + sum(gaps),
        output=None if text is None else str(text),
        error=failed,
        itl_s=gaps,
    )
