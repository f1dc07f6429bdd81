"""Records on disk: corpora, turns and questions.

Files are UTF-8; readers accept a BOM, CRLF and gzip. Only LF ends a line: U+2028 may occur in JSON
strings. A bad line raises DataError with its number.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import string
import unicodedata
import zlib
from dataclasses import asdict, dataclass, field, fields
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
        row = {k: v for k, v in asdict(self).items() if k != "extra" and v is not None}
        return row | {"context": [list(pair) for pair in self.context]} | self.extra


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
            raise DataError(
                f"{path}:{number}: not UTF-8 at byte {e.start} of the line; convert it (iconv)"
            ) from e
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise DataError(
                f"{path}: {e} after line {number:,}; cut off or broken, fetch the file again"
            ) from e


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _scrub(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(v) for v in value]
    return {_scrub(k): _scrub(v) for k, v in value.items()} if isinstance(value, dict) else value


def parse_object(line: str, location: str) -> dict:
    """Parse a JSON object; NaN and Infinity are errors."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise DataError(
            f"{location}: not valid JSON ({e}): {line[:80]!r}; every line must be one whole object"
        ) from e
    if not isinstance(row, dict):
        raise DataError(f"{location}: a line must be one JSON object, not {line[:40]!r}")
    return _scrub(row) if "\\ud" in line.lower() else row


def read_jsonl(path: str) -> Iterator[tuple[int, dict]]:
    """(line number, object) of a JSONL file, skipping blank lines."""
    for number, line in read_lines(path):
        if line.strip():
            yield number, parse_object(line, f"{path}:{number}")


def read_array(path: str, block: int = 1 << 16) -> Iterator[tuple[str, dict]]:
    """Stream (location, object) from a JSON array file, at least `block` characters at a time."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    text, number = "", 0

    def read_on() -> bool:
        nonlocal text
        more = f.read(max(block, len(text)))
        text += more
        return bool(more)

    def next_sign() -> str:
        """The next character that is not white space; `text` begins with it."""
        nonlocal text
        while not (text := text.lstrip(" \t\r\n")) and read_on():
            pass
        return text[:1]

    try:
        with io.TextIOWrapper(open_input(path), "utf-8-sig") as f:
            if next_sign() != "[":
                raise DataError(f"{path}: a JSON array of objects is expected, not {text[:40]!r}")
            while text[0] != "]":
                text = text[1:]  # [ or ,
                if next_sign() == "]" and number == 0:
                    break
                number += 1
                location = f"{path}: object {number}"
                if text[:1] != "{":
                    raise DataError(f"{location}: a JSON object is expected, not {text[:40]!r}")
                while True:
                    try:
                        value, end = decoder.raw_decode(text)
                        break
                    except (ValueError, RecursionError) as e:
                        if len(text) > 1 << 26 or not read_on():
                            raise DataError(
                                f"{location}: broken or cut off ({e}); fetch the file again"
                            ) from e
                yield location, _scrub(value) if "\\ud" in text[:end].lower() else value
                text = text[end:]
                if next_sign() not in (",", "]"):
                    raise DataError(f"{location}: followed by {text[:1]!r}, not by , or ]")
            text = text[1:]
            if next_sign():
                raise DataError(
                    f"{path}: the array of {number} objects is followed by {text[:40]!r}"
                )
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path}: broken after object {number} ({e}); fetch the file again") from e


# ---- fields of a record


def as_text(value: Any) -> str | None:
    """A string, or a number as a string; None for other values."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def as_texts(value: Any) -> list[str] | None:
    """`as_text` of a list's entries, or of one value; None if any is None."""
    texts = [as_text(entry) for entry in (value if isinstance(value, list) else [value])]
    return None if None in texts else texts


def _text(row: dict, key: str, location: str, required: bool = True) -> str | None:
    value = row.get(key)
    text = as_text(value)
    if text is None and (required or value is not None):
        raise DataError(
            f"{location}: {key!r} is {value!r}; it must be a string (fields: {', '.join(row)})"
        )
    return text


def _id(value: str, key: str, location: str, known: Container[str] = ()) -> str:
    """`value`; DataError unless it fits a TREC column and is not `known`."""
    if value.split() != [value] or "\0" in value:
        raise DataError(
            f"{location}: {key} {value!r} must be non-empty and free of blanks and NUL (TREC files)"
        )
    if value in known:
        raise DataError(f"{location}: {key} {value!r} occurs a second time; ids must be unique")
    return value


def _question(row: dict, location: str) -> str:
    question = _text(row, "question", location).strip()
    if not question:
        raise DataError(f"{location}: the question is empty; a record needs one")
    return question


def _context(row: dict, location: str) -> list[tuple[str, str]]:
    """`row["context"]` as (question, answer) pairs; null is an empty list or text."""
    context = [] if row.get("context") is None else row["context"]
    pairs = []
    for pair in context if isinstance(context, list) else [None]:
        texts = as_texts(["" if t is None else t for t in pair]) if isinstance(pair, list) else None
        if texts is None or len(texts) != 2:
            raise DataError(
                f"{location}: context must be a list of [question, answer] pairs, oldest first, "
                f"not {str(context)[:80]!r}"
            )
        pairs.append(tuple(texts))
    return pairs


# ---- files


def read_corpus(path: str) -> Iterator[Passage]:
    """Stream a corpus: JSONL `{"id", "title", "text"}` or `{"id", "contents"}`, or TSV with columns
    id, text, title and an optional header. Ids must be unique."""
    seen: set[str] = set()
    for number, _, passage in located_passages(path):
        seen.add(_id(passage.id, "passage id", f"{path}:{number}", seen))
        yield passage
    if not seen:
        raise DataError(f"{path}: no passages; a corpus needs at least one")


def located_passages(
    path: str, start: tuple[int, int] = (1, 0)
) -> Iterator[tuple[int, int, Passage]]:
    """(line number, byte offset, passage) from `start` on; ids may repeat."""
    tsv = path.removesuffix(".gz").endswith(".tsv")
    for number, byte, line in located_lines(path, start):
        location = f"{path}:{number}"
        if tsv and line:
            columns = line.split("\t")
            if number == 1 and [c.strip().lower() for c in columns] == ["id", "text", "title"]:
                continue
            if len(columns) != 3:
                raise DataError(
                    f"{location}: {len(columns)} tab-separated columns, not id, text and title; "
                    "use JSONL where fields hold tabs"
                )
            key, text, title = columns
        elif line.strip():
            row = parse_object(line, location)
            whole = "contents" in row and "text" not in row
            key = _text(row, "id", location)
            title = "" if whole else _text(row, "title", location, required=False) or ""
            text = _text(row, "contents" if whole else "text", location)
        else:
            continue
        yield number, byte, Passage(_id(key, "passage id", location), title.strip(), text)


_TURN_FIELDS = {f.name for f in fields(Turn)} - {"extra"}


def read_turns(path: str) -> list[Turn]:
    """The turns of a file in order; `gold_ids` may be empty (see `with_gold`)."""
    turns: dict[str, Turn] = {}
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        query_id = _id(_text(row, "query_id", location), "query_id", location, turns)
        turn = row.get("turn", 1)
        if isinstance(turn, bool) or not re.fullmatch(r"\s*\d{1,9}\s*", str(turn)):
            raise DataError(
                f"{location}: turn {repr(turn)[:40]} of {query_id} is not a whole number"
            )
        golds = [] if row.get("gold_ids") is None else as_texts(row["gold_ids"])
        if golds is None:
            raise DataError(
                f"{location}: gold_ids of {query_id} must be a list of passage ids, not "
                f"{row['gold_ids']!r}"
            )
        optional = ("answer", "rewrite", "response")
        turns[query_id] = Turn(
            query_id=query_id,
            conversation_id=_text(row, "conversation_id", location, required=False) or query_id,
            turn=int(turn),
            context=_context(row, location),
            question=_question(row, location),
            gold_ids=list(dict.fromkeys(_id(gold, "gold id", location) for gold in golds)),
            **{key: _text(row, key, location, required=False) for key in optional},
            extra={key: value for key, value in row.items() if key not in _TURN_FIELDS},
        )
    if not turns:
        raise DataError(f"{path}: no turns; a line of it must be a turn")
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
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        key = _id(_text(row, "id", location), "id", location, questions)
        golds = list(filter(scorable, as_texts(row.get("golden_answers")) or []))
        if not golds:
            raise DataError(
                f"{location}: golden_answers of {key} must be a list of strings with one that is "
                f"not blank or punctuation alone, not {str(row.get('golden_answers'))[:80]}"
            )
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise DataError(
                f"{location}: metadata of {key} must be an object, not {str(metadata)[:80]!r}"
            )
        questions[key] = Question(key, _question(row, location), golds, metadata)
    if not questions:
        raise DataError(f"{path}: no questions; a line of it must be a question")
    return list(questions.values())
