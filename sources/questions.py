"""Multi-hop question sets as their authors publish them: corpus.jsonl, {split}.jsonl and .qrels; cutting of documents.

A file of its own because it is the counterpart of `conversations.py`: `prepare.py NAME` reaches both the same way.

Where the forms are written down (all read there, none guessed):

    musique      `raw_data_to_official_format.py` and README of StonyBrookNLP/musique (v1.0)
    hotpotqa     "JSON Format" in the README of hotpotqa/hotpot; the distractor files, which hold both golds
    2wiki        "Dataset Contents" in the README of Alab-NII/2wikimultihop; aliases as 2wikimultihop_evaluate_v1.1.py
    bamboogle    the sheet that ofirpress/self-ask links to, saved as CSV
    multihoprag  the two JSON files of yixuantt/MultiHop-RAG; split as `convert_dataset.py` of ninehills/deepsearch-rl
    wiki18       "Use your own dataset" in the README of PeterGriffinJin/Search-R1; `preprocess_wiki.py` of FlashRAG
    flashrag     "Datasets" in the README of RUC-NLPIR/FlashRAG, and rows of its hotpotqa, 2wikimultihopqa and musique

The sets that bring paragraphs along become a retrieval set by these rules. A passage is a distinct (title, text) after
HTML entities and white space; two texts of a title that differ only in spacing or punctuation are one (the first is
kept). Passage ids are handed out in the order of a content hash, so that an id says nothing about relevance or origin,
and the same files give the same ids. Relevant is the supporting paragraph as it stands in that question's context, in
the order of the hops where it is known. A question of which a supporting paragraph is absent gets no qrels at all: half
a judgment would let "all gold passages found" be true too early. It stays a question, and the result counts it.
This is a closed pool, far easier than all of Wikipedia (`wiki18`): say so beside every figure.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import html
import json
import os
import random
import re
import tempfile
import unicodedata
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Iterable, Iterator

from data import DataError, Question, read_jsonl, read_lines
from runs import atomic_write
from sources.files import (already_made, ENCODE, finished_folder, get, held_out, make_public,
                           Official, optional, parse_object, PublicConfig, Published, read_array,
                           sha256, squeeze, _utf8, write_corpus)

HUB = "https://huggingface.co/datasets/{}/resolve/main/{}"
CUT_OFF = "the file is cut off or of another version"


# -------------------------------------------------------------------------------------------------- pools of paragraphs

@dataclass
class Row:
    """A question of a data set, with the paragraphs that the set gives beside it."""

    split: str
    question: Question
    paragraphs: list[tuple[str, str]] = field(default_factory=list)  # (title, text)
    golds: list[int] = field(default_factory=list)  # positions in `paragraphs`, in the order of the hops
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
        self.spool, self.places = spool, {}

    def add(self, title: str, text: str) -> bytes:
        """Key of the cleaned paragraph, which is kept unless an equal one (but for spacing and punctuation) is."""
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
        return {key: f"{name}-p{number:0{digits}d}" for number, key in enumerate(sorted(self.places))}

    def passages(self, ids: dict[bytes, str]) -> Iterator[dict]:
        """The corpus in the order of `ids`."""
        self.spool.flush()
        for key, passage_id in ids.items():
            self.spool.seek(self.places[key])
            title, text = json.loads(self.spool.readline())
            yield {"id": passage_id, "title": title, "text": text}


def write_rows(folder: str, name: str, splits: Iterable[str], rows: Iterable[Row]) -> dict[str, int]:
    """`{split}.jsonl`, `{split}.qrels` where anything is judged, `corpus.jsonl` where there are paragraphs; the counts.

    Streamed: no list of questions or paragraphs is held, only their keys. DataError: a question id that occurs twice.
    """
    counts: Counter = Counter()
    seen: set[str] = set()
    judged: dict[str, list[tuple[str, list[bytes]]]] = {split: [] for split in splits}
    with contextlib.ExitStack() as stack:
        pool = Pool(stack.enter_context(tempfile.TemporaryFile(dir=folder)))
        files = {split: stack.enter_context(atomic_write(f"{folder}/{split}.jsonl")) for split in judged}
        for row in rows:
            question = row.question
            if question.id in seen:
                raise DataError(f"question id {question.id!r} occurs a second time; {CUT_OFF}")
            seen.add(question.id)
            keys = [pool.add(title, text) for title, text in row.paragraphs]
            record = {"id": question.id, "question": question.question, "golden_answers": question.golden_answers}
            record |= {"metadata": question.metadata} if question.metadata else {}
            files[row.split].write(ENCODE(record) + "\n")
            counts[f"{row.split}_questions"] += 1
            if row.golds and row.complete:
                judged[row.split].append((question.id, list(dict.fromkeys(keys[g] for g in row.golds))))
            elif row.paragraphs:
                counts["questions_without_all_gold"] += 1
        ids = pool.ids(name)
        for split, golds in judged.items():
            if golds:
                with atomic_write(f"{folder}/{split}.qrels") as f:
                    f.writelines(f"{question} 0 {ids[key]} 1\n" for question, keys in golds for key in keys)
            counts[f"{split}_judged"] = len(golds)
        if ids:
            passages = pool.passages(ids)
            counts["passages"] = write_corpus(f"{folder}/corpus.jsonl", passages, len(ids), f"{name} passages")
    return dict(counts)


def golden(answers: Iterable[Any], where: str) -> list[str]:
    """Answers as strings, stripped, each once, blank ones left out; the list may come out empty."""
    texts = [str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else answer
             for answer in answers]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: the answers are {str(texts)[:80]}; the published format has strings there")
    return list(dict.fromkeys(text.strip() for text in texts if text.strip()))


def usable(question: Question, tally: Counter) -> bool:
    """Has it a text and an answer? Else it is left out and counted: nothing could be asked, or nothing scored."""
    whole = bool(question.question and question.golden_answers)
    tally["without_question_or_answer"] += not whole
    return whole


def question_id(row: dict, key: str, where: str) -> str:
    """`row[key]`, which becomes a column of TREC files."""
    value = get(row, key, where)
    if value.split() != [value]:
        raise DataError(f"{where}: {key} {value!r} is empty or holds a blank; {CUT_OFF}")
    return value


def pairs(context: list, joint: str, where: str) -> list[tuple[str, str]]:
    """(title, text) of HotpotQA's `[[title, [sentence, …]], …]`."""
    found = []
    for entry in context:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
                and isinstance(entry[1], list) and all(isinstance(s, str) for s in entry[1])):
            raise DataError(f"{where}: a paragraph is {str(entry)[:80]}; [title, [sentence, …]] is expected")
        found.append((entry[0], joint.join(entry[1])))
    return found


def supporting(titles: Iterable[str], paragraphs: list[tuple[str, str]]) -> tuple[list[int], bool]:
    """(positions of the paragraphs of these titles, in the titles' order; is every title there?)."""
    places: dict[str, list[int]] = {}
    for position, (title, _) in enumerate(paragraphs):
        places.setdefault(title, []).append(position)
    wanted = list(dict.fromkeys(titles))
    return [p for title in wanted for p in places.get(title, [])], all(title in places for title in wanted)


# -------------------------------------------------------------------------------------------------- train and dev files

@dataclass
class MultihopConfig(PublicConfig):
    """What the multi-hop sets with a train and a dev file share."""

    train: bool = True
    """read the train file too; false: the dev file alone, whose paragraphs then are the corpus"""
    dev_percent: int = 0
    """share of the training questions put aside as dev, to validate on; the official dev set is the papers' test"""


def make_multihop(cfg: MultihopConfig, name: str, files: dict[str, Official], published_counts: dict[str, int],
                  read: Callable[[dict[str, str], str, Counter], Iterator[tuple[str, Row]]]) -> dict:
    """The course of a set with official train and dev files; the dev set, which the papers report on, becomes test.

    `read(paths, official split, tally)` yields (official split, row); a row's own split is set here.
    """
    if not 0 <= cfg.dev_percent < 100:
        raise DataError(f"dev_percent={cfg.dev_percent}; it must lie between 0 and 99")
    official = ["train", "dev"] if cfg.train else ["dev"]

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        tally: Counter = Counter()

        def rows() -> Iterator[Row]:
            for split in official:
                number = 0
                for number, row in enumerate(read(paths, split, tally), 1):
                    aside = split == "train" and held_out(row.question.id, cfg.dev_percent)
                    row.split = "test" if split == "dev" else "dev" if aside else "train"
                    if usable(row.question, tally):
                        yield row
                published.check(f"{split} questions", number, published_counts[split], CUT_OFF)

        splits = (["train"] + ["dev"] * (cfg.dev_percent > 0) if cfg.train else []) + ["test"]
        return write_rows(folder, name, splits, rows()) | dict(tally)

    wanted = {key: file for key, file in files.items() if cfg.train or key != "train"}
    return make_public(cfg, name, wanted, write)


MUSIQUE = {split: Official((f"data/musique_ans_v1.0_{split}.jsonl", f"musique_ans_v1.0_{split}.jsonl"),
                           "https://drive.google.com/file/d/1tGdADlNjWFaHLeZZGShh2IRcpO6Lv24h/view",
                           note="musique_v1.0.zip, unpacked; download_data.sh of StonyBrookNLP/musique does it")
           for split in ("train", "dev")}
MUSIQUE_COUNTS = {"train": 19_938, "dev": 2417}


@dataclass
class MusiqueConfig(MultihopConfig):
    """`prepare.py musique`"""


def musique(cfg: MusiqueConfig) -> dict:
    """MuSiQue-Ans v1.0: 20 paragraphs a question, 2 to 4 of them supporting; its dev set becomes test.

    `metadata` keeps the shape of the hops ("2hop", "3hop1", …) as `type`, and the sub-questions. Unanswerable rows (of
    the musique_full files) are left out and counted.
    """
    def read(paths: dict[str, str], split: str, tally: Counter) -> Iterator[Row]:
        for number, row in read_jsonl(paths[split]):
            where = f"{paths[split]}:{number}"
            if row.get("answerable") is False:
                tally["unanswerable"] += 1
                continue
            given = get(row, "paragraphs", where, list)
            paragraphs = [(get(p, "title", where), get(p, "paragraph_text", where)) for p in given]
            place = {get(p, "idx", where, int): i for i, p in enumerate(given)}
            hops = get(row, "question_decomposition", where, list)
            first = [place[h["paragraph_support_idx"]] for h in hops if h.get("paragraph_support_idx") in place]
            flagged = [i for i, p in enumerate(given) if get(p, "is_supporting", where, bool)]
            key = question_id(row, "id", where)
            yield Row(split, Question(
                key, squeeze(get(row, "question", where)),
                golden([get(row, "answer", where), *get(row, "answer_aliases", where, list)], where),
                {"type": key.partition("__")[0],
                 "question_decomposition": [{k: h.get(k) for k in ("id", "question", "answer")} for h in hops]}),
                paragraphs, [i for i in first if i in flagged] + [i for i in flagged if i not in first])

    return make_multihop(cfg, "musique", MUSIQUE, MUSIQUE_COUNTS, read)


HOTPOT_URL = "http://curtis.ml.cmu.edu/datasets/hotpot/"
HOTPOTQA = {"train": Official(("hotpot_train_v1.1.json",), HOTPOT_URL + "hotpot_train_v1.1.json"),
            "dev": Official(("hotpot_dev_distractor_v1.json",), HOTPOT_URL + "hotpot_dev_distractor_v1.json")}
HOTPOTQA_COUNTS = {"train": 90_447, "dev": 7405}


@dataclass
class HotpotqaConfig(MultihopConfig):
    """`prepare.py hotpotqa`"""


def hotpotqa(cfg: HotpotqaConfig) -> dict:
    """HotpotQA, distractor setting: 10 paragraphs a question, 2 of them supporting; its dev set becomes test.

    Sentences carry their leading blank and are joined as they are. `metadata` keeps type, level and supporting facts.
    """
    def read(paths: dict[str, str], split: str, tally: Counter) -> Iterator[Row]:
        for where, row in read_array(paths[split]):
            yield hotpot_row(row, split, where, "", {k: row[k] for k in ("type", "level") if k in row})

    return make_multihop(cfg, "hotpotqa", HOTPOTQA, HOTPOTQA_COUNTS, read)


def hotpot_row(row: dict, split: str, where: str, joint: str, metadata: dict, aliases: Iterable[str] = ()) -> Row:
    """A row of HotpotQA's form; `joint` stands between the sentences of a paragraph."""
    facts = get(row, "supporting_facts", where, list)
    if not all(isinstance(fact, list) and len(fact) == 2 and isinstance(fact[0], str) for fact in facts):
        raise DataError(f"{where}: supporting_facts is {str(facts)[:80]}; a list of [title, sentence] is expected")
    paragraphs = pairs(get(row, "context", where, list), joint, where)
    golds, complete = supporting((title for title, _ in facts), paragraphs)
    return Row(split, Question(question_id(row, "_id", where), squeeze(get(row, "question", where)),
                               golden([get(row, "answer", where), *aliases], where),
                               metadata | {"supporting_facts": facts}), paragraphs, golds, complete)


_ARCHIVE = "https://www.dropbox.com/s/ms2m13252h6xubs/data_ids_april7.zip"
TWOWIKI = {key: Official((name, f"data_ids/{name}", f"data_ids_april7/{name}"), _ARCHIVE,
                         note=f"{name} of data_ids_april7.zip")
           for key, name in (("train", "train.json"), ("dev", "dev.json"), ("aliases", "id_aliases.json"))}
TWOWIKI_COUNTS = {"train": 167_454, "dev": 12_576}


@dataclass
class TwowikiConfig(MultihopConfig):
    """`prepare.py 2wiki`"""


def twowiki(cfg: TwowikiConfig) -> dict:
    """2WikiMultihopQA with answer ids (April 2021): 10 paragraphs a question, 2 or 4 supporting; its dev becomes test.

    Golden answers are the answer and the aliases and demonyms of its entity, as the official evaluation takes them.
    Sentences are joined with a blank. `metadata` keeps type, supporting facts and evidences.
    """
    aliases: dict[str, list[str]] = {}

    def read(paths: dict[str, str], split: str, tally: Counter) -> Iterator[Row]:
        if not aliases:
            for number, row in read_jsonl(paths["aliases"]):
                where = f"{paths['aliases']}:{number}"
                names = [*get(row, "aliases", where, list), *get(row, "demonyms", where, list)]
                aliases[get(row, "Q_id", where)] = names
        for where, row in read_array(paths[split]):
            yield hotpot_row(row, split, where, " ", {k: row[k] for k in ("type", "evidences") if k in row},
                             aliases.get(row.get("answer_id"), ()))

    return make_multihop(cfg, "2wiki", TWOWIKI, TWOWIKI_COUNTS, read)


# ------------------------------------------------------------------------------------------------------------ bamboogle

BAMBOOGLE = {"questions": Official(
    ("bamboogle.csv", "Bamboogle Prerelease - Sheet1.csv"),
    "https://docs.google.com/spreadsheets/d/1jwcsA5kE4TObr9YHn9Gc-wQHYjTbLhDGx6tmIzMhl_U",
    note="save the sheet as CSV")}
BAMBOOGLE_COUNT = 125


@dataclass
class BamboogleConfig(PublicConfig):
    """`prepare.py bamboogle`"""


def bamboogle(cfg: BamboogleConfig) -> dict:
    """Bamboogle: 125 questions and their answers, no paragraphs; search `wiki18` for them.

    Ids are `bamboogle-test_N`, N from 0: FlashRAG's numbers. Where the sheet turned a date or an accent into something
    else ("22-Apr-04", "Tem??r"), it stays so: FlashRAG's file (`prepare.py flashrag`) is the one that papers score.
    """
    def rows(path: str) -> Iterator[Row]:
        reader = csv.reader(line + "\n" for _, line in read_lines(path))
        header = [squeeze(column) for column in next(reader, [])]
        if "Question" not in header or "Answer" not in header:
            raise DataError(f"{path}: the first line is {header}; the sheet has columns Question and Answer there")
        answers = [i for i, column in enumerate(header) if column.startswith("Answer")]
        number = 0
        for cells in reader:
            if not any(cells):
                continue
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(header):
                raise DataError(f"{where}: {len(cells)} columns where the first line has {len(header)}; {CUT_OFF}")
            golds = golden((squeeze(cells[i]) for i in answers), where)
            question = squeeze(cells[header.index("Question")])
            if not question or not golds:
                raise DataError(f"{where}: question is {question!r}, answers are {golds}; {CUT_OFF}")
            yield Row("test", Question(f"bamboogle-test_{number}", question, golds))
            number += 1

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        counts = write_rows(folder, "bamboogle", ["test"], rows(paths["questions"]))
        published.check("questions", counts.get("test_questions", 0), BAMBOOGLE_COUNT, CUT_OFF)
        return counts

    return make_public(cfg, "bamboogle", BAMBOOGLE, write)


# ---------------------------------------------------------------------------------------------------- cutting documents

_WORD = re.compile(r"\w+|[^\w\s]")
_CLOSERS = "\"'”’)]»"


def token_starts(text: str, tokenizer: Any = None) -> list[int]:
    """Where each token of `text` starts; without a tokenizer a token is a word or a punctuation mark."""
    if tokenizer is None:
        return [match.start() for match in _WORD.finditer(text)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def break_strength(text: str, at: int) -> int:
    """How good a place to cut is `text[at]`: 4 line end, 3 sentence end, 2 pause, 1 white space, 0 inside a word."""
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

    A chunk has at most `size` tokens and, but for the last, more than half of that: it ends at the strongest break in
    the second half of its window, the last of equals. The next one begins exactly `overlap` tokens before that end.
    Without overlap the spans partition the text: what stands between tokens goes to the left.
    """
    if size < 2 or not 0 <= overlap <= size // 2:
        raise DataError(f"chunk_size={size} and overlap={overlap}; chunk_size must be at least 2 and overlap from 0 to "
                        "half of it")
    bounds = [0, *starts[1:], len(text)]  # bounds[k]: where token k begins
    strength = [0, *(break_strength(text, b) for b in bounds[1:])]
    count, spans, first = len(bounds) - 1, [], 0
    while True:
        if count - first <= size:
            return [*spans, (bounds[first], bounds[count])]
        last = max(range(first + size // 2 + 1, first + size + 1), key=lambda k: (strength[k], k))
        spans.append((bounds[first], bounds[last]))
        first = last - overlap


@dataclass
class Cut:
    """How documents become passages."""

    chunk_size: int = 200
    """tokens of a passage at most, before title and context fields; 0: documents stay whole"""
    overlap: int = 0
    """tokens that a passage repeats of the one before it"""
    tokenizer: str = ""
    """Hugging Face folder whose tokenizer counts; without one a token is a word or a punctuation mark"""
    context_fields: str | list[str] = "title,source,published_at"
    """what stands before every passage: `title` as its title, the others as `field: value` lines of its text"""


def fields_of(cfg: Cut) -> list[str]:
    value = cfg.context_fields
    return [part.strip() for part in (value.split(",") if isinstance(value, str) else value) if part.strip()]


def open_tokenizer(cfg: Cut) -> Any:
    """The fast tokenizer that `tokenizer` names, or None for words. DataError: no such folder, or a slow tokenizer."""
    if not cfg.tokenizer or not cfg.chunk_size:
        return None
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.tokenizer)
    except (OSError, ValueError) as e:
        why = str(e).splitlines()[0]
        raise DataError(f"tokenizer={cfg.tokenizer}: {why}; name a folder with tokenizer.json") from e
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer={cfg.tokenizer} is not a fast one; positions of tokens need tokenizer.json")
    return tokenizer


def cut_document(title: str, text: str, metadata: dict, cfg: Cut, tokenizer: Any,
                 doc_id: str) -> list[tuple[tuple[int, int], dict]]:
    """((start, end) in `text`, passage without id) for each chunk of a document; every passage has metadata of its own.

    The passage's text is the chunk, stripped, behind the lines of the context fields that the document has.
    """
    spans = chunk_spans(text, token_starts(text, tokenizer), cfg.chunk_size, cfg.overlap) if cfg.chunk_size else [
        (0, len(text))]
    names = fields_of(cfg)
    lines = [f"{name}: {metadata[name]}" for name in names if name != "title" and metadata.get(name) not in (None, "")]
    before = "\n".join(lines) + "\n\n" if lines else ""
    here = {"doc_id": doc_id, "doc_chunks": len(spans)}
    return [((start, end), {"title": title if "title" in names else "", "text": before + text[start:end].strip(),
                            "metadata": {**metadata, **here, "doc_chunk_id": number}})
            for number, (start, end) in enumerate(spans)]


@dataclass(kw_only=True)
class ChunkConfig(Cut):
    """`prepare.py chunk`"""

    source: str
    """corpus file (JSONL): `id`, `title`, `text`, or `contents` with the title as its first line; `metadata` is kept"""
    out: str
    """folder to write: corpus.jsonl"""
    prefix: str = "c"
    """passage ids are this and a running number"""


def chunk(cfg: ChunkConfig) -> dict:
    """Cut the documents of a corpus into passages of at most `chunk_size` tokens, title and context fields in front."""
    if not os.path.isfile(cfg.source):
        raise DataError(f"source={cfg.source}: no such file; name a corpus file (JSONL)")
    made = {"command": "chunk", "config": {k: v for k, v in vars(cfg).items() if k not in ("out", "source")},
            "sources": sha256(cfg.source)}
    done = already_made(cfg.out, made)
    if done:
        return done
    tokenizer, tally = open_tokenizer(cfg), Counter()

    def passages() -> Iterator[dict]:
        for number, row in read_jsonl(cfg.source):
            where = f"{cfg.source}:{number}"
            if "text" in row:
                title = squeeze(get(row, "title", where)) if row.get("title") is not None else ""
                text = get(row, "text", where)
            else:
                title, text = title_and_text(get(row, "contents", where))
            tally["documents"] += 1
            beside = {k: v for k, v in row.items() if k not in ("id", "title", "text", "contents", "metadata")}
            for _, passage in cut_document(title, text, beside | optional(row, "metadata", where), cfg,
                                           tokenizer, get(row, "id", where)):
                yield {"id": f"{cfg.prefix}{tally['passages']}", **passage}
                tally["passages"] += 1

    with finished_folder(cfg, made) as folder:
        write_corpus(f"{folder}/corpus.jsonl", passages(), 0, "passages")
        if not tally["documents"]:
            raise DataError(f"{cfg.source}: no documents; the file is empty")
        made["result"] = dict(tally)
    return {"out": cfg.out, **made["result"], "already_there": False}


# --------------------------------------------------------------------------------------------------------- multihop-rag

MULTIHOPRAG = {
    key: Official((name, f"dataset/{name}"), HUB.format("yixuantt/MultiHopRAG", name), digest)
    for key, name, digest in (
        ("corpus", "corpus.json", "20b61b5ab84de84a927420c5d265b7ec8d859ae49980699958a787ade9e4d28f"),
        ("questions", "MultiHopRAG.json", "03cfb4926461f868684903aadc8024447bdda5bb3f6804741424cce338515bff"))}
MULTIHOPRAG_COUNTS = {"articles": 609, "questions": 2556}


@dataclass
class MultihopragConfig(Cut, PublicConfig):
    """`prepare.py multihoprag`"""

    test_questions: int = 200
    """questions of test: the first of a shuffle with seed 42, on which DeepSearch-RL reports (it calls them val)"""
    dev_percent: int = 0
    """share of the training questions put aside as dev, to validate on"""


def multihoprag(cfg: MultihopragConfig) -> dict:
    """MultiHop-RAG: 609 news articles cut into passages, 2,556 questions; outlet and date stand before every passage.

    A passage is relevant when it holds a fact of the evidence, found in the article (by url, else title) with white
    space left out, as the authors' own evaluation does; of a fact that a cut divides, all parts are. Null questions,
    answered by "Insufficient information.", have no evidence and no qrels. Ids are `multihoprag-N`, N the place in the
    file.
    """
    tokenizer = open_tokenizer(cfg)

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        tally: Counter = Counter()
        articles: dict[str, Article] = {}  # by url and by title

        def passages() -> Iterator[dict]:
            number = 0
            for where, row in read_array(paths["corpus"]):
                title, body = squeeze(get(row, "title", where)), get(row, "body", where)
                metadata = {k: v for k, v in row.items() if k not in ("title", "body")}
                article = Article(body)
                for span, passage in cut_document(title, body, metadata, cfg, tokenizer, str(tally["articles"])):
                    article.spans.append((*span, f"multihoprag-c{number:05d}"))
                    number += 1
                    yield {"id": article.spans[-1][2], **passage}
                tally["articles"] += 1
                for key in (row.get("url"), title):
                    articles.setdefault(key, article)

        counts = {"passages": write_corpus(f"{folder}/corpus.jsonl", passages(), 0, "multihoprag passages")}
        published.check("articles", tally["articles"], MULTIHOPRAG_COUNTS["articles"], CUT_OFF)
        rows = list(multihoprag_rows(paths["questions"], articles, tally))
        published.check("questions", len(rows), MULTIHOPRAG_COUNTS["questions"], CUT_OFF)
        random.Random(42).shuffle(rows)
        splits = {"train": rows[cfg.test_questions:], "test": rows[:cfg.test_questions]}
        if cfg.dev_percent:
            aside = [held_out(record["id"], cfg.dev_percent) for record, _ in splits["train"]]
            splits["dev"] = [row for row, dev in zip(splits["train"], aside) if dev]
            splits["train"] = [row for row, dev in zip(splits["train"], aside) if not dev]
        for split, chosen in splits.items():
            with atomic_write(f"{folder}/{split}.jsonl") as f:
                f.writelines(ENCODE(record) + "\n" for record, _ in chosen)
            if any(golds for _, golds in chosen):
                with atomic_write(f"{folder}/{split}.qrels") as f:
                    f.writelines(f"{record['id']} 0 {gold} 1\n" for record, golds in chosen for gold in golds)
            counts |= {f"{split}_questions": len(chosen), f"{split}_judged": sum(bool(golds) for _, golds in chosen)}
        return counts | dict(tally)

    return make_public(cfg, "multihoprag", MULTIHOPRAG, write)


class Article:
    """A document and its passages, in which a sentence is looked up white space aside."""

    def __init__(self, body: str):
        self.places = [i for i, sign in enumerate(body) if not sign.isspace()]
        self.text = "".join(body[i] for i in self.places)
        self.spans: list[tuple[int, int, str]] = []  # (start, end, passage id)

    def holding(self, fact: str) -> list[str]:
        """Ids of the passages that hold `fact`: the first that has it whole, else all that have a part; or none."""
        wanted = "".join(fact.split())
        at = self.text.find(wanted) if wanted else -1
        if at < 0:
            return []
        first, last = self.places[at], self.places[at + len(wanted) - 1]
        whole = [key for start, end, key in self.spans if start <= first and last < end]
        return whole[:1] or [key for start, end, key in self.spans if start <= last and first < end]


def multihoprag_rows(path: str, articles: dict[str, Article], tally: Counter) -> Iterator[tuple[dict, list[str]]]:
    """(question record, relevant passage ids) of every question; ids only where every fact of it was found."""
    for number, (where, row) in enumerate(read_array(path)):
        evidence = get(row, "evidence_list", where, list)
        found = []
        for item in evidence:
            article = articles.get(item.get("url")) or articles.get(squeeze(item.get("title") or ""))
            found.append(article.holding(get(item, "fact", where)) if article else [])
        tally["facts"] += len(found)
        tally["facts_not_in_their_article"] += sum(not ids for ids in found)
        tally["null_questions"] += not evidence
        tally["questions_without_all_gold"] += not all(found)
        golds = list(dict.fromkeys(key for ids in found for key in ids)) if all(found) else []
        yield {"id": f"multihoprag-{number}", "question": squeeze(get(row, "query", where)),
               "golden_answers": golden([get(row, "answer", where)], where),
               "metadata": {"type": get(row, "question_type", where), "evidence_list": evidence}}, golds


# --------------------------------------------------------------------------------------------------------------- wiki18

WIKI18 = {"passages": Official(
    ("wiki-18.jsonl.gz", "wiki-18.jsonl", "wiki18_100w.jsonl", "retrieval-corpus/wiki18_100w.jsonl"),
    HUB.format("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"))}
WIKI18_PASSAGES = 21_015_324


@dataclass
class Wiki18Config(PublicConfig):
    """`prepare.py wiki18`"""


def title_and_text(contents: str) -> tuple[str, str]:
    """Title and text of `"title"` newline text; the pair of quotes around the title goes, inner ones stay."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), text.strip()


def wiki18(cfg: Wiki18Config) -> dict:
    """wiki-18, the corpus of Search-R1, ReSearch and FlashRAG: 21,015,324 Wikipedia passages of 100 words (Dec 2018).

    One line at a time, packed (.gz) or not: memory stays the same for any length. Ids are the file's, whose numbers
    rise from line to line: that is checked, and no two are the same then.
    """
    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        tally: Counter = Counter()

        def passages() -> Iterator[dict]:
            before = -1
            for where, row in packed_lines(paths["passages"]):
                key = get(row, "id", where)
                if not key.isdigit() or int(key) <= before:
                    raise DataError(f"{where}: id {key!r} behind {before}; ids are numbers that rise from line to "
                                    "line: the file is broken or two were joined, fetch it again")
                before = int(key)
                if "contents" in row:
                    title, text = title_and_text(get(row, "contents", where))
                else:  # FlashRAG's preprocess_wiki.py keeps the two apart
                    title, text = title_and_text(f"{get(row, 'title', where)}\n{get(row, 'text', where)}")
                tally["without_title"] += not title
                tally["without_text"] += not text
                yield {"id": key, "title": title, "text": text}

        counts = {"passages": write_corpus(f"{folder}/corpus.jsonl", passages(), WIKI18_PASSAGES, "wiki18 passages")}
        published.check("passages", counts["passages"], WIKI18_PASSAGES, CUT_OFF)
        return counts | dict(tally)

    return make_public(cfg, "wiki18", WIKI18, write)


def packed_lines(path: str) -> Iterator[tuple[str, dict]]:
    """(where, object) of a JSONL file that may be packed by gzip; blank lines are passed over."""
    number = 0
    try:
        with (gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")) as f:
            for number, raw in enumerate(f, 1):
                where = f"{path}:{number}"
                raw = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if raw:
                    yield where, parse_object(_utf8(raw, where), where)
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path}: {e} after line {number:,}; the download is broken, fetch it again") from e


# ------------------------------------------------------------------------------------------------------------- flashrag

@dataclass
class FlashragConfig(PublicConfig):
    """`prepare.py flashrag`"""

    name: str = "flashrag"
    """what passage ids begin with: the data set's name"""


def flashrag(cfg: FlashragConfig) -> dict:
    """Any data set in FlashRAG's form: the train, dev and test.jsonl in `source`, and the paragraphs in their metadata.

    HotpotQA's and 2WikiMultihopQA's rows have a context, MuSiQue's the supporting paragraph of each hop; other sets
    come out as questions alone. HotpotQA's dev file is the fullwiki one, whose paragraphs often miss a gold: most of
    its questions get no qrels (`prepare.py hotpotqa` has them all). The golden answers of multiple choice are numbers
    of `choices`. The text of the context is left out of `metadata`.
    """
    files = {split: Official((f"{split}.jsonl",), "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets",
                             optional=True) for split in ("train", "dev", "test")}
    if not any(os.path.isfile(os.path.join(cfg.source, f"{split}.jsonl")) for split in files):
        raise DataError(f"source={cfg.source} holds none of train.jsonl, dev.jsonl and test.jsonl; fetch a data set's "
                        f"files from {files['dev'].url}/tree/main")

    def write(paths: dict[str, str], folder: str, published: Published) -> dict:
        tally: Counter = Counter()

        def rows() -> Iterator[Row]:
            for split, path in paths.items():
                for number, row in read_jsonl(path):
                    made = flashrag_row(row, split, f"{path}:{number}")
                    if usable(made.question, tally):
                        yield made

        return write_rows(folder, cfg.name, list(paths), rows()) | dict(tally)

    return make_public(cfg, "flashrag", files, write)


def flashrag_row(row: dict, split: str, where: str) -> Row:
    """The question of a FlashRAG row, with the paragraphs that its metadata holds."""
    metadata = optional(row, "metadata", where)
    while isinstance(metadata.get("metadata"), dict):  # some copies nest it twice
        metadata = {k: v for k, v in metadata.items() if k != "metadata"} | metadata["metadata"]
    answers = row.get("golden_answers")
    answers = answers if isinstance(answers, list) else [answers] if isinstance(answers, str) else None
    if answers is None:
        raise DataError(f"{where}: golden_answers is {str(row.get('golden_answers'))[:60]!r}; a list is expected")
    if row.get("choices"):
        choices = get(row, "choices", where, list)
        if not all(isinstance(a, int) and 0 <= a < len(choices) for a in answers):
            raise DataError(f"{where}: golden_answers {answers} are no numbers of its {len(choices)} choices")
        answers = [choices[a] for a in answers]
    paragraphs, golds, complete = flashrag_paragraphs(metadata, where)
    return Row(split, Question(question_id(row, "id", where), squeeze(get(row, "question", where)),
                               golden(answers, where), slim(metadata)),
               paragraphs, golds, complete)


def flashrag_paragraphs(metadata: dict, where: str) -> tuple[list[tuple[str, str]], list[int], bool]:
    """((title, text) paragraphs, positions of the supporting ones, are all supporting ones there?)."""
    if isinstance(context := metadata.get("context"), dict):
        joint, texts = ("", context["sentences"]) if "sentences" in context else (" ", context.get("content"))
        titles, facts = get(context, "title", where, list), get(metadata, "supporting_facts", where, dict)
        if not isinstance(texts, list) or len(titles) != len(texts):
            raise DataError(f"{where}: metadata.context has {len(titles)} titles and {len(texts or [])} paragraphs; "
                            "it must have as many of both")
        paragraphs = pairs([list(pair) for pair in zip(titles, texts)], joint, where)
        return paragraphs, *supporting(get(facts, "title", where, list), paragraphs)
    steps = get(metadata, "question_decomposition", where, list) if metadata.get("question_decomposition") else []
    hops = [step.get("support_paragraph") if isinstance(step, dict) else None for step in steps]
    paragraphs = [(get(hop, "title", where), get(hop, "paragraph_text", where)) for hop in hops if isinstance(hop, dict)]
    return paragraphs, list(range(len(paragraphs))), len(paragraphs) == len(hops)


def slim(metadata: dict) -> dict:
    """Metadata without the paragraphs' text."""
    kept = {k: v for k, v in metadata.items() if k != "context"}
    if kept.get("question_decomposition"):
        kept["question_decomposition"] = [
            {k: v for k, v in hop.items() if k != "support_paragraph"} if isinstance(hop, dict) else hop
            for hop in kept["question_decomposition"]]
    return kept


# --------------------------------------------------------------------------------------------------------- sub-commands

COMMANDS = {
    "musique": (MusiqueConfig, musique),
    "hotpotqa": (HotpotqaConfig, hotpotqa),
    "2wiki": (TwowikiConfig, twowiki),
    "bamboogle": (BamboogleConfig, bamboogle),
    "multihoprag": (MultihopragConfig, multihoprag),
    "wiki18": (Wiki18Config, wiki18),
    "flashrag": (FlashragConfig, flashrag),
    "chunk": (ChunkConfig, chunk),
}
