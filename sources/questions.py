"""Multi-hop question sets (MuSiQue, HotpotQA, 2WikiMultihopQA) and the corpus wiki-18.

A set's corpus is the pool of its paragraphs, far easier than Wikipedia (`wiki18`). Supporting
paragraphs are gold, in hop order if known. A question that lacks one gets no qrels: with part of
them, "all gold passages found" would be true too early.
"""

from __future__ import annotations

import hashlib
import html
import unicodedata
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, NamedTuple

import regex

from data import Question, Row, as_texts, one_line, scorable
from sources.files import Build, DevConfig, PublicConfig, json_rows

# ---- pools of paragraphs


class Judged(NamedTuple):
    """A question and the paragraphs published with it."""

    question: Question
    paragraphs: list[tuple[str, str]]  # (title, text)
    golds: list[int]  # indices of gold paragraphs; empty if one is missing


SIGNS = regex.compile(r"[\p{P}\p{Z}\p{C}]")  # punctuation, separators, control


def clean(text: str) -> str:
    """Unescape HTML entities and collapse white space."""
    return one_line(html.unescape(text))


class Pool(dict[bytes, tuple[str, str]]):
    """Distinct paragraphs: hash → (title, text)."""

    def add(self, title: str, text: str) -> bytes:
        """Add a paragraph and return its hash, which ignores spacing and punctuation."""
        title, text = clean(title), clean(text)
        same = unicodedata.normalize("NFC", f"{title}\n{SIGNS.sub('', text)}")
        key = hashlib.sha256(same.encode()).digest()[:16]
        self.setdefault(key, (title, text))
        return key

    def ids(self, name: str) -> dict[bytes, str]:
        """Hash → passage id, numbered in hash order, which is unrelated to relevance."""
        digits = max(5, len(str(len(self) - 1)))
        return {key: f"{name}-p{n:0{digits}d}" for n, key in enumerate(sorted(self))}


def golden(answers: list, row: Row) -> list[str]:
    """The distinct answers that can be scored, stripped; the list may be empty."""
    texts = as_texts(answers)
    if texts is None:
        raise row.error(f"the answers are {str(answers)[:80]}; texts are expected there")
    return list(dict.fromkeys(text.strip() for text in texts if scorable(text)))


# ---- train and dev files


@dataclass
class MultihopConfig(DevConfig):
    """Sets with train and dev files; dev becomes test, as in the papers."""

    train: bool = True
    """read the train file too; false: questions and corpus are from dev alone"""


def write_multihop(build: Build, judge: Callable[[Row], Judged | None]) -> None:
    """Write the splits and the pooled paragraphs; `judge` parses a row.

    Unanswerable rows (None) and those without question or answer are left out and counted.
    """
    pool, kept, judged, counts = Pool(), [], {}, build.counts
    for official in ("train", "dev") if build.cfg.train else ("dev",):
        for row in map(judge, json_rows(build.paths[official])):
            counts[f"{official} questions" if row else "unanswerable"] += 1
            if row and not (row.question.question and row.question.golden_answers):
                counts["without_question_or_answer"] += 1
            elif row:
                key = row.question.id
                hashes = [pool.add(*paragraph) for paragraph in row.paragraphs]
                counts["questions_without_all_gold"] += not row.golds
                kept.append((official, row.question))
                judged[key] = [hashes[gold] for gold in row.golds]
    ids = pool.ids(build.name)
    grades = {key: {ids[gold]: 1 for gold in golds} for key, golds in judged.items()}
    names = build.cfg.splits() if build.cfg.train else ("test",)
    build.write_splits(names, kept, grades)
    passages = ((key, *pool[hashed]) for hashed, key in ids.items())
    build.write_corpus({"id": key, "title": t, "text": text} for key, t, text in passages)


def musique(build: Build) -> None:
    """MuSiQue-Ans v1.0: 20 paragraphs per question, 2 to 4 of them gold; dev becomes test.

    `metadata` keeps the hop structure ("2hop", "3hop1", …) as `type`, and the sub-questions.
    """
    write_multihop(build, musique_row)


def musique_row(row: Row) -> Judged | None:
    if row.get("answerable") is False:
        return None
    given, hops = row.rows("paragraphs"), row.rows("question_decomposition")
    place = {part.number("idx"): i for i, part in enumerate(given)}
    flagged = [i for i, part in enumerate(given) if part.field("is_supporting", bool)]
    by_hop = [place.get(hop.get("paragraph_support_idx")) for hop in hops]
    kept = [{key: hop.get(key) for key in ("id", "question", "answer")} for hop in hops]
    metadata = {"type": row.text("id").partition("__")[0], "question_decomposition": kept}
    answers = golden([row.text("answer"), *row.texts("answer_aliases")], row)
    return Judged(
        Question(row.id("id"), row.line("question"), answers, metadata),
        [(part.text("title"), part.text("paragraph_text")) for part in given],
        list(dict.fromkeys([i for i in by_hop if i in flagged] + flagged)),
    )


def hotpotqa(build: Build) -> None:
    """HotpotQA, distractor setting: 10 paragraphs per question, 2 of them gold; dev becomes test.

    `metadata` keeps type, level and supporting facts.
    """
    write_multihop(build, lambda row: hotpot_row(row, "", ("type", "level")))


def hotpot_row(row: Row, joint: str, kept: tuple[str, ...], aliases: Iterable = ()) -> Judged:
    """Parse a HotpotQA row; `joint` joins sentences, `kept` names metadata fields."""
    facts, paragraphs = row.field("supporting_facts", list), []
    if not all(isinstance(f, list) and len(f) == 2 and isinstance(f[0], str) for f in facts):
        raise row.error(f"supporting_facts is {str(facts)[:80]}, not a list of [title, sentence]")
    for entry in row.field("context", list):
        match entry:
            case [str(title), [*parts]] if all(isinstance(part, str) for part in parts):
                paragraphs.append((title, joint.join(parts)))
            case _:
                raise row.error(f"a paragraph is {str(entry)[:80]}, not [title, [sentence, …]]")
    places = [
        [position for position, (title, _) in enumerate(paragraphs) if title == wanted]
        for wanted in dict.fromkeys(title for title, _ in facts)
    ]
    metadata = {key: row[key] for key in kept if key in row} | {"supporting_facts": facts}
    answers = golden([row.text("answer"), *aliases], row)
    question = Question(row.id("_id"), row.line("question"), answers, metadata)
    return Judged(question, paragraphs, sum(places, []) if all(places) else [])


def twowiki(build: Build) -> None:
    """2WikiMultihopQA (April 2021): 10 paragraphs per question, 2 or 4 gold; dev becomes test.

    Aliases and demonyms of the answer's entity are golden answers too, as in the official
    evaluation. `metadata` keeps type, supporting facts and evidences.
    """
    aliases = {
        row.text("Q_id"): row.field("aliases", list) + row.field("demonyms", list)
        for row in json_rows(build.paths["aliases"])
    }

    def judge(row: Row) -> Judged:
        others = aliases.get(row.text("answer_id", required=False), ())
        return hotpot_row(row, " ", ("type", "evidences"), others)

    write_multihop(build, judge)


# ---- wiki18


def title_and_text(contents: str) -> tuple[str, str]:
    """Title (the first line, without its outer quotes) and text."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), text.strip()


def wiki18(build: Build) -> None:
    """wiki-18, the corpus of Search-R1 and ReSearch: 21 M passages of 100 words (December 2018)."""

    def passages() -> Iterator[dict]:
        for row in json_rows(build.paths["passages"]):
            if "contents" not in row:  # as FlashRAG's preprocess_wiki.py writes it
                row["contents"] = f"{row.text('title')}\n{row.text('text')}"
            title, text = title_and_text(row.text("contents"))
            build.counts["without_title"] += not title
            build.counts["without_text"] += not text
            yield {"id": row.text("id"), "title": title, "text": text}

    build.write_corpus(passages())


SETS = {
    "musique": (MultihopConfig, musique),
    "hotpotqa": (MultihopConfig, hotpotqa),
    "2wiki": (MultihopConfig, twowiki),
    "wiki18": (PublicConfig, wiki18),
}
