"""Checks the documentation against the code. Exit code 1 when something does not hold.

- Every ```python block runs. The blocks of a page are one program, run from top to bottom in a
  folder of its own; `<!-- not run: REASON -->` on the line before a block leaves it out.
- Every ```toml block is a settings file that Headstart accepts, with the same way out.
- Every relative link leads to a file, and to a heading of it if it names one.
- Every public name of `headstart` and `headstart.testing` is mentioned in docs/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS_MAX = 300
PUBLIC_MODULES = ("headstart", "headstart.testing")

_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)[^`]*")
_NOT_RUN = re.compile(r"\s*<!--\s*not run:(?P<reason>.*)-->\s*")
_LINK = re.compile(r"\[[^\]]*\]\((?P<inline>[^)\s]+)[^)]*\)|(?:src|href)=\"(?P<html>[^\"]+)\"")
_HEADING = re.compile(r"#{1,6}\s+(?P<title>.*)")


class DocumentationError(Exception):
    """A page that cannot be checked; the message names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: `line` is the 1-based line of its first line of code."""

    language: str
    line: int
    code: str
    runs: bool


def pages(root: Path) -> list[Path]:
    """The Markdown files that readers get."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page. Raises DocumentationError when one is not closed."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        opening = _FENCE.fullmatch(lines[index])
        if opening is None:
            index += 1
            continue
        start = index + 1
        index = start
        while index < len(lines) and lines[index].strip() != opening["ticks"]:
            index += 1
        if index == len(lines):
            raise DocumentationError(f"{page}:{start}: the block is never closed")
        code = textwrap.dedent("\n".join(lines[start:index]) + "\n")
        runs = not _left_out(page, lines, start - 1)
        found.append(Block(language=opening["language"], line=start + 1, code=code, runs=runs))
        index += 1
    return found


def _left_out(page: Path, lines: list[str], fence: int) -> bool:
    match = _NOT_RUN.fullmatch(lines[fence - 1]) if fence else None
    if match and not match["reason"].strip():
        raise DocumentationError(f"{page}:{fence}: `not run:` needs a reason")
    return match is not None


def program(page: Path) -> str:
    """The Python blocks of a page that run, as one program with the page's line numbers."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.runs:
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines)


def check_python(page: Path, folder: Path) -> Iterator[str]:
    """Run the page's program in `folder`, which is made anew."""
    source = program(page)
    if not source:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Named like the page: a traceback points at the page's own lines, and nothing is shadowed.
    script = folder / page.name
    script.write_text(source, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADSTART_")}
    try:
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=folder,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"{page}: its Python blocks took over {RUN_SECONDS_MAX} s"
        return
    if done.returncode:
        yield f"{page}: its Python blocks failed:\n{textwrap.indent(done.stderr, '    ')}"


def check_toml(page: Path) -> Iterator[str]:
    """Settings examples that are not settings."""
    from headstart import ConfigError, Settings

    for block in blocks(page):
        if block.language == "toml" and block.runs:
            try:
                Settings.from_mapping(tomllib.loads(block.code))
            except (tomllib.TOMLDecodeError, ConfigError) as error:
                yield f"{page}:{block.line}: not a settings file: {error}"


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The fragment of each heading, as GitHub makes it."""
    text = re.sub(
        r"^ *(`{3,}).*?^ *\1 *$",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    titles = (_HEADING.fullmatch(line) for line in text.splitlines())
    return {
        re.sub(r"[^\w\- ]", "", match["title"].lower()).strip().replace(" ", "-")
        for match in titles
        if match
    }


def check_links(page: Path) -> Iterator[str]:
    """Relative links of a page that lead nowhere."""
    for match in _LINK.finditer(prose(page)):
        link = match["inline"] or match["html"]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            yield f"{page}: the link {link} leads to no file"
        elif fragment and target.suffix == ".md" and fragment not in anchors(target):
            yield f"{page}: {target} has no heading #{fragment}"


def check_exports(root: Path) -> Iterator[str]:
    """Public names that no page of docs/ mentions."""
    words: set[str] = set()
    for page in (root / "docs").rglob("*.md"):
        if "adr" not in page.parts:
            words.update(re.findall(r"\w+", page.read_text(encoding="utf-8")))
    for module in PUBLIC_MODULES:
        for name in import_module(module).__all__:
            if name not in words and not name.startswith("__"):
                yield f"docs/: {module}.{name} is public, but no page mentions it"


def main() -> int:
    """Print what does not hold; 1 when anything does not."""
    problems: list[str] = []
    num_run = 0
    for page in pages(ROOT):
        name = page.relative_to(ROOT)
        try:
            num_run += sum(block.runs and block.language == "python" for block in blocks(page))
            problems += check_python(page, ROOT / "build" / "docs" / name.with_suffix(""))
            problems += check_toml(page)
            problems += check_links(page)
        except DocumentationError as error:
            problems.append(str(error))
    problems += check_exports(ROOT)
    for problem in problems:
        print(problem.replace(f"{ROOT}{os.sep}", ""))
    print(f"check_docs: {len(problems)} problems, {num_run} Python blocks run")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
