"""Writes docs/doctor-observations.md and the made parts of docs/doctor.md from code and cases.

    python scripts/doctor_docs.py

tests/doctor/test_docs.py fails when a page is not what this writes.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Fact, Known
from headstart.doctor.findings import Cause, Diagnosis
from headstart.doctor.quantities import SHARE
from headstart.doctor.readers import READERS, load
from headstart.doctor.rules import RULES
from headstart.doctor.vocabulary import LISTS, TOP, TOPICS, Arm, Engine, Observations, unit_of

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "doctor" / "cases"
HELD_OUT = ROOT / "tests" / "doctor" / "held_out"
BLIND = ROOT / "tests" / "doctor" / "blind"
KEYS_PAGE = ROOT / "docs" / "doctor-observations.md"
PAGE = ROOT / "docs" / "doctor.md"
NUM_DRAWS = 20
JITTER = 0.2
NEAR = 1.5

_EXAMPLES = {
    Cause.BANDWIDTH_CONTENTION: "cxl_loads_one_after_another",
    Cause.NO_ROOM: "recompute_tax_online",
    Cause.LOOKUP_CPU: "images_encoded_to_be_hashed",
    Cause.LOCK_CONTENTION: "backlog_does_not_drain",
    Cause.SEMANTIC_CACHE: "tested_at_95_lives_at_34",
    Cause.SLOW_TIER: "degraded_storage",
    Cause.BLOCK_SIZE: "shared_prefix_below_block",
    Cause.EVICTION_THRASH: "documents_in_turn",
    Cause.SERIALIZATION: "safetensors_in_the_put_path",
    Cause.IO_PARALLELISM: "raid_at_depth_one",
    Cause.COLD_START: "index_gone_after_restart",
    Cause.CORRECTNESS: "hit_path_answers_wrong",
    Cause.CONFIGURATION: "timestamp_in_system_prompt",
    Cause.MEASUREMENT: "counter_not_wired",
    Cause.ROUTING: "ready_but_not_noticed",
    Cause.NO_FAULT: "plainly_better",
    Cause.CANNOT_SAY: "inside_the_noise",
}


_INTRODUCTION = """
A TOML file of what you measured, on any engine. Nothing is mandatory but the names of arms and
tiers, and an arm's `cache`; what is not told is not assumed. Keys at the top hold for all arms; an
arm may say it otherwise. A misspelt key is refused, with the nearest valid name.

Numbers are in the unit of the table, or text with a unit: `0.25` or `"250 ms"`, `"145 kB"` or
`"1.5 GiB"`, `"1.25 GB/s"` or `"200 Gbit/s"`, `0.665` or `"66.5 %"`, `70000000000` or `"70 G"`,
`9000` or `"9 k tok/s"`. Decimal and binary units are told apart. Of two files on the same thing
the first counts. Tiers are of all arms: runs with one tier, then with another, are two files.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An observations file with the cause that is expected, from its first lines."""

    name: str
    expected: Cause
    is_made: bool
    is_assumed: bool
    """Whether a figure was put in that the report does not have."""
    first: str
    """Of blind cases: the verdict when it first ran; empty: of others."""
    facts: tuple[Fact, ...]

    @property
    def is_control(self) -> bool:
        """Whether nothing may be accused."""
        return self.expected in (Cause.NO_FAULT, Cause.CANNOT_SAY)


@cache
def cases(folder: Path = CASES) -> tuple[Case, ...]:
    """All cases of a folder, by name."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        told = dict(re.findall(r"^# (expected|from|first): (.*)$", text, re.MULTILINE))
        found.append(
            Case(
                name=path.stem,
                expected=Cause(told["expected"]),
                is_made=told["from"] == "made",
                is_assumed="assumed" in told["from"],
                first=told.get("first", ""),
                facts=load([path], READERS).facts,
            )
        )
    return tuple(found)


@cache
def judged(folder: Path = CASES) -> tuple[tuple[Case, Diagnosis], ...]:
    """Each case and what is said of it."""
    return tuple((case, diagnose(Known(case.facts))) for case in cases(folder))


def jittered(case: Case, seed: int) -> Known:
    """The case with every figure off by up to 20 %, the same figure by the same factor.

    Shares stay at most 1. A setting that two arms have in common stays common.
    """
    rng = random.Random(f"{case.name} {seed}")
    factors: dict[tuple[str, float], float] = {}

    def moved(fact: Fact, value: float) -> float:
        factor = factors.setdefault((fact.key, value), rng.uniform(1 - JITTER, 1 + JITTER))
        model = Observations if fact.scope == TOP else LISTS[fact.scope]
        most = 1.0 if unit_of(model, fact.key) is SHARE else float("inf")
        return min(most, value * factor)

    facts = []
    for fact in sorted(case.facts, key=lambda each: (each.scope, each.owner, each.key)):
        value = fact.value
        if isinstance(value, tuple):
            value = tuple(moved(fact, each) for each in value)
        elif not isinstance(value, bool | str):
            value = moved(fact, value)
        facts.append(replace(fact, value=value))
    return Known(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A verdict that another draw of the figures changed."""

    case: Case
    verdict: Cause
    margin: float
    """The smaller of the two first findings' margins: how near to a threshold it was."""


@cache
def changes(folder: Path = CASES) -> tuple[Change, ...]:
    """All of them, over `NUM_DRAWS` draws a case."""
    found = []
    for case, base in judged(folder):
        for seed in range(NUM_DRAWS):
            drawn = diagnose(jittered(case, seed))
            if drawn.verdict != base.verdict:
                margins = [each.findings[0].margin for each in (base, drawn) if each.findings]
                margin = min(margins, default=1.0)
                found.append(Change(case=case, verdict=drawn.verdict, margin=margin))
    return tuple(found)


def matrix(folder: Path) -> Iterator[str]:
    """The confusion matrix: expected causes down, first causes said across."""
    counts = Counter((case.expected, said.verdict) for case, said in judged(folder))
    across = [cause for cause in Cause if any(said == cause for _, said in counts)]
    yield "| expected | cases | right | said instead |"
    yield "|---|---|---|---|"
    for cause in Cause:
        total = sum(n for (expected, _), n in counts.items() if expected == cause)
        others = [
            f"`{said}` {counts[cause, said]}"
            for said in across
            if said != cause and counts[cause, said]
        ]
        if total:
            yield f"| `{cause}` | {total} | {counts[cause, cause]} | {', '.join(others)} |"
    right = sum(n for (expected, said), n in counts.items() if expected == said)
    yield f"| all | {counts.total()} | {right} | |"


def accuracy() -> Iterator[str]:
    """Sentences and tables on how often it is right."""
    found = judged(CASES)
    made = sum(case.is_made for case, _ in found)
    assumed = sum(case.is_assumed for case, _ in found)
    controls = [said for case, said in found if case.is_control]
    accused = sum(bool(said.findings) for said in controls)
    yield f"{len(found)} cases: {len(found) - made} from public reports ({assumed} of them with a"
    yield "figure that the report lacks, assumed and said so in the file),"
    yield f"{made} made. {len(controls)} controls, in which nothing may be accused: {accused} are."
    yield ""
    yield from matrix(CASES)
    yield ""
    right = sum(said.verdict == case.expected for case, said in judged(HELD_OUT))
    num_late = len(cases(HELD_OUT))
    yield f"Of {num_late} more, written after the rules but for five mechanisms that came"
    yield f"with them, {right} are right, as when they first ran. They are not independent."
    yield ""
    yield from _blind()
    yield ""
    num = NUM_DRAWS * len(found)
    moved = changes(CASES)
    far = [change for change in moved if change.margin >= NEAR]
    same = 1 - len(moved) / num
    yield f"With every figure off by up to {JITTER:.0%} at random, {NUM_DRAWS} draws a case, the"
    yield f"verdict stays in {same:.1%} of {num:,}. Of the {len(moved)} others, {len(far)} were"
    yield f"{NEAR} times or more beyond the threshold that decides, the rest nearer."


def _blind() -> Iterator[str]:
    """What came of cases that were written without sight of the rules."""
    found = judged(BLIND)
    controls = [(case, said) for case, said in found if case.is_control]
    causes = {str(cause) for cause in Cause} - {Cause.NO_FAULT, Cause.CANNOT_SAY}
    first = sum(case.first == case.expected for case, _ in found)
    accused = sum(case.first in causes for case, _ in controls)
    refused = sum(case.first == "refused" for case, _ in found)
    retold = sum(case.is_assumed for case, _ in found)
    yield f"Blind: {len(found)} cases made from this page and the keys alone, without sight of a"
    yield f"rule or a case, from what is known of the field and {retold} public reports."
    yield "The verdict was set from the mechanism before the doctor ran. What the failures"
    yield "showed to be wrong or missing is mended since, so that the second column is no"
    yield "longer blind:"
    yield ""
    yield "| | first run | now |"
    yield "|---|---|---|"
    right = sum(case.expected == said.verdict for case, said in found)
    yield f"| right first cause, of {len(found)} | {first} | {right} |"
    now = sum(bool(said.findings) for _, said in controls)
    yield f"| accused, of {len(controls)} healthy or undecidable | {accused} | {now} |"
    yield f"| refused for a unit | {refused} | 0 |"


def rules() -> Iterator[str]:
    """A row for each rule."""
    yield "| cause | rule | mechanism |"
    yield "|---|---|---|"
    for rule in sorted(RULES, key=lambda each: list(Cause).index(each.cause)):
        doc = sys.modules[rule.find.__module__].__doc__ or ""
        first = " ".join(doc.partition("\n\n")[0].split()).replace("|", "\\|")
        yield f"| `{rule.cause}` | `{rule.name}` | {first} |"


def keys_page() -> str:
    """docs/doctor-observations.md."""
    lines = [
        "# The doctor's observations file",
        "",
        "Made by `scripts/doctor_docs.py` from `headstart.doctor.vocabulary`: change it there.",
        "",
        *_INTRODUCTION.strip().splitlines(),
        "",
        "## At the top, or in an arm",
        "",
    ]
    for topic in TOPICS:
        title = (topic.__doc__ or "").rstrip(".")
        lines += [f"### {title}" + (" (at the top only)" if topic is Engine else ""), ""]
        lines += [*_table(topic), ""]
    lines += ["## Lists", ""]
    for name, model in LISTS.items():
        doc = (model.__doc__ or "").rstrip(".")
        lines += [f"### `[[{name}]]`: {doc[0].lower()}{doc[1:]}", ""]
        own = ("name", "cache") if model is Arm else None
        lines += [*_table(model, own), ""]
    lines += ["## An example of each cause", ""]
    for cause, name in _EXAMPLES.items():
        lines += [f"### {str(cause).replace('_', ' ')}", ""]
        text = (CASES / f"{name}.toml").read_text(encoding="utf-8")
        body = text.partition("\n\n")[2]
        lines += ["<!-- not run: an observations file, no settings -->", "```toml"]
        lines += [*body.strip().splitlines(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(model: type, only: tuple[str, ...] | None = None) -> Iterator[str]:
    yield "| key | unit | meaning |"
    yield "|---|---|---|"
    for key, field in model.model_fields.items():  # type: ignore[attr-defined]
        if only is not None and key not in only:
            continue
        unit = unit_of(model, key)
        many = ", a list" if "tuple" in str(field.annotation) else ""
        words = unit.name if unit else ", ".join(_words(field.annotation))
        yield f"| `{key}` | {words}{many} | {field.description or 'tells it apart'} |"


def _words(annotation: object) -> list[str]:
    return [f"`{word}`" for word in re.findall(r"'(\w+)'", str(annotation))]


def page(text: str) -> str:
    """docs/doctor.md with its made parts renewed."""
    parts: dict[str, Callable[[], Iterator[str]]] = {"rules": rules, "accuracy": accuracy}
    for name, lines in parts.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        made = "\n".join(lines())
        found = re.search(pattern, text, flags=re.DOTALL)
        if found is None:
            raise ValueError(f"{PAGE} must have a part {name!r}")
        text = f"{text[: found.end(1)]}{made}\n{text[found.start(2) :]}"
    return text


def main() -> int:
    """Write both pages."""
    KEYS_PAGE.write_text(keys_page(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
