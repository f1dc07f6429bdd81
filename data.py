"""Records on disk: corpora, turns and questions.

Files are UTF-8; readers accept a BOM, CRLF and gzip. Only LF ends a line: U+2028 may occur in JSON
strings. A bad line raises DataError with its number.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import os
import re
import string
import sys
import unicodedata
import zlib
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, Container, Iterator


class DataError(ValueError):
    """Bad input data; the message says where and how to fix it."""

    exit_status = 2


# ---- records


@dataclass(frozen=True)
class Passage:
    """The unit of retrieval."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The text that is indexed."""
        return f"{self.title} {self.text}" if self.title else self.text


@dataclass
class Turn:
    """One question of a conversation, with the turns before it."""

    query_id: str
    conversation_id: str
    turn: int
    context: list[tuple[str, str]]  # (question, answer), oldest first
    question: str
    gold_ids: list[str]
    answer: str | None = None
    rewrite: str | None = None  # by a human
    response: str | None = None  # SFT target with think and rewrite blocks
    extra: dict = field(default_factory=dict)  # other fields, kept as they are

    def record(self) -> dict:
        """The JSON object, without fields that are None."""
        return {k: v for k, v in vars(self).items() if k != "extra" and v is not None} | self.extra


@dataclass
class Question:
    """One question and its golden answers (FlashRAG's format)."""

    id: str
    question: str
    golden_answers: list[str]
    metadata: dict = field(default_factory=dict)

    def record(self) -> dict:
        """The JSON object, without empty metadata."""
        return {key: value for key, value in vars(self).items() if key != "metadata" or value}


def item_id(item: Turn | Question) -> str:
    return item.query_id if isinstance(item, Turn) else item.id


def one_line(text: str) -> str:
    """Collapse white space, as in every query."""
    return " ".join(text.split())


# ---- lines, JSON

PACKED = {
    b"PAR1": "a parquet file; make it JSONL with `prepare.py parquet source={0} out=FILE.jsonl`",
    b"PK\x03\x04": "a zip archive; unpack it (`unzip {0}`) and name a file of it",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it (`zstd -d {0}`)",
}


def open_input(path: str) -> BinaryIO:
    """Open a file for reading, decompressing gzip."""
    try:
        with open(path, "rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}; give the path of an existing file") from e
    if magic in PACKED:
        raise DataError(f"{path} is {PACKED[magic].format(path)}; only gzip is read as it is")
    return gzip.open(path) if magic[:2] == b"\x1f\x8b" else open(path, "rb")


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file."""
    return ((number, line) for number, _, line in located_lines(path))


def located_lines(path: str, start: tuple[int, int] = (1, 0)) -> Iterator[tuple[int, int, str]]:
    """(line number, byte offset, line) from `start` = (line number, byte offset) on; offsets in
    gzip files count decompressed bytes."""
    with open_input(path) as f:
        number, byte = start
        try:
            f.seek(byte)
            for number, raw in enumerate(f, number):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, byte, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                byte += len(raw)
        except UnicodeDecodeError as e:
            raise DataError(f"{path}:{number}: not UTF-8 at byte {e.start}; use iconv") from e
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise DataError(f"{path}: {e} after line {number:,}; fetch it again") from e


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _scrub(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(v) for v in value]
    return {_scrub(k): _scrub(v) for k, v in value.items()} if isinstance(value, dict) else value


def parse_object(line: str, location: str) -> Row:
    """Parse a JSON object; NaN and Infinity are errors."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise DataError(
            f"{location}: not valid JSON ({e}): {line[:80]!r}; mend or remove it"
        ) from e
    if not isinstance(row, dict):
        raise DataError(f"{location}: not one JSON object: {line[:40]!r}; mend or remove it")
    return Row(_scrub(row) if "\\ud" in line.lower() else row, location)


def read_jsonl(path: str) -> Iterator[tuple[int, Row]]:
    """(line number, object) of a JSONL file, skipping blank lines."""
    for number, line in read_lines(path):
        if line.strip():
            yield number, parse_object(line, f"{path}:{number}")


def read_array(path: str, block: int = 1 << 16) -> Iterator[tuple[str, Row]]:
    """Stream (location, object) from a JSON array file, at least `block` characters at a time."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    text, number = "", 0

    def read_on() -> bool:
        nonlocal text
        more = f.read(max(block, len(text)))
        text += more
        return bool(more)

    def expect(signs: str) -> None:
        """Skip white space; DataError unless one of `signs` (none: the end) begins `text` then."""
        nonlocal text
        while not (text := text.lstrip(" \t\r\n")) and read_on():
            pass
        if text[:1] not in (tuple(signs) or [""]):
            raise DataError(
                f"{path}: after {number} objects of a JSON array stands {text[:40]!r}, not "
                f"{' or '.join(signs) or 'the end'}; fetch the file again"
            )

    try:
        with io.TextIOWrapper(open_input(path), "utf-8-sig") as f:
            expect("[")
            while text[0] != "]":
                text = text[1:]  # [ or ,
                expect("{" if number else "{]")
                if text[0] == "]":
                    break
                number += 1
                location = f"{path}: object {number}"
                while True:
                    try:
                        value, end = decoder.raw_decode(text)
                        break
                    except (ValueError, RecursionError) as e:
                        if len(text) > 1 << 26 or not read_on():
                            raise DataError(
                                f"{location}: broken or cut off ({e}); fetch the file again"
                            ) from e
                value = _scrub(value) if "\\ud" in text[:end].lower() else value
                yield location, Row(value, location)
                text = text[end:]
                expect(",]")
            text = text[1:]
            expect("")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path}: broken after object {number} ({e}); fetch the file again") from e


# ---- fields of a record


def as_text(value: Any) -> str | None:
    """A string, or a number as a string; None for other values."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def as_texts(value: Any) -> list[str] | None:
    """`as_text` of a list's entries, or of one value; None if any is None."""
    texts = [as_text(entry) for entry in (value if isinstance(value, list) else [value])]
    return None if None in texts else texts


class Row(dict):
    """A JSON object of a file; a wrong field raises DataError with its place."""

    __slots__ = ("location",)

    def __init__(self, fields: Any = (), location: str = ""):
        super().__init__(fields)
        self.location = location

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.location}: {problem}")

    def wrong(self, key: str, rule: str) -> DataError:
        found = f"is {self[key]!r:.60}" if key in self else "is missing"
        fields_found = ", ".join(self)[:200]
        return self.error(f"{key!r} {found}; it must be {rule} (fields found: {fields_found})")

    def check_names(self, *names: str) -> None:
        """DataError for a field that is nearly one of `names`, which is not there itself."""
        for name in names:
            near = name not in self and difflib.get_close_matches(name, self, n=1, cutoff=0.85)
            if near and near[0] not in names:
                raise self.error(f"unknown field {near[0]!r}; did you mean {name!r}?")

    def field(self, key: str, kind: type) -> Any:
        if not isinstance(value := self.get(key), kind):
            raise self.wrong(key, f"a {kind.__name__}")
        return value

    def text(self, key: str, required: bool = True) -> str | None:
        """A string; a number is converted. None if absent or null and not `required`."""
        text = as_text(self.get(key))
        if text is None and (required or self.get(key) is not None):
            raise self.wrong(key, "a text")
        return text

    def line(self, key: str, required: bool = True) -> str:
        """A text on one line, "" where there is none."""
        return one_line(self.text(key, required) or "")

    def number(self, key: str) -> int:
        """An integer from 0, also from a string."""
        text = as_text(self.get(key)) or ""
        if not re.fullmatch(r"\s*\d{1,18}\s*", text):
            raise self.wrong(key, "a whole number")
        return int(text)

    def texts(self, key: str) -> list[str]:
        """A list of texts, also from a single one."""
        if (texts := as_texts(self.get(key))) is None:
            raise self.wrong(key, "a list of texts")
        return texts

    def rows(self, key: str) -> list[Row]:
        values = self.field(key, list)
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(key, "a list of objects")
        return [Row(value, self.location) for value in values]

    def object(self, key: str) -> Row:
        """An object, also from JSON text; empty if absent or null."""
        value = self.get(key)
        if isinstance(value, str) and value:
            return parse_object(value, f"{self.location}: {key}")
        return Row(self.field(key, dict) if value else {}, self.location)

    def id(self, key: str, known: Container[str] = ()) -> str:
        """A text that fits a column of a TREC file and is not `known`."""
        value = self.check_id(key, self.text(key))
        if value in known:
            raise self.error(f"{key} {value!r} occurs a second time; ids must be unique")
        return value

    def check_id(self, key: str, value: str) -> str:
        if value.split() != [value] or "\0" in value:
            raise self.error(f"{key} {value!r} must be non-empty, free of blanks and NUL (TREC)")
        return value

    def question(self) -> str:
        if not (question := self.text("question").strip()):
            raise self.error("the question is empty; a record needs one")
        return question

    def context(self) -> list[tuple[str, str]]:
        """(question, answer) pairs; null is an empty list or text."""
        pairs = [] if self.get("context") is None else self.field("context", list)
        texts = [
            isinstance(pair, list) and as_texts(["" if text is None else text for text in pair])
            for pair in pairs
        ]
        if not all(pair and len(pair) == 2 for pair in texts):
            raise self.wrong("context", "a list of [question, answer] pairs, oldest first")
        return [tuple(pair) for pair in texts]


# ---- files


def read_corpus(path: str) -> Iterator[Passage]:
    """Stream a corpus: JSONL `{"id", "title", "text"}` or `{"id", "contents"}`, or TSV with columns
    id, text, title and an optional header. Ids must be unique."""
    seen: set[str] = set()
    for _, _, passage in located_passages(path, known=seen):
        seen.add(passage.id)
        yield passage
    if not seen:
        raise DataError(f"{path}: no passages; a corpus needs at least one")


def located_passages(
    path: str, start: tuple[int, int] = (1, 0), known: Container[str] = ()
) -> Iterator[tuple[int, int, Passage]]:
    """(line number, byte offset, passage) from `start` on; ids may repeat unless `known`."""
    tsv, names = path.removesuffix(".gz").endswith(".tsv"), ["id", "text", "title"]
    for number, byte, line in located_lines(path, start):
        location = f"{path}:{number}"
        if not (line if tsv else line.strip()):
            continue
        if tsv:
            columns = line.split("\t")
            if len(columns) != 3:
                raise DataError(
                    f"{location}: {len(columns)} tab-separated columns, not id, text and title; "
                    "use JSONL where fields hold tabs"
                )
            header = [c.strip().lower() for c in columns] if number == 1 else []
            if header == names:
                continue
            if header and header[0] in ("id", "pid", "docid"):
                raise DataError(f"{location}: columns {header}; they must be id, text, title")
            row = Row(zip(names, columns), location)
        else:
            row = parse_object(line, location)
        whole = "contents" in row and "text" not in row
        title = "" if whole else row.text("title", required=False) or ""
        text = row.text("contents" if whole else "text")
        yield number, byte, Passage(row.id("id", known), title.strip(), text)


_TURN_FIELDS = {f.name for f in fields(Turn)} - {"extra"}


def read_turns(path: str) -> list[Turn]:
    """The turns of a file in order; `gold_ids` may be empty (see `with_gold`)."""
    turns: dict[str, Turn] = {}
    for _, row in read_jsonl(path):
        row.check_names("query_id", "conversation_id", "turn", "context", "question", "gold_ids")
        query_id = row.id("query_id", turns)
        golds = [] if row.get("gold_ids") is None else row.texts("gold_ids")
        optional = ("answer", "rewrite", "response")
        turns[query_id] = Turn(
            query_id=query_id,
            conversation_id=row.text("conversation_id", required=False) or query_id,
            turn=row.number("turn") if "turn" in row else 1,
            context=row.context(),
            question=row.question(),
            gold_ids=list(dict.fromkeys(row.check_id("gold_ids", gold) for gold in golds)),
            **{key: row.text(key, required=False) for key in optional},
            extra={key: value for key, value in row.items() if key not in _TURN_FIELDS},
        )
    if not turns:
        raise DataError(f"{path}: no turns; a line of it must be a turn")
    if not any(turn.context for turn in turns.values()) and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: no turn of {path} has a context ([[question, answer], …] before it)",
            file=sys.stderr,
        )
    return list(turns.values())


def with_gold(turns: list[Turn], passage_ids: Container[str], path: str) -> tuple[list[Turn], int]:
    """(turns with golds, number of others). DataError: no golds, or one not in `passage_ids`."""
    kept = [turn for turn in turns if turn.gold_ids]
    if not kept:
        raise DataError(
            f"{path}: none of its {len(turns)} turns has a gold passage; rewards need one"
        )
    turn_of = {gold: turn.query_id for turn in kept for gold in turn.gold_ids}
    known = set(turn_of) & passage_ids  # one request to a served index
    for gold, query_id in turn_of.items():
        if gold not in known:
            raise DataError(
                f"{path}: gold passage {gold!r} of turn {query_id} is not in the index; use the "
                "corpus these turns were made from"
            )
    return kept, len(turns) - len(kept)


def scorable(gold: str) -> bool:
    """Whether normalisation leaves anything of an answer."""
    return any(
        c not in string.punctuation and unicodedata.category(c)[0] not in "CZ"
        for c in unicodedata.normalize("NFKC", gold)
    )


def read_questions(path: str) -> list[Question]:
    """The questions of a file, without golden answers that normalise to ""."""
    questions: dict[str, Question] = {}
    for _, row in read_jsonl(path):
        row.check_names("question", "golden_answers")
        key = row.id("id", questions)
        golds = list(filter(scorable, as_texts(row.get("golden_answers")) or []))
        if not golds:
            raise row.wrong("golden_answers", "texts, one of them not blank or punctuation alone")
        questions[key] = Question(key, row.question(), golds, row.object("metadata"))
    if not questions:
        raise DataError(f"{path}: no questions; a line of it must be a question")
    return list(questions.values())
