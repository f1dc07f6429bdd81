"""Records on disk: corpora, turns and questions.

Files are UTF-8 with LF; readers also take a BOM and CRLF. Only LF ends a line: U+2028, U+0085 and
their like may stand inside a JSON string. A bad line is a DataError that names file, line and
reason; nothing is dropped in silence.
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
from typing import Any, BinaryIO, Iterator


class DataError(ValueError):
    """Bad input data: the message names file, line, value, rule and way out."""

    exit_status = 2


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """One unit of retrieval."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed: the title, one space, the text; without a title the text alone."""
        return f"{self.title} {self.text}" if self.title else self.text


@dataclass
class Turn:
    """One question of a conversation, with what was said before it."""

    query_id: str
    conversation_id: str
    turn: int
    context: list[tuple[str, str]]  # (question, answer), oldest first
    question: str
    gold_ids: list[str]
    answer: str | None = None
    rewrite: str | None = None  # a human's
    response: str | None = None  # an SFT target: think and rewrite blocks
    extra: dict = field(default_factory=dict)  # what else the record holds, kept as it is

    def record(self) -> dict:
        """The turn as a line of a turns file; fields that are not known are left out."""
        row = {k: v for k, v in asdict(self).items() if k != "extra" and v is not None}
        return row | {"context": [list(pair) for pair in self.context]} | self.extra


@dataclass
class Question:
    """One question with its golden answers (the FlashRAG form)."""

    id: str
    question: str
    golden_answers: list[str]
    metadata: dict = field(default_factory=dict)

    def record(self) -> dict:
        """The question as a line of a questions file; empty metadata are left out."""
        return {key: value for key, value in vars(self).items() if key != "metadata" or value}


def item_id(item: Turn | Question) -> str:
    return item.query_id if isinstance(item, Turn) else item.id


def one_line(text: str) -> str:
    """The text with white space collapsed to single blanks: the form in which every query is
    searched."""
    return " ".join(text.split())


# --------------------------------------------------------------------------------------------------


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 text file; DataError names a missing
    file or a bad line."""
    return ((number, line) for number, _, line in located_lines(path))


PACKED = {
    b"PAR1": "a parquet file; make it JSONL with `prepare.py parquet source={0} out=FILE.jsonl`",
    b"PK\x03\x04": "a zip archive; unpack it (`unzip {0}`) and name a file of it",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it (`zstd -d {0}`)",
}


def open_input(path: str) -> BinaryIO:
    """The bytes of a file, those of a gzip file unpacked; DataError: none, parquet, zip or zstd."""
    try:
        f = open(path, "rb")
        magic = f.peek(4)[:4]
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}; give the path of an existing file") from e
    if magic in PACKED or magic[:2] == b"\x1f\x8b":
        f.close()
    if magic in PACKED:
        raise DataError(f"{path} is {PACKED[magic].format(path)}; only gzip is read as it is")
    return gzip.open(path) if f.closed else f


def located_lines(path: str, start: tuple[int, int] = (1, 0)) -> Iterator[tuple[int, int, str]]:
    """`read_lines` from a place on: (line number, the line's first byte, line).

    `start` is such a number and byte. Of a gzip file the bytes are those of its content, and a
    place is reached by unpacking all before it.
    """
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
                f"{path}:{number}: not UTF-8 at byte {e.start} of the line ({e.reason}); convert "
                "the file to UTF-8 (iconv)"
            ) from e
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise DataError(
                f"{path}: {e} after line {number:,}; the gzip file is cut off or broken, fetch it "
                "again"
            ) from e


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _scrub(value: Any) -> Any:
    """Lone surrogates (half of an emoji, cut by somebody's substring) become U+FFFD: text can be
    written again."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(v) for v in value]
    return {_scrub(k): _scrub(v) for k, v in value.items()} if isinstance(value, dict) else value


def parse_object(line: str, location: str) -> dict:
    """The JSON object of a line; DataError names what is none."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise DataError(
            f"{location}: not valid JSON ({e}): {line[:80]!r}; every line must be one whole object"
        ) from e
    if not isinstance(row, dict):
        raise DataError(f"{location}: a line must be one JSON object, not {line[:40]!r}")
    return _scrub(row) if "\\ud" in line.lower() else row


def read_array(path: str, block: int = 1 << 16) -> Iterator[tuple[str, dict]]:
    """(location, object) of a file that is one JSON array, read `block` characters at a time."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    text, number = "", 0

    def first() -> str:
        """The next character that is no white space, with which `text` begins then."""
        nonlocal text
        while not (text := text.lstrip(" \t\r\n")):
            if not (text := f.read(block)):
                break
        return text[:1]

    try:
        with io.TextIOWrapper(open_input(path), "utf-8-sig") as f:
            if first() != "[":
                raise DataError(
                    f"{path}: a JSON array of objects is expected, but it begins with {text[:40]!r}"
                )
            text = text[1:]
            ended = first() == "]"
            while not ended:
                number += 1
                location = f"{path}: object {number}"
                if first() != "{":
                    raise DataError(f"{location}: a JSON object is expected, not {text[:40]!r}")
                while True:
                    try:
                        value, end = decoder.raw_decode(text)
                        break
                    except (ValueError, RecursionError) as e:
                        more = f.read(max(block, len(text)))
                        if not more or len(text) > 1 << 26:
                            raise DataError(
                                f"{location}: broken or cut off ({e}); fetch the file again"
                            ) from e
                        text += more
                yield location, _scrub(value) if "\\ud" in text[:end].lower() else value
                text = text[end:]
                ended = first() == "]"
                if not ended and first() != ",":
                    raise DataError(
                        f"{location}: followed by {first()!r} instead of a comma or the end"
                    )
                text = text[1:]
            text = text[1:] if number == 0 else text
            if first():
                raise DataError(
                    f"{path}: the array of {number} objects is followed by {text[:40]!r}"
                )
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path}: broken after object {number} ({e}); fetch the file again") from e


def read_jsonl(path: str) -> Iterator[tuple[int, dict]]:
    """(line number, object) of a JSONL file; blank lines are passed over, all else that is no
    object is an error."""
    return (
        (number, parse_object(line, f"{path}:{number}"))
        for number, line in read_lines(path)
        if line.strip()
    )


def as_text(value: Any) -> str | None:
    """A string, or the text of a number (ids and answers are often written so); else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def as_texts(value: Any) -> list[str] | None:
    """`as_text` of a list's entries or of one value in its place; None where one is no text."""
    texts = [as_text(entry) for entry in (value if isinstance(value, list) else [value])]
    return None if None in texts else texts


def _text(row: dict, key: str, location: str, required: bool = True) -> str | None:
    """`row[key]` as a string; a number becomes its text."""
    value = row.get(key)
    if value is None and not required:
        return None
    text = as_text(value)
    if text is None:
        raise DataError(
            f"{location}: {key!r} is {value!r}; it must be a string (fields found: "
            f"{', '.join(row)})"
        )
    return text


def _id(value: str, key: str, location: str) -> str:
    if value.split() != [value] or "\0" in value:
        raise DataError(
            f"{location}: {key} {value!r} must be non-empty and free of blanks and NUL: it becomes "
            "a column of TREC files"
        )
    return value


def _new_id(row: dict, key: str, location: str, seen: set[str]) -> str:
    """`row[key]`, which no earlier record has; goes to `seen`."""
    value = _id(_text(row, key, location), key, location)
    if value in seen:
        raise DataError(
            f"{location}: {key} {value!r} occurs a second time; every record needs its own"
        )
    seen.add(value)
    return value


def _question(row: dict, location: str) -> str:
    question = _text(row, "question", location).strip()
    if not question:
        raise DataError(f"{location}: the question is empty; a record needs one")
    return question


def _context(row: dict, location: str) -> list[tuple[str, str]]:
    """`row["context"]` as (question, answer) pairs; absent or null: a first turn; a null part: an
    empty text."""
    context = [] if row.get("context") is None else row["context"]
    pairs = [
        as_texts(["" if text is None else text for text in pair])
        if isinstance(pair, list) and len(pair) == 2
        else None
        for pair in (context if isinstance(context, list) else [None])
    ]
    if None in pairs:
        raise DataError(
            f"{location}: context must be a list of [question, answer] pairs, oldest first, not "
            f"{str(context)[:80]!r}"
        )
    return [(question, answer) for question, answer in pairs]


def read_corpus(path: str) -> Iterator[Passage]:
    """Passages of a corpus file, streamed: JSONL `{"id", "title", "text"}` or `{"id", "contents"}`;
    TSV id text title.

    In a TSV a quote is a character like any other and a header line `id text title` is passed over.
    DataError: an empty corpus, a duplicate id, an empty id, a TSV line without exactly three
    columns.
    """
    seen: set[str] = set()
    for number, _, passage in located_passages(path):
        if passage.id in seen:
            raise DataError(
                f"{path}:{number}: passage id {passage.id!r} occurs a second time; ids must be "
                "unique"
            )
        seen.add(passage.id)
        yield passage
    if not seen:
        raise DataError(f"{path}: no passages; a corpus needs at least one")


def located_passages(
    path: str, start: tuple[int, int] = (1, 0)
) -> Iterator[tuple[int, int, Passage]]:
    """(line number, the line's first byte, passage) of a corpus file from a place on; holds no id,
    so twice is no error.

    For files larger than memory: several processes read their own parts of one, and who needs
    unique ids sorts them.
    """
    for number, byte, line in located_lines(path, start):
        location = f"{path}:{number}"
        if path.removesuffix(".gz").endswith(".tsv"):
            columns = line.split("\t")
            if (
                number == 1
                and [c.strip().lower() for c in columns] == ["id", "text", "title"]
                or not line
            ):
                continue
            if len(columns) != 3:
                raise DataError(
                    f"{location}: {len(columns)} tab-separated columns; a corpus TSV has three: "
                    "id, text, title; replace tabs inside a field, or use JSONL"
                )
            passage = Passage(columns[0], columns[2].strip(), columns[1])
        elif line.strip():
            row = parse_object(line, location)
            if "contents" in row and "text" not in row:
                passage = Passage(_text(row, "id", location), "", _text(row, "contents", location))
            else:
                title = _text(row, "title", location, required=False) or ""
                passage = Passage(
                    _text(row, "id", location), title.strip(), _text(row, "text", location)
                )
        else:
            continue
        _id(passage.id, "id", location)
        yield number, byte, passage


_TURN_FIELDS = {f.name for f in fields(Turn)} - {"extra"}


def read_turns(path: str) -> list[Turn]:
    """The turns of a `rewrite` file, in file order.

    A turn may have no gold passage (`gold_ids` empty or absent): callers that need one use
    `with_gold`. DataError: empty file, missing field, wrong type, empty question, duplicate
    query_id.
    """
    turns: list[Turn] = []
    seen: set[str] = set()
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        query_id, question = _new_id(row, "query_id", location, seen), _question(row, location)
        turn = row.get("turn", 1)
        if isinstance(turn, bool) or not re.fullmatch(r"\s*\d{1,9}\s*", str(turn)):
            raise DataError(
                f"{location}: turn {repr(turn)[:40]} of {query_id} is not a whole number"
            )
        gold = [] if row.get("gold_ids") is None else as_texts(row["gold_ids"])
        if gold is None:
            raise DataError(
                f"{location}: gold_ids of {query_id} must be a list of passage ids, not "
                f"{row['gold_ids']!r}"
            )
        turns.append(
            Turn(
                query_id=query_id,
                conversation_id=_text(row, "conversation_id", location, required=False) or query_id,
                turn=int(turn),
                context=_context(row, location),
                question=question,
                gold_ids=list(dict.fromkeys(_id(g, "gold id", location) for g in gold)),
                **{
                    k: _text(row, k, location, required=False)
                    for k in ("answer", "rewrite", "response")
                },
                extra={k: v for k, v in row.items() if k not in _TURN_FIELDS},
            )
        )
    if not turns:
        raise DataError(
            f"{path}: no turns; the file is empty: give one with a turn a line (of a tool that "
            "filters: let more pass)"
        )
    return turns


def with_gold(turns: list[Turn], passage_ids, path: str) -> tuple[list[Turn], int]:
    """The turns that can be rewarded, and how many have no gold passage and were left out.

    `passage_ids` is any container of the index's ids. DataError: a gold id that is not in the index
    (the wrong corpus), or no turn left.
    """
    kept = [t for t in turns if t.gold_ids]
    golds = {g for t in kept for g in t.gold_ids}
    among = getattr(passage_ids, "among", None)  # a served index is asked once for all
    known = among(golds) if among else {g for g in golds if g in passage_ids}
    for t in kept:
        for g in t.gold_ids:
            if g not in known:
                raise DataError(
                    f"{path}: gold passage {g!r} of turn {t.query_id} is not in the index; use the "
                    "corpus these turns were made from"
                )
    if not kept:
        raise DataError(
            f"{path}: none of its {len(turns)} turns has a gold passage; rewards need one"
        )
    return kept, len(turns) - len(kept)


def _scorable(gold: str) -> bool:
    """Is anything left of a golden answer when it is normalised for scoring?"""
    return any(
        c not in string.punctuation and unicodedata.category(c)[0] not in "CZ"
        for c in unicodedata.normalize("NFKC", gold)
    )


def read_questions(path: str) -> list[Question]:
    """The questions of a `search` or `agent` file: `{"id", "question", "golden_answers"}`, optional
    `metadata`."""
    questions: list[Question] = []
    seen: set[str] = set()
    for number, row in read_jsonl(path):
        location = f"{path}:{number}"
        key = _new_id(row, "id", location, seen)
        golds = as_texts(row.get("golden_answers"))
        if golds is None or not any(map(_scorable, golds)):
            raise DataError(
                f"{location}: golden_answers of {key} must be a list of strings with one that is "
                "not blank or punctuation alone (scoring drops both), not "
                f"{str(row.get('golden_answers'))[:80]}"
            )
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise DataError(
                f"{location}: metadata of {key} must be an object, not {str(metadata)[:80]!r}"
            )
        questions.append(
            Question(key, _question(row, location), list(filter(_scorable, golds)), metadata)
        )
    if not questions:
        raise DataError(f"{path}: no questions; the file is empty")
    return questions
