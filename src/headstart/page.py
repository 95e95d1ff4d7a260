"""Pages of reports: HTML that needs nothing but itself, in light and dark, on screen and paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --page: #fff;
  --good: #1a7f52; --bad: #c62f2f; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af;
  --line: #3a424c; --page: #14171b; --good: #4cc38a; --bad: #ff7b72; } }
body { background: var(--page); color: var(--ink); margin: 0 auto; max-width: 52rem;
  padding: 2rem 1.2rem 4rem; font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .3rem; }
p { margin: .3rem 0 .8rem; }
.soft { color: var(--soft); }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
svg { display: block; width: 100%; height: auto; margin: .6rem 0; }
figure { margin: .6rem 0 1.2rem; } figure, tr { break-inside: avoid; }
caption, figcaption { color: var(--soft); font-size: .88rem; text-align: left; }
svg.key { display: inline; height: .8em; margin: 0 .3em 0 0; width: 1.8em; }
ul.keys { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; list-style: none; margin: .3rem 0;
  padding: 0; }
@media print { body { max-width: none; padding: 0; } .wide { overflow: visible; } }
svg text { font-family: system-ui, sans-serif; }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """The whole page; `parts` are HTML, one below the other."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def html_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int],
    caption: str = "",
) -> str:
    """A table of text, which is escaped. `numbers`: columns that are aligned right."""
    right = set(numbers)

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (
            f"<{tag}{' class=number' if column in right else ''}>{escape(cell)}</{tag.split()[0]}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    head = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="wide"><table>{head}<thead>{line("th scope=col", titles)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def html_keys(items: Iterable[tuple[str, str, str]]) -> str:
    """What the lines of a plot stand for: name, colour and dashes (of SVG, empty: none) of each."""
    rows = (
        '<li><svg class="key" viewBox="0 0 24 10" aria-hidden="true">'
        f'<path d="M0 5h24" stroke="{color}" stroke-width="4" stroke-dasharray="{dash}"/></svg>'
        f"{escape(name)}</li>"
        for name, color, dash in items
    )
    return f'<ul class="keys">{"".join(rows)}</ul>'
