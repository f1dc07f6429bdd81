"""Multi-hop question sets → corpus, questions and qrels; wiki-18 and FlashRAG's files.

Where the forms are written down: `raw_data_to_official_format.py` and README of
StonyBrookNLP/musique (v1.0); "JSON Format" in the README of hotpotqa/hotpot; "Dataset Contents" in
the README of Alab-NII/2wikimultihop, with the aliases of 2wikimultihop_evaluate_v1.1.py; the sheet
that ofirpress/self-ask links to; "Use your own dataset" in the README of PeterGriffinJin/Search-R1;
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
import hashlib
import html
import json
import tempfile
import unicodedata
from dataclasses import dataclass, field
from typing import BinaryIO, Callable, Iterable, Iterator

from data import DataError, Question, as_texts
from runs import atomic_write
from sources.files import (
    CUT_OFF,
    ENCODE,
    Build,
    DevConfig,
    PublicConfig,
    Row,
    array_rows,
    csv_rows,
    jsonl_rows,
    squeeze,
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
    "wiki18": (PublicConfig, wiki18),
    "flashrag": (FlashragConfig, flashrag),
}
