"""A million passages on two cores: an index killed twice, resumed, and equal to an undisturbed one byte for byte.

    python bench/million.py encoder=FOLDER work=/tmp/million out=bench/results/million.json

`prepare.py demo` writes the corpus, to which a million synthetic passages are added, `retriever.py` indexes it two
times at once, each on one core; one of the two is stopped by SIGKILL at a third and at two thirds of its shards and
started again with the same command.  Then a process of its own opens the index, memory-mapped, and searches it.
Peaks are of whole processes, interpreter included; what of a memory-mapped file is in memory counts as well, so the
part that can't be dropped (anonymous memory) is given beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import run  # noqa: E402
from data import read_turns  # noqa: E402
from runs import atomic_write  # noqa: E402


@dataclass
class MillionConfig:
    encoder: str
    """folder of a small encoder; the tokens are pooled by their mean"""
    passages: int = 1_000_000
    """synthetic passages behind those of the demo"""
    passage_length: int = 32
    """tokens of a passage that are encoded"""
    shard_size: int = 16384
    """passages of one file of the index"""
    work: str = ""
    """folder for corpus and indexes, kept when given; empty: a temporary one"""
    out: str = ""
    """JSON file for the result"""
    search_only: bool = False
    """only open the index in `work` and search it (the script calls itself with this)"""


def build_command(cfg: MillionConfig, work: Path, name: str) -> list[str]:
    return [
        sys.executable,
        f"{ROOT}/retriever.py",
        "kind=dense",
        f"corpus={work}/demo/corpus.jsonl",
        f"index={work}/{name}",
        f"encoder={cfg.encoder}",
        "pooling=mean",
        "device=cpu",
        f"passage_length={cfg.passage_length}",
        f"shard_size={cfg.shard_size}",
    ]


class Build:
    """A build in a process group of its own, with one thread."""

    def __init__(self, cfg: MillionConfig, work: Path, name: str):
        self.cfg, self.work, self.name, self.shards = cfg, work, name, work / name / "dense"
        self.cpu = self.wall = 0.0
        self.peak, self.log = 0, open(work / f"{name}.log", "a")
        self.start()

    def start(self) -> None:
        self.began = time.monotonic()
        command, one_thread = (
            build_command(self.cfg, self.work, self.name),
            os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=one_thread,
            start_new_session=True,
        )

    def made(self) -> int:
        """Shards that are whole."""
        return len(list(self.shards.glob("shard-*.json")))

    def finish(self) -> dict:
        """Wait for the end; what the command reported."""
        said = self.process.stdout.read()
        status = self.reap()
        if status:
            raise SystemExit(
                f"the build of {self.name} ended with status {status}; see {self.log.name}"
            )
        return json.loads(said.splitlines()[-1])

    def kill(self) -> int:
        """SIGKILL; the shards that were made by then."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.reap()
        return self.made()

    def reap(self) -> int:
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = status  # reaped here, for its usage
        self.wall += time.monotonic() - self.began
        self.cpu += used.ru_utime + used.ru_stime
        self.peak = max(self.peak, used.ru_maxrss * 1024)
        return status


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def memory(key: str) -> int:
    """Bytes of this process by the kernel's account: VmHWM (the peak), RssAnon, RssFile (now)."""
    line = next(line for line in open("/proc/self/status") if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def search(cfg: MillionConfig) -> dict:
    """Open the index and search it with the questions of the demo's test split, on two threads."""
    import torch

    from retriever import RetrieverConfig, open_retriever

    torch.set_num_threads(2)
    began = time.perf_counter()
    retriever = open_retriever(
        RetrieverConfig(
            kind="dense",
            index=f"{cfg.work}/killed",
            encoder=cfg.encoder,
            device="cpu",
            pooling="mean",
            passage_length=cfg.passage_length,
            verify=True,
        )
    )
    opened, before = time.perf_counter() - began, memory("RssAnon")
    turns = read_turns(f"{cfg.work}/demo/test.jsonl")
    queries, golds = (
        [turn.rewrite or turn.question for turn in turns],
        [turn.gold_ids for turn in turns],
    )
    result = {
        "passages": len(retriever.passage_ids),
        "opened_and_verified_s": round(opened, 2),
        "vector_bytes": sum(s.nbytes for s in retriever.index.shards),
        "queries": len(queries),
    }
    retriever.search(queries[:1], 100)
    for name, call in (
        ("search_top100", lambda: retriever.search(queries, 100)),
        ("search_one", lambda: retriever.search(queries[:1], 100)),
        ("gold_ranks", lambda: retriever.gold_ranks(queries, golds)),
    ):
        began = time.perf_counter()
        got = call()
        result[f"{name}_s"] = round(time.perf_counter() - began, 3)
    result["found_in_top100"] = sum(rank is not None for rank in got)
    return result | {
        "anonymous_before_bytes": before,
        "anonymous_after_bytes": memory("RssAnon"),
        "mapped_after_bytes": memory("RssFile"),
        "peak_rss_bytes": memory("VmHWM"),
    }


def synthetic_passages(count: int) -> Iterator[dict]:
    """`count` passages about made-up entities; ids, titles and texts say that they are synthetic."""
    rng = random.Random("0/synthetic")
    parts = [a + b for a in "bdgklmnprstvz" for b in "aeiou"]
    claims = [
        "has the currency {}",
        "was first described by {}",
        "lies on the river {}",
        "is named after {}",
        "was designed by {}",
        "has its premiere hall in {}",
        "has the capital {}",
        "is governed from {}",
    ]
    nouns = ["town", "country", "mountain", "opera", "element", "novelist", "film", "tower"]
    for i in range(1, count + 1):
        bits = rng.getrandbits(48)
        word = [parts[bits >> s & 63] for s in (0, 6, 12, 18, 24, 30)]
        name, value = "".join(word[:3]).capitalize(), "".join(word[3:]).capitalize()
        noun, claim = nouns[bits >> 36 & 7], claims[bits >> 39 & 7].format(value)
        yield {
            "id": f"synthetic-{i:07d}",
            "title": f"{name} {i} (synthetic {noun})",
            "text": f"In this synthetic record, the {noun} {name} {i} {claim}.",
        }


def main(cfg: MillionConfig) -> dict:
    if cfg.search_only:
        return search(cfg)
    work = Path(cfg.work or tempfile.mkdtemp(prefix="million_"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            [sys.executable, f"{ROOT}/prepare.py", "demo", f"out={work}/demo"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with open(work / "demo" / "corpus.jsonl", "a", encoding="utf-8") as f:
            f.writelines(json.dumps(passage) + "\n" for passage in synthetic_passages(cfg.passages))
        for name in ("whole", "killed"):
            shutil.rmtree(work / name, ignore_errors=True)
        whole, killed, kills = Build(cfg, work, "whole"), Build(cfg, work, "killed"), []
        with open(work / "demo" / "corpus.jsonl", "rb") as f:
            total = sum(1 for _ in f)
        shards = -(-total // cfg.shard_size)
        for at in (shards // 3, shards * 2 // 3):
            while killed.made() < at and killed.process.poll() is None:
                time.sleep(0.05)
            kills.append({"shards_made": killed.kill(), "of": shards})
            killed.start()
        resumed, undisturbed = killed.finish(), whole.finish()
        a, b = digests(work / "killed" / "dense"), digests(work / "whole" / "dense")
        found = subprocess.run(
            [
                sys.executable,
                __file__,
                f"encoder={cfg.encoder}",
                f"work={work}",
                "search_only=true",
                f"passage_length={cfg.passage_length}",
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "2"},
        )
        result = {
            "command": "python bench/million.py encoder=" + Path(cfg.encoder).name,
            "passages": total,
            "passage_length": cfg.passage_length,
            "kills": kills,
            "byte_identical": a == b,
            "files": len(a),
            "whole": {
                "seconds": undisturbed["seconds"],
                "cpu_seconds": round(whole.cpu, 1),
                "passages_per_cpu_second": round(total / whole.cpu),
                "peak_rss_bytes": whole.peak,
            },
            "killed": {
                "seconds_of_the_last_start": resumed["seconds"],
                "indexed_by_the_last_start": resumed["indexed"],
                "cpu_seconds": round(killed.cpu, 1),
                "peak_rss_bytes": killed.peak,
            },
            "search": json.loads(found.stdout.splitlines()[-1]),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "commit": subprocess.run(
                ["git", "-C", ROOT, "describe", "--always", "--dirty"],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            ).stdout.strip(),
        }
    finally:
        if not cfg.work:
            shutil.rmtree(work, ignore_errors=True)
    if cfg.out:
        with atomic_write(cfg.out) as f:
            json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    run(MillionConfig, main)
