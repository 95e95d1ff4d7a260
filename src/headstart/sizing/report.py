"""The page of a plan: self-contained HTML with plots, every answer and every formula."""

from __future__ import annotations

from html import escape

from headstart.page import html_keys, html_page, html_table
from headstart.sizing.plan import Plan
from headstart.sizing.plots import (
    COMPUTE,
    COMPUTE_DASH,
    LOAD,
    MEMORY,
    MEMORY_DASH,
    break_even_svg,
    flips_svg,
    times_svg,
)


def page(plan: Plan) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    by_key = {answer.key: answer for answer in plan.answers}
    machine = plan.machine
    title = f"{plan.model.name}: what storage must deliver"
    even, have = by_key["break_even_bytes_per_s"], by_key["read_bytes_per_s"]
    wins = have.value / machine.num_engines > even.value
    verdict = "beats" if wins else "does not beat"
    times_keys = [
        ("computed", COMPUTE, COMPUTE_DASH),
        ("read from the storage, alone", LOAD, ""),
        ("from host memory", MEMORY, MEMORY_DASH),
    ]
    even_keys = [("needed", COMPUTE, COMPUTE_DASH), ("there is, for each engine", LOAD, "")]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(machine.gpu.name)}: {machine.num_gpus} an engine, '
        f"engines on this storage: {machine.num_engines}.</p>",
        f"<p>A hit of a mean prompt needs {even.shown}; the storage gives {have.shown}: it "
        f'<span class="{"good" if wins else "bad"}">{verdict}</span> recomputing.</p>',
        "<h2>To the first token</h2>",
        html_keys(times_keys),
        times_svg(plan),
        "<h2>Break-even bandwidth</h2>",
        html_keys(even_keys),
        break_even_svg(plan),
        "<h2>Where the answer flips</h2>",
        "<p>The last of so many prompts that come at once, all held: its load behind the others, "
        "over computing it on an idle GPU. On the line both take the same.</p>",
        flips_svg(plan),
        html_table(
            ["tokens", "loading wins up to so many at once"],
            [[f"{tokens:,}", f"{count:,}"] for tokens, count in plan.flips],
            numbers=[0, 1],
        ),
        "<h2>Answers</h2>",
        html_table(
            ["", "", "formula"],
            [[each.title, each.shown, each.formula] for each in plan.answers],
            numbers=[1],
        ),
        "<h2>Sources</h2>",
        "<ul>" + "".join(f"<li>{escape(each)}</li>" for each in plan.sources) + "</ul>",
    ]
    return html_page(title, parts)
