"""scripts/check_docs.py finds documentation that does not hold."""

from pathlib import Path

import pytest

import check_docs

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def page(tmp_path):
    """A function that writes a page and returns its path."""

    def write(text, name="page.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def python(code):
    return f"```python\n{code}\n```\n"


def test_blocks_of_a_page_are_one_program(page, tmp_path):
    good = page("# Title\n" + python("x = 1") + "text\n" + python("assert x == 1"))
    assert list(check_docs.check_python(good, tmp_path / "run")) == []


def test_a_failing_block_is_reported_with_the_line_of_the_page(page, tmp_path):
    bad = page("# Title\n\n" + python("x = 1") + "\n" + python("y = 2\nassert x == y"))
    (problem,) = check_docs.check_python(bad, tmp_path / "run")
    assert 'page.md", line 9' in problem
    assert "AssertionError" in problem


def test_a_block_in_a_list_runs(page, tmp_path):
    indented = page("- item\n\n  ```python\n  raise SystemExit(3)\n  ```\n")
    assert len(list(check_docs.check_python(indented, tmp_path / "run"))) == 1


def test_a_block_is_left_out_only_with_a_reason(page, tmp_path):
    left_out = page("<!-- not run: needs a GPU -->\n" + python("1 / 0"))
    assert list(check_docs.check_python(left_out, tmp_path / "run")) == []
    without = page("<!-- not run: -->\n" + python("1 / 0"))
    with pytest.raises(check_docs.DocumentationError, match="needs a reason"):
        check_docs.program(without)


@pytest.mark.parametrize(
    ("settings", "num_problems"),
    [('capacity = "1GiB"', 0), ('capacty = "1GiB"', 1), ("capacity = ", 1)],
)
def test_toml_blocks_are_settings(page, settings, num_problems):
    text = f"```toml\n[memory]\n{settings}\n```\n"
    assert len(list(check_docs.check_toml(page(text)))) == num_problems
    assert list(check_docs.check_toml(page(f"<!-- not run: an example -->\n{text}"))) == []


def test_other_languages_and_nested_fences_do_not_run(page):
    text = "```console\nls\n```\n````markdown\n" + python("1 / 0") + "````\n"
    assert check_docs.program(page(text)) == ""


def test_an_open_block_is_an_error(page):
    with pytest.raises(check_docs.DocumentationError, match="never closed"):
        check_docs.blocks(page("```python\nx = 1\n"))


@pytest.mark.parametrize(
    "link",
    [
        "[a](other.md)",
        "[a](other.md#one-title)",
        "[a](#here-it-is)",
        "[a](docs)",
        "![a](docs/plot.png)",
        '<img src="docs/plot.png">',
        "[a](https://example.org/x)",
        "`[a](missing.md)`",
    ],
)
def test_links_that_lead_somewhere(page, link):
    page("# One title\n", "other.md")
    page("", "docs/plot.png")
    assert list(check_docs.check_links(page(f"## Here it is\n{link}\n"))) == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](missing.md)",
        "[a](other.md#missing)",
        "[a](#missing)",
        "![a](docs/missing.png)",
        '<a href="missing.md">a</a>',
        '[a](missing.md "title")',
    ],
)
def test_links_that_lead_nowhere(page, link):
    page("# One title\n", "other.md")
    assert len(list(check_docs.check_links(page(f"# Title\n{link}\n")))) == 1


def test_public_names_must_be_mentioned(tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "PUBLIC_MODULES", ("textwrap",))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "api.md").write_text("`TextWrapper`, `wrap`, `fill`, `indent`, `dedent`\n")
    (problem,) = check_docs.check_exports(tmp_path)
    assert "textwrap.shorten" in problem


def test_pages_are_found():
    names = {path.relative_to(REPOSITORY).as_posix() for path in check_docs.pages(REPOSITORY)}
    assert {"CONTRIBUTING.md", "docs/glossary.md", "docs/dependencies.md"} <= names
