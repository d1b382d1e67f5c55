"""The pages under docs/ and the README do what they say: their Python is run, their output compared.

The blocks of a page run in order and share their names. docs/development.md explains the marks.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

from dtorch import errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """(first line of the body, info string, body) of every fenced block."""
    return [
        (text.count("\n", 0, found.start()) + 2, found["info"].strip(), found["body"]) for found in FENCE.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, printed = {"__name__": "__docs__"}, ""
    for line, info, body in blocks(page.read_text()):
        if info == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * (line - 1) + body, str(page), "exec"), names)
            printed = output.getvalue()
        elif info == "text output":
            assert printed.strip() == body.strip(), f"{page.name}:{line} shows another output"


def test_every_error_has_a_section():
    headings = set(re.findall(r"^## (\w+)$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    for name, each in vars(errors).items():
        if isinstance(each, type) and issubclass(each, (errors.DTorchError, Warning)):
            assert name in headings, f"docs/errors.md has no section {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
