"""Kill a small training at every file event, and at random moments, and let the same command go on.

    python bench/kills.py out=bench/results/kills.json random=40

An event is a file opened for writing, a folder made, a rename or a removal below the run folder. A run that was killed
with SIGKILL is started again until it ends; it must then have the metrics, the last weights and the best policy of one
that nobody disturbed, and leave no temporary behind. Two-layer model of random weights, BM25, CPU.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from test_grpo import settings, write_formatted_lm, write_world  # noqa: E402
from tiny import tiny_tokenizer  # noqa: E402

import config  # noqa: E402
import data  # noqa: E402
import grpo  # noqa: E402

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


@dataclass
class KillsConfig:
    out: str = "kills.json"
    """file to write"""
    random: int = 40
    """kills at random moments"""
    every: int = 1
    """kill at every so-manieth event"""
    seed: int = 0
    """of the moments"""


def train(folder: Path, name: str, kill_at: int = 0, counted: Path | None = None) -> int:
    """One attempt in a forked process: its status, negative for a signal. `kill_at`: die at that event."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(folder)
    count, root = 0, os.path.abspath(name)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        writes = event != "open" or any(c in str(arguments[1]) for c in "wax+")
        if writes and os.path.abspath(os.fsdecode(arguments[0])).startswith(root):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    torch.set_num_threads(1)
    status = 0
    try:
        config.run(
            grpo.GRPOConfig, grpo.main, [*settings(name), "save_every=2"], status_file="exit.json"
        )
    except SystemExit as e:
        status = e.code or 0
    if counted:
        counted.write_text(str(count))
    os._exit(status)


def found(folder: Path, name: str) -> dict:
    """What a run left: figures without seconds, digests of its weights, what should not be there."""
    rows = [row for _, row in data.read_jsonl(str(folder / name / "metrics.jsonl"))]
    best = folder / name / "best" / "best.json"
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith("seconds_")} for row in rows],
        "final": (folder / name / "final" / "model.safetensors").read_bytes(),
        "best": json.loads(best.read_text()) if best.exists() else None,
        "left": sorted(p.name for p in (folder / name).rglob("*.tmp")),
    }


def judge(folder: Path, name: str, whole: dict) -> str:
    """Let the run end; what came of it in a word."""
    for _ in range(3):
        status = train(folder, name)
        if status == 0:
            break
    if status:
        return f"ended with status {status}"
    seen = found(folder, name)
    differing = [key for key in whole if seen[key] != whole[key]]
    return "equal" if not differing else "differs in " + ", ".join(differing)


def main(cfg: KillsConfig) -> dict:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_world(folder)
        write_formatted_lm(folder / "lm")
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ '!' }}"
        tokenizer.save_pretrained(folder / "lm")
        began = time.monotonic()
        assert train(folder, "whole", counted=folder / "events") == 0, (
            folder / "whole.log"
        ).read_text()
        seconds, whole = time.monotonic() - began, found(folder, "whole")
        events = int((folder / "events").read_text())
        outcomes: dict[str, dict[str, int]] = {"at an event": {}, "at random": {}}
        for at in range(1, events + 1, cfg.every):
            assert train(folder, f"e{at}", kill_at=at) == -signal.SIGKILL
            outcome = judge(folder, f"e{at}", whole)
            outcomes["at an event"][outcome] = outcomes["at an event"].get(outcome, 0) + 1
            if outcome != "equal":
                print(f"killed at event {at}: {outcome}", flush=True)
            subprocess.run(["rm", "-r", str(folder / f"e{at}")], check=True)
        rng = random.Random(cfg.seed)
        for i in range(cfg.random):
            pid = os.fork()
            if not pid:
                os._exit(0 if train(folder, f"r{i}") in (0, -signal.SIGKILL) else 1)
            time.sleep(rng.uniform(0, seconds))
            subprocess.run(["pkill", "-KILL", "-P", str(pid)], check=False)
            os.waitpid(pid, 0)
            outcome = judge(folder, f"r{i}", whole)
            outcomes["at random"][outcome] = outcomes["at random"].get(outcome, 0) + 1
            if outcome != "equal":
                print(f"random kill {i}: {outcome}", flush=True)
            subprocess.run(["rm", "-r", str(folder / f"r{i}")], check=False)
    result = {
        "bench": "kills",
        "command": "python bench/kills.py " + " ".join(sys.argv[1:]),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "events_of_a_run": events,
        "outcomes": outcomes,
    }
    with open(cfg.out, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    config.run(KillsConfig, main)
