"""Does a policy learn to search twice? Expert episodes, GRPO with three rewards, controls.

    python bench/second_search.py data=DATA parallel=6                  # trains all arms on one GPU
    python bench/second_search.py stage=evaluate                        # writes results/figures.json

DATA holds multihop/{hotpotqa_train,2wiki,musique_eval} and conv/squad. One search shows `top_k`
passages, 2, so that one cannot do for most questions of two hops. The experts are made from the gold
passages: their titles are the queries, in the order in which they can be known. A policy that
imitates them (`twice`) or one that was only shown a single search with the question itself (`once`)
is then trained by GRPO. To be called from the project's folder; a study that was killed goes on.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import ConfigError, run  # noqa: E402
from data import Question, read_corpus, read_jsonl, read_questions, read_turns  # noqa: E402
from engines.base import Rollout, Sampling  # noqa: E402
from model import load_tokenizer  # noqa: E402
from reward import all_gold  # noqa: E402
from runs import atomic_write, read_json, write_jsonl  # noqa: E402
from scoring.ranking import bootstrap_interval, means, read_golds, read_run  # noqa: E402
from tasks import TaskConfig, open_task  # noqa: E402

from bench.study import Study, join, tool  # noqa: E402

EPISODE = "top_k=2 max_rounds=4 max_calls=3 result_tokens=320 turn_tokens=96"
BUDGET = 900  # tokens of an episode
TEST = {"hotpotqa": 200, "2wiki": 142, "musique": 200, "squad": 200}  # questions; squad: one hop
DEV = 96


@dataclass(frozen=True)
class Arm:
    """GRPO after a fine-tuning on expert episodes."""

    experts: Literal["twice", "once"]
    gold: Literal["none", "recall", "all"]  # episode.gold_reward
    penalty: float = 0.0  # episode.penalty
    seed: int = 0


ARMS = {
    "twice-none": Arm("twice", "none"),
    "twice-recall": Arm("twice", "recall"),
    "twice-all": Arm("twice", "all"),
    "twice-all-1": Arm("twice", "all", seed=1),
    "twice-all-2": Arm("twice", "all", seed=2),
    "once-all": Arm("once", "all"),
    "once-none": Arm("once", "none"),
    "once-penalty": Arm("once", "none", penalty=0.2),
}


@dataclass
class SearchStudyConfig:
    stage: Literal["train", "evaluate"] = "train"
    data: str = ""
    """folder with conv/ and multihop/"""
    work: str = "runs/second"
    """folder of data, models, episodes and logs"""
    results: str = os.path.join(ROOT, "bench", "results", "second_search")
    """folder of figures.json"""
    model: str = "models/smollm2"
    """the instruct model that is trained"""
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    """which to train"""
    steps: int = 100
    """of GRPO"""
    parallel: int = 1
    """commands that share the card"""
    seconds: float | None = None
    """GRPO runs that are still going so many seconds after the start are ended"""
    questions: int | None = None
    """use the first so many of every file: a rehearsal"""
    sft: str = ""
    """further words for sft.py"""
    grpo: str = ""
    """further words for grpo.py"""


# ------------------------------------------------------------------------------------------- data


def make_data(cfg: SearchStudyConfig) -> None:
    """`work`/data: one corpus, train, dev and test questions with their qrels, expert episodes."""
    made, multihop, squad = f"{cfg.work}/data", f"{cfg.data}/multihop", f"{cfg.data}/conv/squad"
    sets = {"hotpotqa": "hotpotqa_train", "2wiki": "2wiki", "musique": "musique_eval"}
    corpora = [f"{multihop}/{name}/corpus.jsonl" for name in sets.values()]
    join(f"{made}/corpus.jsonl", [*corpora, f"{squad}/corpus.jsonl"])
    for name, most in TEST.items():
        if name == "squad":
            questions, golds = one_hop(f"{squad}/test.jsonl")
        else:
            file = f"{multihop}/{sets[name]}/{'questions' if name == 'musique' else 'test'}"
            questions, golds = read_questions(f"{file}.jsonl"), read_golds([f"{file}.qrels"])
        write_questions(f"{made}/{name}", questions[: min(most, cfg.questions or most)], golds)
    join(f"{made}/test.jsonl", [f"{made}/{name}.jsonl" for name in TEST])
    join(f"{made}/test.qrels", [f"{made}/{name}.qrels" for name in TEST])
    questions, golds = one_hop(f"{squad}/train.jsonl")
    for name in ("hotpotqa", "2wiki"):
        file = f"{multihop}/{sets[name]}/train"
        questions += read_questions(f"{file}.jsonl")
        golds |= read_golds([f"{file}.qrels"])
    questions.sort(key=lambda q: hashlib.md5(q.id.encode()).hexdigest())
    dev = min(DEV, cfg.questions or DEV)
    write_questions(f"{made}/dev", questions[:dev], golds)
    questions = questions[dev : cfg.questions and 4 * dev]
    write_questions(f"{made}/train", questions, golds)
    for experts in ("twice", "once"):
        path = f"{made}/{experts}.jsonl"
        if not os.path.exists(path):
            write_jsonl(path, expert_episodes(cfg, experts, questions, golds))


def one_hop(path: str) -> tuple[list[Question], dict[str, list[str]]]:
    """The turns of a file as questions that stand alone, and their gold passages."""
    turns = read_turns(path)
    questions = [Question(t.query_id, t.rewrite, [t.answer]) for t in turns]
    return questions, {t.query_id: t.gold_ids for t in turns}


def write_questions(path: str, questions: list[Question], golds: dict[str, list[str]]) -> None:
    write_jsonl(f"{path}.jsonl", [question.record() for question in questions])
    with atomic_write(f"{path}.qrels") as f:
        f.writelines(f"{q.id} 0 {gold} 1\n" for q in questions for gold in golds[q.id])


class Expert:
    """An engine that says what it is told, turn by turn."""

    max_length = 4096

    def __init__(self, tokenizer, eos_id: int):
        self.tokenizer, self.eos_id, self.turns = tokenizer, eos_id, []

    def generate(self, prompts: list[list[int]], samplings, progress=None) -> list[Rollout]:
        (prompt,) = prompts
        ids = self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]
        end = "stop" if self.turns else "eos"
        ids += [] if self.turns else [self.eos_id]
        return [Rollout(prompt, ids, [0.0] * len(ids), [1] * len(ids), 0, end)]


def expert_episodes(cfg, experts: str, questions: list[Question], golds: dict) -> list[dict]:
    """Trajectories for sft.py, of those experts that were shown all gold passages (`twice`)."""
    corpus = f"{cfg.work}/data/corpus.jsonl"
    passages = {p.id: p for p in read_corpus(corpus)}
    tokenizer = load_tokenizer(cfg.model)
    settings = TaskConfig(task="search", max_response_tokens=BUDGET)
    settings.retriever.corpus = corpus
    for word in EPISODE.split():
        key, _, value = word.partition("=")
        setattr(settings.episode, key, int(value))
    task, rows = open_task(settings, tokenizer, qrels=[f"{cfg.work}/data/train.qrels"]), []
    engine = Expert(tokenizer, task.eos_id)
    for question in questions:
        queries = [(question.question, "the answer")]
        if len(golds[question.id]) > 1 and experts == "twice":
            queries = two_queries(question, [passages[id_] for id_ in golds[question.id]])
        if not queries:
            continue
        engine.turns = [
            f"<think>I have to find {what}.</think> <search>{query}</search>"
            for query, what in queries
        ] + [
            "<think>The results say it.</think> <answer>The answer is \\[ \\boxed{"
            f"{question.golden_answers[0]}}} \\]</answer>"
        ]
        sampling = Sampling(1, 1.0, max_tokens=BUDGET)
        (episode,) = task.rollouts(engine, [task.prompt(question)], sampling)
        (figures,) = task.measure([episode], [question])
        if episode.well_formed and (figures["all_gold"] or experts == "once"):
            rows.append(task.row(question, episode, {}))
    task.close()
    print(f"{experts}: {len(rows)} of {len(questions)} questions have an expert episode")
    return rows


def two_queries(question: Question, golds: list) -> list[tuple[str, str]]:
    """The titles of two gold passages in the order in which they can be known: the first stands in
    the question, the second there or in the first passage. Empty if that is not so."""
    asked = question.question.casefold()
    named = [(re.sub(r" \([^)]*\)$", "", p.title), p) for p in golds]
    named.sort(key=lambda pair: (asked.find(pair[0].casefold()) % (len(asked) + 1), pair[0]))
    if len(named) != 2 or named[0][0].casefold() not in asked:
        return []
    (first, passage), (second, _) = named
    if second.casefold() not in asked + passage.text.casefold():
        return []
    return [(first, first), (second, second)]


# --------------------------------------------------------------------------------------- training


def train(cfg: SearchStudyConfig) -> dict:
    make_data(cfg)
    study = SearchStudy(cfg)

    def submit(pool: ThreadPoolExecutor) -> list[Future]:
        needed = dict.fromkeys(ARMS[name].experts for name in cfg.arms)
        warm = {experts: pool.submit(study.imitate, experts) for experts in needed}
        after = [pool.submit(study.answer_after, experts, warm[experts]) for experts in needed]
        return [*after, *(pool.submit(study.train, name, warm) for name in cfg.arms)]

    return study.run(submit)


class SearchStudy(Study):
    """The commands of this study."""

    def episode(self, corpus: str = "") -> str:
        words = " ".join(f"episode.{word}" for word in EPISODE.split())
        corpus = corpus or f"{self.cfg.work}/data/corpus.jsonl"
        return (
            f"task=search retriever.kind=bm25 retriever.corpus={corpus} {words} "
            f"max_response_tokens={BUDGET} max_prompt_tokens=512 engine.batch=256"
        )

    def imitate(self, experts: str) -> None:
        self.call(
            f"sft-{experts}",
            "sft.py",
            f"stage=train model={self.cfg.model} records={self.cfg.work}/data/{experts}.jsonl "
            "max_length=1536 heldout_fraction=0.05 epochs=3 sequences_per_step=16 lr=1e-4 "
            "micro_batch_tokens=16384 save_every=100000 keep_checkpoints=1 compile=false "
            f"{self.cfg.sft} out={self.cfg.work}/sft-{experts}",
        )

    def answer_after(self, experts: str, warm) -> None:
        warm.result()
        self.answer(experts, f"{self.cfg.work}/sft-{experts}/final")

    def answer(self, name: str, model: str, corpus: str = "") -> None:
        """Greedy episodes of all test questions: `work`/answers/NAME.jsonl."""
        out, questions = f"{self.cfg.work}/answers/{name}.jsonl", f"{self.cfg.work}/data/test.jsonl"
        words = f"model={model} questions={questions} chunk=512 {self.episode(corpus)} out={out}"
        self.call(f"infer-{name}", "infer.py", words)

    def train(self, name: str, warm: dict) -> None:
        """One arm's GRPO and its answers."""
        cfg, arm, folder = self.cfg, ARMS[name], f"{self.cfg.work}/{name}"
        warm[arm.experts].result()
        began = f"{cfg.work}/sft-{arm.experts}/final"
        self.call(
            f"grpo-{name}",
            "grpo.py",
            f"model={began} train={cfg.work}/data/train.jsonl dev={cfg.work}/data/dev.jsonl "
            f"qrels=[{cfg.work}/data/train.qrels,{cfg.work}/data/dev.qrels] {self.episode()} "
            f"episode.gold_reward={arm.gold} episode.penalty={arm.penalty:g} seed={arm.seed} "
            f"steps={cfg.steps} prompts_per_step=16 group_size=8 temperature=0.9 lr=5e-6 "
            "warmup_steps=5 validate_every=20 save_every=100000 keep_checkpoints=1 compile=false "
            f"micro_batch_tokens=16384 export_dtype=bfloat16 {cfg.grpo} out={folder}",
            cfg.seconds,
        )
        best = f"{folder}/best"
        best = best if os.path.isdir(best) else began
        self.answer(name, best)
        if name == "twice-all":  # with a search engine that finds other things, and with none
            self.answer("foreign", best, f"{ROOT}/demo/corpus.jsonl")
            empty = f"{cfg.work}/data/empty.jsonl"
            write_jsonl(empty, [{"id": "empty", "title": "", "text": "zzzzz"}])
            self.answer("empty", best, empty)


# ------------------------------------------------------------------------------------- evaluation


def evaluate(cfg: SearchStudyConfig) -> dict:
    """Figures of every system on every set, and of the question searched once."""
    cells = {}
    for name in TEST:
        questions, qrels = (f"{cfg.work}/data/{name}.{kind}" for kind in ("jsonl", "qrels"))
        ids = {q.id for q in read_questions(questions)}
        folder = f"{cfg.work}/evaluation/{name}"
        files = []
        for path in sorted(glob.glob(f"{cfg.work}/answers/*.jsonl")):
            files.append(f"{folder}/{os.path.basename(path)}")
            rows = [row for _, row in read_jsonl(path) if row["query_id"] in ids]
            write_jsonl(files[-1], rows)
        both = [f"questions={questions}", f"qrels={qrels}"]
        for baseline in ("twice", "once"):
            out, start = f"{folder}/{baseline}", f"{folder}/{baseline}.jsonl"
            if start not in files:
                continue
            base, others = f"baseline={start}", ",".join(f for f in files if f != start)
            tool("evaluate.py", *both, base, f"answers={others}", f"out={out}")
            systems = read_json(f"{out}/metrics.json")["systems"]
            for system, row in systems.items():
                cell = cells.setdefault(f"{name}/{os.path.basename(system)}", {})
                cell |= {metric: [row[metric], *row["ci"][metric]] for metric in SHOWN}
                if paired := row.get("paired"):
                    cell[f"p_{baseline}"] = {metric: paired[metric]["p"] for metric in SHOWN}
        search = f"retriever.kind=bm25 retriever.corpus={cfg.work}/data/corpus.jsonl".split()
        tool("evaluate.py", *both, "query=question", *search, f"out={folder}/question")
        found, golds = read_run(f"{folder}/question/question.trec"), read_golds([qrels])
        for k in (2, 4):
            first = {q: [id_ for id_, _ in found.get(q, [])[:k]] for q in golds}
            scores = {q: {"all_gold": all_gold(first[q], golds[q])} for q in golds}
            cell = [means(scores)["all_gold"], *bootstrap_interval(scores)["all_gold"]]
            cells[f"{name}/question, first {k}"] = {"all_gold": cell}
    figures = {
        "machine": read_json(f"{cfg.work}/machine.json"),
        "arms": {name: arm_figures(cfg, name) for name in cfg.arms},
        "cells": cells,
    }
    with atomic_write(f"{cfg.results}/figures.json") as f:
        f.write(json.dumps(figures, separators=(",", ":")).replace(cfg.work, "runs/second"))
    return {"figures": f"{cfg.results}/figures.json", "cells": len(cells)}


SHOWN = ("em", "f1", "all_gold", "well_formed", "searches")
CURVES = ("reward", "f1", "all_gold", "searches", "well_formed", "entropy", "kl")


def arm_figures(cfg: SearchStudyConfig, name: str) -> dict:
    """What an arm was, its curves and what its commands took."""
    arm = ARMS[name]
    notes = [f"{cfg.work}/commands/{n}.json" for n in (f"sft-{arm.experts}", f"grpo-{name}")]
    figures = asdict(arm) | {"commands": [note for note in map(read_json, notes) if note]}
    with open(f"{cfg.work}/{name}/metrics.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    figures["dev"] = {
        r["step"]: {key: round(v, 4) for key, v in r.items() if key.startswith("dev_")}
        for r in rows
        if "dev_f1" in r
    }
    taken = [r for r in rows if r["step"]]
    figures["curves"] = {
        key: [round(r[key], 3) for r in taken] for key in CURVES if key in taken[0]
    }
    return figures


def main(cfg: SearchStudyConfig) -> dict:
    if unknown := [name for name in cfg.arms if name not in ARMS]:
        raise ConfigError(f"arms: there is no {unknown[0]!r}; there are {', '.join(ARMS)}")
    if cfg.stage == "train" and not cfg.data:
        raise ConfigError("data is empty; give the folder with conv/ and multihop/")
    return {"train": train, "evaluate": evaluate}[cfg.stage](cfg)


if __name__ == "__main__":
    run(SearchStudyConfig, main)
