"""Configuration: dataclass defaults ← YAML (`--config file.yaml`) ← `key=value`; the later wins.

A tool's knobs are the fields of one dataclass, each with a string under it that says what it is,
and a range where numbers are limited: `lr: Annotated[float, above(0)] = 1e-6`. A field decides what
an unquoted scalar means: `007` is a text in a str field and 7 in an int field. Nested dataclasses
have dotted keys (`retriever.k1=0.82`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import select
import signal
import sys
import textwrap
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Callable, Literal, NamedTuple, Union, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """Bad configuration: the message names the key, the value, the rule and the way out."""

    exit_status = 2


class Range(NamedTuple):
    """The values that a field may have: what an `Annotated` type carries."""

    rule: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Range:
    return Range(f"at least {low}", lambda value: low <= value < math.inf)


def above(low: float, at_most: float = math.inf) -> Range:
    rule = f"above {low}" if at_most == math.inf else f"above {low}, at most {at_most}"
    return Range(rule, lambda value: low < value <= at_most and value < math.inf)


def between(low: float, high: float) -> Range:
    return Range(f"from {low} to {high}", lambda value: low <= value <= high)


FINITE = Range("finite", math.isfinite)
Positive = Annotated[int, at_least(1)]


class Only(NamedTuple):
    """A field has an effect only where field `key` has one of `values`, or any value but empty."""

    key: str
    values: tuple = ()

    def __str__(self) -> str:
        return f"{self.key}={' or '.join(self.values) or '…'}"


def check_fields(cfg: Any, prefix: str = "", scope: dict | None = None, idle: str = "") -> None:
    """ConfigError for the first value, nested ones too, that is outside its range, or was given
    though it has no effect. null is inside every range.

    scope: the values around a nested dataclass; idle: why none of its fields has an effect
    """
    hints = typing.get_type_hints(type(cfg), include_extras=True)
    scope = (scope or {}) | vars(cfg)
    for f in fields(cfg):
        value, (tp, marks), reason = getattr(cfg, f.name), split_hint(hints[f.name]), idle
        for mark in marks:
            if isinstance(mark, Only):
                setting = scope.get(mark.key)
                used = setting in mark.values if mark.values else bool(setting)
                if mark.key in scope and not used:
                    reason = f"it has an effect with {mark} alone"
            elif value is not None and not mark.holds(value):
                null = ", or null" if type(None) in get_args(tp) else ""
                raise ConfigError(f"{prefix}{f.name}={value} must be {mark.rule}{null}")
        if isinstance(value, str) and get_origin(tp) is list:
            raise ConfigError(f"{prefix}{f.name}={value!r} must be {type_name(tp)}")
        if is_dataclass(value):
            check_fields(value, f"{prefix}{f.name}.", scope, reason)
        elif reason and value != default_of(f):
            raise ConfigError(f"{prefix}{f.name}={value}: {reason}; leave it out")


def split_hint(hint: Any) -> tuple[Any, tuple]:
    """(type, marks) of an `Annotated` type or a plain one."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def default_of(f: dataclasses.Field) -> Any:
    """The default of a dataclass field; MISSING where it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def check_given(cfg: Any, *names: str) -> None:
    """ConfigError for the first of these fields that is empty."""
    for name in names:
        if not getattr(cfg, name):
            raise ConfigError(f"{name} is empty; give {name}=…")


class Plain(str):
    """An unquoted YAML scalar as it is written: its field's type decides what it means."""


class _Loader(yaml.SafeLoader):
    """YAML with `Plain` scalars, in which a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in keys[:i] and key.value != "<<":
                problem = f"key {key.value} stands twice in one mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


for _tag in ("str", "int", "float", "bool", "null", "timestamp"):
    _Loader.add_constructor(
        f"tag:yaml.org,2002:{_tag}", lambda _, node: node.value if node.style else Plain(node.value)
    )
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # a float to everybody but YAML 1.1


def resolve(text: str) -> Any:
    """What YAML takes a plain scalar for: bool, null, int, float (`1e-5` too), or the text."""
    loader, text = yaml.SafeLoader(""), str(text)
    if _EXPONENT.fullmatch(text):
        return float(text)
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except (yaml.YAMLError, ValueError):  # `<<`, or a day such as 2025-13-45
        return text


def type_name(tp: Any) -> str:
    """A type as a person would write it: `int`, `str or null`, `one of strict, paper`."""
    origin, args = get_origin(tp), get_args(tp)
    if origin is Annotated:
        marks = (f" (with {m})" if isinstance(m, Only) else f", {m.rule}" for m in tp.__metadata__)
        return type_name(tp.__origin__) + "".join(marks)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else type_name(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, dict):
        return f"{origin.__name__} of {type_name(args[-1])}"
    return tp.__name__


def convert(value: Any, tp: Any, key: str) -> Any:
    """`value`, as `_Loader` gave it, as type `tp`; ConfigError naming `key`, value and type."""
    origin, args, written = get_origin(tp), get_args(tp), value
    if isinstance(value, Plain):
        value = resolve(written)
        if tp is str and (value is not None or not written):
            return str(written)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_dataclass(tp):
        if isinstance(value, dict):
            return build(tp, value, prefix=f"{key}.")
        raise ConfigError(f"{key}={value!r}: expected a mapping of {tp.__name__} fields")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for arg in args:
            with contextlib.suppress(ConfigError):
                return convert(written, arg, key)
    elif origin is Literal:
        for arg in args:
            if type(arg) in (type(value), str) and arg in (value, str(written)):
                return arg
    elif origin is list:
        if isinstance(written, str) and (value is not None or not written):  # a,b or one value
            parts = map(str.strip, written.split(",")) if isinstance(written, Plain) else [written]
            parts = [type(written)(part) for part in parts if part]
            with contextlib.suppress(ConfigError):
                if not any(isinstance(part, Plain) and part[0] in "\"'[{" for part in parts):
                    return [convert(part, args[0], key) for part in parts]
        if isinstance(value, list):
            return [convert(v, args[0], f"{key}[{i}]") for i, v in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {str(k): convert(v, args[1], f"{key}.{k}") for k, v in value.items()}
    elif tp is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    elif tp is float and number and not math.isnan(value):
        return float(value)
    elif tp in (bool, str) and isinstance(value, tp):
        return value
    kind = "" if origin is Literal else f" of type {type(value).__name__}"
    shown = "null" if value is None else f"{value!r}{kind}"
    raise ConfigError(f"{key}={shown}; it must be {type_name(tp)}")


def build(cls: type, values: dict, prefix: str = "") -> Any:
    """An instance of dataclass `cls` from a nested mapping, or ConfigError."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}
    if unknown := [key for key in values if key not in known]:
        key = unknown[0]
        parts = {name: getattr(hints[name], "__dataclass_fields__", ()) for name in known}
        inner = [f"{name}.{key}" for name, keys in parts.items() if key in keys]
        near = inner or difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        all_keys = "known keys: " + ", ".join(prefix + name for name in known)
        hint = f"did you mean {prefix}{near[0]}?" if near else all_keys
        raise ConfigError(f"unknown key {prefix}{key}; {hint}")
    for name, f in known.items():
        if default_of(f) is MISSING and name not in values:
            raise ConfigError(f"{prefix}{name} is required: give {prefix}{name}=…")
    return cls(**{k: convert(v, hints[k], prefix + k) for k, v in values.items()})


def merge(base: dict, update: dict) -> dict:
    """`update` laid over `base`; mappings merge key by key, everything else is replaced."""
    out = dict(base)
    for key, value in update.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def read_yaml(path: str) -> dict:
    """The mapping in a YAML file."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            value = yaml.load(f, _Loader)
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror}; give the path of a YAML file") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(e).split())}") from e
    if isinstance(value, Plain):
        value = resolve(value)
    if not isinstance(value, (dict, type(None))):
        kind = type(value).__name__
        raise ConfigError(f"--config {path}: the top level must be a mapping of keys, not a {kind}")
    return value or {}


def read_words(cls: type, argv: list[str] | None = None) -> dict:
    """What files and words give, as nested mappings, not yet checked against `cls`."""
    words = list(sys.argv[1:] if argv is None else argv)
    values: dict = {}
    overrides: dict = {}
    while words:
        key, equals, text = words.pop(0).partition("=")
        if key in ("-h", "--help"):
            print(help_text(cls))
            raise SystemExit(0)
        if key == "--config":
            if not (equals or words):
                raise ConfigError("--config needs a YAML file behind it")
            values = merge(values, read_yaml(text if equals else words.pop(0)))
            continue
        if not equals:
            raise ConfigError(f"{key!r} is neither --config FILE nor key=value; see --help")
        value: Any = Plain(text)
        if text.startswith(("[", "{", '"', "'")):  # all else is one plain scalar
            with contextlib.suppress(yaml.YAMLError):
                value = yaml.load(text, _Loader)
        for part in reversed(key.removeprefix("--").split(".")):
            value = {part: value}
        overrides = merge(overrides, value)
    return merge(values, overrides)


def load_config(cls: type, argv: list[str] | None = None) -> Any:
    """Dataclass `cls` ← the YAML files of `--config FILE` (in order) ← `key=value`, of `argv` or
    sys.argv; ConfigError for what is wrong there. `--help` prints every knob and leaves."""
    cfg = build(cls, read_words(cls, argv))
    check_fields(cfg)
    return cfg


to_dict = dataclasses.asdict  # the configuration as plain nested mappings


def save_config(cfg: Any, path: str) -> None:
    """Write the configuration, whole or not at all, as YAML that `--config` reads back equal."""
    text = yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    os.replace(temporary, path)


def field_docs(cls: type) -> dict[str, str]:
    """Field name → the string literal that stands under the field in the class's source."""
    docs: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if is_dataclass(c)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for node, after in zip(body, body[1:]):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Constant):
                docs[node.target.id] = " ".join(text.value.split())
    return docs


def knobs(cls: type, prefix: str = "") -> typing.Iterator[str]:
    """Lines of help: for every key `key: type = default`, and its meaning below."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls, include_extras=True)
    # nested ones last
    for f in sorted(fields(cls), key=lambda f: is_dataclass(split_hint(hints[f.name])[0])):
        key, (tp, marks), meaning = prefix + f.name, split_hint(hints[f.name]), docs.get(f.name, "")
        if is_dataclass(tp):
            where = "".join(f"with {mark}: " for mark in marks)
            yield f"  {key}.…    {where}{meaning}"
            yield from knobs(tp, f"{key}.")
        elif f.init:
            value = default_of(f)
            default = "(required)" if value is MISSING else json.dumps(value, ensure_ascii=False)
            yield f"  {key}: {type_name(hints[f.name])} = {default}"
            yield from (" " * 8 + line for line in textwrap.wrap(meaning, 92))


def help_text(cls: type) -> str:
    """What the tool is, its usage, and all knobs."""
    entry = sys.modules["__main__"]  # the tool, which may have its configuration from another file
    module = entry if getattr(entry, cls.__name__, None) is cls else sys.modules[cls.__module__]
    first = (inspect.getdoc(module) or "").split("\n")[0]
    usage = f"usage: python {os.path.basename(sys.argv[0])} [--config FILE.yaml] [key=value …]"
    return "\n".join([first, "", usage, "", *knobs(cls)])


def run(
    cls: type,
    main: Callable[[Any], dict | None],
    argv: list[str] | None = None,
    status_file: str = "",
) -> None:
    """Parse, call `main(cfg)`, print its dict as one JSON line, the last of stdout, and leave.

    Status 0: success; 2: bad input (the exception's class has `exit_status = 2`); 1: a full disk or
    unreadable file, or a bug, with its traceback; 130 after Ctrl-C, 143 after SIGTERM, 141 when who
    reads the output is gone. `status_file`: in the folder `out`, for a run that did not end well,
    with status and reason: torchrun's own status is always 1.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a model wrote ends no run
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    note = ""
    try:
        values = read_words(cls, argv)
        if status_file and (out := str(values.get("out", cls.out))):
            note = os.path.join(out, status_file)
            _remove_note(note)
        cfg = build(cls, values)
        check_fields(cfg)
        result = main(cfg)
        _remove_note(note)  # of a call that was refused meanwhile
        if result is not None:
            print(json.dumps(result, ensure_ascii=False, allow_nan=False), flush=True)
    except BaseException as e:
        status, reason = exit_reason(e)
        reason += place_of(str(e), argv) if isinstance(e, ConfigError) else ""
        if note and status != 0 and getattr(e, "leaves_note", True):
            # "x": of several processes the first one's reason is the cause
            with contextlib.suppress(OSError), open(note, "x", encoding="utf-8") as f:
                rank = os.environ.get("RANK", "0")
                json.dump({"status": status or 1, "reason": reason, "rank": rank}, f)
        if status is None:
            raise
        if reason and not isinstance(e, SystemExit):
            print(reason, file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # else the interpreter tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _remove_note(path: str) -> None:
    if os.path.exists(path) and os.environ.get("RANK", "0") == "0":
        os.remove(path)


def place_of(message: str, argv: list[str] | None = None) -> str:
    """` (FILE, line N)` of the setting that a ConfigError begins with; empty if no file of
    `--config` has it."""
    words = list(sys.argv[1:] if argv is None else argv)
    key, place = re.match(r"(?:unknown key )?([\w.]*)", message)[1], ""
    for word, after in zip(words, [*words[1:], ""]):
        name, _, text = word.partition("=")
        if not key or name.removeprefix("--") == key:
            return ""
        if name == "--config":
            path, line = text or after, 0
            with open(path, encoding="utf-8-sig") as f:
                node = yaml.compose(f)
            for part in key.split("."):
                pairs = node.value if isinstance(node, yaml.MappingNode) else []
                line, node = next(
                    ((k.start_mark.line + 1, v) for k, v in pairs if k.value == part), (0, None)
                )
            place = f" ({path}, line {line})" if line else place
    return place


def exit_reason(e: BaseException) -> tuple[int | None, str]:
    """(the status that a command leaves with for this exception, what it prints); None: a bug."""
    if isinstance(e, SystemExit):
        return e.code if isinstance(e.code, int) else 1, f"stopped with status {e.code}"
    if isinstance(e, KeyboardInterrupt):
        return 130, "stopped by Ctrl-C"
    if isinstance(e, BrokenPipeError) and _reader_gone():
        return 128 + signal.SIGPIPE, ""
    if isinstance(e, OSError) and e.errno is not None:
        return 1, f"error: {e.filename}: {e.strerror}" if e.filename else f"error: {e.strerror}"
    return getattr(e, "exit_status", None), f"error: {e}"


def _reader_gone() -> bool:
    """Has who read this process's stdout or stderr, such as `head -1`, closed the pipe?"""
    poll = select.poll()
    poll.register(1, 0)
    poll.register(2, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
