# SPDX-License-Identifier: Apache-2.0
"""Configuration: one frozen tree, read from YAML, overridden by ``key.sub=value``, unknown keys refused.

Each room defines its own config beside the code that reads it; ``train/config.py`` puts them together.

YAML is read by the rules of YAML 1.2: ``1e-5`` is a number, ``yes`` and ``on`` are text, a date is text, and a
key that appears twice is an error.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from palestra.errors import ConfigError

FORMAT = 1
C = TypeVar("C", bound="Config")


class Config(pydantic.BaseModel):
    """Base of every config: frozen, and a key that nobody reads is an error that names the nearest right one.

    shorthand: the field that a plain value stands for, so that ``env: calculator`` means ``env: {name: calculator}``
    and ``env.max_steps=3`` may still follow.

    >>> class Env(Config):
    ...     shorthand = "name"
    ...     name: str
    >>> Env.model_validate("calculator").name
    'calculator'
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, populate_by_name=True, allow_inf_nan=False
    )
    shorthand: typing.ClassVar[str | None] = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        plain = cls.shorthand is not None and isinstance(value, str | int | float)
        return {cls.shorthand: value} if plain else value


def load(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], cls: type[C]) -> C:
    """Read a config of class ``cls`` from a YAML file or a mapping, then apply ``key.sub=value`` overrides.

    An override's value is YAML; a number in its key indexes a list (``rewards.0.weight=2``). ``format: 1`` may
    stand at the root. Whatever is wrong comes back as one :class:`~palestra.errors.ConfigError` line that names
    the place (file or command line), the key path and the nearest right key.

    >>> class Optim(Config):
    ...     learning_rate: float = 1e-5
    >>> load({"learning_rate": 1e-4}, ["learning_rate=3e-4"], Optim).learning_rate
    0.0003
    >>> load(None, ["learning_rte=1"], Optim)
    Traceback (most recent call last):
    palestra.errors.ConfigError: unknown key 'learning_rte' (command line): did you mean 'learning_rate'?
    """
    place = str(source) if isinstance(source, str | Path) else "config"
    given = read_yaml(source) if isinstance(source, str | Path) else dict(source or {})
    data = _canonical(given, [cls], place)
    overridden = []
    for override in overrides:
        path, value = _parse_override(override)
        canonical, options = [], _options(cls)
        for part in path:
            canonical.append(_field_names(options).get(part, part))
            options = _child(options, part)
        _assign(data, canonical, _canonical(value, options, "command line"), override)
        overridden.append(tuple(canonical))
    if "format" not in cls.model_fields:
        _check_format(data.pop("format", FORMAT), place)
    try:
        return cls.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, data, cls, place, overridden)) from None


def dump(config: Config) -> str:
    """The resolved config as YAML, defaults included; :func:`load` of the text gives an equal config.

    >>> class Optim(Config):
    ...     learning_rate: float = 1e-5
    >>> print(dump(Optim()), end="")
    format: 1
    learning_rate: 1.0e-05
    """
    values = config.model_dump(mode="json")
    text: str = yaml.dump({"format": FORMAT, **values}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as a mapping; ConfigError with file, line and column where it is none."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name the YAML file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8 YAML") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror or error}") from None
    value = _parse_yaml(text, str(path))
    if value is None:
        raise ConfigError(f"config file {path} is empty; write 'key: value' lines or leave the file out")
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; a config is a mapping of 'key: value' lines")
    return value


# YAML 1.1, which PyYAML speaks, reads 1e-5 as text, `no` as False, 010 as 8 and 1:30 as 90.
_FLOAT = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    "tag:yaml.org,2002:float": (_FLOAT, "-+0123456789."),
}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """PyYAML's safe loader with YAML 1.2 scalars, refusing duplicate keys."""

    yaml_implicit_resolvers: typing.ClassVar[dict[Any, Any]] = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, str(key_node.value))
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Knows the scalars of both YAMLs, so text that either of them would misread is quoted."""


def _text(dumper: Any, text: str) -> Any:
    odd = any(not c.isprintable() and c != "\n" for c in text)  # PyYAML reads some of these back as line breaks
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


def _decimal(loader: Any, node: Any) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


_Dumper.add_representer(str, _text)
_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _starts = [*_first, ""] if _tag.endswith("null") else [*_first]
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _starts)


MAX_DEPTH, MAX_VALUES = 50, 100_000
"""Bounds of what a config may hold, aliases written out: a few lines of them can stand for more than memory holds."""


def _parse_yaml(text: str, place: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        raise ConfigError(f"{where}: {error.problem or error.context}; this is not valid YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{place}: {' '.join(str(error).split())}; this is not valid YAML") from None
    except (LookupError, AttributeError, TypeError):  # what PyYAML makes of a tag whose text does not fit it
        raise ConfigError(f"{place}: a value does not fit its tag (such as !!bool); leave the tag out") from None
    except RecursionError:
        raise ConfigError(f"{place}: nested too deeply; at most {MAX_DEPTH} levels") from None
    _check_extent(value, place)
    return value


def _check_extent(value: Any, place: str) -> None:
    """Refuse what is nested too deeply (an alias of itself without end) or too large once aliases are written out."""
    level, values = [value], 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            if values + len(inner) > MAX_VALUES:
                raise ConfigError(f"{place}: more than {MAX_VALUES} values, aliases written out; use fewer aliases")
        level, values = inner, values + len(inner)
    if level:
        raise ConfigError(f"{place}: nested too deeply; at most {MAX_DEPTH} levels")


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, value = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    return path, _parse_yaml(value, f"override {override!r}")


def _assign(data: dict[str, Any], path: Sequence[str], value: Any, override: str) -> None:
    """Set ``data[path] = value``, opening sections on the way."""
    node: Any = data
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                listed = ".".join(path[:i])
                raise ConfigError(
                    f"override {override!r}: {listed} is a list of {len(node)}; {part!r} is no index in it"
                )
            key: Any = int(part)
        elif isinstance(node, dict):
            key = part
        else:
            raise ConfigError(f"override {override!r}: {'.'.join(path[:i])} is {node!r}, not a section with keys")
        if last:
            node[key] = value
        else:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]


def _check_format(version: Any, place: str) -> None:
    if type(version) is not int or version != FORMAT:
        raise ConfigError(f"{place}: format {version!r} is not known here; this version reads format {FORMAT}")


def _options(annotation: Any) -> list[Any]:
    """The alternatives of a type: Optional, Union and Annotated taken apart, None left out."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [o for a in typing.get_args(annotation) for o in _options(a)]
    return [] if annotation is type(None) else [annotation]


def _is_config(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, Config)


def _field_names(options: Sequence[Any]) -> dict[str, str]:
    """Every accepted key of the configs among ``options`` → the field it sets (itself, or an alias's)."""
    names: dict[str, str] = {}
    for option in filter(_is_config, options):
        for name, field in option.model_fields.items():
            aliases = [field.alias, field.validation_alias]
            if isinstance(field.validation_alias, pydantic.AliasChoices):
                aliases = list(field.validation_alias.choices)
            names |= {key: name for key in (name, *aliases) if isinstance(key, str)}
    return names


def _child(options: Sequence[Any], key: str | int) -> list[Any]:
    """What may stand under ``key``: a config's field, a list's item or a mapping's value."""
    found: list[Any] = []
    for option in options:
        args = [a for a in typing.get_args(option) if a is not Ellipsis]
        if _is_config(option):
            name = _field_names([option]).get(str(key))
            found += _options(option.model_fields[name].annotation) if name else []
        elif args:
            found += _options(args[-1])
    return found


def _canonical(value: Any, options: Sequence[Any], place: str) -> Any:
    """``value`` with field names for aliases and mappings for shorthands, so that a file and an override meet."""
    if isinstance(value, list):
        return [_canonical(v, _child(options, i), place) for i, v in enumerate(value)]
    if isinstance(value, str | int | float) and len(options) == 1 and _is_config(options[0]):
        return {options[0].shorthand: value} if options[0].shorthand else value
    if not isinstance(value, Mapping):
        return value
    names, result = _field_names(options), {}
    for key, item in value.items():
        name = names.get(key, key)
        if name in result:
            raise ConfigError(f"{place}: {name!r} is given twice, also under another name ({key!r}); keep one")
        result[name] = _canonical(item, _child(options, key), place)
    return result


def _explain(error: pydantic.ValidationError, data: Any, cls: type[Config], place: str, overridden: Any) -> str:
    """One line for everything pydantic found; unknown keys first, since a missing one is often a mistyped one."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for item in sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"):
        path, options, value = _locate(item["loc"], data, cls)
        named = any(path[: len(o)] == o or o[: len(path)] == path for o in overridden if path)
        where = "command line" if named else place
        section = ".".join(map(str, path[:-1]))
        if item["type"] == "extra_forbidden":
            hint = _nearest(str(path[-1]), options, cls)
            found[path] = [f"unknown key {path[-1]!r}{f' in {section}' if section else ''} ({where}): {hint}"]
        elif item["type"] == "missing":
            found.setdefault(path, [f"key {'.'.join(map(str, path))!r} is missing ({where}); it has no default"])
        else:
            says = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
            shown = _shown(path, value, where)
            lines = found.setdefault(path, [shown + says])
            if len(lines) == 1 and lines[0] != shown + says and says.startswith("should be"):
                found[path] = [f"{lines[0]} or {says.removeprefix('should be ')}"]
    return " ".join("; ".join(line for lines in found.values() for line in lines).split())


_ELSEWHERE, _NAMED = 0.75, 3
"""How near a key of another section must come to be named, and how many sections are."""


def _nearest(key: str, options: Sequence[Any], cls: type[Config]) -> str:
    """The key that was meant: the nearest one here or, where one elsewhere in the tree comes nearer, its full path.

    >>> class Run(Config):
    ...     seed: int = 0
    ...     steps: int = 1
    >>> _nearest("stpes", [Run], Run), _nearest("zz", [Run], Run)
    ("did you mean 'steps'?", 'known: seed, steps')
    """
    known = sorted(set(_field_names(options)))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    best, named = max((_likeness(key, n) for n in near), default=0.0), [repr(n) for n in near]
    paths = [(_likeness(key, path[-1]), path) for path in _paths([cls])]
    likest = max((likeness for likeness, _ in paths), default=0.0)
    if likest >= _ELSEWHERE and likest > best:
        found = [path for likeness, path in paths if likeness == likest][:_NAMED]
        named = [repr(".".join(path)) + (" at the top level" if len(path) == 1 else "") for path in found]
    if not named:
        return f"known: {', '.join(known) or 'none'}"
    return f"did you mean {' or '.join([', '.join(named[:-1])] * (len(named) > 1) + named[-1:])}?"


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _paths(options: Sequence[Any], depth: int = 5) -> list[tuple[str, ...]]:
    """Every key of the sections among ``options`` and below, as a path, the shallow ones first."""
    names = sorted(_field_names(options)) if depth else []
    found = [(name, *path) for name in names for path in [(), *_paths(_sections(options, name), depth - 1)]]
    return sorted(found, key=len)


def _sections(options: Sequence[Any], name: str) -> list[Any]:
    return [child for child in _child(options, name) if _is_config(child)]


def _locate(loc: Sequence[Any], data: Any, cls: type[Config]) -> tuple[tuple[Any, ...], list[Any], Any]:
    """pydantic's location without the union tags that are no keys, the types of the parent, and the value found."""
    path: list[Any] = []
    value, options, parent = data, _options(cls), _options(cls)
    for i, part in enumerate(loc):
        inside = (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        if not inside and (i < len(loc) - 1 or part not in _field_names(options)):
            continue
        path.append(part)
        parent, options = options, _child(options, part)
        value = value[part] if inside else None
    return tuple(path), parent, value


def _shown(path: tuple[Any, ...], value: Any, where: str) -> str:
    """The place a message is about; a section's own value would only be noise."""
    name = ".".join(map(str, path))
    if isinstance(value, Mapping):
        return f"{name} ({where}): " if path else f"{where}: "
    return f"{name} = {_short(value)} ({where}): " if path else f"{where}: "


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
