"""Peak memory and speed of `prepare.py topiocqa` on synthetic passages in the official format.

    python bench/prepare_scale.py rows=2000000 work=/tmp out=bench/results/prepare_topiocqa.json

Passages have 200 words like the real ones, with quotes and tabs inside; the turns are few, since
the passages are what takes the time.  The command runs in a process of its own: the peak is that
process's, the interpreter included.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import run  # noqa: E402
from runs import atomic_write  # noqa: E402


@dataclass
class ScaleConfig:
    rows: int = 2_000_000
    """passages of the synthetic file"""
    work: str = ""
    """where the temporary files go; empty: the system's temporary folder"""
    out: str = ""
    """JSON file for the result"""


def write_source(folder: str, rows: int) -> int:
    """The five official files, `rows` passages; the bytes of the passage file."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(30_000)] + [
        '"said"',
        "a\tb",
    ] * 50
    quoted = io.StringIO()
    writer = csv.writer(quoted, delimiter="\t", lineterminator="\n")
    writer.writerows([" ".join(rng.choices(words, k=200))] for _ in range(4000))
    texts = (
        quoted.getvalue().splitlines()
    )  # as the official file has them: quoted where they hold a quote or a tab
    os.makedirs(f"{folder}/retriever/all_history")
    with open(f"{folder}/full_wiki_segments.tsv", "w", encoding="utf-8", newline="") as f:
        f.write("id\ttext\ttitle\n")
        f.writelines(
            f"{i}\t{texts[i * 7919 % 4000]}\tArticle {i // 8} [SEP] Section {i % 8}\n"
            for i in range(1, rows + 1)
        )
    for split in ("train", "dev"):
        turns, golds = [], []
        for turn in range(1, 13):
            turns.append(
                {
                    "Conversation_no": 1,
                    "Turn_no": turn,
                    "Question": "q",
                    "Answer": "a",
                    "Topic": "t",
                    "Topic_section": "s",
                    "Context": ["q", "a"] * (turn - 1),
                }
            )
            golds.append(
                {
                    "conv_id": 1,
                    "turn_id": turn,
                    "positive_ctxs": [{"passage_id": str(rng.randint(1, rows))}],
                }
            )
        for name, value in (
            (f"topiocqa_{split}.json", turns),
            (f"retriever/all_history/{split}.json", golds),
        ):
            with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
                json.dump(value, f)
    return os.path.getsize(f"{folder}/full_wiki_segments.tsv")


def main(cfg: ScaleConfig) -> dict:
    """Write the source, run the command, measure it."""
    work = tempfile.mkdtemp(prefix="prepare_scale_", dir=cfg.work or None)
    try:
        size = write_source(f"{work}/raw", cfg.rows)
        command = ["prepare.py", "topiocqa", "source=raw", "out=data", "strict=false"]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, f"{ROOT}/{command[0]}", *command[1:]],
            cwd=work,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak, cpu = (
            used.ru_maxrss * 1024,
            used.ru_utime + used.ru_stime,
        )  # cpu: what a loaded machine doesn't change
        made = json.loads(done.stdout.splitlines()[-1])
        assert made["passages"] == cfg.rows and made["train_turns"] == 12, made
        result = {
            "command": "python " + " ".join(command),
            "passages": made["passages"],
            "tsv_bytes": size,
            "seconds": round(seconds, 1),
            "passages_per_second": round(cfg.rows / seconds),
            "cpu_seconds": round(cpu, 1),
            "passages_per_cpu_second": round(cfg.rows / cpu),
            "peak_rss_bytes": peak,
            "peak_rss_mib": round(peak / 2**20),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "niceness": os.nice(0),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "commit": subprocess.run(
                ["git", "-C", ROOT, "describe", "--always", "--dirty"],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            ).stdout.strip(),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if cfg.out:
        with atomic_write(cfg.out) as f:
            json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    run(ScaleConfig, main)
