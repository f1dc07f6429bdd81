"""BM25 as Lucene scores it: English analysis, the index, search, and the gold's rank by counting.

A file of its own so that sparse search copies out, with data.py and passages.py, and runs without torch: it needs numpy
and PyStemmer, and `regex` for the Unicode properties of what isn't ASCII.

The rule of order is retriever.py's: lists by (score descending, id ascending); a rank is 1 + the number of other
passages whose score is at least the gold's, other golds left out; a score of 0 is no hit.

Agreement with Lucene 9 (Anserini's defaults) is exact, to the bit of a score: its analysis, its passage lengths rounded
to one byte, its float32 arithmetic, summed in float64 (`bench/bm25.py` shows it on real corpora).  A posting therefore
keeps no score, as bm25s has it, but which of a few thousand pairs of a word's count and a passage's length it has
(2 bytes): k1, b and the weight of a word repeated in a query stay free, and an index is smaller.

Shapes: M passages, V distinct words, P postings (pairs of a word and a passage), C pairs of a count and a length.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import mmap
import os
import pickle
import re
import shutil
import threading
import warnings
from array import array
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

import numpy as np

from data import located_passages, Passage
from runs import atomic_folder
from search.passages import (check_k, check_queries, check_same, corpus_bytes, gold_positions,
                             Hits, mapped, mapped_text, PassageIds, passages_of, read_ids,
                             read_meta, RetrieverError, write_ids, write_meta)

# ------------------------------------------------------------------------------------------------------------- analysis

STOP_WORDS = frozenset("a an and are as at be but by for if in into is it no not of on or such that the their then "
                       "there these they this to was will with".split())  # Lucene's EnglishAnalyzer

# Lucene's StandardTokenizer is the word break rules of UAX #29 (Unicode 9), keeping what holds a letter, digit,
# ideograph or emoji.  Here are two forms of its grammar: over ASCII text itself, and over a text's classes, one letter
# a character (CLASSES).  The `regex` module's word boundaries (\b with the WORD flag) would not do: they are of a newer
# Unicode (a colon inside a word parts it), break Thai elsewhere, and are boundaries, not words.  Characters younger
# than Unicode 9 are words here and unknown to Lucene 9.
ASCII_WORD = re.compile(r"(?<!_)_*[A-Za-z0-9]\w*(?:(?:(?<=[A-Za-z])[.:'](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*",
                        re.ASCII)


def _class_pattern() -> re.Pattern:
    x = "[EVZcs]*"  # WB4: marks, format characters and joiners belong to the character before them
    digit, kana, join, dead, hebrew = f"N{x}", f"K{x}", f"_{x}", f"[_-]{x}", f"H{x}"
    letter = f"(?:A{x}|H{x}(?!'|d{x}H))"  # a Hebrew letter before a quotation mark: WB7a to WB7c
    core = (f"(?:{hebrew}(?:'{x}|d{x}{hebrew})|{digit}(?:(?:(?:{join})*|[nq']{x}){digit})*"
            f"|{letter}(?:(?:(?:{join})*|[mq']{x}){letter})*)+")  # WB5 to WB12
    part = f"(?:{kana}(?:(?:{join})*{kana})*|{core})"
    word = f"(?:{join})*{part}(?:(?:{join})+{part})*(?:{dead})*"  # WB13
    emoji = "(?:P[EZ]*(?:V|M[EZ]*)?|M[EZ]*)"
    return re.compile(f"{word}|(?:{join})+\\Z|Z*{emoji}(?:(?:(?<=Z)|Z+){emoji})*|Z+\\Z|#[EZ]*V?c[EZ]*|(?:R{x}){{2}}"
                      f"|(?:[Ss]{x})+|[JI]{x}")  # \\Z: of a window, see standard_words


CLASS_WORD = _class_pattern()
CLASSES = [  # the first that fits a character; by Word_Break (WB), Line_Break (LB) and others, as in Unicode 9
    ("V", r"[\uFE0E\uFE0F]"), ("c", r"\u20E3"), ("Z", r"\p{WB=ZWJ}"), ("M", r"\p{Emoji_Modifier}"),
    ("s", r"(?=\p{LB=SA})\p{WB=Extend}"), ("E", r"[\p{WB=Extend}\p{WB=Format}\u0600-\u0605\u06DD\u070F]"),
    ("H", r"\p{WB=Hebrew_Letter}"), ("A", r"(?![\u00B8\u02E5-\u02EB\u055A\u058A\uA708-\uA716])\p{WB=ALetter}"),
    ("N", r"[\p{WB=Numeric}\uFF10-\uFF19]"), ("K", r"\p{WB=Katakana}"), ("_", r"\p{WB=ExtendNumLet}"),
    ("m", r"(?!\u055F)[\p{WB=MidLetter}:]"), ("q", r"\p{WB=MidNumLet}"), ("n", r"[\p{WB=MidNum}\uFE10\uFE14]"),
    ("'", r"'"), ("d", r'"'), ("#", r"[#*]"), ("R", r"\p{WB=Regional_Indicator}"), ("J", r"\p{Script=Han}"),
    ("I", r"\p{Script=Hiragana}"), ("S", r"\p{LB=SA}"),
    ("P", r"[\p{Extended_Pictographic}\u2388\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712"
          r"\u2763-\u2767\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F16F\U0001F1AD-\U0001F1E5"
          r"\U0001F260-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF]")]  # Emoji 11


class _Classes(dict):
    """For str.translate: the class of a character, looked up when it is first seen."""

    def __missing__(self, code: int) -> str:
        import regex
        character = chr(code)
        self[code] = next((name for name, pattern in CLASSES if regex.fullmatch(pattern, character)), " ")
        return self[code]


_CLASSES = _Classes()
NON_ASCII = re.compile(r"[^\x00-\x7F]")
LONGEST = 255  # characters of a token; a longer one is cut into such pieces
# Characters of a window behind the end of a piece that settle the piece: beyond marks, nothing looks further ahead than
# a letter that joins words, a Hebrew letter and a quotation mark.
SETTLED = re.compile("(?:[EVZcs]*[^EVZcs]){4}")


def _classes(text: str) -> str:
    """The class of every character, for CLASS_WORD.

    A run of _ (and marks) that no word follows becomes -, a run of ZWJ that no emoji follows E, as any other mark: else
    a search would run ahead to the end of the run from each of its characters.
    """
    classes = text.translate(_CLASSES)
    if "_" in classes:
        classes = re.sub("_[_EVZcs]*([AHKN]?)", lambda m: m[0] if m[1] else m[0].replace("_", "-"), classes)
    if "Z" in classes:
        classes = re.sub("Z+([MP]?)", lambda m: m[0] if m[1] else "E" * len(m[0]), classes)
    return classes


def standard_words(text: str) -> list[str]:
    """The words of a text as Lucene's StandardTokenizer finds them."""
    words, at = [], 0
    while match := NON_ASCII.search(text, at):  # what is around it, up to the blanks, goes by classes: slower
        start, end = max(text.rfind(" ", at, match.start()) + 1, at), text.find(" ", match.end())
        words += ASCII_WORD.findall(text, at, start)
        at = end if end >= 0 else len(text)
        words += [text[start + m.start():start + m.end()] for m in CLASS_WORD.finditer(_classes(text[start:at]))]
    words += ASCII_WORD.findall(text, at)
    if not words or max(map(len, words)) <= LONGEST:
        return words
    classes, words, at = _classes(text), [], 0
    while True:  # in windows, as each search would else run to the end of a word that is megabytes long
        end = at + 4 * LONGEST
        match = CLASS_WORD.search(classes, at, end)
        if end < len(classes) and not (
                match and SETTLED.match(classes, min(match.end(), match.start() + LONGEST), end)):
            match = CLASS_WORD.search(classes, at)
        if not match:
            return words
        at = min(match.end(), match.start() + LONGEST)
        words.append(text[match.start():at])


def porter(word: str) -> str:
    """The stem of a lower-case word by Porter's algorithm as his own programs (and Lucene's) have it.

    M. F. Porter, An algorithm for suffix stripping, Program 14(3), 1980.  Three differences from the paper (and from
    PyStemmer's "porter"): words of one and two letters stay, -bli becomes -ble, -logi becomes -log.
    """
    if len(word) <= 2:
        return word
    w = word

    def shape(stem: str) -> str:  # one letter a character, c or v
        out = ""
        for ch in stem:
            out += "v" if ch in "aeiou" or ch == "y" and out[-1:] == "c" else "c"
        return out

    def measure(stem: str) -> int:  # m of [C](VC)^m[V]
        return shape(stem).count("vc")

    def double(stem: str) -> bool:
        return len(stem) > 1 and stem[-1] == stem[-2] and shape(stem)[-1] == "c"

    def short(stem: str) -> bool:  # *o: ends consonant, vowel, consonant, the last not w, x or y
        return shape(stem).endswith("cvc") and stem[-1] not in "wxy"

    def swap(w: str, endings: dict[str, str], least: int) -> str:  # of the ending that fits, where m exceeds `least`
        for ending, new in endings.items():
            if w.endswith(ending):
                stem = w[:-len(ending)]
                return stem + new if measure(stem) > least else w
        return w

    if w.endswith("s"):  # step 1a
        if w.endswith(("sses", "ies")):
            w = w[:-2]
        elif w[-2] != "s":
            w = w[:-1]
    if w.endswith("eed"):  # step 1b
        w = w[:-1] if measure(w[:-3]) > 0 else w
    else:
        stem = w[:-2] if w.endswith("ed") else w[:-3] if w.endswith("ing") else ""
        if "v" in shape(stem):
            w = stem
            if w.endswith(("at", "bl", "iz")):
                w += "e"
            elif double(w):
                w = w if w[-1] in "lsz" else w[:-1]
            elif measure(w) == 1 and short(w):
                w += "e"
    if w.endswith("y") and "v" in shape(w[:-1]):  # step 1c
        w = w[:-1] + "i"
    w = swap(w, STEP_2, 0)
    w = swap(w, STEP_3, 0)
    for ending in STEP_4:
        if w.endswith(ending):
            stem = w[:-len(ending)]
            if measure(stem) > 1 and (ending != "ion" or stem[-1:] in ("s", "t")):
                w = stem
            break
    if w.endswith("e"):  # step 5
        m = measure(w)
        if m > 1 or m == 1 and not short(w[:-1]):
            w = w[:-1]
    return w[:-1] if w.endswith("ll") and measure(w) > 1 else w


def _endings(text: str) -> dict[str, str]:
    return {old: new for old, _, new in (pair.partition(">") for pair in text.split())}


STEP_2 = _endings("ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e ousli>ous "
                  "ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive "
                  "biliti>ble logi>log")
STEP_3 = _endings("icate>ic ative> alize>al iciti>ic ical>ic ful> ness>")
STEP_4 = ("al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize").split()


class LuceneEnglish:
    """Lucene's and Anserini's English analysis: words less 's, in lower case, less stop words, Porter's stems."""

    name = "lucene"

    def __init__(self):
        self._term = lru_cache(1 << 19)(self._analyse)

    @staticmethod
    def _analyse(word: str) -> str:
        """The term of a word; empty for a stop word."""
        if len(word) >= 2 and word[-1] in "sS" and word[-2] in "'\u2019\uFF07":
            word = word[:-2]
        # character by character, as Java does: no final sigma, and a dotted capital I becomes i alone
        word = word.lower() if word.isascii() else "".join("i" if c == "\u0130" else c.lower() for c in word)
        return "" if word in STOP_WORDS else porter(word)

    def __call__(self, text: str) -> list[str]:
        return [term for term in map(self._term, standard_words(text)) if term]

    @staticmethod
    def lengths(lengths: np.ndarray) -> np.ndarray:
        """Passage lengths as Lucene keeps them, in one byte (SmallFloat.byte4ToInt of intToByte4): exact below 40."""
        above = np.maximum(lengths - 24, 1)
        shift = np.maximum(np.frexp(above)[1] - 4, 0)  # of the four bits that are kept
        return np.where(lengths < 24, lengths, 24 + (lengths - 24 >> shift << shift))


class SnowballEnglish:
    """Words of two and more characters in lower case, less the same stop words, Snowball's stems; exact lengths.

    As bm25s and PyStemmer do it.  For results that were measured with it; prefer `LuceneEnglish`.
    """

    name = "snowball"

    def __init__(self):
        import Stemmer
        self._words = re.compile(r"\b\w\w+\b").findall
        self._stemmer, self._lock = Stemmer.Stemmer("english"), threading.Lock()  # PyStemmer is not safe among threads

    def __call__(self, text: str) -> list[str]:
        words = [w for w in self._words(text.lower()) if w not in STOP_WORDS]
        with self._lock:
            return self._stemmer.stemWords(words)

    @staticmethod
    def lengths(lengths: np.ndarray) -> np.ndarray:
        return lengths


def make_analyzer(name: str) -> LuceneEnglish | SnowballEnglish:
    """The analysis of that name, one object for passages and queries; RetrieverError: no such name."""
    for kind in (LuceneEnglish, SnowballEnglish):
        if kind.name == name:
            return kind()
    raise RetrieverError(f"analyzer is {name!r}; it must be lucene (as Lucene and Anserini do it) or snowball (as "
                         "bm25s and PyStemmer do it)")


# ------------------------------------------------------------------------------------------------------------- building

SHARD = 1 << 17  # passages that are counted together: about 300 MB of working memory at 100 words each
BLOCK = 1 << 24  # postings that are merged together
PIECE = 1 << 15  # postings that are read together


@dataclass
class Postings:
    """An inverted index.  Words in the order of their UTF-8 bytes; a word's postings by ascending passage number."""

    words: Words
    start: np.ndarray  # (V + 1,) int64: postings start[v]:start[v + 1] are word v's
    passages: np.ndarray  # (P,) int32 passage numbers
    codes: np.ndarray  # (P,) uint16 or uint32: which pair
    pairs: np.ndarray  # (C, 2) int64: how often the word stands there, and the passage's length in words
    tokens: int  # words of all passages, repeated ones repeated
    documents: int  # passages with a word


class Words:
    """The distinct words in order, one block of UTF-8 with a line feed after each, memory-mapped where it is a file."""

    def __init__(self, text: bytes | mmap.mmap, start: np.ndarray):
        self._text, self._start = text, start  # (V + 1,) int64 first bytes

    def __len__(self) -> int:
        return len(self._start) - 1

    def __getitem__(self, i: int) -> bytes:
        if not 0 <= i < len(self):
            raise IndexError(f"word {i} of {len(self)}")
        return self._text[int(self._start[i]):int(self._start[i + 1]) - 1]

    def find(self, word: str) -> int | None:
        """The number of a word; None where no passage holds it."""
        wanted = word.encode("utf-8", "surrogatepass")
        i = bisect_left(self, wanted)
        return i if i < len(self) and self[i] == wanted else None


def count(passages: Sequence[Passage], analyzer: Callable[[str], list[str]], first: int) -> tuple[list[bytes], dict]:
    """The words of one shard in order, and its postings: passage numbers from `first` on, arrays as in `Postings`."""
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    tokens, lengths = array("i"), np.empty(len(passages), dtype=np.int64)
    for i, passage in enumerate(passages):
        words = analyzer(passage.contents)
        tokens.extend(map(numbers.__getitem__, words))
        lengths[i] = len(words)
    order = sorted(numbers)  # code points, so UTF-8 bytes
    place = np.empty(len(order), dtype=np.int64)
    place[[numbers[word] for word in order]] = np.arange(len(order))
    keys = place[np.frombuffer(tokens, dtype=np.int32)] if tokens else np.empty(0, dtype=np.int64)
    keys = keys * len(passages) + np.repeat(np.arange(len(passages)), lengths)  # by word, then by passage
    keys.sort()
    new = np.flatnonzero(np.diff(keys, prepend=-1))
    times, keys = np.diff(new, append=len(keys)), keys[new]
    word, row = np.divmod(keys, max(len(passages), 1))
    kept, length = np.unique(analyzer.lengths(lengths), return_inverse=True)
    pair = length[row] * (int(times.max(initial=0)) + 1) + times
    pairs, codes = np.unique(pair, return_inverse=True)
    length, times = np.divmod(pairs, int(times.max(initial=0)) + 1)
    return [w.encode("utf-8", "surrogatepass") for w in order], {
        "start": np.searchsorted(word, np.arange(len(order) + 1)), "passages": (row + first).astype(np.int32),
        "codes": codes.astype(np.uint32), "pairs": np.stack([times, kept[length]], axis=1),
        "sizes": np.array([lengths.sum(), np.count_nonzero(lengths)])}


def merge(shards: Sequence[tuple[Iterable[bytes], dict]],
          write: Callable[[str, int, np.dtype, Iterator], object]) -> dict:
    """The shards' postings as one; `write(name, entries, dtype, blocks)` takes each array piece by piece → its results.

    Memory holds the shards' words' numbers (4 bytes a word and shard) and BLOCK postings, however large the index is.
    """
    maps = [np.empty(len(words), dtype=np.int32) for words, _ in shards]
    total = 0

    def words() -> Iterator[bytes]:  # and their numbers, for what follows
        nonlocal total
        last, at = None, [0] * len(shards)
        for word, s in heapq.merge(*(zip(words, repeat(s)) for s, (words, _) in enumerate(shards))):
            if word != last:
                total, last = total + 1, word
                yield word
            maps[s][at[s]] = total - 1
            at[s] += 1

    out = {"words": write("words", 0, np.dtype("S"), words())}
    start = np.zeros(total + 1, dtype=np.int64)
    for own, (_, shard) in zip(maps, shards):
        start[own + 1] += np.diff(shard["start"])
    np.cumsum(start, out=start)
    pairs = np.unique(np.concatenate([shard["pairs"] for _, shard in shards]), axis=0)
    values = pairs[:, 0] << 32 | pairs[:, 1]
    codes = [np.searchsorted(values, shard["pairs"][:, 0] << 32 | shard["pairs"][:, 1]) for _, shard in shards]
    bounds = [0]
    while bounds[-1] < total:  # word numbers at which a block begins
        bounds.append(max(int(np.searchsorted(start, start[bounds[-1]] + BLOCK, "right")) - 1, bounds[-1] + 1))

    def blocks(name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        for low, high in zip(bounds, bounds[1:]):
            block, free = np.empty(start[high] - start[low], dtype=dtype), start[low:high] - start[low]
            for own, code, (_, shard) in zip(maps, codes, shards):
                a, b = np.searchsorted(own, (low, high))  # the words of this shard in the block
                begin, sizes = shard["start"][a], np.diff(shard["start"][a:b + 1])
                values = shard[name][begin:shard["start"][b]]
                to = np.repeat(free[own[a:b] - low] - (shard["start"][a:b] - begin), sizes) + np.arange(len(values))
                block[to] = code[values] if name == "codes" else values
                free[own[a:b] - low] += sizes
            yield block

    small = np.dtype(np.uint16 if len(pairs) <= 1 << 16 else np.uint32)
    for name, dtype in (("passages", np.dtype(np.int32)), ("codes", small)):
        out[name] = write(name, int(start[-1]), dtype, blocks(name, dtype))
    tokens, documents = np.sum([shard["sizes"] for _, shard in shards], axis=0).tolist()
    return out | {"start": start, "pairs": pairs, "tokens": tokens, "documents": documents}


def _words_in_memory(words: Iterable[bytes]) -> Words:
    lines = [word + b"\n" for word in words]
    return Words(b"".join(lines), np.cumsum([0, *map(len, lines)], dtype=np.int64))


def _in_memory(name: str, entries: int, dtype: np.dtype, blocks: Iterator) -> Words | np.ndarray:
    return _words_in_memory(blocks) if name == "words" else np.concatenate([np.empty(0, dtype), *blocks])


def _write_array(path: Path, entries: int, dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
    """An .npy file of `entries` numbers, from pieces."""
    with open(path, "wb") as f:
        np.lib.format.write_array_header_2_0(
            f, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (entries,)})
        for block in blocks:
            f.write(np.ascontiguousarray(block, dtype=dtype).data)


def _write_words(folder: Path, words: Iterable[bytes]) -> None:
    start = array("q", [0])
    with open(folder / "words.txt", "wb") as f:
        for word in words:
            start.append(start[-1] + f.write(word + b"\n"))
    np.save(folder / "words.start.npy", np.frombuffer(start, dtype=np.int64))


def _array(path: Path) -> np.ndarray:
    """An .npy file, memory-mapped; as a plain array, whose slices cost a tenth of np.memmap's."""
    return mapped(path).view(np.ndarray)


def _read_words(folder: Path) -> Words:
    start = _array(folder / "words.start.npy")
    text = mapped_text(folder / "words.txt") if start[-1] else b""
    if start[-1] != len(text):
        raise ValueError(f"{folder}/words.txt and words.start.npy do not belong together")
    return Words(text, start)


class Child:
    """A function's call in a forked process, which shares what this one holds; `result` is what it returns or raises.

    It lives for the one call, so it leaves nobody behind and sees what is in memory now.  It must stay clear of locks
    (another thread may have held one at the fork), of torch and of the GPU.
    """

    def __init__(self, call: Callable[[], object]):
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's about forking beside threads: see above
            self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._read)
                with os.fdopen(write, "wb") as f:
                    try:
                        answer = True, call()
                    except Exception as e:
                        answer = False, e
                    pickle.dump(answer, f)
            finally:
                os._exit(0)
        os.close(write)

    def result(self) -> object:
        with os.fdopen(self._read, "rb") as f:
            answer = f.read()
        _, status = os.waitpid(self._pid, 0)
        try:
            fine, value = pickle.loads(answer)
        except (EOFError, pickle.UnpicklingError) as e:
            raise RuntimeError(f"a worker process of BM25 ended without an answer (status {status}); if it was killed "
                               "for want of memory, use fewer workers") from e
        if not fine:
            raise value
        return value


def build_postings(folder: str | os.PathLike, corpus: str | os.PathLike | Iterable[Passage], analyzer: str = "lucene",
                   workers: int = 1, progress: Callable[[int], None] = lambda n: None) -> int:
    """Write the index of a corpus to `folder`, whole or not at all, in bounded memory → number of passages.

    Each worker process counts a shard of the corpus at a time, which then lies on disk; the shards are merged word by
    word.  progress: is told how many passages more are counted.
    """
    make_analyzer(analyzer)  # its error, before anything is read
    analyse, digest, running, names = make_analyzer(analyzer), hashlib.sha256(), [], []
    passages = ((p for _, _, p in located_passages(os.fspath(corpus))) if isinstance(corpus, (str, os.PathLike))
                else iter(corpus))
    with atomic_folder(os.fspath(folder)) as temporary:
        temporary = Path(temporary)

        def shard(part: list[Passage], first: int) -> Callable[[], None]:
            own = temporary / f"shard-{first}"
            names.append(own)

            def work() -> None:
                own.mkdir()
                words, arrays = count(part, analyse, first)
                _write_words(own, words)
                for name, values in arrays.items():
                    np.save(own / f"{name}.npy", values)
            return work

        def hand_out(part: list[Passage], first: int) -> None:
            work = shard(part, first)
            if workers == 1:
                work()
            else:
                while len(running) >= workers:
                    running.pop(0).result()
                running.append(Child(work))
            progress(len(part))

        def ids() -> Iterator[str]:
            part, first = [], 0
            for passage in passages:
                if passage.id.split() != [passage.id]:
                    raise RetrieverError(f"passage id {passage.id!r} must be non-empty and free of blanks: it becomes a"
                                         " column of TREC files. Rename it.")
                digest.update(f"{passage.id}\x1f{passage.contents}\x1e".encode())  # as passages.survey does
                part.append(passage)
                if len(part) == SHARD:
                    hand_out(part, first)
                    part, first = [], first + SHARD
                yield passage.id
            if part:
                hand_out(part, first)

        try:
            number = write_ids(temporary, ids())
        finally:
            for child in running:
                child.result()
        shards = [(_read_words(own), {name: _array(own / f"{name}.npy")
                                      for name in ("start", "passages", "codes", "pairs", "sizes")}) for own in names]
        _write_postings(temporary, merge(shards, _to_folder(temporary)), number, analyzer,
                        {"corpus": digest.hexdigest(), **corpus_bytes(corpus)})
        for own in names:
            shutil.rmtree(own)
    return number


def _to_folder(folder: Path) -> Callable:
    def write(name: str, entries: int, dtype: np.dtype, blocks: Iterator) -> None:
        if name == "words":
            _write_words(folder, blocks)
        else:
            _write_array(folder / f"{name}.npy", entries, dtype, blocks)
    return write


def _write_postings(folder: Path, merged: dict, number: int, analyzer: str, source: dict) -> None:
    """What remains of an index folder once the large arrays are there; meta.json is last."""
    if not merged["documents"]:
        raise RetrieverError(_no_word(number))
    np.save(folder / "start.npy", merged["start"])
    np.save(folder / "pairs.npy", merged["pairs"])
    write_meta(folder, {"format": FORMAT, "analyzer": analyzer, "count": number, **source,
                        "tokens": merged["tokens"], "documents": merged["documents"]})


def _no_word(number: int) -> str:
    return (f"none of the {number} passages holds a word that can be indexed (only stop words and signs); look at the "
            "corpus file")


FORMAT = "bm25-2"


# --------------------------------------------------------------------------------------------------------------- search

class BM25Retriever:
    """BM25 as Lucene scores it: the sum over the query's words of idf · tf / (tf + k1 (1 - b + b length/mean)).

    A word that stands n times in the query counts n times.  Of a query the first `query_words` words (split at blanks)
    are used; `counts["truncated"]` says how many queries were cut.  A score of 0 is no hit, in lists and in ranks.
    k1, b, query_words and workers may be changed at any time.  Safe to call from several threads.

    Words are taken from the rarest on.  As soon as those that are left can't lift a passage without any of the words so
    far to the k-th best score (or to the gold's), only passages found so far stay in question, and the postings of the
    frequent words are looked up for these alone (Turtle and Flood's MaxScore): the same result from fewer postings.
    """

    def __init__(self, passages: str | os.PathLike | Iterable[Passage], k1: float = 0.9, b: float = 0.4,
                 query_words: int = 1024, analyzer: str = "lucene", workers: int = 1):
        """passages: a corpus file, or data.Passage objects; workers: processes that share the queries of one call."""
        self._setup(k1, b, query_words, analyzer, workers)
        ids, shards, part = [], [], []
        for passage in passages_of(passages):
            ids.append(passage.id)
            part.append(passage)
            if len(part) == SHARD:
                shards.append(count(part, self._analyse, len(ids) - len(part)))
                part = []
        shards.append(count(part, self._analyse, len(ids) - len(part)))
        self.passage_ids = PassageIds(ids)
        self._merged = merge(shards, _in_memory)
        if not self._merged["documents"]:
            raise RetrieverError(_no_word(len(ids)))
        self._index = Postings(**self._merged)

    def _setup(self, k1: float, b: float, query_words: int, analyzer: str, workers: int) -> None:
        self._analyse = make_analyzer(analyzer)
        self.k1, self.b, self.query_words, self.workers = float(k1), float(b), query_words, workers
        self.counts: dict[str, int] = {"truncated": 0}
        self._lock, self._local, self._scored_with = threading.Lock(), threading.local(), None
        self._check()

    def _check(self) -> None:
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise RetrieverError(f"k1 is {self.k1:g}, b {self.b:g}; BM25 needs a finite k1 >= 0 and 0 <= b <= 1. The "
                                 "usual values are 0.9 and 0.4 (QReCC 0.82 and 0.68).")
        check_k(self.query_words, "query_words")
        check_k(self.workers, "workers")

    def save(self, folder: str | os.PathLike, corpus_print: str = "") -> None:
        """Write the index to `folder`, whole or not at all; `BM25Retriever.open` maps it into memory.

        For a corpus that is larger than memory there is `build_postings`.
        """
        index = self._index
        with atomic_folder(os.fspath(folder)) as temporary:
            write, temporary = _to_folder(Path(temporary)), Path(temporary)
            write_ids(temporary, self.passage_ids)
            write("words", 0, np.dtype("S"), iter(index.words))
            for name in ("passages", "codes"):
                values = getattr(index, name)
                write(name, len(values), values.dtype, [values])
            _write_postings(temporary, vars(index), len(self.passage_ids), self._analyse.name,
                            {"corpus": corpus_print})

    @classmethod
    def open(cls, folder: str | os.PathLike, k1: float = 0.9, b: float = 0.4, query_words: int = 1024,
             analyzer: str = "lucene", workers: int = 1) -> BM25Retriever:
        """A saved index, memory-mapped.  RetrieverError: no index, another format, another analyzer."""
        folder, self = Path(folder), cls.__new__(cls)
        meta = read_meta(folder)
        if meta is None or meta.get("format") != FORMAT:
            raise RetrieverError(f"there is no BM25 index of format {FORMAT} at {folder}; build it with: python "
                                 "retriever.py kind=bm25 corpus=FILE index="
                                 f"{folder.parent if folder.name == 'bm25' else 'OUT'}")
        check_same(folder, meta, {"analyzer": analyzer}, "Give the value it was built with, or build another index.")
        self._setup(k1, b, query_words, analyzer, workers)
        try:
            self.passage_ids = read_ids(folder)
            self._index = Postings(words=_read_words(folder), tokens=meta["tokens"], documents=meta["documents"],
                                   **{name: _array(folder / f"{name}.npy")
                                      for name in ("start", "passages", "codes", "pairs")})
        except (OSError, ValueError, KeyError) as e:
            raise RetrieverError(f"the BM25 index at {folder} is damaged ({e}); delete it and build it again") from e
        if (len(self.passage_ids) != meta["count"]
                or not self._index.start[-1] == len(self._index.passages) == len(self._index.codes)):
            raise RetrieverError(f"the BM25 index at {folder} is damaged: its files hold {len(self.passage_ids):,} ids "
                                 f"and {len(self._index.passages):,} postings, and they don't fit. Build it again.")
        return self

    # ------------------------------------------------------------------------------------------------------- one query

    def _words(self, query: str) -> list[tuple[int, int]]:
        """(word number, times) of the query's known words."""
        words = query.split()
        if len(words) > self.query_words:
            with self._lock:
                self.counts["truncated"] += 1
            query = " ".join(words[:self.query_words])
        times: dict[str, int] = {}
        for word in self._analyse(query):
            times[word] = times.get(word, 0) + 1
        return [(number, n) for word, n in times.items() if (number := self._index.words.find(word)) is not None]

    def _divisors(self) -> np.ndarray:
        """(C,) float32: 1 + tf / (k1 (1 - b + b length/mean)) of every pair, in Lucene's order of operations."""
        settings = self.k1, self.b
        known = self._scored_with
        if known is None or known[0] != settings:
            self._check()
            k1, b, one = np.float32(self.k1), np.float32(self.b), np.float32(1)
            times, length = self._index.pairs.T.astype(np.float32)
            mean = np.float32(self._index.tokens / self._index.documents)
            with np.errstate(divide="ignore"):  # k1 = 0: a word counts its idf wherever it stands
                known = settings, one + times * (one / (k1 * ((one - b) + b * length / mean)))
            self._scored_with = known
        return known[1]

    def _lists(self, words: Sequence[tuple[int, int]]) -> list[tuple[float, np.ndarray, np.ndarray, np.ndarray]]:
        """(most it can add, passages, codes, what each code adds) of every word, the rarest first."""
        index, divisors, lists = self._index, self._divisors(), []
        for number, times in words:
            low, high = index.start[number:number + 2].tolist()
            n = high - low
            idf = np.float32(math.log(1 + (index.documents - n + 0.5) / (n + 0.5)))
            weight = np.float32(times) * idf
            lists.append((float(weight), index.passages[low:high], index.codes[low:high], weight - weight / divisors))
        return sorted(lists, key=lambda entry: -entry[0])

    def _totals(self) -> np.ndarray:
        """(M,) float64 zeros, this thread's own; whoever changes them makes them zero again."""
        if getattr(self._local, "totals", None) is None:
            self._local.totals = np.zeros(len(self.passage_ids))
        return self._local.totals

    def _best(self, lists: list, k: int | None = None, floor: float = 0.0,
              enough: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
        """Passage numbers and float32 scores: all passages above 0 that can be among the k best, or score `floor`.

        None once `enough` passages are known to score `floor`.  When to stop reading lists and start looking passages
        up in them follows what numpy takes for either; it changes no result.
        """
        totals, read, rows, last = self._totals(), [], None, math.inf
        rest = sum(entry[0] for entry in lists)  # more than the words that are left can add
        unread = sum(len(entry[1]) for entry in lists)

        def least() -> float:  # what a passage needs by now; a little less, so that no rounding leaves one out
            return floor * (1 - 1e-6) - rest

        try:
            for weight, passages, codes, gains in lists:
                # worth it where having the last word alone isn't enough, and much is left that need not be read
                if rows is None and least() > 0.7 * last and 4 * unread > min(len(totals), 2 * sum(map(len, read))):
                    rows = self._above(totals, read, least())
                    if 8 * len(rows) >= len(passages):
                        rows = None
                rest, unread, last = rest - weight, unread - len(passages), weight
                if rows is None:
                    read.append(passages)
                    scores = self._read(totals, passages, codes, gains, k)
                else:
                    at = np.minimum(passages.searchsorted(rows), len(passages) - 1)
                    here = passages.take(at) == rows
                    totals[rows[here]] += gains[codes[at[here]]]
                    scores = totals.take(rows)
                    rows = rows[scores >= least()]
                if k is not None:
                    floor = max(floor, _kth(scores, k))
                elif enough is not None and np.count_nonzero(scores >= floor) >= enough:
                    return None
            rest = 0.0
            if rows is None:
                rows = self._above(totals, read, least())
            return rows, totals.take(rows).astype(np.float32)
        finally:
            if sum(map(len, read)) > len(totals):
                totals.fill(0)
            else:
                for passages in read:
                    totals[passages.astype(np.intp)] = 0

    @staticmethod
    def _read(totals: np.ndarray, passages: np.ndarray, codes: np.ndarray, gains: np.ndarray,
              k: int | None) -> np.ndarray:
        """Add a word's list to the totals → the passages' totals, or of a long list the largest of each few of them.

        Piece by piece, which keeps what is at work in the processor's cache.
        """
        group, tops = len(passages) // (16 * k) if k else 1, []
        for low in range(0, len(passages), PIECE):
            at = passages[low:low + PIECE].astype(np.intp)  # by other integers numpy gathers far slower
            scores = totals.take(at)
            scores += gains.take(codes[low:low + PIECE])
            totals[at] = scores
            tops.append(scores if group <= 1 else scores[:len(scores) // group * group].reshape(group, -1).max(axis=0))
        return np.concatenate(tops)

    @staticmethod
    def _above(totals: np.ndarray, read: list[np.ndarray], least: float) -> np.ndarray:
        """The passages of the lists so far whose total is at least that, each once: int32."""
        least = max(least, 1e-30)
        if 2 * sum(map(len, read)) > len(totals):
            return np.flatnonzero(totals >= least).astype(np.int32)
        found = [np.empty(0, np.intp)]
        for passages in read:
            for low in range(0, len(passages), PIECE):
                at = passages[low:low + PIECE].astype(np.intp)
                scores = totals.take(at)
                if (kept := scores >= least).any():
                    found.append(at[kept])
                    totals[found[-1]] = -scores[kept]  # so that the next list doesn't find it again
        rows = np.concatenate(found)
        totals[rows] = -totals.take(rows)
        return rows.astype(np.int32)

    def scores(self, query: str) -> np.ndarray | None:
        """(M,) float32 scores of all passages; None where no word of the query is in the corpus."""
        if not (words := self._words(query)):
            return None
        totals = np.zeros(len(self.passage_ids))
        for _, passages, codes, gains in self._lists(words):
            totals[passages] += gains[codes]
        return totals.astype(np.float32)

    def _hits(self, words: Sequence[tuple[int, int]], k: int) -> Hits:
        if not words:
            return []
        rows, scores = self._best(self._lists(words), k)
        if len(rows) > k:
            rows, scores = rows[kept := scores >= np.partition(scores, -k)[-k]], scores[kept]
        order = np.lexsort((self.passage_ids.order[rows], -scores))[:k]
        return [(self.passage_ids[row], score) for row, score in zip(rows[order].tolist(), scores[order].tolist())]

    def _rank(self, words: Sequence[tuple[int, int]], golds: Sequence[int], cutoff: int) -> int | None:
        lists, golds = self._lists(words), np.unique(np.array(golds, dtype=np.int32))
        own = np.zeros(len(golds))
        for _, passages, codes, gains in lists:
            at = np.minimum(passages.searchsorted(golds), len(passages) - 1)
            here = passages[at] == golds
            own[here] += gains[codes[at[here]]]
        own = own.astype(np.float32)
        best = own.max()
        if best <= 0 or (found := self._best(lists, floor=float(best), enough=cutoff + len(golds))) is None:
            return None
        rank = 1 + int(np.count_nonzero(found[1] >= best)) - int(np.count_nonzero(own >= best))
        return rank if rank <= cutoff else None

    # ---------------------------------------------------------------------------------------------------- many queries

    def _all(self, work: Callable, entries: list) -> list:
        """`work` of every entry, shared among the worker processes where it is worth the forks."""
        self._divisors()  # its error here, and once for all
        if self.workers == 1 or len(entries) < 8 * self.workers:
            return [work(*entry) for entry in entries]
        children = [Child(lambda part=entries[i::self.workers]: [work(*entry) for entry in part])
                    for i in range(self.workers)]
        out: list = [None] * len(entries)
        for i, child in enumerate(children):
            out[i::self.workers] = child.result()
        return out

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best k passages of every query whose score is above 0, by (score descending, id ascending)."""
        queries = check_queries(queries)
        check_k(k)
        once = list(dict.fromkeys(queries))
        done = dict(zip(once, self._all(self._hits, [(self._words(query), k) for query in once])))
        return [list(done[query]) for query in queries]

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query by the rule of order; None beyond `cutoff` or where its score is 0."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        wanted = list(zip(queries, map(tuple, gold_positions(self.passage_ids, queries, gold_ids))))
        words = {query: self._words(query) for query in dict.fromkeys(queries)}
        once = [pair for pair in dict.fromkeys(wanted) if words[pair[0]]]
        done = dict(zip(once, self._all(self._rank, [(words[query], gold, cutoff) for query, gold in once])))
        return [done.get(pair) for pair in wanted]


def _kth(scores: np.ndarray, k: int) -> float:
    """The k-th largest of the scores, 0 where there are fewer."""
    return float(np.partition(scores, -k)[-k]) if len(scores) >= k else 0.0
