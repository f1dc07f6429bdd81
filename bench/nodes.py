"""A node boundary rehearsed on one host: a small GRPO run under `torchrun --nnodes 2`, whole, killed and continued.

    python bench/nodes.py out=bench/results/nodes.json

Each node is a torchrun of its own that meets the other at a c10d rendezvous on localhost, with gloo on the CPU. The run
of two nodes must have the metrics of one node with as many processes. Then a rank, or a whole node with its torchrun, is
killed with SIGKILL after the second step: every process of both nodes must end, the cause must be told, and the same
command must go on to the metrics of the run that nobody disturbed. Two-layer model of random weights, BM25.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from test_grpo import ENV, metrics, settings, write_formatted_lm, write_world  # noqa: E402
from tiny import tiny_tokenizer  # noqa: E402

import config  # noqa: E402


@dataclass
class NodesConfig:
    out: str = "nodes.json"
    """file to write"""
    processes: list[int] = field(default_factory=lambda: [1, 2])
    """processes of a node, one case after the other"""
    wait: int = 90
    """seconds until what still runs after a kill is called hanging, and ended"""


def make_world(folder: Path) -> None:
    """Data and a tiny model that answers in the right form, as tests/test_grpo.py has them."""
    write_world(folder)
    write_formatted_lm(folder / "lm")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '!' }}"
    tokenizer.save_pretrained(folder / "lm")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(folder: Path, name: str, nodes: int, processes: int) -> list[subprocess.Popen]:
    """torchrun of every node, each with a log `NAME.node0`, …, for the run folder `name`."""
    meeting = f"127.0.0.1:{free_port()}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    launch += ["--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", meeting, "--rdzv-id", name]
    command = [*launch, str(ROOT / "grpo.py"), *settings(name)]
    started = []
    for node in range(nodes):
        with open(folder / f"{name}.node{node}", "ab") as log:
            started.append(subprocess.Popen(command, cwd=folder, env=ENV, stdout=log, stderr=log))
    return started


def workers(folder: Path, name: str) -> dict[int, int]:
    """Rank → process id of the trainers of a run that live."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            here = os.path.samefile(place / "cwd", folder)
            environ = dict(
                w.split(b"=", 1) for w in (place / "environ").read_bytes().split(b"\0") if b"=" in w
            )
        except OSError:  # it has ended, or is another user's
            continue
        if here and f"out={name}".encode() in words and b"RANK" in environ:
            found[int(environ[b"RANK"])] = int(place.name)
    return found


def wait_for_step(folder: Path, name: str, step: int, started: list[subprocess.Popen]) -> None:
    while all(p.poll() is None for p in started):
        path = folder / name / "metrics.jsonl"
        if path.exists() and f'"step": {step}' in path.read_text():
            return
        time.sleep(0.05)
    raise RuntimeError(f"{name} ended before step {step}:\n" + logs(folder, name)[-3000:])


def logs(folder: Path, name: str) -> str:
    return "".join(p.read_text(errors="replace") for p in sorted(folder.glob(f"{name}.node*")))


def whole(folder: Path, name: str, nodes: int, processes: int) -> list[dict]:
    """The metrics of a run that is let alone, or continued."""
    for p in start(folder, name, nodes, processes):
        if p.wait():
            raise RuntimeError(logs(folder, name)[-3000:])
    return metrics(folder, name)


def killed(folder: Path, name: str, processes: int, rank: int, node: bool, wait: int) -> dict:
    """Kill a rank (with `node`: all ranks of its node and their torchrun) after step 2; what became of the others."""
    nodes = start(folder, name, 2, processes)
    wait_for_step(folder, name, 2, nodes)
    alive, which = workers(folder, name), rank // processes
    doomed = [p for r, p in alive.items() if r == rank or node and r // processes == which]
    for pid in ([nodes[which].pid] if node else []) + doomed:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while (left := workers(folder, name)) or any(p.poll() is None for p in nodes):
        if time.monotonic() - began > wait:
            break
        time.sleep(0.05)
    seconds = time.monotonic() - began
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    for p in nodes:
        p.kill()
        p.wait()
    text, note = logs(folder, name), folder / name / "exit.json"
    return {
        "processes_a_node": processes,
        "killed": f"node {which}" if node else f"rank {rank}",
        "seconds_until_all_ended": round(seconds, 1),
        "still_running": sorted(left),
        "statuses": [p.returncode for p in nodes],
        "torchrun_says": sorted(
            set(re.findall(r"Signal 9 \(SIGKILL\) received|rank\s+: \d+", text))
        ),
        "exit.json": json.loads(note.read_text()) if note.exists() else None,
    }


def main(cfg: NodesConfig) -> dict:
    result = {
        "bench": "nodes",
        "command": "python bench/nodes.py " + " ".join(sys.argv[1:]),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "whole": [],
        "killed": [],
    }
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        make_world(folder)
        for n in cfg.processes:
            one, two = whole(folder, f"one{n}", 1, 2 * n), whole(folder, f"two{n}", 2, n)
            losses = {
                "one node": [r.get("loss") for r in one],
                "two nodes": [r.get("loss") for r in two],
            }
            result["whole"].append({"processes_a_node": n, "equal": one == two, "loss": losses})
            for rank, node in [(2 * n - 1, False), (0, False), (2 * n - 1, True), (0, True)]:
                name = f"killed{n}-{rank}-{node}"
                row = killed(folder, name, n, rank, node, cfg.wait)
                row["continued_equally"] = whole(folder, name, 2, n) == one
                print(json.dumps(row), flush=True)
                result["killed"].append(row)
            with open(cfg.out, "w", encoding="utf-8") as f:
                json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    config.run(NodesConfig, main)
