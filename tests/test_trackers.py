"""Trackers: a run continued once, read back from each that is installed; what is refused, and what only warns."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_grpo import ENV, command, world  # noqa: F401  a fixture

from config import ConfigError
from data import read_jsonl
from scoring.trackers import Trackers, check_trackers

NAMES = ("tensorboard", "wandb", "trackio")
INSTALLED = [name for name in NAMES if importlib.util.find_spec(name)]
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def needs(name: str):
    return pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def tracked(world):  # noqa: F811
    """A run of two steps, continued to four, with every tracker that is installed; its folder."""
    if not INSTALLED:
        pytest.skip("no tracker is installed: pip install tensorboard wandb trackio")
    env = ENV | OFFLINE | {"TRACKIO_DIR": str(world / "trackio")}
    for steps in (2, 4):
        words = command(world, "tracked", f"log_to=[{','.join(INSTALLED)}]", f"steps={steps}")
        done = subprocess.run(words, cwd=world, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stdout, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1])["steps"] == steps  # trackers print, too
    return world / "tracked"


def logged(folder: Path) -> dict[tuple[int, str], float]:
    """(step, name) → figure of metrics.jsonl, which is the oracle."""
    rows = [row for _, row in read_jsonl(str(folder / "metrics.jsonl"))]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    pairs = ((row, key) for row in rows for key in row if key != "step")
    return {(row["step"], key): row[key] for row, key in pairs if row[key] is not None}


def scalars(folder: Path) -> dict[tuple[int, str], list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    found: dict[tuple[int, str], list[float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.setdefault((event.step, tag), []).append(event.value)
    return found


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@needs("tensorboard")
def test_tensorboard_read_back_equals_the_log(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = {key: [float32(value)] for key, value in logged(tracked).items()}
    assert len(expected) > 100 and scalars(tracked) == expected
    events = EventAccumulator(str(tracked / "tensorboard")).Reload()
    tables = events.Tensors("rollouts/text_summary")
    assert {event.step for event in tables} == {1, 2, 4}  # the first, and those that validate
    rollouts = [row for _, row in read_jsonl(str(tracked / "rollouts/step_000001.jsonl"))]
    lines = tables[0].tensor_proto.string_val[0].decode().splitlines()
    assert len(lines) == 2 + 16 and lines[0].startswith("| query_id | group | response |")
    for line, rollout in zip(lines[2:], rollouts, strict=True):
        shown = " ".join(rollout["response"].split()).replace("<", "&lt;")
        assert line.startswith(f"| {rollout['query_id']} | {rollout['group']} | {shown} |")


def wandb_records(path: Path):
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB) behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        parts, at = parts + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@needs("wandb")
def test_wandb_offline_read_back_equals_the_log(tracked):
    found, ids, tables = {}, set(), {}
    folders = sorted((tracked / "wandb").glob("offline-run-*/*.wandb"))
    assert len(folders) == 2  # one for each process, of one run
    for record in (record for path in folders for record in wandb_records(path)):
        if record.WhichOneof("record_type") == "run":
            ids.add((record.run.run_id, record.run.project))
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            tables |= {row["_step"]: row["rollouts/nrows"]} if "rollouts/nrows" in row else {}
            for key, value in row.items():
                if not key.startswith(("_", "rollouts")):
                    assert (row["_step"], key) not in found  # no step twice
                    found[row["_step"], key] = value
    state = json.loads((tracked / "trackers.json").read_text())
    assert found == logged(tracked) and ids == {(state["id"], "nanosearch-r1")}
    assert tables == {1: 16, 2: 16, 4: 16}


TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("nanosearch-r1")
json.dump([run, SQLiteStorage.get_logs("nanosearch-r1", run)], sys.stdout, default=str)
"""


@needs("trackio")
def test_trackio_read_back_equals_the_log(tracked, world):  # noqa: F811
    env = ENV | {"TRACKIO_DIR": str(world / "trackio")}
    done = subprocess.run([sys.executable, "-c", TRACKIO], env=env, capture_output=True, text=True)
    run, rows = json.loads(done.stdout)
    state = json.loads((tracked / "trackers.json").read_text())
    assert run == f"tracked {state['id']}" and [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    numbers = ((r, key) for r in rows for key in r if isinstance(r[key], (int, float)))
    assert {(r["step"], key): r[key] for r, key in numbers if key != "step"} == logged(tracked)
    tables = {r["step"]: r["rollouts"]["_value"] for r in rows if "rollouts" in r}
    assert {step: len(table) for step, table in tables.items()} == {1: 16, 2: 16, 4: 16}
    assert tables[1][0]["query_id"].startswith("q")


@dataclass
class Config:
    out: str
    validate_every: int = 5


@needs("tensorboard")
def test_steps_taken_again_stand_once_with_their_later_figures(tmp_path):
    """As after a kill: the run goes on from step 2 although 4 were logged; NaN is no point."""
    cfg = Config(str(tmp_path))
    first = Trackers(["tensorboard"], cfg, 0)
    for step in range(5):
        first.log({"step": step, "reward": step / 8, "kl": math.nan})
    again = Trackers(["tensorboard"], cfg, 2)
    for step in range(2, 6):
        again.log({"step": step, "reward": -step / 8})
    expected = [0.0, 0.125, -0.25, -0.375, -0.5, -0.625]
    assert scalars(tmp_path) == {(i, "reward"): [value] for i, value in enumerate(expected)}
    assert again.state == {"id": first.state["id"], "step": 5}
    anew = Trackers(["tensorboard"], cfg, 0)  # a new run in the same folder is another one there
    assert anew.state["id"] != first.state["id"] and anew.state["step"] == -1
    anew.log({"step": 0, "reward": 9.0})
    assert scalars(tmp_path) == {(0, "reward"): [9.0]}


def test_a_step_is_handed_to_a_tracker_once_and_a_failure_is_said_once(
    tmp_path, monkeypatch, capsys
):
    """With a tracker in a file of its own, which fails from its third row on."""
    (tmp_path / "trackio.py").write_text(
        "rows, started = [], []\n"
        "def init(**how): started.append(how)\n"
        "def log(row, step):\n"
        "    rows.append((step, row))\n"
        "    if len(rows) > 2: raise ConnectionError('gone')\n"
        "def finish(): raise AssertionError('it was left out')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    cfg = Config(str(tmp_path / "run"))
    os.mkdir(cfg.out)
    Trackers(["trackio"], cfg, 0).log({"step": 0, "loss": 1.0})
    tracked = Trackers(["trackio"], cfg, 0 + 1)
    for step in (0, 1, 2, 3):  # 0 was logged before
        tracked.log({"step": step, "loss": 0.5})
    tracked.close()
    import trackio

    assert trackio.rows == [(0, {"loss": 1.0}), (1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert len({how["name"] for how in trackio.started}) == 1 and len(trackio.started) == 2
    assert (
        trackio.started[1]["resume"] == "allow" and trackio.started[1]["config"]["out"] == cfg.out
    )
    assert capsys.readouterr().out.count("warning: trackio failed, nothing more is logged") == 1


@needs("tensorboard")
def test_a_tracker_that_cannot_start_ends_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    tracked = Trackers(["tensorboard"], Config(str(tmp_path)), 0)
    for step in range(3):
        tracked.log({"step": step, "reward": 1.0})
    tracked.close()
    assert capsys.readouterr().out.count("warning: tensorboard failed") == 1


@needs("tensorboard")
def test_a_tracker_named_twice_gets_a_figure_once(tmp_path):
    tracked = Trackers(["tensorboard", "tensorboard"], Config(str(tmp_path)), 0)
    tracked.log({"step": 0, "reward": 1.0})
    tracked.close()
    assert scalars(tmp_path) == {(0, "reward"): [1.0]}


def test_off_by_default_nothing_is_written(tmp_path):
    tracked = Trackers([], Config(str(tmp_path)), 0)
    tracked.log({"step": 0, "reward": 1.0})
    tracked.close()
    assert os.listdir(tmp_path) == []


def test_what_is_not_installed_is_refused_by_name_before_a_model_is_loaded(world, monkeypatch):  # noqa: F811
    check_trackers([])
    missing = [name for name in NAMES if name not in INSTALLED]
    if not missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="log_to=wandb is not installed; run pip install"):
            check_trackers(["wandb"])
        return
    for tool in ("grpo.py", "sft.py"):
        words = [str(Path(__file__).parent.parent / tool), "model=no-model", "train=train.jsonl"]
        words = words if tool == "grpo.py" else [words[0], "model=no-model", "stage=train"]
        done = subprocess.run(
            [sys.executable, *words, "out=refused", f"log_to={missing[0]}"],
            cwd=world,
            env=ENV,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and f"pip install {missing[0]}" in done.stderr


def test_a_tracker_that_fails_at_the_end_ends_no_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(
        "def init(**how): pass\n"
        "def log(row, step): pass\n"
        "def finish(): raise ConnectionError('gone')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    cfg = Config(str(tmp_path / "run"))
    os.mkdir(cfg.out)
    tracked = Trackers(["trackio"], cfg, 0)
    tracked.log({"step": 0, "loss": 1.0})
    tracked.close()
    assert capsys.readouterr().out.count("warning: trackio failed") == 1
