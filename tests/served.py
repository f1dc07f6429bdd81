"""A small corpus, and serve.py in a process of its own: what the tests of the service share."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from data import Passage

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter"
).split()


def make_passages(n: int = 60) -> list[Passage]:
    rng = random.Random(0)
    return [
        Passage(
            f"p{i:02d}",
            rng.choice(["", f"Title {i}"]),
            " ".join(rng.choices(WORDS, k=rng.randint(2, 9))),
        )
        for i in range(n)
    ]


PASSAGES = make_passages()
QRELS = {"q1": ["p01"], "q2": ["p02", "p05"], "q3": ["p03"]}
QUERIES = [" ".join(random.Random(i).choices(WORDS, k=3)) for i in range(40)]


def contents(id_: str) -> str:
    """As wiki-18 and the servers of FlashRAG and Search-R1 have it."""
    passage = PASSAGES[int(id_[1:])]
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


class Server:
    """serve.py in a process of its own."""

    def __init__(self, folder: Path, *words: str, port: int = 0):
        command = [
            sys.executable,
            str(ROOT / "serve.py"),
            f"retriever.corpus={folder / 'corpus.jsonl'}",
            f"qrels={folder / 'test.qrels'}",
            f"port={port}",
            *words,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        if not line.startswith("serving 60 passages") or " at http://127.0.0.1:" not in line:
            self.process.kill()  # its stderr has an end then
            raise AssertionError(line + self.process.stderr.read())
        assert ("/mcp" in line) != ("mcp=off" in words)
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, dict]:
        """(exit status, last line of stdout)."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        assert "Traceback" not in err, err
        return self.process.returncode, json.loads(out.splitlines()[-1])


def call(
    url: str, body=None, raw: bytes | None = None, kind: str = "application/json"
) -> tuple[int, object]:
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": kind}), timeout=30
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())
