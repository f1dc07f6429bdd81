"""Cutting documents into passages: `prepare.py chunk`, MultiHop-RAG, GraphRAG-Bench."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Iterator, NamedTuple

from config import at_least
from data import DataError, Question, Row
from runs import write_jsonl
from sources.files import (
    Build,
    DevConfig,
    PublicConfig,
    json_rows,
    make_once,
    sha256,
    with_progress,
)
from sources.questions import golden, title_and_text

# ---- cutting

_CLOSERS = "\"'”’)]»"


def token_starts(text: str, tokenizer: Any = None) -> list[int]:
    """Character offset of each token; None: words and punctuation marks."""
    if tokenizer is None:
        return [match.start() for match in re.finditer(r"\w+|[^\w\s]", text)]
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return [start for start, _ in encoded["offset_mapping"]]


def break_strength(text: str, at: int) -> int:
    """Strength of a break: 4 line end, 3 sentence end, 2 pause, 1 blank, 0 none."""
    left, right = text[max(0, at - 100) : at], text[at : at + 100]
    before, after = left.rstrip(), right.lstrip()
    gap = left[len(before) :] + right[: len(right) - len(after)]
    sign = (before.rstrip(_CLOSERS) or before)[-1:]  # skip closing quotes
    if "\n" in gap:
        return 4
    if sign in tuple("。！？") or gap and sign in tuple(".!?…"):
        return 3
    return 2 if gap and sign in tuple(",;:—–") else 1 if gap else 0


def chunk_spans(text: str, starts: list[int], size: int, overlap: int = 0) -> list[tuple[int, int]]:
    """(start, end) characters of each chunk of `text`, whose tokens begin at `starts`.

    A chunk has at most `size` tokens and, but for the last, more than half; it ends at the last of
    the strongest breaks in between. The next begins `overlap` tokens earlier. Without overlap the
    spans partition the text.
    """
    if size < 2 or not 0 <= overlap <= size // 2:
        raise DataError(
            f"chunk_size={size} and overlap={overlap}; chunk_size must be at least 2 and overlap "
            "from 0 to half of it"
        )
    bounds = [0, *starts[1:], len(text)]  # starts of the tokens, and the end
    strength = [break_strength(text, bound) for bound in bounds]
    count, spans, first = len(bounds) - 1, [], 0
    while count - first > size:
        window = range(first + size // 2 + 1, first + size + 1)
        last = max(window, key=lambda k: (strength[k], k))
        spans.append((bounds[first], bounds[last]))
        first = last - overlap
    return [*spans, (bounds[first], bounds[count])]


@dataclass
class Cut:
    """How documents are cut into passages."""

    chunk_size: int = 200
    """maximum tokens of a passage, without context fields; 0: documents stay whole"""
    overlap: int = 0
    """tokens repeated from the previous passage"""
    tokenizer: str = ""
    """Hugging Face folder; empty: tokens are words and punctuation marks"""
    context_fields: str = "title,source,published_at"
    """metadata shown in each passage: `title` as title, others as lines `field: value`"""

    def cutter(
        self, prefix: str, digits: int = 0
    ) -> Callable[[str, str, dict, str], Iterator[tuple[tuple[int, int], dict]]]:
        """`cut(title, text, metadata, doc_id)`, which yields ((start, end) in `text`, passage).

        Passage ids are `prefix` and a running number of at least `digits` digits.
        """
        names = [name.strip() for name in self.context_fields.split(",")]
        tokenizer = open_tokenizer(self.tokenizer) if self.tokenizer and self.chunk_size else None
        numbers = itertools.count()

        def cut(title: str, text: str, metadata: dict, doc_id: str):
            spans = [(0, len(text))]
            if self.chunk_size:
                starts = token_starts(text, tokenizer)
                spans = chunk_spans(text, starts, self.chunk_size, self.overlap)
            shown = [n for n in names if n != "title" and metadata.get(n) not in (None, "")]
            before = "".join(f"{n}: {metadata[n]}\n" for n in shown) + ("\n" if shown else "")
            for number, (start, end) in enumerate(spans):
                place = {"doc_id": doc_id, "doc_chunks": len(spans), "doc_chunk_id": number}
                passage = {
                    "id": f"{prefix}{next(numbers):0{digits}d}",
                    "title": title if "title" in names else "",
                    "text": before + text[start:end].strip(),
                    "metadata": metadata | place,
                }
                yield (start, end), passage

        return cut


def open_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise DataError(
            f"tokenizer={path}: {str(e).splitlines()[0]}; name a folder with tokenizer.json"
        ) from e
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer={path}: positions of tokens need a fast one (tokenizer.json)")
    return tokenizer


@dataclass(kw_only=True)
class ChunkConfig(Cut):
    """`prepare.py chunk`"""

    source: str
    """JSONL corpus: `id`, `title`, `text`, or `id`, `contents` (title in its first line)"""
    out: str
    """folder to write: corpus.jsonl"""
    prefix: str = "c"
    """prefix of passage ids"""


def chunk(cfg: ChunkConfig) -> dict:
    """Cut documents into passages of at most `chunk_size` tokens."""
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file; name a corpus file (JSONL)")
    config = dataclasses.asdict(cfg) | {"out": "", "source": sha256(cfg.source)}

    def fill(folder: str) -> dict:
        cut, counts = cfg.cutter(cfg.prefix), Counter()

        def passages() -> Iterator[dict]:
            for row in json_rows(cfg.source):
                if "text" in row:
                    title, text = row.line("title", required=False), row.text("text")
                else:
                    title, text = title_and_text(row.text("contents"))
                counts["documents"] += 1
                known = ("id", "title", "text", "contents", "metadata")
                metadata = {k: v for k, v in row.items() if k not in known} | row.object("metadata")
                for _, passage in cut(title, text, metadata, row.text("id")):
                    counts["passages"] += 1
                    yield passage

        write_jsonl(f"{folder}/corpus.jsonl", with_progress(passages()))
        return dict(counts)

    return make_once(cfg, {"command": "chunk", "config": config}, fill)


# ---- multihop-rag


@dataclass
class MultihopragConfig(Cut, DevConfig):
    """`prepare.py multihoprag`"""

    test_questions: Annotated[int, at_least(0)] = 200
    """size of test: the first of a shuffle with seed 42, as DeepSearch-RL's val"""


def multihoprag(build: Build) -> None:
    """MultiHop-RAG: 609 news articles cut into passages, 2,556 questions.

    A passage is gold if it holds a fact of the evidence, ignoring white space (as the authors do),
    or a part of one that was cut. Null questions have no qrels. Ids are `multihoprag-ROW`, from 0.
    Split like `convert_dataset.py` of ninehills/deepsearch-rl.
    """
    articles: dict[str, Article] = {}  # by url and by title
    cfg, counts = build.cfg, build.counts
    cut = cfg.cutter("multihoprag-c", 5)

    def passages() -> Iterator[dict]:
        for row in json_rows(build.paths["corpus"]):
            title, body = row.line("title"), row.text("body")
            metadata = {k: v for k, v in row.items() if k not in ("title", "body")}
            article = Article(letters(body), [])
            for span, passage in cut(title, body, metadata, str(counts["articles"])):
                start, end = (len(letters(body[:at])) for at in span)
                article.spans.append((start, end, passage["id"]))
                yield passage
            counts["articles"] += 1
            for key in filter(None, (row.text("url", required=False), title)):
                articles.setdefault(key, article)

    build.write_corpus(passages())
    rows = list(enumerate(json_rows(build.paths["questions"])))
    counts["questions"] = len(rows)
    random.Random(42).shuffle(rows)

    splits, judged = [], {}
    for place, (number, row) in enumerate(rows):
        key, evidence = f"multihoprag-{number}", row.rows("evidence_list")
        metadata = {"type": row.text("question_type"), "evidence_list": evidence}
        question = Question(key, row.line("query"), golden([row.text("answer")], row), metadata)
        splits.append(("test" if place < cfg.test_questions else "train", question))
        judged[key] = relevant(evidence, articles, counts)
    build.write_splits(cfg.splits(), splits, judged)


def relevant(evidence: list[Row], articles: dict[str, Article], counts: Counter) -> dict[str, int]:
    """Gold passage id → 1; empty if any fact was not found."""
    found = []
    for item in evidence:
        keys = item.text("url", required=False), item.line("title", required=False)
        article = articles.get(keys[0]) or articles.get(keys[1])
        found.append(article.holding(item.text("fact")) if article else [])
    counts["facts"] += len(found)
    counts["facts_not_in_their_article"] += sum(not ids for ids in found)
    counts["null_questions"] += not evidence
    counts["questions_without_all_gold"] += not all(found)
    return dict.fromkeys(itertools.chain(*found), 1) if all(found) else {}


def letters(text: str) -> str:
    return "".join(text.split())


class Article(NamedTuple):
    """A document without white space; `spans` refer to that text."""

    text: str
    spans: list[tuple[int, int, str]]  # start, end, passage id

    def holding(self, fact: str) -> list[str]:
        """Ids of passages: the first one with all of `fact`, else all with a part."""
        first = self.text.find(letters(fact))
        last = first + len(letters(fact))
        if first < 0 or last == first:
            return []
        whole = [key for start, end, key in self.spans if start <= first and last <= end]
        return whole[:1] or [key for start, end, key in self.spans if start < last and first < end]


# ---- graphrag-bench


@dataclass
class GraphragConfig(Cut, PublicConfig):
    """`prepare.py graphrag-novel` and `graphrag-medical`"""


def graphrag(build: Build) -> None:
    """GraphRAG-Bench: novels or a medical guideline, cut into passages; all questions are test.

    Evidence is paraphrased, so there are no qrels; `metadata` keeps it, `source` (the document)
    and `type`. A repeated id gets `-2`.
    """
    cut, counts = build.cfg.cutter(f"{build.name}-c", 5), build.counts
    seen, splits = Counter(), []

    def passages() -> Iterator[dict]:
        for row in json_rows(build.paths["corpus"]):
            counts["documents"] += 1
            for _, passage in cut("", row.text("context"), {}, row.text("corpus_name")):
                yield passage

    build.write_corpus(passages())
    for row in json_rows(build.paths["questions"]):
        key, text, answer = row.text("id"), row.line("question"), golden([row.text("answer")], row)
        seen[key] += 1
        key += f"-{seen[key]}" if seen[key] > 1 else ""
        known = ("id", "question", "answer", "question_type")
        metadata = {k: v for k, v in row.items() if k not in known}
        metadata["type"] = row.text("question_type")
        splits.append(("test", Question(key, text, answer, metadata)))
    counts["questions"] = len(splits)
    build.write_splits(("test",), splits, judged={})


SETS = {
    "multihoprag": (MultihopragConfig, multihoprag),
    "graphrag-novel": (GraphragConfig, graphrag),
    "graphrag-medical": (GraphragConfig, graphrag),
}
