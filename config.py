"""Configuration: dataclass defaults, then YAML (`--config file.yaml`), then `key=value`; the later
wins.

Every entry file declares its knobs in one dataclass and documents each by the string under the
field:

    @dataclass
    class EvaluateConfig:
        run: str = ""
        \"\"\"TREC run file to score\"\"\"

    if __name__ == "__main__":
        run(EvaluateConfig, main)

An unknown key is an error that names the nearest right one; a value of the wrong type is an error
that names key, value and type. What an unquoted scalar means is decided by the field it is for:
`007` is a text in a str field and 7 in an int field, `1e-5` is a float; a quoted one is always a
text, and nothing else is converted. A dataclass inside a dataclass is set by dotted keys
(`retriever.k1=0.82`). Standard library and PyYAML only. The numbers a field may hold stand in its
annotation, `lr: Annotated[float, above(0)] = 1e-6`.
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
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Callable, Literal, Union, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """Bad configuration: the message names the key, the value, the rule and the way out."""

    exit_status = 2


@dataclass(frozen=True)
class Range:
    """The finite numbers that a field may hold: what an `Annotated` type carries."""

    low: float
    high: float = math.inf
    open: bool = False  # `low` itself is not allowed

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (value > self.low if self.open else value >= self.low)
            and value <= self.high
        )

    def __str__(self) -> str:
        low = f"above {self.low}" if self.open else f"at least {self.low}"
        if self.low == -math.inf:
            return "finite"
        if self.high == math.inf:
            return low
        return f"{low}, at most {self.high}" if self.open else f"from {self.low} to {self.high}"


def at_least(low: float) -> Range:
    return Range(low)


def above(low: float, at_most: float = math.inf) -> Range:
    return Range(low, at_most, open=True)


def between(low: float, high: float) -> Range:
    """low ≤ value ≤ high."""
    return Range(low, high)


FINITE = Range(-math.inf)


def check_ranges(cfg: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first number of a configuration (nested ones too) outside its
    field's range.

    null, where the type allows it, is in every range.
    """
    hints = typing.get_type_hints(type(cfg), include_extras=True)
    for f in fields(cfg):
        value, hint = getattr(cfg, f.name), hints[f.name]
        if is_dataclass(value):
            check_ranges(value, f"{prefix}{f.name}.")
        elif (
            get_origin(hint) is Annotated
            and value is not None
            and value not in hint.__metadata__[0]
        ):
            null = ", or null" if type(None) in get_args(hint.__origin__) else ""
            raise ConfigError(f"{prefix}{f.name}={value} must be {hint.__metadata__[0]}{null}")


class Plain(str):
    """An unquoted YAML scalar as it is written: `convert` gives it the meaning that its field's
    type asks for."""


class _Loader(yaml.SafeLoader):
    """YAML with `Plain` scalars, in which a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1 and key != "<<"]:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]} stands twice in one mapping", node.start_mark
            )
        return super().construct_mapping(node, deep)


for _tag in ("str", "int", "float", "bool", "null", "timestamp"):
    _Loader.add_constructor(
        f"tag:yaml.org,2002:{_tag}", lambda _, node: node.value if node.style else Plain(node.value)
    )


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


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # a float to everybody but YAML 1.1


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


def type_name(tp: Any) -> str:
    """A type as a person would write it: `int`, `str or null`, `one of strict, paper`."""
    origin, args = get_origin(tp), get_args(tp)
    if origin is Annotated:
        return f"{type_name(args[0])}, {args[1]}"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else type_name(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (list, dict):
        return f"{origin.__name__} of {type_name(args[-1])}" if args else origin.__name__
    return getattr(tp, "__name__", str(tp))


def convert(value: Any, tp: Any, key: str) -> Any:
    """`value` (as `_Loader` gave it) checked against type `tp`; raises ConfigError naming `key`,
    value and type."""
    origin, args = get_origin(tp), get_args(tp)
    written = value
    if isinstance(value, Plain):
        value = resolve(written)
        if tp is str and (value is not None or not written):
            return str(written)
    if is_dataclass(tp):
        if isinstance(value, tp):
            return value
        if not isinstance(value, dict):
            raise ConfigError(f"{key}={value!r}: expected a mapping of {tp.__name__} fields")
        return build(tp, value, prefix=f"{key}.")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for arg in args:
            if arg is not type(None):
                try:
                    return convert(written, arg, key)
                except ConfigError:
                    continue
    elif origin is Literal:
        for arg in args:
            if type(arg) in (type(value), str) and arg in (value, str(written)):
                return arg
    elif origin is list:
        # one value stands for a list of one
        if isinstance(written, str) and written and value is not None:
            with contextlib.suppress(ConfigError):
                return [convert(written, args[0], key)]
        if isinstance(value, list):
            return [convert(v, args[0], f"{key}[{i}]") for i, v in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {str(k): convert(v, args[1], f"{key}.{k}") for k, v in value.items()}
    elif tp is bool and isinstance(value, bool):
        return value
    elif tp is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif tp is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not math.isnan(value):
            return float(value)
    elif tp is str and isinstance(value, str):
        return value
    shown = "null" if value is None else f"{value!r} of type {type(value).__name__}"
    raise ConfigError(f"{key}={shown}; it must be {type_name(tp)}")


def build(cls: type, values: dict, prefix: str = "") -> Any:
    """An instance of dataclass `cls` from a (nested) mapping; unknown keys and wrong types raise
    ConfigError."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.init]
    for key in values:
        if key not in names:
            inner = [
                f"{n}.{key}"
                for n in names
                if is_dataclass(hints[n]) and key in {f.name for f in fields(hints[n])}
            ]
            near = inner or difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else "known keys: " + ", ".join(prefix + n for n in names)
            )
            raise ConfigError(f"unknown key {prefix}{key}; {hint}")
    missing = [
        f.name
        for f in fields(cls)
        if f.init and f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(
            f"{prefix}{missing[0]} is required: give {prefix}{missing[0]}=… or set it in the "
            "--config file"
        )
    return cls(**{k: convert(v, hints[k], prefix + k) for k, v in values.items()})


def merge(base: dict, update: dict) -> dict:
    """`update` laid over `base`; mappings merge key by key, everything else is replaced."""
    out = dict(base)
    for key, value in update.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def read_yaml(path: str) -> dict:
    """The mapping in a YAML file; ConfigError: a missing file, bad YAML, another top level."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            value = yaml.load(f, _Loader)
    except OSError as e:
        raise ConfigError(
            f"--config {path}: {e.strerror or e}; give the path of a YAML file"
        ) from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(e).split())}") from e
    if value is None or (isinstance(value, Plain) and resolve(value) is None):
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"--config {path}: the top level must be a mapping of keys, not a "
            f"{'text' if isinstance(value, str) else type(value).__name__}"
        )
    return value


def read_word(text: str) -> Any:
    """The value in a command line's `key=value`: `[…]`, `{…}` and quoted text are YAML, all else
    one plain scalar."""
    if text.startswith(("[", "{", '"', "'")):
        try:
            return yaml.load(text, _Loader)
        except yaml.YAMLError:
            pass
    return Plain(text)


def load_config(cls: type, argv: list[str] | None = None) -> Any:
    """Dataclass `cls` ← YAML files given by `--config FILE` (in order) ← `key=value` words of
    `argv` (or sys.argv).

    `--help` prints every knob with its meaning and default, and leaves with status 0. Raises
    ConfigError (exit status 2) for an unknown key, a wrong type, a number out of its range, an
    unreadable file.
    """
    cfg = build(cls, read_words(cls, argv))
    check_ranges(cfg)
    return cfg


def read_words(cls: type, argv: list[str] | None = None) -> dict:
    """What files and words give, as nested mappings, not yet checked against `cls`."""
    words = list(sys.argv[1:] if argv is None else argv)
    values: dict = {}
    overrides: dict = {}
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            print(help_text(cls))
            raise SystemExit(0)
        if word == "--config" or word.startswith("--config="):
            if word == "--config" and not words:
                raise ConfigError("--config needs a YAML file behind it")
            values = merge(
                values, read_yaml(word.partition("=")[2] if "=" in word else words.pop(0))
            )
            continue
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(
                f"{word!r} is neither --config FILE nor key=value; --help lists the keys"
            )
        value = read_word(text)
        for part in reversed(key.split(".")):
            value = {part: value}
        overrides = merge(overrides, value)
    return merge(values, overrides)


def to_dict(cfg: Any) -> dict:
    """The configuration as plain nested mappings."""
    return dataclasses.asdict(cfg)


def save_config(cfg: Any, path: str) -> None:
    """Write the resolved configuration as YAML that `--config` reads back to an equal object."""
    text = yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def help_text(cls: type) -> str:
    """Usage and one line a knob: `key: type = default   meaning`."""
    entry = sys.modules["__main__"]  # the tool, which may have its configuration from another file
    module = entry if getattr(entry, cls.__name__, None) is cls else sys.modules[cls.__module__]
    first = (inspect.getdoc(module) or "").split("\n")[0]
    usage = f"usage: python {os.path.basename(sys.argv[0])} [--config FILE.yaml] [key=value …]"
    lines = [first, "", usage, ""]

    def walk(c: type, prefix: str) -> None:
        docs, hints = field_docs(c), typing.get_type_hints(c, include_extras=True)
        for f in fields(c):
            if not f.init:
                continue
            tp = hints[f.name]
            if is_dataclass(tp):
                lines.append(f"  {prefix}{f.name}.…    {docs.get(f.name, '')}")
                walk(tp, f"{prefix}{f.name}.")
                continue
            if f.default is MISSING and f.default_factory is MISSING:
                default = "(required)"
            else:
                value = f.default if f.default is not MISSING else f.default_factory()
                default = json.dumps(value, ensure_ascii=False)
            lines.append(f"  {prefix}{f.name}: {type_name(tp)} = {default}")
            wrapped = textwrap.wrap(docs.get(f.name, ""), 92)
            lines.extend(" " * 8 + line for line in wrapped)

    walk(cls, "")
    return "\n".join(lines)


def _on_sigterm(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _reader_gone() -> bool:
    """Has whoever read this process's stdout or stderr, such as `head -1`, closed the pipe?"""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def run(
    cls: type,
    main: Callable[[Any], dict | None],
    argv: list[str] | None = None,
    status_file: str = "",
) -> None:
    """Parse, call `main(cfg)`, print its dict as one JSON line (the last of stdout), and leave with
    a stated status.

    0 success; 2 bad input (an exception whose class carries `exit_status = 2`); 1 a full disk or
    unreadable file; 130 after Ctrl-C, 143 after SIGTERM, 141 (quietly) when the reader of its
    output is gone; anything else is a bug and shows its traceback (1). `status_file`: a file of
    this name in the folder `out` tells status and reason of a run that did not end well: torchrun's
    own status is 1 whatever happened.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    for stream in (sys.stdout, sys.stderr):
        # what a model wrote must not end a run where the locale lacks a character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    note = ""
    try:
        values = read_words(cls, argv)
        if status_file:
            note = os.path.join(str(values.get("out", cls.out)), status_file)
        if note and os.path.exists(note) and os.environ.get("RANK", "0") == "0":
            os.remove(note)
        cfg = build(cls, values)
        check_ranges(cfg)
        result = main(cfg)
        if result is not None:
            print(json.dumps(result, ensure_ascii=False, allow_nan=False), flush=True)
    except BaseException as e:
        status, reason = exit_reason(e)
        if note and status != 0 and os.path.isdir(os.path.dirname(note)):
            _note_status(note, status or 1, reason)
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


def _note_status(path: str, status: int, reason: str) -> None:
    """Leave status and reason, once: of several processes the first one's is the cause."""
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as f:
        json.dump({"status": status, "reason": reason, "rank": os.environ.get("RANK", "0")}, f)
