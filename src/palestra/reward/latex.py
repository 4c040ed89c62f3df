# SPDX-License-Identifier: Apache-2.0
r"""Mathematical answers as plain text, so that most comparisons need no algebra: ``\frac{3\pi}{4}`` is ``3pi/4``."""

from __future__ import annotations

import re

from palestra.data.boxes import closing

MAX_LENGTH = 1000
MAX_DEPTH = 60
WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
LAYOUT: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])", ""),
        (r"\\[,!;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\\$|\$|\\[()\[\]]", ""),
        (r"[−–]", "-"),
        (r"\\[dt]frac", r"\\frac"),
        (r"\^[\s{]{0,4}\\circ\s{0,4}\}?(?:\s*[CF]\b)?|°(?:\s*[CF]\b)?|\\degree(?![A-Za-z])|\\%|%", ""),
        (r"(?<=\d)\{,\}(?=\d{3}(?:\D|$))", ""),
    )
)
SYMBOLS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:cdot|times)(?![A-Za-z])|×|·", "*"),
        (r"\\(?:le|leq|leqslant)(?![A-Za-z])|≤", "<="),
        (r"\\(?:ge|geq|geqslant)(?![A-Za-z])|≥", ">="),
        (r"\\pm(?![A-Za-z])|±", "+-"),
        (r"\\infty(?![A-Za-z])|∞", "oo"),
        (r"π", "pi"),
        (r"√", r"\\sqrt"),
    )
)
PREFIX = re.compile(r"^\s*(?:[A-Za-z]|[Aa]nswer)\s*(?:=|:=|\\in|∈)\s*(?=[^=])")
UNIT_TAIL = re.compile(r"(?:(?<=[\d)}])|(?<=\\pi))\s+[A-Za-z][A-Za-z ./]*(?:\^\{?[23]\}?)?$")
TEXT_TAIL = re.compile(r"(?<=[\w)}])[\s\\,~]*\\(?:text|mathrm|mbox)\s*\{[A-Za-z ./]*\}(?:\^\{?[23]\}?)?[\s.]*$")
ABOVE = re.compile(r"-?\w+(?:\.\d+)?(?:\^\w+)?|(?:sqrt)?\([^()]*\)")
BELOW = re.compile(r"(?:[A-Za-z]+|\d+(?:\.\d+)?)(?:\^\w+)?|(?:sqrt)?\([^()]*\)")


def plain_math(text: str) -> str:
    r"""The expression in plain text: no LaTeX spacing, fractions with ``/``, no ``n =`` in front, no unit behind.

    >>> [plain_math(t) for t in ("2 + \\sqrt{5}", "(5, \\frac{3\\pi}{4})", "n = 3, 5, 7", "\\frac{1}{3^{80}}")]
    ['2+sqrt(5)', '(5, 3pi/4)', '3,5,7', '1/3^80']
    """
    if len(text) > MAX_LENGTH:
        return " ".join(text.split())
    text = bare_latex(text)
    for pattern, replacement in SYMBOLS:
        text = pattern.sub(replacement, text)
    return _spaced(_convert(text, 0))


def bare_latex(text: str) -> str:
    r"""Still LaTeX, without what does not change the value: spacing, text, separators, a prefix, a unit.

    >>> bare_latex("n = \\left(1, \\tfrac{1{,}000}{3}\\right)")
    '(1, \\frac{1000}{3})'
    """
    text = WRAPPERS.sub(r" \1 ", without_unit(text[:MAX_LENGTH]))
    for pattern, replacement in LAYOUT:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\([{}])", r"\1", _without_separators(text))
    return UNIT_TAIL.sub("", PREFIX.sub("", text).strip().rstrip(".。"))


def without_unit(text: str) -> str:
    r"""Without the words behind a quantity.

    >>> without_unit("3\\pi square units"), without_unit("72\\text{ cm}^2"), without_unit("\\text{even}")
    ('3\\pi', '72', '\\text{even}')
    """
    return UNIT_TAIL.sub("", TEXT_TAIL.sub("", text)).rstrip(" .。")


GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")


def _without_separators(text: str) -> str:
    """``1,234`` is a number; a comma inside brackets parts two, unless others there have a space behind them."""

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        opened = max(before.rfind(mark) for mark in ("(", "[", "\\{"))
        listed = opened > max(before.rfind(mark) for mark in (")", "]", "\\}"))
        spaced = listed and ", " in re.split(r"[)\]]|\\\}", text[opened:], maxsplit=1)[0]
        return match[0] if listed and not spaced else match[0].replace(",", "")

    return GROUPED.sub(joined, text)


def _convert(text: str, depth: int) -> str:
    out: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == "\\":
            name = re.compile(r"[A-Za-z]*").match(text, at + 1)
            command = name[0] if name is not None else ""
            at += 1 + len(command)
            written, at = _command(command, text, at, depth)
            out.append(written)
        elif text[at] in "^_":
            exponent, end = _argument(text, at + 1, depth)
            out.append(text[at] + _factor(exponent, ABOVE))
            at = end
        elif text[at] == "{" and closing(text, at) > 0:
            inside, at = _argument(text, at, depth)
            out.append(inside if ABOVE.fullmatch(inside) else f"{{{inside}}}")
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


def _command(name: str, text: str, at: int, depth: int) -> tuple[str, int]:
    if name == "frac":
        above, at = _argument(text, at, depth)
        below, at = _argument(text, at, depth)
        return f"{_factor(above, ABOVE)}/{_factor(below, BELOW)}", at
    if name == "sqrt":
        index = re.compile(r"\s*\[([^\[\]]*)\]").match(text, at)
        body, at = _argument(text, at if index is None else index.end(), depth)
        return (f"sqrt({body})" if index is None else f"root({index[1]},{body})"), at
    return name, at


def _argument(text: str, at: int, depth: int) -> tuple[str, int]:
    """One LaTeX argument: a braced group, a command, or a single character."""
    while text[at : at + 1].isspace():
        at += 1
    end = closing(text, at) if text[at : at + 1] == "{" else -1
    if end > 0 and depth < MAX_DEPTH:
        return _convert(text[at + 1 : end], depth + 1).strip(), end + 1
    named = re.compile(r"\\([A-Za-z]+)").match(text, at)
    if named is not None and depth < MAX_DEPTH:
        return _command(named[1], text, named.end(), depth + 1)
    return text[at : at + 1], at + 1


def _factor(text: str, atom: re.Pattern[str]) -> str:
    return text if atom.fullmatch(text) else f"({text})"


def _spaced(text: str) -> str:
    """No spaces, but one after a comma inside brackets."""
    depth = 0
    out: list[str] = []
    for char in text:
        if char.isspace():
            continue
        depth += (char in "([{") - (char in ")]}")
        out.append(", " if char == "," and depth > 0 else char)
    return "".join(out)


def parts(text: str) -> tuple[str, tuple[str, ...]]:
    """The brackets around a list, and its elements, split at the outermost commas.

    >>> parts("(5, 3pi/4)"), parts("3,5,7"), parts("f(1, 2)")
    (('()', ('5', '3pi/4')), ('', ('3', '5', '7')), ('', ('f(1, 2)',)))
    """
    brackets = text[:1] + text[-1:] if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") else ""
    if brackets and len(inner := _split(text[1:-1])) > 1:
        return brackets, tuple(inner)
    return "", tuple(_split(text))


def _split(text: str) -> list[str]:
    depth, start = 0, 0
    found: list[str] = []
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]
