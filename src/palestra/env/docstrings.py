# SPDX-License-Identifier: Apache-2.0
"""What a docstring says of a function and of each parameter, in the styles that people write them in.

Google's is read here, since it is loosely written and a reader must forgive; numpy's, Sphinx's (reST) and epydoc's by
docstring-parser.
"""

from __future__ import annotations

import re

from docstring_parser import (
    Docstring,
    DocstringParam,
    DocstringRaises,
    DocstringReturns,
    DocstringStyle,
    ParseError,
    parse,
)

_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:\s*$")
_PARAMETERS = re.compile(r"^(Args|Arguments|Parameters)\s*:\s*$", re.MULTILINE)
_DOCTEST = re.compile(r"^[ \t]*>>>.*(?:\n[ \t]*\S.*)*", re.MULTILINE)
_STYLES = (DocstringStyle.NUMPYDOC, DocstringStyle.REST, DocstringStyle.EPYDOC)
_MARKS = {
    DocstringStyle.NUMPYDOC: re.compile(r"^(Parameters|Returns|Raises|Yields|Examples?|Notes)\n-{3,}[ \t]*$", re.M),
    DocstringStyle.REST: re.compile(r"^:(param|parameter|arg|type|returns?|rtype|raises?)\b[^:\n]*:", re.M),
    DocstringStyle.EPYDOC: re.compile(r"^@(param|type|return|rtype|raise)\b[^:\n]*:", re.M),
}


def describe(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section or doctest, parameter → description), each on one line.

    text: a docstring without its common indentation, as :func:`inspect.getdoc` gives it. A style that is not known
    is description from end to end.

    >>> describe("Add.\\n\\n:param int a: the first\\n:returns: the sum")
    ('Add.', {'a': 'the first'})
    """
    if not _PARAMETERS.search(text):
        for style in _STYLES:
            if _MARKS[style].search(text):
                return _described(text, style)
    return _google(text)


def _described(text: str, style: DocstringStyle) -> tuple[str, dict[str, str]]:
    try:
        parsed: Docstring = parse(_DOCTEST.sub("", text).strip(), style)
    except ParseError:  # a field without its colon: better the whole text than none
        return _google(text)
    kinds = (DocstringParam, DocstringRaises, DocstringReturns)
    if not any(isinstance(item, kinds) for item in parsed.meta) and style is not DocstringStyle.NUMPYDOC:
        return _google(text)
    said = _line(f"{parsed.short_description or ''} {parsed.long_description or ''}")
    names = ((name.strip().lstrip("*"), item) for item in parsed.params for name in item.arg_name.split(","))
    return said, {name: _line(item.description or "") for name, item in names}


def _line(text: str) -> str:
    return " ".join(text.split())


def _google(text: str) -> tuple[str, dict[str, str]]:
    summary: list[str] = []
    described: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, current = heading[1], ""
        elif line.lstrip().startswith(">>>"):
            section = "Examples"
        elif not section:
            summary.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            found = _PARAMETER.match(line)
            if found and (not current or depth <= indent):
                current, indent = found[1], depth
                described[current] = found[2].strip()
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return " ".join(s for s in summary if s), described
