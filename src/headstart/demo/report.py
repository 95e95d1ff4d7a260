"""The demo's report: one HTML page that needs nothing but itself."""

from __future__ import annotations

from headstart.demo.plots import (
    TITLES,
    first_token_svg,
    questions_svg,
    steps_svg,
    tokens_svg,
    write_plot,
)
from headstart.demo.results import DemoResult, Phase
from headstart.page import html_page, html_table
from headstart.units import format_nbytes, format_seconds

__all__ = ["phase_rows", "report_html", "write_plot"]

PHASE_COLUMNS = (
    "phase",
    "first token",
    "faster",
    "tokens loaded",
    "tokens computed",
    "bytes loaded",
    "load",
    "GB/s",
    "answers",
)


def report_html(result: DemoResult) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    return html_page(
        "Headstart demo",
        [
            _headline(result),
            "<h2>First token of question 1</h2>",
            first_token_svg(result),
            _phase_table(result),
            "<h2>First token of every answer</h2>",
            '<p class="soft">Q1 to Q6 share the document; C1 to C4 are the turns of a chat, whose '
            "later turns find the blocks of earlier answers. Logarithmic scale.</p>",
            questions_svg(result),
            "<h2>Where the tokens of each prompt came from</h2>",
            tokens_svg(result),
            "<h2>What is left of the first token's time</h2>",
            steps_svg(result),
            "<h2>Bytes from the device</h2>",
            _device(result),
            "<h2>Answers</h2>",
            _answers(result),
            "<h2>Measured on</h2>",
            _facts(result),
        ],
    )


def phase_rows(result: DemoResult) -> list[tuple[str, ...]]:
    """One row a phase, as text for people, in the order of `PHASE_COLUMNS`."""
    slowest = result.phase("recompute").first.ttft_s
    return [_phase_row(phase, slowest) for phase in result.phases]


def _phase_row(phase: Phase, slowest_s: float) -> tuple[str, ...]:
    first = phase.first
    bandwidth = phase.load_bytes_per_s
    same = len(phase.answers) - len(phase.differences)
    return (
        TITLES[phase.name],
        format_seconds(first.ttft_s),
        f"{slowest_s / first.ttft_s:.3g}x",
        f"{first.hit_tokens:,}",
        f"{first.prompt_tokens - first.hit_tokens:,}",
        format_nbytes(first.loaded_nbytes) if first.loaded_nbytes else "-",
        format_seconds(first.load_s) if first.loaded_nbytes else "-",
        f"{bandwidth / 1e9:.2f}" if bandwidth else "-",
        f"{same} of {len(phase.answers)} identical",
    )


def _headline(result: DemoResult) -> str:
    before, after = (result.phase(name).first for name in ("recompute", "restart"))
    verdict = (
        '<span class="good">Every answer is identical.</span>'
        if result.identical
        else '<span class="bad">Answers differ; see below.</span>'
    )
    return (
        f"<h1>A new process answers {result.speedup_restart:.0f} times sooner</h1>"
        f"<p>A prompt of {before.prompt_tokens:,} tokens, first token after "
        f"{format_seconds(after.ttft_s)} instead of {format_seconds(before.ttft_s)}: "
        f"{after.hit_tokens:,} tokens were loaded from disk, "
        f"{after.prompt_tokens - after.hit_tokens} computed. {verdict}</p>"
    )


def _phase_table(result: DemoResult) -> str:
    return html_table(PHASE_COLUMNS, phase_rows(result), numbers=range(1, 8))


def _device(result: DemoResult) -> str:
    restart = result.phase("restart")
    if restart.device is None or restart.device.process_nbytes is None:
        return "<p>This system does not count the bytes that a process reads.</p>"
    verdict = "verified" if result.device_verified else "NOT verified: the page cache served some"
    device = restart.device.device_nbytes
    whole = f"; the device itself counted {format_nbytes(device)}" if device is not None else ""
    return (
        f"<p>The page cache was emptied before the new process read. Question 1 loaded "
        f"{format_nbytes(restart.first.loaded_nbytes)}; the kernel counted "
        f"{format_nbytes(restart.device.process_nbytes)} read from the device for this process"
        f"{whole}: <b>{verdict}</b>.</p>"
    )


def _answers(result: DemoResult) -> str:
    rows = []
    for index, answer in enumerate(result.phases[0].answers):
        others = [phase.answers[index] for phase in result.phases if index in phase.differences]
        texts = [answer.text, *(f"differs: {other.text}" for other in others)]
        same = "differs" if others else "identical"
        rows.append((answer.question, " / ".join(texts), same))
    return (
        '<p class="soft">The model is small, and its answers are often wrong. What counts here is '
        "that they are the same with the cache as without it.</p>"
        + html_table(("question", "answer", "in all phases"), rows, numbers=())
    )


def _facts(result: DemoResult) -> str:
    facts = {
        "Model": f"{result.model}, {result.dtype}",
        "Block": f"{result.block_size} tokens, {format_nbytes(result.block_nbytes)}",
        **result.machine,
        "Whole demo": format_seconds(result.seconds),
    }
    return html_table(("fact", "value"), list(facts.items()), numbers=())
