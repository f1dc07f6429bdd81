"""config.py: where a value comes from, what it may be, what the user is told, and how a command leaves."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
import config
from config import Only, above, at_least, between, check_fields, ConfigError, load_config

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Inner:
    k1: float = 0.9
    """term saturation"""
    kind: Literal["bm25", "dense"] = "bm25"
    """which engine"""


@dataclass
class Knobs:
    name: str = "run"
    """a text"""
    note: str | None = None
    """a text or nothing"""
    count: int = 3
    """a whole number"""
    limit: int | None = None
    """a whole number or nothing"""
    rate: float = 0.5
    """a number,
    told on two lines"""
    flag: bool = False
    """yes or no"""
    words: list[str] = field(default_factory=list)
    """several texts"""
    numbers: list[float] = field(default_factory=lambda: [1.0])
    """several numbers"""
    table: dict[str, float] = field(default_factory=dict)
    """numbers by name"""
    mode: Literal["fast", "7"] = "fast"
    """a choice of texts"""
    level: Literal[1, 2] = 1
    """a choice of numbers"""
    paths: str | list[str] = ""
    """one text or several"""
    inner: Inner = field(default_factory=Inner)
    """a part"""


@dataclass
class Strict:
    needed: int
    """has no default"""


def load(*words, cls=Knobs):
    return config.load_config(cls, list(words))


def load_text(tmp_path, text, *words, cls=Knobs):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load_config(cls, ["--config", str(path), *words])


# ------------------------------------------------------------------------------------------------------ order


def test_defaults_then_yaml_then_words(tmp_path):
    assert load() == Knobs()
    text = "count: 5\nrate: 0.25\ninner:\n  k1: 1.5\n  kind: dense\n"
    got = load_text(tmp_path, text, "count=9", "inner.k1=0.82")
    assert (got.count, got.rate, got.inner, got.name) == (9, 0.25, Inner(0.82, "dense"), "run")


def test_words_win_wherever_they_stand_and_the_last_word_wins(tmp_path):
    (tmp_path / "c.yaml").write_text("count: 5\n")
    assert load("count=9", "--config", str(tmp_path / "c.yaml")).count == 9
    assert load("count=9", "count=10").count == 10
    assert load("--count=11").count == 11


def test_several_files_are_laid_over_each_other(tmp_path):
    (tmp_path / "a.yaml").write_text("count: 5\nname: a\ninner: {k1: 2, kind: dense}\n")
    (tmp_path / "b.yaml").write_text("name: b\ninner: {k1: 3}\n")
    got = load("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    assert (got.count, got.name, got.inner) == (5, "b", Inner(3.0, "dense"))


def test_defaults_are_not_shared_between_two_configs():
    first = load("words=[a]", "inner.k1=5")
    first.words.append("b")
    assert load().words == [] and load().inner.k1 == 0.9


# ------------------------------------------------------------------------------------------------------ scalars

SCALARS = [
    ("rate", "1e-5", 1e-5),
    ("rate", "1E5", 1e5),
    ("rate", "-2.5e+3", -2500.0),
    ("rate", "3", 3.0),
    ("rate", ".5", 0.5),
    ("rate", ".inf", math.inf),
    ("count", "1e3", 1000),
    ("count", "-4", -4),
    ("count", "1_000", 1000),
    ("count", "007", 7),
    ("flag", "true", True),
    ("flag", "True", True),
    ("flag", "yes", True),
    ("flag", "off", False),
    ("name", "007", "007"),
    ("name", "1e-5", "1e-5"),
    ("name", "1.50", "1.50"),
    ("name", "true", "true"),
    ("name", "12", "12"),
    ("name", "2025-01-01", "2025-01-01"),
    ("name", "0x10", "0x10"),
    ("name", "1:30", "1:30"),
    ("name", "'a b'", "a b"),
    ("name", '"null"', "null"),
    ("name", "'007'", "007"),
    ("name", "''", ""),
    ("name", "村上 春樹", "村上 春樹"),
    ("note", "null", None),
    ("note", "~", None),
    ("note", "'null'", "null"),
    ("note", "007", "007"),
    ("note", "", None),
    ("limit", "null", None),
    ("limit", "", None),
    ("limit", "12", 12),
    ("words", "[a, 007, 'b c', 1.50, yes]", ["a", "007", "b c", "1.50", "yes"]),
    ("words", "[]", []),
    ("numbers", "[1, 1e-5, 2.5]", [1.0, 1e-5, 2.5]),
    ("table", "{a: 1, 07: 2e0}", {"a": 1.0, "07": 2.0}),
    ("mode", "fast", "fast"),
    ("mode", "7", "7"),
    ("level", "2", 2),
    ("paths", "a.run", "a.run"),
    ("paths", "[a.run, 12]", ["a.run", "12"]),
    ("inner", "{k1: 2}", Inner(2.0)),
]


@pytest.mark.parametrize("key, text, value", SCALARS, ids=[f"{k}={t}" for k, t, _ in SCALARS])
def test_scalar_means_the_same_in_a_word_and_in_a_file(tmp_path, key, text, value):
    for got in (
        getattr(load(f"{key}={text}"), key),
        getattr(load_text(tmp_path, f"{key}: {text}\n"), key),
    ):
        assert got == value and type(got) is type(value)
        if isinstance(value, list):
            assert [type(g) for g in got] == [type(v) for v in value]


@pytest.mark.parametrize(
    "text",
    [
        "a: b",
        "#1",
        "a #b",
        "a=b",
        "{",
        "[x",
        "- a",
        " x ",
        "query: ",
        "<|im_end|>",
        "*",
        "&a",
        "!t",
        "|",
    ],
)
def test_a_word_is_kept_as_typed_where_yaml_would_take_it_apart(text):
    assert load(f"name={text}").name == text


def test_empty_word_and_empty_file_entry_are_the_empty_text(tmp_path):
    assert load("name=").name == "" and load_text(tmp_path, "name:\n").name == ""


WRONG = [
    ("count", "1.5", "int"),
    ("count", "true", "int"),
    ("count", "'3'", "int"),
    ("count", "three", "int"),
    ("count", "null", "int"),
    ("count", "", "int"),
    ("count", "[1]", "int"),
    ("count", ".nan", "int"),
    ("count", ".inf", "int"),
    ("rate", "fast", "float"),
    ("rate", "true", "float"),
    ("rate", ".nan", "float"),
    ("rate", "nan", "float"),
    ("rate", "'1'", "float"),
    ("flag", "1", "bool"),
    ("flag", "'true'", "bool"),
    ("flag", "2.0", "bool"),
    ("name", "[a]", "str"),
    ("name", "null", "str"),
    ("limit", "x", "int or null"),
    ("words", "[[a]]", "str"),
    ("numbers", "[1, x]", "float"),
    ("table", "[1]", "dict of float"),
    ("table", "{a: x}", "float"),
    ("mode", "slow", "one of fast, 7"),
    ("level", "3", "one of 1, 2"),
    ("level", "true", "one of 1, 2"),
    ("level", "1.0", "one of 1, 2"),
    ("level", "'1'", "one of 1, 2"),
]


@pytest.mark.parametrize("key, text, kind", WRONG, ids=[f"{k}={t}" for k, t, _ in WRONG])
def test_wrong_type_names_key_value_and_type(tmp_path, key, text, kind):
    for attempt in (lambda: load(f"{key}={text}"), lambda: load_text(tmp_path, f"{key}: {text}\n")):
        with pytest.raises(config.ConfigError) as error:
            attempt()
        message = str(error.value)
        assert message.startswith(key) and f"must be {kind}" in message
        shown = yaml.safe_load(text) if text else None
        if isinstance(shown, (str, bool)) or (isinstance(shown, (int, float)) and shown == shown):
            assert repr(shown) in message


def test_nested_errors_name_the_whole_key():
    with pytest.raises(config.ConfigError, match=r"^inner\.k1='x' .*float"):
        load("inner.k1=x")
    with pytest.raises(config.ConfigError, match=r"^numbers\[1\]='x'"):
        load("numbers=[1, x]")
    with pytest.raises(config.ConfigError, match=r"^inner.*mapping of Inner"):
        load("inner=3")


# ------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    "word, near",
    [
        ("cuont=3", "count"),
        ("rates=1", "rate"),
        ("inner.k2=1", "inner.k1"),
        ("iner.k1=1", "inner"),
        ("inner.knid=dense", "inner.kind"),
        ("--Count=3", "count"),
    ],
)
def test_unknown_key_names_the_nearest(word, near):
    with pytest.raises(config.ConfigError, match=rf"unknown key .*did you mean {near}\?"):
        load(word)


def test_a_key_of_a_nested_mapping_is_named_in_full():
    with pytest.raises(config.ConfigError, match=r"unknown key k1; did you mean inner\.k1\?"):
        load("k1=1")


def test_a_list_is_written_with_commas_or_in_brackets(tmp_path):
    assert load("numbers=3").numbers == load("numbers=[3]").numbers == [3]
    assert load("numbers=3, 1e-5,").numbers == load("numbers=[3, 1e-5]").numbers == [3, 1e-5]
    assert load_text(tmp_path, "numbers: 1,2\n").numbers == [1, 2]
    assert load("numbers=").numbers == load("numbers=[]").numbers == []
    for nothing in ("numbers=null", "numbers=x", "numbers=1,x", "numbers=[1,2", "numbers='1',2"):
        with pytest.raises(config.ConfigError, match="^numbers=.*must be list of float"):
            load(nothing)


def test_unknown_key_without_a_neighbour_lists_all(tmp_path):
    with pytest.raises(
        config.ConfigError, match="unknown key zzzzzzz; known keys: name, note, count"
    ):
        load("zzzzzzz=1")
    with pytest.raises(config.ConfigError, match="unknown key 1"):
        load_text(tmp_path, "1: 2\n")


def test_key_twice_in_one_mapping_is_an_error(tmp_path):
    with pytest.raises(config.ConfigError, match="c.yaml.*count stands twice.*line 3"):
        load_text(tmp_path, "count: 1\nname: x\ncount: 2\n")
    with pytest.raises(config.ConfigError, match="k1 stands twice"):
        load_text(tmp_path, "inner:\n  k1: 1\n  k1: 2\n")
    assert load_text(tmp_path, "inner: {k1: 1}\ntable: {k1: 1}\n").inner.k1 == 1.0


def test_required_field():
    assert load("needed=3", cls=Strict).needed == 3
    with pytest.raises(config.ConfigError, match="needed is required"):
        load(cls=Strict)


@pytest.mark.parametrize("words", [["count"], ["--config"], ["-x"], ["count", "3"]])
def test_stray_words(words):
    with pytest.raises(config.ConfigError):
        load(*words)


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("text", ["", "# only a comment\n", "null\n", "---\n", "\ufeffcount: 3\n"])
def test_files_that_set_nothing_new(tmp_path, text):
    assert load_text(tmp_path, text) == Knobs()


@pytest.mark.parametrize(
    "text, reason",
    [
        ("5", "mapping"),
        ("[1]", "mapping"),
        ("abc", "mapping"),
        ("count: 1\n\tname: x", "YAML"),
        (b"name: caf\xe9", "YAML"),
        ("a: 1\n---\nb: 2\n", "YAML"),
        ("name: !!python/name:os.system\n", "YAML"),
        ("[a]: 3", "mapping|YAML"),
    ],
)
def test_bad_files_are_named(tmp_path, text, reason):
    with pytest.raises(config.ConfigError, match=rf"c\.yaml.*({reason})"):
        load_text(tmp_path, text)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(config.ConfigError, match="nowhere.yaml: No such file"):
        load("--config", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(config.ConfigError, match="directory"):
        load("--config", str(tmp_path))


AWKWARD = [
    "007",
    "1e-5",
    "1.50",
    "yes",
    "null",
    "~",
    "",
    " x ",
    "a: b",
    "#1",
    "a\nb\n",
    "\ttab",
    "2025-01-01",
    "é 村上 🎬",
    "a\u2028b",
    "'q'",
    '"',
    "- x",
    "{",
    "=",
    "<<",
    "|",
    "0x10",
    "1:30",
    "\ufeffx",
    "\x07",
]


def test_saved_config_loads_equal(tmp_path):
    path = str(tmp_path / "saved.yaml")
    cfg = Knobs(
        name="a: b",
        note="null",
        count=-3,
        limit=0,
        rate=1e-6,
        flag=True,
        words=AWKWARD,
        numbers=[1e-30, 1e300, math.inf, -0.0],
        table={w: float(i) for i, w in enumerate(AWKWARD)},
        mode="7",
        level=2,
        paths=AWKWARD[:3],
        inner=Inner(0.82, "dense"),
    )
    config.save_config(cfg, path)
    assert config.load_config(Knobs, ["--config", path]) == cfg
    assert list(yaml.safe_load(Path(path).read_text(encoding="utf-8"))) == [
        f for f in Knobs.__dataclass_fields__
    ]  # whole, in order
    for text in AWKWARD:
        config.save_config(Knobs(name=text, note=text, paths=text), path)
        got = config.load_config(Knobs, ["--config", path])
        assert (got.name, got.note, got.paths) == (text, text, text)


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = str(tmp_path / "saved.yaml")
    config.save_config(Knobs(), path)
    before = Path(path).read_bytes()
    with pytest.raises(Exception):
        config.save_config(Knobs(name=object()), path)
    assert Path(path).read_bytes() == before and os.listdir(tmp_path) == ["saved.yaml"]


# ------------------------------------------------------------------------------------------------------ a whole command

SCRIPT = '''"""A command for the test.

More words.
"""
import os, signal, sys, time
from dataclasses import dataclass, field
sys.path.insert(0, {root!r})
import config

class Bad(ValueError):
    exit_status = 2

class Ended(RuntimeError):
    exit_status = 3

@dataclass
class Part:
    k1: float = 0.9
    """saturation of terms"""

@dataclass
class C:
    what: str = "ok"
    """what to do"""
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    """some sizes"""
    part: Part = field(default_factory=Part)
    """a part of it"""

def main(cfg):
    print("working")
    if cfg.what == "bad":
        raise Bad("the value 3 is wrong; use 4")
    if cfg.what == "ended":
        raise Ended("collapse")
    if cfg.what == "bug":
        raise KeyError("oops")
    if cfg.what == "full":
        raise OSError(28, "No space left on device", "/tmp/x")
    if cfg.what == "ctrl-c":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job started in the background ignores it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    if cfg.what == "term":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            print("cleaned up", file=sys.stderr)
    if cfg.what == "none":
        return None
    return {{"what": cfg.what, "k1": cfg.part.k1, "é": 1}}

if __name__ == "__main__":
    config.run(C, main)
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("command") / "tool.py"
    path.write_text(SCRIPT.format(root=str(ROOT)), encoding="utf-8")

    def call(*words):
        return subprocess.run(
            [sys.executable, str(path), *words],
            capture_output=True,
            text=True,
            timeout=60,
            encoding="utf-8",
        )

    return call


def test_output_is_utf8_whatever_the_locale(command, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command("what=fine")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["é"] == 1, done.stderr


def test_success_ends_with_one_json_line(command):
    done = command("what=fine", "part.k1=1.5")
    assert done.returncode == 0 and done.stdout.splitlines()[0] == "working"
    assert json.loads(done.stdout.splitlines()[-1]) == {"what": "fine", "k1": 1.5, "é": 1}


@pytest.mark.parametrize(
    "words, status, text",
    [
        (["what=bad"], 2, "error: the value 3 is wrong; use 4"),
        (["waht=x"], 2, "did you mean what?"),
        (["part.k1=x"], 2, "part.k1='x'"),
        (["--config", "/nonexistent.yaml"], 2, "/nonexistent.yaml"),
        (["what=ended"], 3, "error: collapse"),
        (["what=full"], 1, "error: /tmp/x: No space left on device"),
        (["what=ctrl-c"], 130, "Ctrl-C"),
        (["what=term"], 143, "cleaned up"),
    ],
)
def test_exit_status(command, words, status, text):
    done = command(*words)
    assert done.returncode == status and text in done.stderr
    assert "Traceback" not in done.stderr and "{" not in done.stdout


@pytest.mark.parametrize(
    "words, place",
    [
        ([], "what=['a'] of type list; it must be str (FILE, line 3)\n"),
        (["what=ok"], "part.k1='x' of type str; it must be float (FILE, line 5)\n"),
        (["what=ok", "--part.k1=y"], "part.k1='y' of type str; it must be float\n"),
        (["what=ok", "part.k1=1"], "unknown key waht; did you mean what? (FILE, line 6)\n"),
        (["waht=1", "what=ok", "part.k1=1"], "unknown key waht; did you mean what?\n"),
    ],
)
def test_the_file_and_line_of_a_bad_setting_are_named(command, tmp_path, words, place):
    file, first = tmp_path / "my.yaml", tmp_path / "first.yaml"
    first.write_text("what: first")
    file.write_text("# a comment\n\nwhat: [a]\npart:\n  k1: x\n")
    if "waht" in place:
        file.write_text(file.read_text() + "waht: 1\n")
    done = command("--config", str(first), f"--config={file}", *words)
    assert done.returncode == 2 and done.stderr == "error: " + place.replace("FILE", str(file))


def test_a_bug_shows_its_traceback(command):
    done = command("what=bug")
    assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError" in done.stderr


def test_none_prints_no_result(command):
    done = command("what=none")
    assert done.returncode == 0 and done.stdout == "working\n"


def test_help_shows_every_knob_with_type_default_and_meaning(command):
    done = command("--help")
    assert done.returncode == 0 and done.stderr == ""
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert (
        lines[0] == "A command for the test."
        and "usage: python tool.py [--config FILE.yaml] [key=value …]" in lines
    )
    for knob, meaning in [
        ('what: str = "ok"', "what to do"),
        ("sizes: list of int = [1, 2]", "some sizes"),
        ("part.k1: float = 0.9", "saturation of terms"),
    ]:
        assert lines[lines.index(knob) + 1] == meaning
    assert any(line.startswith("part.…") and line.endswith("a part of it") for line in lines)


def test_help_joins_doc_lines_and_names_choices():
    text = " ".join(config.help_text(Knobs).split())
    assert (
        "a number, told on two lines" in text
        and 'mode: one of fast, 7 = "fast"' in text
        and "note: str or null = null" in text
    )
    assert "needed: int = (required)" in config.help_text(Strict)


# ------------------------------------------------------------------------------------------------------ the project's own

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.skipif(not CONFIGS, reason="configs/ is empty")
@pytest.mark.parametrize("path", CONFIGS, ids=[p.name for p in CONFIGS])
def test_committed_yaml_loads_into_its_tool(path, monkeypatch):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# tool: "), f"{path.name}: the first line must be `# tool: <file>.py`"
    tool, *command = first.removeprefix(
        "# tool: "
    ).split()  # `# tool: prepare.py demo` names a command of a tool
    module = importlib.import_module(tool.removesuffix(".py"))
    noun = command[0] if command else module.__name__
    classes = [
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and c.__module__ == module.__name__
        and c.__name__.lower() == f"{noun}config"
    ]
    assert len(classes) == 1, f"{module.__name__}.py has no {noun.capitalize()}Config"
    cfg = config.load_config(classes[0], ["--config", str(path)])
    text = path.read_text(encoding="utf-8")
    monkeypatch.setattr(
        importlib.import_module("tasks"), "check_engine", lambda *a, **k: None
    )  # is vLLM installed here?
    if (
        noun == "grpo"
    ):  # what the tool itself refuses before it loads a model, for the processes that the comment names
        module.check_config(cfg, int(re.search(r"nproc-per-node (\d+)|$", text)[1] or 1))
    if noun == "evaluate":
        module.check(cfg)
    if noun in ("sft", "grpo") and re.search(
        r"-(qwen|llama)[\d.]+b-", path.name
    ):  # a published model's: says what to expect
        assert all(
            f"\n# {word}" in text for word in ("Hardware:", "Hours:", "Expected", "Departures:")
        ), path.name


ENTRY = [
    n
    for n in (
        "prepare",
        "retriever",
        "sft",
        "grpo",
        "infer",
        "evaluate",
        "serve",
        "report",
        "sources.files",
        "sources.conversations",
        "sources.questions",
    )
    if (ROOT / f"{n.replace('.', '/')}.py").exists()
]


@pytest.mark.parametrize("name", ENTRY)
def test_every_knob_of_every_tool_has_its_line_of_meaning(name):
    module = importlib.import_module(name)
    configs = [
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and c.__module__ in (name, "search.passages")
        and c.__name__.endswith("Config")
        and hasattr(c, "__dataclass_fields__")
    ]
    assert configs
    for cls in configs:
        docs = config.field_docs(cls)
        assert [f for f in cls.__dataclass_fields__ if not docs.get(f)] == []


@dataclass
class Ranged:
    lr: Annotated[float, above(0)] = 1e-3
    steps: Annotated[int | None, at_least(1)] = None
    share: Annotated[float, between(0, 1)] = 0.5


@dataclass
class Outer:
    inner: Ranged = field(default_factory=Ranged)


@pytest.mark.parametrize(
    "word, message",
    [
        ("inner.lr=0", "inner.lr=0.0 must be above 0"),
        ("inner.lr=.inf", "inner.lr=inf must be above 0"),
        ("inner.steps=0", "inner.steps=0 must be at least 1, or null"),
        ("inner.share=1.5", "must be from 0 to 1"),
    ],
)
def test_a_number_out_of_its_range_is_named_with_the_rule(word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(Outer, [word])


def test_numbers_at_the_edge_of_a_range_and_null_are_taken():
    cfg = load_config(Outer, ["inner.lr=1e-300", "inner.steps=null", "inner.share=1"])
    assert (cfg.inner.lr, cfg.inner.steps, cfg.inner.share) == (1e-300, None, 1.0)
    with pytest.raises(ConfigError, match="share"):
        check_fields(Outer(Ranged(share=2.0)))


@dataclass
class Search:
    depth: Annotated[int, at_least(1)] = 10
    template: Annotated[str, Only("task", ("search",))] = "chat"


@dataclass
class Tasks:
    task: str = "rewrite"
    judge: str = ""
    model: Annotated[str, Only("judge")] = ""
    words: Annotated[list[str], Only("task", ("rewrite",))] = field(default_factory=lambda: ["a"])
    search: Annotated[Search, Only("task", ("search", "agent"))] = field(default_factory=Search)


@pytest.mark.parametrize(
    "words, message",
    [
        (["search.depth=3"], "search.depth=3: it has an effect with task=search or agent alone"),
        (["task=agent", "search.template=x"], "search.template=x: it has an effect with task=sear"),
        (["task=agent", "words=[b]"], "words=['b']: it has an effect with task=rewrite alone"),
        (["model=m"], "model=m: it has an effect with judge=… alone; leave it out"),
        (["task=agent", "search.depth=0"], "search.depth=0 must be at least 1"),
        (["search.depth=10", "words=[a]", "model="], ""),
        (["task=search", "search.depth=3", "search.template=x", "judge=j", "model=m"], ""),
    ],
)
def test_a_setting_without_effect_is_refused_by_name(words, message):
    with (
        pytest.raises(ConfigError, match=re.escape(message))
        if message
        else contextlib.nullcontext()
    ):
        load_config(Tasks, words)


@pytest.mark.parametrize(
    "tool, words, named",
    [
        ("grpo.GRPO", "kl_coef=0 kl_limit=3", "kl_limit=3.0"),
        ("grpo.GRPO", "task=search episode.gold_weight=1", "episode.gold_weight=1.0"),
        ("sft.SFT", "records=r.jsonl", "records=r.jsonl"),
        ("infer.Infer", "examples=e.jsonl", "examples=e.jsonl"),
        ("infer.Infer", "retriever.kind=dense", "retriever.kind=dense"),
    ],
)
def test_each_tool_refuses_settings_without_effect(tool, words, named):
    module, name = tool.split(".")
    cls = getattr(importlib.import_module(module), f"{name}Config")
    with pytest.raises(ConfigError, match=re.escape(f"{named}: it has an effect with ")):
        load_config(cls, words.split())


@dataclass
class Output:
    out: str = ""


def test_a_run_that_ends_early_leaves_its_status_in_its_folder(tmp_path, capsys):
    """torchrun's status is 1 whatever a worker's was."""

    class Collapsed(RuntimeError):
        exit_status = 3

    def ends_with(error):
        def main(cfg):
            if error:
                raise error
            return {}

        with contextlib.suppress(SystemExit):
            config.run(Output, main, [f"out={tmp_path}"], status_file="exit.json")
        path = tmp_path / "exit.json"
        return json.loads(path.read_text()) if path.exists() else None

    assert ends_with(Collapsed("the reward fell")) == {
        "status": 3,
        "reason": "error: the reward fell",
        "rank": "0",
    }
    assert ends_with(SystemExit(143))["status"] == 143
    assert ends_with(ConfigError("lr"))["status"] == 2

    class InUse(ConfigError):
        leaves_note = False

    assert ends_with(InUse("another process is writing")) is None  # it would be that run's

    def refuse(cfg=None):  # a second call, while the first runs or alone
        words = [f"out={tmp_path}", "lrr=1"]
        with pytest.raises(SystemExit):
            config.run(Output, lambda cfg: None, words, status_file="exit.json")

    config.run(Output, refuse, [f"out={tmp_path}"], status_file="exit.json")
    assert not (tmp_path / "exit.json").exists()
    refuse()
    assert "unknown key lrr" in json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert ends_with(None) is None  # a run that ends well leaves none, of an earlier one neither
