# SPDX-License-Identifier: Apache-2.0
"""Documents do not lie: their code runs, their links lead somewhere, the configuration page is the code's own."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def blocks(language: str) -> list[Any]:
    """Every fenced block of a language, in the English pages."""
    pages = [p for p in PAGES if ".zh-CN" not in p.name]
    found = ((p, n, *b) for p in pages for n, b in enumerate(BLOCK.findall(p.read_text(encoding="utf-8"))))
    return [pytest.param(text, id=f"{page.name}-{n}") for page, n, kind, text in found if kind == language]


def test_the_configuration_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == module.page(), "run: python docs/make_configuration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    inside = [link.partition("#")[0] for link in LINK.findall(text) if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in inside if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_in_code_marks_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|docs|examples|tests)/[\w/.-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda p: p.name)
def test_examples_of_the_pages_at_the_root_run(page: Path) -> None:
    # Those of docs/ are collected by pytest itself.
    assert doctest.testfile(str(page), module_relative=False, optionflags=FLAGS, encoding="utf-8").failed == 0


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "document", "exec"), {"__name__": "document"})


def without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and ast.get_docstring(node):
            node.body.pop(0)
    return ast.unparse(tree)


@pytest.mark.parametrize("page", [p for p in PAGES if ".zh-CN" in p.name], ids=lambda p: p.name)
def test_a_translation_shows_the_same_code(page: Path) -> None:
    original = page.with_name(page.name.replace(".zh-CN", ""))
    there, here = (BLOCK.findall(p.read_text(encoding="utf-8")) for p in (original, page))
    assert [without_docstrings(text) for _, text in here] == [without_docstrings(text) for _, text in there]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_configs(text: str, tmp_path: Path) -> None:
    from palestra.config import load
    from palestra.train.config import RLConfig, SFTConfig

    path = tmp_path / "block.yaml"
    path.write_text(text, encoding="utf-8")
    load(path, [], SFTConfig if "sft:" in text else RLConfig)
