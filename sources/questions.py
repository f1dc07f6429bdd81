"""Multi-hop question sets → corpus, questions and qrels; cutting of documents.

Where the forms are written down: `raw_data_to_official_format.py` and README of
StonyBrookNLP/musique (v1.0); "JSON Format" in the README of hotpotqa/hotpot; "Dataset Contents" in
the README of Alab-NII/2wikimultihop, with the aliases of 2wikimultihop_evaluate_v1.1.py; the sheet
that ofirpress/self-ask links to; yixuantt/MultiHop-RAG, split as `convert_dataset.py` of
ninehills/deepsearch-rl; "Use your own dataset" in the README of PeterGriffinJin/Search-R1;
"Datasets" in the README of RUC-NLPIR/FlashRAG.

A set that brings paragraphs along becomes a retrieval set. A passage is a distinct (title, text)
after HTML entities and white space; two texts of a title that differ only in spacing or punctuation
are one (the first is kept). Passage ids follow a content hash, so they say nothing about relevance,
and the same files give the same ids. Relevant is the supporting paragraph as it stands in that
question's context, in the order of the hops where it is known. A question of which a supporting
paragraph is absent gets no qrels: half a judgment would let "all gold passages found" be true too
early. It stays a question, and the result counts it. This is a closed pool, far easier than all of
Wikipedia (`wiki18`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import itertools
import json
import os
import random
import re
import tempfile
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Callable, Iterable, Iterator

from config import at_least
from data import DataError, Question, as_texts
from runs import atomic_write, write_jsonl
from sources.files import (
    CUT_OFF,
    ENCODE,
    Build,
    DevConfig,
    PublicConfig,
    Row,
    already_made,
    array_rows,
    csv_rows,
    finished_folder,
    jsonl_rows,
    sha256,
    squeeze,
    write_corpus,
)

# ---------------------------------------------------------------------------- pools of paragraphs


@dataclass
class Judged:
    """A question of a data set, with the paragraphs that the set gives beside it."""

    question: Question
    paragraphs: list[tuple[str, str]] = field(default_factory=list)  # (title, text)
    golds: list[int] = field(default_factory=list)  # positions in `paragraphs`, hop by hop
    complete: bool = True  # every supporting paragraph is among them


class _Kept(dict):
    """str.translate table that deletes punctuation, blanks and control characters of any script."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code))[0] in "PZC" else code
        return self[code]


_KEPT = _Kept()


def clean(text: str) -> str:
    """HTML entities resolved, white space collapsed."""
    return squeeze(html.unescape(text))


class Pool:
    """Distinct paragraphs. The texts lie in a file; memory holds 16 bytes and a number for each."""

    def __init__(self, spool: BinaryIO):
        self.spool = spool
        self.places: dict[bytes, int] = {}

    def add(self, title: str, text: str) -> bytes:
        """Key of a paragraph, kept unless an equal one (but for spacing and punctuation) is."""
        title, text = clean(title), clean(text)
        same = unicodedata.normalize("NFC", f"{title}\n{text.translate(_KEPT)}")
        key = hashlib.sha256(same.encode()).digest()[:16]
        if key not in self.places:
            self.places[key] = self.spool.tell()
            self.spool.write(ENCODE([title, text]).encode() + b"\n")
        return key

    def ids(self, name: str) -> dict[bytes, str]:
        """Key → passage id, `{name}-p00000` and on, in the order of the keys, which are hashes."""
        digits = max(5, len(str(len(self.places) - 1)))
        return {key: f"{name}-p{n:0{digits}d}" for n, key in enumerate(sorted(self.places))}

    def passages(self, ids: dict[bytes, str]) -> Iterator[dict]:
        """The corpus in the order of `ids`."""
        for key, passage_id in ids.items():
            self.spool.seek(self.places[key])
            title, text = json.loads(self.spool.readline())
            yield {"id": passage_id, "title": title, "text": text}


def write_judged(
    build: Build, name: str, splits: Iterable[str], rows: Iterable[tuple[str, Judged]]
) -> None:
    """(split, question) rows as `{split}.jsonl` and, where judged, `.qrels`; the pooled corpus.

    Streamed: only keys are held. A question without text or answer is left out and counted: nothing
    could be asked, or nothing scored. DataError: a question id that occurs twice.
    """
    counts, seen = build.counts, set()
    judged: dict[str, dict[str, list[bytes]]] = {split: {} for split in splits}
    with contextlib.ExitStack() as stack:
        pool = Pool(stack.enter_context(tempfile.TemporaryFile(dir=build.folder)))
        files = {
            split: stack.enter_context(atomic_write(f"{build.folder}/{split}.jsonl"))
            for split in judged
        }
        for split, row in rows:
            question = row.question
            if not question.question or not question.golden_answers:
                counts["without_question_or_answer"] += 1
                continue
            if question.id in seen:
                raise DataError(f"question id {question.id!r} occurs a second time; {CUT_OFF}")
            seen.add(question.id)
            keys = [pool.add(title, text) for title, text in row.paragraphs]
            files[split].write(ENCODE(question.record()) + "\n")
            counts[f"{split}_questions"] += 1
            if row.golds and row.complete:
                judged[split][question.id] = [keys[gold] for gold in row.golds]
            elif row.paragraphs:
                counts["questions_without_all_gold"] += 1
        ids = pool.ids(name)
        for split, golds in judged.items():
            write_qrels(build, split, {q: [ids[key] for key in keys] for q, keys in golds.items()})
        if ids:
            build.write_corpus(pool.passages(ids), len(ids))


def write_qrels(build: Build, split: str, golds: dict[str, list[str]]) -> None:
    """Question id → relevant passages, each once; no file where nothing is judged."""
    build.counts[f"{split}_judged"] = len(golds)
    if golds:
        with atomic_write(f"{build.folder}/{split}.qrels") as f:
            for question, keys in golds.items():
                f.writelines(f"{question} 0 {key} 1\n" for key in dict.fromkeys(keys))


def golden(answers: list, row: Row) -> list[str]:
    """Answers as strings, stripped, each once, blank ones left out; the list may come out empty."""
    texts = as_texts(answers)
    if texts is None:
        raise row.error(f"the answers are {str(answers)[:80]}; texts are expected there")
    return list(dict.fromkeys(text.strip() for text in texts if text.strip()))


def question_id(row: Row, key: str) -> str:
    """`row[key]`, which becomes a column of TREC files."""
    value = row.text(key)
    if value.split() != [value]:
        raise row.error(f"{key} {value!r} is empty or holds a blank; {CUT_OFF}")
    return value


def sentences(context: list, joint: str, row: Row) -> list[tuple[str, str]]:
    """(title, text) of HotpotQA's `[[title, [sentence, …]], …]`; `joint` joins sentences."""
    found = []
    for entry in context:
        match entry:
            case [str(title), [*parts]] if all(isinstance(part, str) for part in parts):
                found.append((title, joint.join(parts)))
            case _:
                raise row.error(
                    f"a paragraph is {str(entry)[:80]}; [title, [sentence, …]] is expected"
                )
    return found


def supporting(titles: Iterable[str], paragraphs: list[tuple[str, str]]) -> tuple[list[int], bool]:
    """(positions of the paragraphs with these titles, in that order; is every title there?)."""
    places: dict[str, list[int]] = {}
    for position, (title, _) in enumerate(paragraphs):
        places.setdefault(title, []).append(position)
    wanted = dict.fromkeys(titles)
    return [p for title in wanted for p in places.get(title, [])], wanted.keys() <= places.keys()


# ---------------------------------------------------------------------------- train and dev files


@dataclass
class MultihopConfig(DevConfig):
    """Sets with a train and a dev file; the dev set, which the papers report on, becomes test."""

    train: bool = True
    """read the train file too; false: the dev file alone, whose paragraphs then are the corpus"""


def write_multihop(
    cfg: MultihopConfig, build: Build, read: Callable[[Build, str], Iterable[Judged]]
) -> None:
    """The official train and dev files, which `read(build, official split)` yields."""

    def rows() -> Iterator[tuple[str, Judged]]:
        for official in ("train", "dev") if cfg.train else ("dev",):
            for row in read(build, official):
                build.counts[f"{official} questions"] += 1
                yield cfg.split(official, row.question.id), row

    write_judged(build, build.name, cfg.splits() if cfg.train else ("test",), rows())


def musique(cfg: MultihopConfig, build: Build) -> None:
    """MuSiQue-Ans v1.0: 20 paragraphs a question, 2 to 4 supporting; its dev set becomes test.

    `metadata` keeps the shape of the hops ("2hop", "3hop1", …) as `type`, and the sub-questions.
    Unanswerable rows (of the musique_full files) are left out and counted.
    """
    write_multihop(cfg, build, musique_rows)


def musique_rows(build: Build, split: str) -> Iterator[Judged]:
    for row in jsonl_rows(build.paths[split]):
        if row.get("answerable") is False:
            build.counts["unanswerable"] += 1
            continue
        given, hops = row.rows("paragraphs"), row.rows("question_decomposition")
        place = {part.number("idx"): i for i, part in enumerate(given)}
        flagged = [i for i, part in enumerate(given) if part.field("is_supporting", bool)]
        by_hop = [place.get(hop.get("paragraph_support_idx")) for hop in hops]
        key, answers = question_id(row, "id"), [row.text("answer"), *row.texts("answer_aliases")]
        kept = [{k: hop.get(k) for k in ("id", "question", "answer")} for hop in hops]
        metadata = {"type": key.partition("__")[0], "question_decomposition": kept}
        yield Judged(
            Question(key, row.squeezed("question"), golden(answers, row), metadata),
            [(part.text("title"), part.text("paragraph_text")) for part in given],
            list(dict.fromkeys([i for i in by_hop if i in flagged] + flagged)),
        )


def hotpotqa(cfg: MultihopConfig, build: Build) -> None:
    """HotpotQA, distractor setting: 10 paragraphs a question, 2 supporting; dev becomes test.

    Sentences carry their leading blank and are joined as they are. `metadata` keeps type, level and
    supporting facts.
    """
    write_multihop(cfg, build, hotpotqa_rows)


def hotpotqa_rows(build: Build, split: str) -> Iterator[Judged]:
    return (hotpot_row(row, "", ("type", "level")) for row in array_rows(build.paths[split]))


def hotpot_row(row: Row, joint: str, kept: tuple[str, ...], aliases: Iterable = ()) -> Judged:
    """A row of HotpotQA's form; `kept` fields go to the metadata."""
    facts = row.field("supporting_facts", list)
    if not all(isinstance(f, list) and len(f) == 2 and isinstance(f[0], str) for f in facts):
        raise row.error(
            f"supporting_facts is {str(facts)[:80]}; a list of [title, sentence] is expected"
        )
    paragraphs = sentences(row.field("context", list), joint, row)
    metadata = {key: row[key] for key in kept if key in row} | {"supporting_facts": facts}
    answers = golden([row.text("answer"), *aliases], row)
    question = Question(question_id(row, "_id"), row.squeezed("question"), answers, metadata)
    return Judged(question, paragraphs, *supporting((title for title, _ in facts), paragraphs))


def twowiki(cfg: MultihopConfig, build: Build) -> None:
    """2WikiMultihopQA (April 2021): 10 paragraphs a question, 2 or 4 supporting; dev becomes test.

    Golden answers are the answer and the aliases and demonyms of its entity, as the official
    evaluation takes them. Sentences are joined with a blank. `metadata` keeps type, supporting
    facts and evidences.
    """
    aliases = {
        row.text("Q_id"): row.field("aliases", list) + row.field("demonyms", list)
        for row in jsonl_rows(build.paths["aliases"])
    }

    def rows(build: Build, split: str) -> Iterator[Judged]:
        for row in array_rows(build.paths[split]):
            yield hotpot_row(row, " ", ("type", "evidences"), aliases.get(row.get("answer_id"), ()))

    write_multihop(cfg, build, rows)


# -------------------------------------------------------------------------------------- bamboogle


def bamboogle(cfg: PublicConfig, build: Build) -> None:
    """Bamboogle: 125 questions and their answers, no paragraphs; search `wiki18` for them.

    Ids are `bamboogle-test_N`, N from 0: FlashRAG's numbers. Where the sheet turned a date or an
    accent into something else ("22-Apr-04", "Tem??r"), it stays so: FlashRAG's file (`prepare.py
    flashrag`) is the one that papers score.
    """
    write_judged(build, "bamboogle", ["test"], bamboogle_rows(build.paths["questions"]))
    build.counts["questions"] = build.counts["test_questions"]


def bamboogle_rows(path: str) -> Iterator[tuple[str, Judged]]:
    rows = csv_rows(path, ",")
    header = [squeeze(column) for column in next(rows, ("", []))[1]]
    if "Question" not in header or "Answer" not in header:
        raise DataError(f"{path}: the first line is {header}; it has columns Question and Answer")
    for number, (location, cells) in enumerate(row for row in rows if any(row[1])):
        row = Row(zip(header, cells), location)
        if len(cells) != len(header):
            raise row.error(f"{len(cells)} columns where the first line has {len(header)}")
        answers = [squeeze(cell) for name, cell in row.items() if name.startswith("Answer")]
        question, golds = row.squeezed("Question"), golden(answers, row)
        if not question or not golds:
            raise row.error(f"question is {question!r}, answers are {golds}; {CUT_OFF}")
        yield "test", Judged(Question(f"bamboogle-test_{number}", question, golds))


# ------------------------------------------------------------------------------ cutting documents

_WORD = re.compile(r"\w+|[^\w\s]")
_CLOSERS = "\"'”’)]»"


def token_starts(text: str, tokenizer: Any = None) -> list[int]:
    """Where each token of `text` starts; without a tokenizer: each word or punctuation mark."""
    if tokenizer is None:
        return [match.start() for match in _WORD.finditer(text)]
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    return [start for start, _ in encoded["offset_mapping"]]


def break_strength(text: str, at: int) -> int:
    """How good a cut at `text[at]` is: 4 line end, 3 sentence end, 2 pause, 1 blank, 0 none."""
    left, right = at, at
    while left > 0 and text[left - 1].isspace():
        left -= 1
    while right < len(text) and text[right].isspace():
        right += 1
    gap, sign = text[left:right], left - 1
    while sign > 0 and text[sign] in _CLOSERS:  # a closing quote belongs to the sentence before it
        sign -= 1
    before = text[sign] if sign >= 0 else ""
    if "\n" in gap:
        return 4
    if before in ("。", "！", "？") or (gap and before in (".", "!", "?", "…")):
        return 3
    return 2 if gap and before in (",", ";", ":", "—", "–") else 1 if gap else 0


def chunk_spans(text: str, starts: list[int], size: int, overlap: int = 0) -> list[tuple[int, int]]:
    """(start, end) characters of the chunks of `text`, whose tokens begin at `starts`.

    A chunk has at most `size` tokens and, but for the last, more than half of that: it ends at the
    strongest break in the second half of its window, the last of equals. The next one begins
    exactly `overlap` tokens before that end. Without overlap the spans partition the text: what
    stands between tokens goes to the left.
    """
    if size < 2 or not 0 <= overlap <= size // 2:
        raise DataError(
            f"chunk_size={size} and overlap={overlap}; chunk_size must be at least 2 and overlap "
            "from 0 to half of it"
        )
    bounds = [0, *starts[1:], len(text)]  # bounds[k]: where token k begins
    strength = [0, *(break_strength(text, bound) for bound in bounds[1:])]
    count, spans, first = len(bounds) - 1, [], 0
    while count - first > size:
        window = range(first + size // 2 + 1, first + size + 1)
        last = max(window, key=lambda k: (strength[k], k))
        spans.append((bounds[first], bounds[last]))
        first = last - overlap
    return [*spans, (bounds[first], bounds[count])]


@dataclass
class Cut:
    """How documents become passages."""

    chunk_size: int = 200
    """tokens of a passage at most, before title and context fields; 0: documents stay whole"""
    overlap: int = 0
    """tokens that a passage repeats of the one before it"""
    tokenizer: str = ""
    """Hugging Face folder whose tokenizer counts; without one words and punctuation marks count"""
    context_fields: str | list[str] = "title,source,published_at"
    """what stands before every passage: `title` as its title, others as lines `field: value`"""

    def cutter(self) -> Callable[[str, str, dict, str], list[tuple[tuple[int, int], dict]]]:
        """`cut_document` with these settings. DataError: no such tokenizer, or a slow one."""
        names = self.context_fields
        names = names.split(",") if isinstance(names, str) else names
        tokenizer = open_tokenizer(self.tokenizer) if self.tokenizer and self.chunk_size else None
        return functools.partial(cut_document, self, tokenizer, [name.strip() for name in names])


def open_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise DataError(
            f"tokenizer={path}: {str(e).splitlines()[0]}; name a folder with tokenizer.json"
        ) from e
    if not tokenizer.is_fast:
        raise DataError(
            f"tokenizer={path} is not a fast one; positions of tokens need tokenizer.json"
        )
    return tokenizer


def cut_document(
    cut: Cut, tokenizer: Any, names: list[str], title: str, text: str, metadata: dict, doc_id: str
) -> list[tuple[tuple[int, int], dict]]:
    """((start, end) in `text`, passage without id) for each chunk of a document.

    The passage's text is the chunk, stripped, behind the lines of the context fields that the
    document has.
    """
    spans = [(0, len(text))]
    if cut.chunk_size:
        spans = chunk_spans(text, token_starts(text, tokenizer), cut.chunk_size, cut.overlap)
    shown = [name for name in names if name != "title" and metadata.get(name) not in (None, "")]
    before = "".join(f"{name}: {metadata[name]}\n" for name in shown) + ("\n" if shown else "")
    passages = []
    for number, (start, end) in enumerate(spans):
        place = {"doc_id": doc_id, "doc_chunks": len(spans), "doc_chunk_id": number}
        passage = {
            "title": title if "title" in names else "",
            "text": before + text[start:end].strip(),
            "metadata": metadata | place,
        }
        passages.append(((start, end), passage))
    return passages


@dataclass(kw_only=True)
class ChunkConfig(Cut):
    """`prepare.py chunk`"""

    source: str
    """a corpus as JSONL: `id`, `title`, `text`, or `contents` with the title as its first line"""
    out: str
    """folder to write: corpus.jsonl"""
    prefix: str = "c"
    """passage ids are this and a running number"""


def chunk(cfg: ChunkConfig) -> dict:
    """Cut documents into passages of `chunk_size` tokens at most, with context in front."""
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file; name a corpus file (JSONL)")
    config = {key: value for key, value in vars(cfg).items() if key not in ("out", "source")}
    made = {"command": "chunk", "config": config, "sources": sha256(cfg.source)}
    if done := already_made(cfg.out, made):
        return done
    cut, counts = cfg.cutter(), Counter()

    def passages() -> Iterator[dict]:
        for row in jsonl_rows(cfg.source):
            if "text" in row:
                title = row.squeezed("title") if row.get("title") is not None else ""
                text = row.text("text")
            else:
                title, text = title_and_text(row.text("contents"))
            counts["documents"] += 1
            known = ("id", "title", "text", "contents", "metadata")
            metadata = {k: v for k, v in row.items() if k not in known} | row.object("metadata")
            for _, passage in cut(title, text, metadata, row.text("id")):
                yield {"id": f"{cfg.prefix}{counts['passages']}", **passage}
                counts["passages"] += 1

    with finished_folder(cfg, made) as folder:
        write_corpus(f"{folder}/corpus.jsonl", passages())
        made["result"] = dict(counts)
    return {"out": cfg.out, **made["result"], "already_there": False}


# ----------------------------------------------------------------------------------- multihop-rag


@dataclass
class MultihopragConfig(Cut, DevConfig):
    """`prepare.py multihoprag`"""

    test_questions: Annotated[int, at_least(0)] = 200
    """questions of test: the first of a shuffle with seed 42, DeepSearch-RL's val"""


def multihoprag(cfg: MultihopragConfig, build: Build) -> None:
    """MultiHop-RAG: 609 news articles cut into passages, 2,556 questions.

    A passage is relevant when it holds a fact of the evidence, found in the article (by url, else
    title) with white space left out, as the authors' own evaluation does; of a fact that a cut
    divides, all parts are. Null questions, answered by "Insufficient information.", have no
    evidence and no qrels. Ids are `multihoprag-N`, N the place in the file.
    """
    articles: dict[str, Article] = {}  # by url and by title
    cut, counts = cfg.cutter(), build.counts

    def passages() -> Iterator[dict]:
        ids = (f"multihoprag-c{number:05d}" for number in itertools.count())
        for row in array_rows(build.paths["corpus"]):
            title, body = row.squeezed("title"), row.text("body")
            metadata = {k: v for k, v in row.items() if k not in ("title", "body")}
            article = Article(body)
            for span, passage in cut(title, body, metadata, str(counts["articles"])):
                article.spans.append((*span, next(ids)))
                yield {"id": article.spans[-1][2], **passage}
            counts["articles"] += 1
            for key in (row.get("url"), title):
                articles.setdefault(key, article)

    build.write_corpus(passages())
    rows = [
        multihoprag_row(row, f"multihoprag-{number}", articles, counts)
        for number, row in enumerate(array_rows(build.paths["questions"]))
    ]
    counts["questions"] = len(rows)
    random.Random(42).shuffle(rows)
    splits = {split: [] for split in cfg.splits()}
    for place, row in enumerate(rows):
        official = "test" if place < cfg.test_questions else "train"
        splits[cfg.split(official, row[0].id)].append(row)
    for split, chosen in splits.items():
        counts[f"{split}_questions"] = len(chosen)
        write_jsonl(f"{build.folder}/{split}.jsonl", (question.record() for question, _ in chosen))
        write_qrels(build, split, {question.id: golds for question, golds in chosen if golds})


def multihoprag_row(
    row: Row, key: str, articles: dict[str, Article], counts: Counter
) -> tuple[Question, list[str]]:
    """(question, relevant passage ids), the latter only where every fact of it was found."""
    evidence, found = row.rows("evidence_list"), []
    for item in evidence:
        article = articles.get(item.get("url")) or articles.get(squeeze(item.get("title") or ""))
        found.append(article.holding(item.text("fact")) if article else [])
    counts["facts"] += len(found)
    counts["facts_not_in_their_article"] += sum(not ids for ids in found)
    counts["null_questions"] += not evidence
    counts["questions_without_all_gold"] += not all(found)
    metadata = {"type": row.text("question_type"), "evidence_list": evidence}
    question = Question(key, row.squeezed("query"), golden([row.text("answer")], row), metadata)
    return question, list(itertools.chain(*found)) if all(found) else []


class Article:
    """A document and its passages, in which a sentence is looked up white space aside."""

    def __init__(self, body: str):
        self.places = [i for i, sign in enumerate(body) if not sign.isspace()]
        self.text = "".join(body[i] for i in self.places)
        self.spans: list[tuple[int, int, str]] = []  # (start, end, passage id)

    def holding(self, fact: str) -> list[str]:
        """Ids of the passages that hold `fact`: the first with all of it, else all with a part."""
        wanted = "".join(fact.split())
        at = self.text.find(wanted) if wanted else -1
        if at < 0:
            return []
        first, last = self.places[at], self.places[at + len(wanted) - 1]
        whole = [key for start, end, key in self.spans if start <= first and last < end]
        return whole[:1] or [key for start, end, key in self.spans if start <= last and first < end]


# ----------------------------------------------------------------------------------------- wiki18


def title_and_text(contents: str) -> tuple[str, str]:
    """Title and text of `"title"` newline text; quotes inside the title stay."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), text.strip()


def wiki18(cfg: PublicConfig, build: Build) -> None:
    """wiki-18, the corpus of Search-R1, ReSearch and FlashRAG: 21 M passages of 100 words.

    Of Wikipedia in December 2018; the ids are the file's.
    """

    def passages() -> Iterator[dict]:
        for row in jsonl_rows(build.paths["passages"]):
            if "contents" in row:
                title, text = title_and_text(row.text("contents"))
            else:  # FlashRAG's preprocess_wiki.py keeps the two apart
                title, text = title_and_text(f"{row.text('title')}\n{row.text('text')}")
            build.counts["without_title"] += not title
            build.counts["without_text"] += not text
            yield {"id": row.text("id"), "title": title, "text": text}

    build.write_corpus(passages())


# --------------------------------------------------------------------------------------- flashrag


@dataclass
class FlashragConfig(PublicConfig):
    """`prepare.py flashrag`"""

    name: str = "flashrag"
    """what passage ids begin with: the data set's name"""


def flashrag(cfg: FlashragConfig, build: Build) -> None:
    """Any data set in FlashRAG's form: train, dev and test.jsonl with the paragraphs in metadata.

    HotpotQA's and 2WikiMultihopQA's rows have a context, MuSiQue's the supporting paragraph of each
    hop; other sets come out as questions alone. HotpotQA's dev file is the fullwiki one, whose
    paragraphs often miss a gold: most of its questions get no qrels (`prepare.py hotpotqa` has them
    all). The golden answers of multiple choice are numbers of `choices`. The text of the context is
    left out of `metadata`.
    """
    if not build.paths:
        raise DataError(
            f"source={cfg.source} holds none of train.jsonl, dev.jsonl and test.jsonl; fetch a "
            f"data set's files from {build.files['dev']['url']}/tree/main"
        )
    rows = (
        (split, flashrag_row(row))
        for split, path in build.paths.items()
        for row in jsonl_rows(path)
    )
    write_judged(build, cfg.name, build.paths, rows)


def flashrag_row(row: Row) -> Judged:
    """The question of a FlashRAG row, with the paragraphs that its metadata holds."""
    metadata = row.object("metadata")
    while isinstance(metadata.get("metadata"), dict):  # some copies nest it twice
        outer = {k: v for k, v in metadata.items() if k != "metadata"}
        metadata = Row(outer | metadata["metadata"], row.location)
    answers = row.get("golden_answers")
    answers = answers if isinstance(answers, list) else [answers]
    if row.get("choices"):
        choices = row.field("choices", list)
        if not all(isinstance(a, int) and 0 <= a < len(choices) for a in answers):
            raise row.error(
                f"golden_answers {answers} are no numbers of its {len(choices)} choices"
            )
        answers = [choices[a] for a in answers]
    answers = golden(answers, row)
    paragraphs, golds, complete = flashrag_paragraphs(metadata)
    question = Question(question_id(row, "id"), row.squeezed("question"), answers, slim(metadata))
    return Judged(question, paragraphs, golds, complete)


def flashrag_paragraphs(metadata: Row) -> tuple[list[tuple[str, str]], list[int], bool]:
    """(paragraphs, positions of the supporting ones, are all supporting ones there?)."""
    if isinstance(metadata.get("context"), dict):
        context = metadata.object("context")
        form, joint = ("sentences", "") if "sentences" in context else ("content", " ")
        titles, texts = context.field("title", list), context.field(form, list)
        if len(titles) != len(texts):
            raise metadata.error(
                f"metadata.context has {len(titles)} titles and {len(texts)} paragraphs; it must "
                "have as many of both"
            )
        paragraphs = sentences([list(pair) for pair in zip(titles, texts)], joint, metadata)
        facts = metadata.object("supporting_facts").field("title", list)
        return paragraphs, *supporting(facts, paragraphs)
    hops = metadata.rows("question_decomposition") if metadata.get("question_decomposition") else []
    shown = [hop.object("support_paragraph") for hop in hops if hop.get("support_paragraph")]
    paragraphs = [(hop.text("title"), hop.text("paragraph_text")) for hop in shown]
    return paragraphs, list(range(len(paragraphs))), len(paragraphs) == len(hops)


def slim(metadata: dict) -> dict:
    """Metadata without the paragraphs' text."""
    kept = {k: v for k, v in metadata.items() if k != "context"}
    if hops := kept.get("question_decomposition"):
        kept["question_decomposition"] = [
            {k: v for k, v in hop.items() if k != "support_paragraph"} for hop in hops
        ]
    return kept


SETS = {
    "musique": (MultihopConfig, musique),
    "hotpotqa": (MultihopConfig, hotpotqa),
    "2wiki": (MultihopConfig, twowiki),
    "bamboogle": (PublicConfig, bamboogle),
    "multihoprag": (MultihopragConfig, multihoprag),
    "wiki18": (PublicConfig, wiki18),
    "flashrag": (FlashragConfig, flashrag),
}
