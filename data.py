"""Records on disk, prompts, chat encoding and loss masks.

Files are UTF-8 with LF; readers also take a BOM and CRLF.  Only LF ends a line: U+2028, U+0085 and their like may stand
inside a JSON string.  A bad line is a DataError that names file, line and reason; nothing is dropped in silence.

Prompts are ours, not the paper's (arXiv 2505.15776, Fig. 6 and 7): what never changes stands first, so that an engine
computes it once for all prompts; the history is numbered question/answer pairs, oldest first, answers included.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Iterable, Iterator

import jinja2


class DataError(ValueError):
    """Bad input data: the message names file, line, value, rule and way out."""

    exit_status = 2


# ------------------------------------------------------------------------------------------------------------ records

@dataclass(frozen=True)
class Passage:
    """One unit of retrieval."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed: the title, one space, the text; the text alone where there is no title."""
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


# ------------------------------------------------------------------------------------------------------------ readers

def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 text file; DataError names a missing file or a bad line."""
    return ((number, line) for number, _, line in located_lines(path))


PACKED = {b"PAR1": "a parquet file; make it JSONL with `python prepare.py parquet source={0} out=FILE.jsonl`",
          b"PK\x03\x04": "a zip archive; unpack it (`unzip {0}`) and name a file of it",
          b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it (`zstd -d {0}`)"}


def open_input(path: str) -> BinaryIO:
    """The bytes of an input file, those of a gzip file unpacked; DataError for none, parquet, zip and zstd files."""
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
    """`read_lines` from a place on: (line number, the line's first byte, line); `start` is such a number and byte.

    Of a gzip file the bytes are those of its content, and a place is reached by unpacking all before it.
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
            raise DataError(f"{path}:{number}: not UTF-8 at byte {e.start} of the line ({e.reason}); "
                            "convert the file to UTF-8 (iconv)") from e
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise DataError(f"{path}: {e} after line {number:,}; the gzip file is cut off or broken, fetch it "
                            "again") from e


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _scrub(value: Any) -> Any:
    """Lone surrogates (half of an emoji, cut by somebody's substring) become U+FFFD: text can be written again."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(v) for v in value]
    return {_scrub(k): _scrub(v) for k, v in value.items()} if isinstance(value, dict) else value


def parse_object(text: str, location: str) -> dict:
    """The JSON object that a line or a field is; DataError names what is none."""
    try:
        row = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{location}: not valid JSON ({e}): {text[:80]!r}; every line must be one whole object") from e
    if not isinstance(row, dict):
        raise DataError(f"{location}: a line must be one JSON object, not {text[:40]!r}")
    return _scrub(row) if "\\ud" in text.lower() else row


def read_array(path: str, block: int = 1 << 16) -> Iterator[tuple[str, dict]]:
    """(location, object) of a file that is one JSON array of objects, read `block` characters at a time."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    text, number = "", 0

    def first() -> str:
        """The next character that is no white space; `text` begins with it then.  Empty at the end of the file."""
        nonlocal text
        while not (text := text.lstrip(" \t\r\n")):
            if not (text := f.read(block)):
                break
        return text[:1]

    try:
        with io.TextIOWrapper(open_input(path), "utf-8-sig") as f:
            if first() != "[":
                raise DataError(f"{path}: a JSON array of objects is expected, but it begins with {text[:40]!r}")
            text = text[1:]
            ended = first() == "]"
            while not ended:
                number += 1
                location = f"{path}: object {number}"
                if first() != "{":
                    raise DataError(f"{location}: a JSON object is expected, not {text[:40]!r}; fetch the file again")
                while True:
                    try:
                        value, end = decoder.raw_decode(text)
                        break
                    except (ValueError, RecursionError) as e:
                        more = f.read(max(block, len(text)))
                        if not more or len(text) > 1 << 26:
                            raise DataError(f"{location}: broken or cut off ({e}); fetch the file again") from e
                        text += more
                yield location, _scrub(value) if "\\ud" in text[:end].lower() else value
                text = text[end:]
                ended = first() == "]"
                if not ended and first() != ",":
                    raise DataError(f"{location}: followed by {first()!r} instead of a comma or the end; fetch the file "
                                    "again")
                text = text if ended else text[1:]
            text = text[1:]
            if first():
                raise DataError(f"{path}: the array of {number} objects is followed by {text[:40]!r}; a file is one "
                                "array")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(f"{path}: broken after object {number} ({e}); fetch the file again") from e


def read_jsonl(path: str) -> Iterator[tuple[int, dict]]:
    """(line number, object) of a JSONL file; blank lines are passed over, all else that is no object is an error."""
    return ((number, parse_object(line, f"{path}:{number}")) for number, line in read_lines(path) if line.strip())


def as_text(value: Any) -> str | None:
    """A string as it is and a number as its text: ids and answers are often written as numbers; else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def as_texts(value: Any) -> list[str] | None:
    """`as_text` of every entry of a list, or of one value in place of a list; None where one is no text."""
    texts = [as_text(entry) for entry in (value if isinstance(value, list) else [value])]
    return None if None in texts else texts


def _text(row: dict, key: str, where: str, required: bool = True) -> str | None:
    """`row[key]` as a string; numbers become strings."""
    value = row.get(key)
    if value is None and not required:
        return None
    text = as_text(value)
    if text is None:
        raise DataError(f"{where}: {key!r} is {value!r}; it must be a string (fields found: {', '.join(row)})")
    return text


def _id(value: str, key: str, where: str) -> str:
    if value.split() != [value] or "\0" in value:
        raise DataError(f"{where}: {key} {value!r} must be non-empty and free of blanks and NUL: it becomes a column of "
                        "TREC files")
    return value


def _new_id(row: dict, key: str, where: str, seen: set[str]) -> str:
    """`row[key]`, which no earlier record has; goes to `seen`."""
    value = _id(_text(row, key, where), key, where)
    if value in seen:
        raise DataError(f"{where}: {key} {value!r} occurs a second time; every record needs its own")
    seen.add(value)
    return value


def _question(row: dict, where: str) -> str:
    question = _text(row, "question", where).strip()
    if not question:
        raise DataError(f"{where}: the question is empty; a record needs one")
    return question


def _context(row: dict, where: str) -> list[tuple[str, str]]:
    """`row["context"]` as (question, answer) pairs; absent or null: a first turn; a null part: an empty text."""
    context = [] if row.get("context") is None else row["context"]
    pairs = [as_texts(["" if s is None else s for s in pair]) if isinstance(pair, list) and len(pair) == 2 else None
             for pair in (context if isinstance(context, list) else [None])]
    if None in pairs:
        raise DataError(f"{where}: context must be a list of [question, answer] pairs, oldest first, not "
                        f"{str(context)[:80]!r}")
    return [(question, answer) for question, answer in pairs]


def read_corpus(path: str) -> Iterator[Passage]:
    """Passages of a corpus file, streamed: JSONL `{"id", "title", "text"}` or `{"id", "contents"}`; TSV id text title.

    In a TSV a quote is a character like any other and a header line `id text title` is passed over.
    DataError: an empty corpus, a duplicate id, an empty id, a TSV line without exactly three columns.
    """
    seen: set[str] = set()
    for number, _, passage in located_passages(path):
        if passage.id in seen:
            raise DataError(f"{path}:{number}: passage id {passage.id!r} occurs a second time; ids must be unique")
        seen.add(passage.id)
        yield passage
    if not seen:
        raise DataError(f"{path}: no passages; a corpus needs at least one")


def located_passages(path: str, start: tuple[int, int] = (1, 0)) -> Iterator[tuple[int, int, Passage]]:
    """(line number, the line's first byte, passage) of a corpus file from a place on; holds no id, so twice is no error.

    For files larger than memory: several processes read their own parts of one, and who needs unique ids sorts them.
    """
    for number, byte, line in located_lines(path, start):
        where = f"{path}:{number}"
        if path.removesuffix(".gz").endswith(".tsv"):
            columns = line.split("\t")
            if number == 1 and [c.strip().lower() for c in columns] == ["id", "text", "title"] or not line:
                continue
            if len(columns) != 3:
                raise DataError(f"{where}: {len(columns)} tab-separated columns; a corpus TSV has three: id, text, "
                                "title; replace tabs inside a field, or use JSONL")
            passage = Passage(columns[0], columns[2].strip(), columns[1])
        elif line.strip():
            row = parse_object(line, where)
            if "contents" in row and "text" not in row:
                passage = Passage(_text(row, "id", where), "", _text(row, "contents", where))
            else:
                title = _text(row, "title", where, required=False) or ""
                passage = Passage(_text(row, "id", where), title.strip(), _text(row, "text", where))
        else:
            continue
        _id(passage.id, "id", where)
        yield number, byte, passage


_TURN_FIELDS = {"query_id", "conversation_id", "turn", "context", "question", "gold_ids", "answer", "rewrite",
                "response"}


def read_turns(path: str) -> list[Turn]:
    """The turns of a `rewrite` file, in file order.

    A turn may have no gold passage (`gold_ids` empty or absent): callers that need one use `with_gold`.
    DataError: empty file, missing field, wrong type, empty question, duplicate query_id.
    """
    turns: list[Turn] = []
    seen: set[str] = set()
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        query_id, question = _new_id(row, "query_id", where, seen), _question(row, where)
        turn = row.get("turn", 1)
        if isinstance(turn, bool) or not re.fullmatch(r"\s*\d{1,9}\s*", str(turn)):
            raise DataError(f"{where}: turn {repr(turn)[:40]} of {query_id} is not a whole number")
        gold = [] if row.get("gold_ids") is None else as_texts(row["gold_ids"])
        if gold is None:
            raise DataError(f"{where}: gold_ids of {query_id} must be a list of passage ids, not {row['gold_ids']!r}")
        turns.append(Turn(
            query_id=query_id, conversation_id=_text(row, "conversation_id", where, required=False) or query_id,
            turn=int(turn), context=_context(row, where), question=question,
            gold_ids=list(dict.fromkeys(_id(g, "gold id", where) for g in gold)),
            **{k: _text(row, k, where, required=False) for k in ("answer", "rewrite", "response")},
            extra={k: v for k, v in row.items() if k not in _TURN_FIELDS}))
    if not turns:
        raise DataError(f"{path}: no turns; the file is empty: give one with a turn a line (of a tool that filters: let more pass)")
    return turns


def with_gold(turns: list[Turn], passage_ids, path: str) -> tuple[list[Turn], int]:
    """The turns that can be rewarded, and how many have no gold passage and were left out.

    `passage_ids` is any container of the index's ids.  DataError: a gold id that is not in the index (the wrong
    corpus), or no turn left.
    """
    kept = [t for t in turns if t.gold_ids]
    golds = {g for t in kept for g in t.gold_ids}
    among = getattr(passage_ids, "among", None)  # a served index is asked once for all
    known = among(golds) if among else {g for g in golds if g in passage_ids}
    for t in kept:
        for g in t.gold_ids:
            if g not in known:
                raise DataError(f"{path}: gold passage {g!r} of turn {t.query_id} is not in the index; "
                                "use the corpus these turns were made from")
    if not kept:
        raise DataError(f"{path}: none of its {len(turns)} turns has a gold passage; rewards need one")
    return kept, len(turns) - len(kept)


def read_questions(path: str) -> list[Question]:
    """The questions of a `search` or `agent` file: `{"id", "question", "golden_answers"}`, optional `metadata`."""
    questions: list[Question] = []
    seen: set[str] = set()
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        key = _new_id(row, "id", where, seen)
        golds = as_texts(row.get("golden_answers"))
        if golds is None or not "".join(golds).strip():
            raise DataError(f"{where}: golden_answers of {key} must be a list of strings with one that is not blank, not "
                            f"{str(row.get('golden_answers'))[:80]}")
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise DataError(f"{where}: metadata of {key} must be an object, not {str(metadata)[:80]!r}")
        questions.append(Question(key, _question(row, where), [g for g in golds if g.strip()], metadata))
    if not questions:
        raise DataError(f"{path}: no questions; the file is empty")
    return questions


# ------------------------------------------------------------------------------------------------------------ writers

@contextlib.contextmanager
def naming(path: str):
    """An OSError of the block names `path` (a full disk's names no file by itself)."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or path
        raise


@contextlib.contextmanager
def atomic_write(path: str, mode: str = "w"):
    """A file object whose content appears under `path` whole or not at all (temporary name, fsync, rename)."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with naming(path), open(temporary, mode, **text) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def atomic_folder(path: str):
    """A temporary folder beside `path` that takes its name when the block ends well, and is removed when it doesn't."""
    path = path.rstrip("/")
    temporary, retired = f"{path}.{os.getpid()}.tmp", f"{path}.{os.getpid()}.old.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        yield temporary
        if os.path.isdir(path):
            shutil.rmtree(retired, ignore_errors=True)
            os.rename(path, retired)
        os.rename(temporary, path)
    except BaseException:
        if os.path.isdir(retired) and not os.path.exists(path):
            os.rename(retired, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(retired, ignore_errors=True)


@contextlib.contextmanager
def only_writer(folder: str, name: str = ""):
    """Within the block no other process writes `folder`, or the output `name` in it; clears what a killed one left.

    The lock is the folder's own or, for an output, a file `<name>.lock`; it is released when the process dies.
    DataError where another process holds it.  A folder made here goes again if it stays empty.
    """
    made = not os.path.isdir(folder)
    if made and os.path.exists(folder):
        raise DataError(f"{folder} is a file; name a folder")
    os.makedirs(folder, exist_ok=True)
    lock = os.path.join(folder, f"{name}.lock") if name else folder
    handle = os.open(lock, os.O_CREAT if name else os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DataError(f"another process is writing {os.path.join(folder, name).rstrip('/')}; wait for it, or "
                            "choose another name") from e
        for left in os.listdir(folder):
            if re.fullmatch((rf"{re.escape(name)}(\.\w+)*" if name else ".*") + r"\.\d+(\.old)?\.tmp", left):
                path = os.path.join(folder, left)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        try:
            yield
        finally:
            if name:
                os.remove(lock)
    finally:
        os.close(handle)
        if made and not os.listdir(folder):
            os.rmdir(folder)


def write_jsonl(path: str, rows: Iterable[dict]) -> int:
    """Write rows as JSONL, whole or not at all; returns their number.  ValueError for NaN and infinity: not JSON."""
    count = 0
    with atomic_write(path) as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def begin_metrics(path: str, step: int) -> list[dict]:
    """Keep a log's rows up to the step that is resumed from (0: none); a half-written last line goes too.  The rows."""
    rows = []
    if step and os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            rows = [parse_object(line, f"{path}:{number}") for number, line in enumerate(f, 1) if line.endswith("\n")]
    rows = [row for row in rows if row["step"] <= step]
    write_jsonl(path, rows)
    return rows


def append_metrics(path: str, row: dict) -> None:
    """Add a row of figures to a log; those that are not finite, which JSON lacks, become null."""
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    with naming(path), open(path, "a", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps(finite) + "\n")


# ------------------------------------------------------------------------------------------------------------ prompts

INSTRUCTION = """\
Rewrite the last question of a conversation so that a search engine understands it without the conversation.
First think: say in a few words what every pronoun and every left-out part of the question stands for.
Then write one complete question that means the same and names everything it asks about.
Answer in exactly this form:
<think>what the question refers to</think>
<rewrite>the complete question</rewrite>"""


def _conversation(context: list[tuple[str, str]], question: str) -> str:
    """The history as numbered pairs (`Q1: …`, `A1: …`), then the question; a first turn says there was nothing."""
    lines = [f"{label}{i}: {' '.join(text.split())}" for i, pair in enumerate(context, 1)
             for label, text in zip("QA", pair)]
    return "\n".join(["Conversation:", *(lines or ["(nothing yet)"]), f"Question: {' '.join(question.split())}"])


def rewrite_prompt(turn: Turn) -> str:
    """The zero-shot user message of the `rewrite` task (arXiv 2505.15776, Fig. 7, in our own words)."""
    return f"{INSTRUCTION}\n\n{_conversation(turn.context, turn.question)}"


def response_text(think: str, rewrite: str) -> str:
    """The canonical response: a think block, a newline, a rewrite block."""
    return f"<think>{think.strip()}</think>\n<rewrite>{rewrite.strip()}</rewrite>"


def few_shot_prompt(turn: Turn, examples: list[Turn]) -> list[dict]:
    """The self-distillation chat (Fig. 6): the instruction once, then each example as a turn that was answered well.

    An example is a Turn with a `response`.  The paper shows its example inside one message; as turns of the chat a
    small model keeps the form far more often (SmolLM2-135M copies the examples otherwise).
    """
    messages = []
    for example in examples:
        messages += [{"role": "user", "content": _conversation(example.context, example.question)},
                     {"role": "assistant", "content": example.response}]
    messages.append({"role": "user", "content": _conversation(turn.context, turn.question)})
    messages[0]["content"] = f"{INSTRUCTION}\n\n{messages[0]['content']}"
    return messages


def read_examples(path: str) -> list[Turn]:
    """Few-shot examples: JSONL with context, question, think and rewrite."""
    examples = []
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        think, rewrite = _text(row, "think", where), _text(row, "rewrite", where)
        if not rewrite.strip() or re.search("</?(think|rewrite)>", think + rewrite):
            raise DataError(f"{where}: think is {think[:60]!r}, rewrite {rewrite[:60]!r}: the rewrite must not be empty, "
                            "and neither may hold the tags that are put around them")
        examples.append(Turn(f"example-{number}", "examples", number, _context(row, where), _question(row, where), [],
                             response=response_text(think, rewrite)))
    if not examples:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return examples


# Tasks `search` (arXiv 2503.19470) and `agent`: what those systems tell their models, in our own words.

SEARCH_RULES = r"""
Thoughts stand between <think> and </think>: what is known, and what has to be found next.
A search query stands between <search> and </search>: a few words, one thing at a time.
What the search finds is then shown between <result> and </result>, which only the search engine writes.
Thinking and searching go on until the answer is known; it stands between <answer> and </answer>.
Inside it the exact answer alone, a name, a date, a number, yes or no, is put into \boxed{} with latex format.
The form is: <think>…</think> <search>…</search> <result>…</result> <think>…</think>
<answer>The answer is \[ \boxed{exact answer} \]</answer>"""
SEARCH_INSTRUCTION = "You answer a question by thinking and by searching an encyclopedia." + SEARCH_RULES
SEARCH_DIALOGUE = "A user asks an assistant, who answers by thinking and by searching an encyclopedia." + SEARCH_RULES

AGENT_INSTRUCTION = """\
You answer questions with the help of a tool that searches a collection of passages; rely on what the passages say.
Ask it for one thing at a time, in a few words.  A question often takes several steps: find the first thing, then use \
what you found to ask for the next.  If a search does not help, ask in other words.
When you know the answer, write it between <answer> and </answer>: only a name, a date, a number, yes or no."""

TOOLS_INSTRUCTION = """\
# Tools

Each line between <tools> and </tools> describes a function that you may call:
<tools>
{schemas}
</tools>

To call one, write {how}:
{form}
Its result is then shown to you between <tool_response> and </tool_response>."""

CALL_FORM = '{"name": "…", "arguments": {…}}'


def search_messages(question: str, examples: list[list[dict]] = (), instruction: str = "") -> list[dict]:
    """The chat of the `search` task's instruct form: rules as the system message, the bare question as the user's."""
    return [{"role": "system", "content": instruction or SEARCH_INSTRUCTION}, *(m for e in examples for m in e),
            {"role": "user", "content": " ".join(question.split())}]


def search_text(question: str, examples: list[list[dict]] = (), instruction: str = "") -> str:
    """The `search` prompt of a model without a chat template (a base model): one string that ends in `Assistant:`."""
    shown = [" ".join(f"{m['role'].capitalize()}: {m['content']}" for m in e) for e in examples]
    return "\n".join([instruction or SEARCH_DIALOGUE, *shown, f"User: {' '.join(question.split())} Assistant:"])


def agent_messages(question: str, examples: list[list[dict]] = (), instruction: str = "") -> list[dict]:
    """The chat of the `agent` task; its tools go to the chat template, or into the system message (`spell_tools`)."""
    return [{"role": "system", "content": instruction or AGENT_INSTRUCTION}, *(m for e in examples for m in e),
            {"role": "user", "content": " ".join(question.split())}]


def spell_tools(messages: list[dict], tools: list[dict], bare: bool = False) -> list[dict]:
    """The same chat for a template without tools: schemas stand in the system message, calls and results in texts.

    `bare`: calls are the JSON alone, without tool_call tags.
    """
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = "nothing but this, on one line" if bare else "its name and its arguments as JSON"
    form = CALL_FORM if bare else f"<tool_call>\n{CALL_FORM}\n</tool_call>"
    out: list[dict] = []
    for m in messages:
        content = m["content"]
        if m["role"] == "system":
            content += "\n\n" + TOOLS_INSTRUCTION.format(schemas=schemas, how=how, form=form)
        for call in m.get("tool_calls", []):
            text = call_json(call["function"]) if bare else tool_call_text(call["function"])
            content = (content + "\n" if content else "") + text
        if m["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if out[-1]["role"] == "user":  # parallel calls: their results share a turn
                out[-1]["content"] += "\n" + content
                continue
        out.append({"role": "user" if m["role"] == "tool" else m["role"], "content": content})
    return out


def call_json(function: dict) -> str:
    """A call as JSON: {"name", "arguments" (a mapping, or its JSON)}."""
    arguments = function["arguments"]
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'


def tool_call_text(function: dict) -> str:
    """A call in the hermes form: its JSON between tool_call tags."""
    return f"<tool_call>\n{call_json(function)}\n</tool_call>"


def read_conversations(path: str) -> list[list[dict]]:
    """Few-shot examples of `search` and `agent`: JSONL {"messages": [...]}, each from a user's question to its answer.

    `search`: one user and one assistant message, results included.  `agent`: assistant messages with `tool_calls`
    (function: name, arguments as a mapping), messages of role `tool`, and a last answer.
    """
    conversations = []
    for number, row in read_jsonl(path):
        messages = row.get("messages")
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages] if isinstance(messages, list) else []
        if len(roles) < 2 or roles[0] != "user" or roles[-1] != "assistant" or not all(
                isinstance(m.get("content"), str) for m in messages):
            raise DataError(f"{path}:{number}: messages must run from a user's question to the assistant's answer, "
                            f"each with role and content; the roles are {roles}")
        conversations.append(messages)
    if not conversations:
        raise DataError(f"{path}: no examples; a few-shot prompt needs at least one")
    return conversations


# ------------------------------------------------------------------------------------------------------- chat encoding

TEMPLATE_DATE = "01 Jan 2025"  # some templates (Llama 3) print today's date: pinned, so that prompts stay the same


def defuse(text: str, special: Iterable[str]) -> str:
    """`text` with special-token strings broken by a space (`<|im_end|>` → `< |im_end|>`): data never ends a turn."""
    for token in special:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def special_strings(tokenizer) -> list[str]:
    """Every string that the tokenizer makes one added token of, whether it calls it special or not."""
    # Llama 3 declares its header tokens special without giving them a role, so all_special_tokens lacks them.
    return sorted({*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values())})


FORM_TAGS = {f"<{slash}{name}>" for name in ("think", "rewrite", "search", "result", "answer") for slash in ("", "/")}


def control_strings(tokenizer) -> list[str]:
    """The added tokens that the tokenizer calls special, but the tags that instructions name and responses consist of."""
    added = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return sorted({*tokenizer.all_special_tokens, *added} - FORM_TAGS)


def render_chat(tokenizer, chat: str | list[dict], tools: list[dict] | None = None, answer_next: bool = True) -> str:
    """The text of a chat (a user's text, or role/content messages) in the tokenizer's template; the assistant is next.

    Special-token strings inside the texts are made harmless; the date is pinned.  `tools`: JSON schemas of functions;
    assistant messages may then carry `tool_calls`, and messages of role `tool` hold results.  DataError: a tokenizer
    without a chat template, or one that refuses such messages.
    """
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; use an instruct model, "
                        "or add a chat_template.jinja to its folder")
    special = control_strings(tokenizer)
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    messages = [m | {"content": defuse(m["content"], special)} for m in chat]
    # A macro, because transformers hands no function of ours on to a template.
    template = (f"{{% macro strftime_now(form) %}}{TEMPLATE_DATE}{{% endmacro %}}\n"
                f"{tokenizer.get_chat_template(tools=tools)}")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False,
                                             add_generation_prompt=answer_next, date_string=TEMPLATE_DATE,
                                             enable_thinking=False)
    except jinja2.TemplateError as e:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(f"the chat template of {tokenizer.name_or_path} refuses these messages ({roles}): {e}; use a "
                        "model whose template takes them") from e


def encode_chat(tokenizer, chat: str | list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of `render_chat`.  The template writes BOS itself where the model wants one (once, never twice).

    What examples answered stands there as it is: some templates cut the thoughts off earlier turns.  DataError for a
    template that leaves out another message (of the role system, say): the model would not know what it is to do.
    """
    chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    marked = [m | {"content": f"\ue000{i}\ue001"} if m["role"] == "assistant" else m for i, m in enumerate(chat)]
    text = render_chat(tokenizer, marked, tools)
    if len(chat) > 1:
        special = control_strings(tokenizer)
        contents = [defuse(m["content"], special) for m in chat]
        for m, content in zip(marked, contents):
            if m["role"] == "assistant":
                text = text.replace(m["content"], content)
        shown = "".join(text.split())
        lost = [m for m, content in zip(chat, contents) if "".join(content.split()) not in shown]
        if 0 < len(lost) < len(chat):  # all: a template that is a constant, on purpose
            raise DataError(f"the chat template of {tokenizer.name_or_path} leaves out the message of role "
                            f"{lost[0]['role']} ({lost[0]['content'][:40]!r}…); use a model whose template writes it")
    # Templates of reasoning models open the think block themselves: left to the model, so a response has both tags.
    text = text.rstrip().removesuffix("<think>") if text.rstrip().endswith("<think>") else text
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_text(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt without a template, BOS included where the tokenizer puts one; no EOS, which would end it."""
    ids = tokenizer(defuse(text, control_strings(tokenizer)))["input_ids"]
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def eos_token_ids(tokenizer, generation_config=None) -> list[int]:
    """Ids that end a response: the tokenizer's own first, then the generation config's (an int or a list)."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    ids = ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) + listed
    if not ids:
        raise DataError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token; responses would never end: "
                        "set eos_token")
    return list(dict.fromkeys(ids))


def pad_token_id(tokenizer, eos_ids: list[int], vocabulary: int | None = None) -> int:
    """What fills the unused part of a row: the pad token, or EOS where there is none (masks go by position, not by id).

    Some tokenizers have a pad token that the model has no embedding for: given its `vocabulary`, that is EOS as well.
    """
    pad = tokenizer.pad_token_id
    return eos_ids[0] if pad is None or (vocabulary is not None and pad >= vocabulary) else pad


def decode_response(tokenizer, response_ids: list[int]) -> str:
    """The text of a sampled response, without special tokens and with its blanks as they are: what is parsed.

    Tags of the form stay, also where the tokenizer has them as special tokens.
    """
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    if FORM_TAGS & set(special.values()):
        kept = [i for i in response_ids if special.get(i, "<think>") in FORM_TAGS]
        return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return tokenizer.decode(response_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def without_eos(tokenizer, text: str) -> str:
    """`text` without the EOS strings at its end that data made for other trainers has."""
    while tokenizer.eos_token and text.rstrip().endswith(tokenizer.eos_token):
        text = text.rstrip().removesuffix(tokenizer.eos_token)
    return text


def encode_example(tokenizer, prompt_ids: list[int], response: str, eos_id: int) -> tuple[list[int], list[int]]:
    """(token ids (T+1), loss mask (T)) of a prompt and its target: the response's tokens and one EOS are trained.

    Prompt and response are encoded apart and joined, as a rollout is, so that no token spans the border.  An EOS that
    is spelled out behind the response goes; other special tokens in it are broken, as in prompts.
    """
    response = defuse(without_eos(tokenizer, response), control_strings(tokenizer))
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [eos_id]
    return prompt_ids + response_ids, [0] * (len(prompt_ids) - 1) + [1] * len(response_ids)
