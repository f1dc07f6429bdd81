"""Rewriting learnt on one set of conversations, tried on all: training, figures, an adapter.

    python bench/study.py data=DATA parallel=6             # trains all arms on one GPU
    python bench/study.py stage=evaluate                   # searches, writes results/figures.json
    python bench/study.py data=DATA arms=ablations steps=80 results=bench/results/ablations
    python bench/study.py stage=adapter arm=lora-fast out=adapters/NAME
    python bench/study_tables.py                           # the tables, from the committed figures

DATA holds conv/{squad,mtrag,canard} and multihop/{hotpotqa_train,2wiki}; the demo's data is in
demo/. To be called from the project's folder; a study that was killed goes on when it is called
again. One arm of GRPO takes up to 27 GB of the card.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Literal

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import ConfigError, run  # noqa: E402
from data import read_jsonl, read_turns  # noqa: E402
from reward import REWARDS  # noqa: E402
from runs import atomic_write, read_json  # noqa: E402

from bench.study_tables import SETS, card  # noqa: E402

MIX = ("squad", "mtrag", "demo")
SAMPLING = "max_prompt_tokens=2560 max_response_tokens=96 engine.batch=512 chunk=512"
RULES = ("first", "first+question", "previous+question", "context")


@dataclass(frozen=True)
class Arm:
    """One training: what it is trained on and how."""

    sets: tuple[str, ...]
    seed: int = 0
    sft_lr: float = 5e-5
    lr: float = 1e-5
    rank: int | None = None  # of a LoRA adapter; None: all weights
    given: bool = False  # fine-tuned on the given rewrites instead; no GRPO
    start: str = ""  # the arm whose warm-up it begins with, or "model": no warm-up
    engine: Literal["BM25", "MiniLM", "fused"] = "BM25"  # whose ranks are the reward
    grpo: str = ""  # further words for grpo.py

    @property
    def data(self) -> str:
        return "mix" if len(self.sets) > 1 else self.sets[0]

    @property
    def both(self) -> str:
        """Words for sft.py and grpo.py."""
        return f"compile=false seed={self.seed}" + (f" lora.r={self.rank}" if self.rank else "")


def squad(seed: int, grpo: str) -> Arm:
    """One setting of GRPO changed, after the warm-up of the arm with this seed."""
    return Arm(("squad",), seed, start=f"squad-{seed}" if seed else "squad", grpo=grpo)


ARMS = {
    "squad": Arm(("squad",)),
    "squad-1": Arm(("squad",), seed=1),
    "mtrag": Arm(("mtrag",)),
    "demo": Arm(("demo",)),
    "canard": Arm(("canard",)),
    "mix": Arm(MIX),
    "mix-1": Arm(MIX, seed=1),
    "lora": Arm(MIX, sft_lr=5e-4, lr=1e-4, rank=8),
    "lora-fast": Arm(MIX, sft_lr=5e-4, lr=3e-4, rank=8),
    "given": Arm(MIX, given=True),
}
ABLATIONS = (
    {
        "squad": ARMS["squad"],
        "squad-1": ARMS["squad-1"],
        "squad-2": Arm(("squad",), seed=2),
        "no-warmup": Arm(("squad",), start="model"),
        "no-warmup-1": Arm(("squad",), seed=1, start="model"),
        "no-warmup-2": Arm(("squad",), seed=2, start="model"),
        "kl0": squad(0, "kl_coef=0"),
        "no-std": squad(0, "scale_by_std=false"),
        "paper-parser": squad(0, "parser=paper"),
    }
    | {
        f"{engine.lower()}-{seed}": Arm(
            ("squad",), seed, start=f"squad-{seed}" if seed else "squad", engine=engine
        )
        for engine in ("MiniLM", "fused")
        for seed in range(3)
    }
    | {
        f"{reward.replace('@', '')}-{seed}": squad(seed, f"reward={reward}")
        for seed in (0, 1)
        for reward in list(REWARDS)[1:]
    }
)
VLLM = "engine.kind=vllm engine.gpu_memory=0.1"
CORRECTIONS = {
    f"vllm-{name}-{seed}": squad(seed, f"{VLLM} {words}".strip())
    for seed in range(3)
    for name, words in {
        "none": "",
        "token": "importance_cap=2",
        "sequence": "importance_cap=3 importance_level=sequence",
    }.items()
}
NAMED = {"ablations": ABLATIONS, "corrections": CORRECTIONS}
ALL = ARMS | ABLATIONS | CORRECTIONS


@dataclass
class StudyConfig:
    stage: Literal["train", "evaluate", "adapter"] = "train"
    """train: all arms, to rewrites of the test turns; evaluate: search these, write the figures;
    adapter: the LoRA arm `arm` as a folder `out` to commit"""
    data: str = ""
    """folder with conv/ and multihop/"""
    work: str = "runs/study"
    """folder of data, models, rewrites and logs"""
    results: str = os.path.join(ROOT, "bench", "results", "study")
    """folder of figures.json"""
    model: str = "models/smollm2"
    """the instruct model that is trained"""
    encoder: str = "models/minilm"
    """of the second search engine, alone and fused with BM25; empty: BM25 alone"""
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    """which to train; ablations: GRPO on squad, one setting changed at a time; corrections: with
    vLLM as the engine, weighted for its rounding or not"""
    steps: int = 100
    """of GRPO"""
    parallel: int = 1
    """commands that share the card"""
    seconds: float | None = None
    """GRPO runs that are still going so many seconds after the start are ended; the best policy on
    dev so far is what counts"""
    turns: int | None = None
    """use the first so many turns of every file: a rehearsal"""
    sft: str = ""
    """further words for sft.py"""
    grpo: str = ""
    """further words for grpo.py"""
    arm: str = "lora"
    """adapter: which arm"""
    out: str = ""
    """adapter: folder to write"""


# ------------------------------------------------------------------------------------------- data


def make_data(cfg: StudyConfig) -> None:
    """`work`/data: every set's corpus and splits, the mix of three, all test turns in one file."""
    made = f"{cfg.work}/data"
    conv = {name: f"{cfg.data}/conv/{name}" for name in SETS} | {"demo": f"{ROOT}/demo"}
    behind = [f"{cfg.data}/multihop/{name}/corpus.jsonl" for name in ("hotpotqa_train", "2wiki")]
    for name in SETS:
        more = behind if name == "squad" else []
        join(f"{made}/{name}/corpus.jsonl", [f"{conv[name]}/corpus.jsonl", *more])
        join(f"{made}/{name}/test.qrels", [f"{conv[name]}/test.qrels"])
        for split in ("train", "dev", "test"):
            join(f"{made}/{name}/{split}.jsonl", [f"{conv[name]}/{split}.jsonl"], cfg.turns)
    for file in ("corpus", "train", "dev"):
        join(f"{made}/mix/{file}.jsonl", [f"{made}/{name}/{file}.jsonl" for name in MIX])
    join(f"{made}/test.jsonl", [f"{made}/{name}/test.jsonl" for name in SETS])


def join(target: str, sources: list[str], lines: int | None = None) -> None:
    """The first `lines` of every source, one after the other; ids of the sets do not clash."""
    with atomic_write(target) as out:
        for source in sources:
            with open(source, encoding="utf-8") as f:
                out.writelines(line for i, line in enumerate(f) if lines is None or i < lines)


# --------------------------------------------------------------------------------------- training


class Study:
    """The commands of a study, each with its log; what they took is kept in `work`/commands."""

    def __init__(self, cfg: StudyConfig):
        self.cfg, self.began = cfg, time.monotonic()
        self.running: set[subprocess.Popen] | None = set()  # None: the study was ended
        self.indexing = threading.Lock()

    def stop(self) -> None:
        """End what runs; nothing is started any more."""
        running, self.running = self.running, None
        for process in running:
            process.terminate()

    def run(self, submit: Callable[[ThreadPoolExecutor], list[Future]]) -> dict:
        """Wait for what `submit` starts, `parallel` commands at a time; print failures."""
        with atomic_write(f"{self.cfg.work}/machine.json") as f:
            json.dump(machine(), f)
        with ThreadPoolExecutor(self.cfg.parallel) as pool:
            try:
                failures = [done.exception() for done in submit(pool) if done.exception()]
            except BaseException:
                self.stop()
                raise
        for failure in failures:
            print(failure, file=sys.stderr)
        return {"arms": len(self.cfg.arms), "failed": len(failures)}

    def call(self, name: str, tool: str, words: str, end: float | None = None) -> None:
        """Run a tool once; RuntimeError with the end of its log unless it ends well or at `end`."""
        note = f"{self.cfg.work}/commands/{name}.json"
        if read_json(note):
            return
        if self.running is None:
            raise RuntimeError(f"{name}: the study was ended")
        os.makedirs(os.path.dirname(note), exist_ok=True)
        command, clock = [sys.executable, f"{ROOT}/{tool}", *words.split()], time.monotonic()
        with open(f"{note[:-5]}.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            self.running.add(process)
        try:
            status = process.wait(end and max(1, self.began + end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # best/ appears whole; a checkpoint would cost more than it is worth
            status = process.wait() and 0
        seconds = round(time.monotonic() - clock, 1)
        print(f"{time.monotonic() - self.began:5.0f} s  {name}: {seconds} s", flush=True)
        if status:
            with open(f"{note[:-5]}.log", encoding="utf-8") as log:
                raise RuntimeError(f"{name} failed ({status}): {log.read()[-800:]}")
        with atomic_write(note) as f:
            json.dump({"command": f"python {tool} {words}", "seconds": seconds}, f)

    def search(self, name: str, engine: str = "BM25") -> str:
        if engine != "BM25":
            corpus = f"corpus={self.cfg.work}/data/{name}/corpus.jsonl"
            with self.indexing:  # by the first of the arms that need it
                words = " ".join([corpus, *dense_words(self.cfg, name)])
                self.call(f"index-{name}", "retriever.py", words)
        return " ".join(engine_words(self.cfg, name)[engine])

    def rewrite(self, name: str, model: str, more: str = "") -> None:
        """Rewrites of all test turns: `work`/rewrites/NAME.jsonl."""
        words = f"model={model} turns={self.cfg.work}/data/test.jsonl {SAMPLING} {more}"
        self.call(f"infer-{name}", "infer.py", f"{words} out={self.cfg.work}/rewrites/{name}.jsonl")

    def sample(self, name: str) -> None:
        """The self-driven warm-up's records of a data set."""
        self.call(
            f"sample-{name}",
            "sft.py",
            f"stage=sample model={self.cfg.model} turns={self.cfg.work}/data/{name}/train.jsonl "
            f"examples=demo/examples.jsonl {self.search(name)} samples_per_turn=8 "
            f"{SAMPLING} {self.cfg.sft} out={self.cfg.work}/sample/{name}",
        )

    def warm_up(self, name: str, sampled) -> None:
        """The fine-tuning of an arm, on its own records or on the given rewrites."""
        cfg, arm = self.cfg, ALL[name]
        records = f"records={cfg.work}/sample/{arm.data}/records.jsonl epochs=3"
        if arm.given:
            records = f"records={cfg.work}/data/{arm.data}/train.jsonl target=rewrite epochs=2"
        else:
            sampled[arm.data].result()
        self.call(
            f"sft-{name}",
            "sft.py",
            f"stage=train model={cfg.model} {records} sequences_per_step=16 "
            f"micro_batch_tokens=16384 lr={arm.sft_lr:g} save_every=100000 keep_checkpoints=1 "
            f"{arm.both} {cfg.sft} out={cfg.work}/{name}/sft",
        )

    def train(self, name: str, warm: dict) -> None:
        """One arm's GRPO, and the rewrites before and after it."""
        cfg, arm = self.cfg, ALL[name]
        if arm.start != "model":
            warm[arm.start or name].result()
        if arm.given:
            return self.rewrite(name, start(cfg, name))
        self.call(
            f"grpo-{name}",
            "grpo.py",
            f"model={start(cfg, name)} train={cfg.work}/data/{arm.data}/train.jsonl "
            f"dev={cfg.work}/data/{arm.data}/dev.jsonl {self.search(arm.data, arm.engine)} "
            f"steps={cfg.steps} prompts_per_step=32 group_size=8 max_response_tokens=96 "
            f"micro_batch_tokens=16384 lr={arm.lr:g} warmup_steps=10 validate_every=10 "
            "save_every=100000 "
            f"keep_checkpoints=1 export_dtype=bfloat16 {arm.both} {cfg.grpo} {arm.grpo} "
            f"out={cfg.work}/{name}/grpo",
            cfg.seconds,
        )
        if not arm.start:
            self.rewrite(f"{name}-warmup", start(cfg, name))
        self.rewrite(f"{name}-grpo", chosen(cfg, name))


def dense_words(cfg: StudyConfig, name: str) -> list[str]:
    """Settings of the dense index of a data set's corpus."""
    index = f"index={cfg.work}/index/{name}"
    return ["kind=dense", f"encoder={cfg.encoder}", index, "passage_length=256"]


def engine_words(cfg: StudyConfig, name: str) -> dict[str, list[str]]:
    """Search engine → settings; the dense index is there."""
    corpus = f"retriever.corpus={cfg.work}/data/{name}/corpus.jsonl"
    dense = [f"retriever.{word}" for word in dense_words(cfg, name)]
    engines = {"BM25": ["retriever.kind=bm25", corpus]}
    if cfg.encoder:
        engines |= {"MiniLM": dense, "fused": [*dense, "retriever.kind=hybrid", corpus]}
    return engines


def start(cfg: StudyConfig, name: str) -> str:
    """What an arm's GRPO begins with."""
    arm = ALL[name]
    return cfg.model if arm.start == "model" else f"{cfg.work}/{arm.start or name}/sft/final"


def chosen(cfg: StudyConfig, name: str) -> str:
    """The policy of an arm with the best MRR on dev; the starting one where no step was better."""
    best = f"{cfg.work}/{name}/grpo/best"
    return best if os.path.isdir(best) else start(cfg, name)


def train(cfg: StudyConfig) -> dict:
    make_data(cfg)
    study, shots = Study(cfg), "prompt=few-shot examples=demo/examples.jsonl"
    own = dict.fromkeys(ALL[name].start or name for name in cfg.arms)  # with a warm-up
    own.pop("model", None)

    def submit(pool: ThreadPoolExecutor) -> list[Future]:
        needed = sorted({ALL[name].data for name in cfg.arms}, reverse=True)
        sampled = {name: pool.submit(study.sample, name) for name in needed}
        base = [pool.submit(study.rewrite, "base", cfg.model, shots)]
        base.append(pool.submit(study.rewrite, "base-zero", cfg.model))
        warm = {name: pool.submit(study.warm_up, name, sampled) for name in own}
        return [*base, *(pool.submit(study.train, name, warm) for name in cfg.arms)]

    return study.run(submit)


def machine() -> dict:
    import torch

    cuda = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    return {"card": card, "python": platform.python_version(), **versions}


# ------------------------------------------------------------------------------------- evaluation


def evaluate(cfg: StudyConfig) -> dict:
    """Search every system's queries on every set with every engine; write `results`/figures.json."""
    files = sorted(glob.glob(f"{cfg.work}/rewrites/*.jsonl"))
    cells = {}
    for name in SETS:
        if cfg.encoder:
            corpus = f"corpus={cfg.work}/data/{name}/corpus.jsonl"
            tool("retriever.py", corpus, *dense_words(cfg, name))
        for engine, words in engine_words(cfg, name).items():
            cells[f"{name}/{engine}"] = cell(cfg, name, engine, words, files)
    figures = {
        "machine": read_json(f"{cfg.work}/machine.json"),
        "arms": {name: arm_figures(cfg, name) for name in cfg.arms},
        "cells": cells,
    }
    with atomic_write(f"{cfg.results}/figures.json") as f:
        f.write(json.dumps(figures, separators=(",", ":")).replace(cfg.work, "runs/study"))
    return {"figures": f"{cfg.results}/figures.json", "cells": len(cells)}


def tool(*words: str) -> None:
    command = [sys.executable, *" ".join(words).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")


def newer(path: str, sources: list[str]) -> bool:
    when = os.path.getmtime(path) if os.path.exists(path) else 0
    return when > max(map(os.path.getmtime, sources))


def cell(cfg: StudyConfig, name: str, engine: str, search: list[str], files: list[str]) -> dict:
    """System → figures on one set with one engine; tests against the raw question and the best rule."""
    out, data = f"{cfg.work}/evaluation/{name}-{engine}", f"{cfg.work}/data/{name}"
    both = [f"turns={data}/test.jsonl", f"qrels={data}/test.qrels", "breakdown=false"]
    rules = f"query=question,{','.join(RULES)},rewrite"
    if not newer(f"{out}/metrics.json", files):
        tool("evaluate.py", *both, rules, f"rewrites={','.join(files)}", *search, f"out={out}")
    rows = read_json(f"{out}/metrics.json")["systems"]
    best = max(RULES, key=lambda rule: rows[f"turns: {rule}"]["mrr"])
    trained = [os.path.basename(file)[:-6] for file in files]
    runs = ",".join(f"{out}/{system}.trec" for system in trained)
    against = f"{out}/turns_{best.replace('+', '_')}.trec"
    if not newer(f"{out}/rule/metrics.json", files):
        tool("evaluate.py", *both, f"baseline={against}", f"run={runs}", f"out={out}/rule")
    tests = read_json(f"{out}/rule/metrics.json")["systems"]
    cells = {}
    for title, row in rows.items():
        system = title.removeprefix("turns: ")
        cells[system] = {
            metric: [row[metric], *row["ci"][metric]]
            for metric in ("mrr", "ndcg@3", "recall@10", "recall@100")
        } | {"p_question": row["paired"]["mrr"]["p"] if "paired" in row else None}
    for first in cfg.arms:
        others = [a for a in cfg.arms if a not in (*ARMS, first) and usual(a) == first]
        if others:
            runs = ",".join(f"{out}/{a}-grpo.trec" for a in others)
            base, against = f"baseline={out}/{first}-grpo.trec", f"{out}/against-{first}"
            tool("evaluate.py", *both, base, f"run={runs}", f"out={against}")
            systems = read_json(f"{against}/metrics.json")["systems"]
            for a in others:
                cells[f"{a}-grpo"]["against"] = systems[f"{a}-grpo"]["paired"]["mrr"]
    turns = read_turns(f"{data}/test.jsonl")
    for file, system in zip(files, trained):
        cells[system]["p_rule"] = tests[system]["paired"]["mrr"]["p"]
        cells[system] |= form(file, {t.query_id: t.context[:1] for t in turns})
    return cells | {"best rule": cells[best] | {"rule": best}}


def usual(name: str) -> str:
    """The arm that one with a changed setting is compared with: the same seed, usual settings."""
    seed = ALL[name].seed
    if name in CORRECTIONS:
        return f"vllm-none-{seed}"
    return f"squad-{seed}" if seed else "squad"


def form(file: str, first: dict[str, list]) -> dict[str, float]:
    """Shares of these turns' responses that parse, and, of those, of rewrites that are questions,
    and that are the conversation's first question word for word. first: query id → its pair."""
    rows = [row for _, row in read_jsonl(file) if row["query_id"] in first]
    good = [row for row in rows if row["status"] == "ok"]
    asking = sum(row["rewrite"].rstrip().endswith("?") for row in good)
    copied = sum(row["rewrite"] in (q for q, _ in first[row["query_id"]]) for row in good)
    count = max(1, len(good))
    return {
        "well_formed": len(good) / len(rows),
        "questions": asking / count,
        "first_question": copied / count,
    }


def arm_figures(cfg: StudyConfig, name: str) -> dict:
    """What an arm was, its curve on dev, and what its commands took."""
    notes = [f"{cfg.work}/commands/{kind}-{name}.json" for kind in ("sft", "grpo")]
    arm = ALL[name]
    figures = asdict(arm) | {"commands": [note for note in map(read_json, notes) if note]}
    if stats := read_json(f"{cfg.work}/sample/{arm.data}/sample_stats.json"):
        figures["records"] = stats["kept"]
    folder = f"{cfg.work}/{name}/grpo"
    if os.path.exists(f"{folder}/metrics.jsonl"):
        with open(f"{folder}/config.yaml", encoding="utf-8") as f:
            figures["lr"] = yaml.safe_load(f)["lr"]
        with open(f"{folder}/metrics.jsonl", encoding="utf-8") as f:
            rows = [json.loads(line) for line in f]
        figures["dev"] = {r["step"]: round(r["dev_mrr"], 4) for r in rows if "dev_mrr" in r}
        for key in ("reward", "kl"):
            figures[key] = [round(r[key], 3) for r in rows if r["step"] and r[key] is not None]
    return figures


# ---------------------------------------------------------------------------------------- adapter


def adapter(cfg: StudyConfig) -> dict:
    """The adapter of an arm in bfloat16, with its card."""
    import torch
    from safetensors.torch import load_file, save_file

    source, name = chosen(cfg, cfg.arm), "adapter_model.safetensors"
    os.makedirs(cfg.out, exist_ok=True)
    weights = {key: w.to(torch.bfloat16) for key, w in load_file(f"{source}/{name}").items()}
    save_file(weights, f"{cfg.out}/{name}", {"format": "pt"})
    shutil.copyfile(f"{source}/task.json", f"{cfg.out}/task.json")
    settings = read_json(f"{source}/adapter_config.json") | {"base_model_name_or_path": cfg.model}
    for path, text in (
        ("adapter_config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n"),
        ("README.md", card(read_json(f"{cfg.results}/figures.json"), cfg.out, cfg.arm)),
    ):
        with atomic_write(f"{cfg.out}/{path}") as f:
            f.write(text)
    return {"out": cfg.out, "bytes": os.path.getsize(f"{cfg.out}/{name}")}


def main(cfg: StudyConfig) -> dict | None:
    cfg.arms = list(dict.fromkeys(arm for name in cfg.arms for arm in NAMED.get(name, [name])))
    if unknown := [name for name in cfg.arms if name not in ALL]:
        raise ConfigError(f"arms: there is no {unknown[0]!r}; there are {', '.join(ALL)}")
    if cfg.stage == "train" and not cfg.data:
        raise ConfigError("data is empty; give the folder with conv/ and multihop/")
    if cfg.stage == "adapter" and not cfg.out:
        raise ConfigError("out is empty; give the adapter's folder")
    return {"train": train, "evaluate": evaluate, "adapter": adapter}[cfg.stage](cfg)


if __name__ == "__main__":
    run(StudyConfig, main)
