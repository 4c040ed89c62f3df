# SPDX-License-Identifier: Apache-2.0
"""What ``import palestra`` promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import palestra

ROOT = Path(__file__).parents[1]
LICENCE = "# SPDX-License-Identifier: Apache-2.0"


def test_the_public_names_are_sorted_and_listed_by_dir() -> None:
    assert palestra.__all__ == sorted(palestra.__all__) == dir(palestra)


@pytest.mark.parametrize("name", palestra.__all__)
def test_each_public_name_is_the_thing_of_that_name(name: str) -> None:
    thing = getattr(palestra, name)
    assert name == "__version__" or getattr(thing, "__name__", name) == name


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        palestra.Trainer  # noqa: B018


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    light = "palestra, palestra.agent, palestra.data, palestra.env, palestra.reward, palestra.run.directory"
    heavy = "{'torch', 'transformers', 'peft', 'sympy', 'datasets'}"
    code = f"import sys, {light}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def sources() -> list[Path]:
    folders = ("src", "tests", "examples", "docs")
    return sorted(p for f in folders for e in ("*.py", "*.yaml") for p in (ROOT / f).rglob(e))


def test_each_source_file_names_its_licence_in_its_first_line() -> None:
    without = [str(p.relative_to(ROOT)) for p in sources() if not p.read_text(encoding="utf-8").startswith(LICENCE)]
    assert without == []
    assert len(sources()) > 80, "the files were looked for in the right place"
