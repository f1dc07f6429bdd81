"""English text to terms, exactly as Lucene does it or as bm25s does.

Copies out with a ValueError named RetrieverError.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache

import numpy as np
import regex
import Stemmer

from search.passages import RetrieverError

STOP_WORDS = frozenset(  # Lucene's EnglishAnalyzer
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with".split()
)

# Lucene's StandardTokenizer: UAX #29 word breaks of Unicode 9 (`regex` has newer ones), keeping
# words with a letter, digit, ideograph or emoji. ASCII_WORD matches ASCII text, CLASS_WORD a
# text's character classes (CLASSES, one letter per character).
ASCII_WORD = re.compile(
    r"(?<!_)_*[A-Za-z0-9]\w*"
    r"(?:(?:(?<=[A-Za-z])[.:'](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*",
    re.ASCII,
)


def _class_pattern() -> re.Pattern:
    x = "[EVZcs]*"  # WB4: marks, formats and joiners extend the character before
    digit, kana, join, dead, hebrew = f"N{x}", f"K{x}", f"_{x}", f"[_-]{x}", f"H{x}"
    letter = f"(?:A{x}|H{x}(?!'|d{x}H))"  # WB7a to WB7c: Hebrew and quotes
    core = (  # WB5 to WB12
        f"(?:{hebrew}(?:'{x}|d{x}{hebrew})|{digit}(?:(?:(?:{join})*|[nq']{x}){digit})*"
        f"|{letter}(?:(?:(?:{join})*|[mq']{x}){letter})*)+"
    )
    part = f"(?:{kana}(?:(?:{join})*{kana})*|{core})"
    word = f"(?:{join})*{part}(?:(?:{join})+{part})*(?:{dead})*"  # WB13
    emoji = "(?:P[EZ]*(?:V|M[EZ]*)?|M[EZ]*)"
    return re.compile(  # \\Z: end of a window
        f"{word}|(?:{join})+\\Z|Z*{emoji}(?:(?:(?<=Z)|Z+){emoji})*|Z+\\Z|#[EZ]*V?c[EZ]*"
        f"|(?:R{x}){{2}}|(?:[Ss]{x})+|[JI]{x}"
    )


CLASS_WORD = _class_pattern()
# The first match is the class of a character (Unicode 9).
CLASSES = [
    ("V", r"[\uFE0E\uFE0F]"),
    ("c", r"\u20E3"),
    ("Z", r"\p{WB=ZWJ}"),
    ("M", r"\p{Emoji_Modifier}"),
    ("s", r"(?=\p{LB=SA})\p{WB=Extend}"),
    ("E", r"[\p{WB=Extend}\p{WB=Format}\u0600-\u0605\u06DD\u070F]"),
    ("H", r"\p{WB=Hebrew_Letter}"),
    ("A", r"(?![\u00B8\u02E5-\u02EB\u055A\u058A\uA708-\uA716])\p{WB=ALetter}"),
    ("N", r"[\p{WB=Numeric}\uFF10-\uFF19]"),
    ("K", r"\p{WB=Katakana}"),
    ("_", r"\p{WB=ExtendNumLet}"),
    ("m", r"(?!\u055F)[\p{WB=MidLetter}:]"),
    ("q", r"\p{WB=MidNumLet}"),
    ("n", r"[\p{WB=MidNum}\uFE10\uFE14]"),
    ("'", r"'"),
    ("d", r'"'),
    ("#", r"[#*]"),
    ("R", r"\p{WB=Regional_Indicator}"),
    ("J", r"\p{Script=Han}"),
    ("I", r"\p{Script=Hiragana}"),
    ("S", r"\p{LB=SA}"),
    (  # Emoji 11
        "P",
        r"[\p{Extended_Pictographic}\u2388\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
        r"\u2708-\u2712\u2763-\u2767\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F"
        r"\U0001F16C-\U0001F16F\U0001F1AD-\U0001F1E5\U0001F260-\U0001F3FA\U0001F400-\U0001F53D"
        r"\U0001F546-\U0001F64F\U0001F680-\U0001F6FF]",
    ),
]


class _Classes(dict):
    """A lazy table of character classes for str.translate."""

    def __missing__(self, code: int) -> str:
        found = (name for name, pattern in CLASSES if regex.fullmatch(pattern, chr(code)))
        self[code] = next(found, " ")
        return self[code]


_CLASSES = _Classes()
NON_ASCII = re.compile(r"(?<![^ ])([\x00-\x1F!-\x7F]*[^\x00-\x7F][^ ]*)")  # chunks between spaces
LONGEST = 255  # characters of a token; longer ones are split
# After this, text beyond a window can't change a match.
SETTLED = re.compile("(?:[EVZcs]*[^EVZcs]){4}")


def _classes(text: str) -> str:
    """Map characters to classes; for fast searches, _ or ZWJ before no word become - or E."""
    classes = text.translate(_CLASSES)
    classes = re.sub(
        "_[_EVZcs]*([AHKN]?)", lambda m: m[0] if m[1] else m[0].replace("_", "-"), classes
    )
    return re.sub("Z+([MP]?)", lambda m: m[0] if m[1] else "E" * len(m[0]), classes)


def standard_words(text: str) -> list[str]:
    """Split a text into words as Lucene's StandardTokenizer does."""
    words = []
    for i, part in enumerate([text] if text.isascii() else NON_ASCII.split(text)):
        if i % 2:
            words += [part[m.start() : m.end()] for m in CLASS_WORD.finditer(_classes(part))]
        else:
            words += ASCII_WORD.findall(part)
    if max(map(len, words), default=0) <= LONGEST:
        return words
    classes, words, at = _classes(text), [], 0
    while True:  # windows, so that no search scans a huge word
        end = at + 4 * LONGEST
        match = CLASS_WORD.search(classes, at, end)
        cut = match and min(match.end(), match.start() + LONGEST)
        if end < len(classes) and not (match and SETTLED.match(classes, cut, end)):
            match = CLASS_WORD.search(classes, at)
        if not match:
            return words
        at = min(match.end(), match.start() + LONGEST)
        words.append(text[match.start() : at])


_porter, _snowball = Stemmer.Stemmer("porter").stemWord, Stemmer.Stemmer("english").stemWords
_stemming = threading.Lock()  # PyStemmer objects are not thread-safe
MEASURED = re.compile("[aeiou][^aeiou]|(?:[^aeiouy]|^y)y[^aeiou]")  # a vowel before a consonant
# A word whose doubled consonant PyStemmer keeps; group 1 has it once.
DOUBLED = re.compile(
    r"(.*(?:([^abdefgilmnoprstuyz])(?=\2)|(?:[^aeiouy]y|[aeiou]yy|^yy)(?:yy)*(?=y))).(?:ing|ed)s?"
)


def porter(word: str) -> str:
    """Stem a lower-case word as Porter's own programs and Lucene do.

    Unlike PyStemmer's "porter", keep words of up to two letters, map -bli to -ble and -logi to
    -log, and undouble any consonant but l, s and z before -ed and -ing.
    """
    if len(word) <= 2:
        return word
    doubled = DOUBLED.fullmatch(word)
    if doubled and MEASURED.search(doubled[1] + doubled[1][-1]):
        return porter(doubled[1])
    stem = _porter(word)
    for old, new in (("bli", "ble"), ("logi", "log")):
        before = stem.removesuffix(old)
        # only a suffix that step 1 removes follows i or y
        ending = re.fullmatch("[iy](es|(ed|ing)?s?)", word[len(stem) - 1 :])
        if before != stem and ending and MEASURED.search(before):
            return _porter(before + new)
    return stem


class LuceneEnglish:
    """Lucene's English analysis: drop 's, lower-case, drop stop words, stem (Porter)."""

    name = "lucene"

    @staticmethod
    @lru_cache(1 << 19)
    def _term(word: str) -> str:
        if len(word) >= 2 and word[-1] in "sS" and word[-2] in "'\u2019\uff07":
            word = word[:-2]
        # by character, as in Java: no final sigma, dotted capital I becomes i
        word = "".join(map(str.lower, word.replace("\u0130", "i")))
        if word in STOP_WORDS:
            return ""
        with _stemming:
            return porter(word)

    def __call__(self, text: str) -> list[str]:
        return [term for term in map(self._term, standard_words(text)) if term]

    @staticmethod
    def lengths(lengths: np.ndarray) -> np.ndarray:
        """Round (M,) passage lengths as Lucene's one-byte SmallFloat does; exact below 40."""
        above = np.maximum(lengths - 24, 1)
        shift = np.maximum(np.frexp(above)[1] - 4, 0)  # four bits are kept
        return np.where(lengths < 24, lengths, 24 + (lengths - 24 >> shift << shift))


class SnowballEnglish:
    """bm25s with PyStemmer: words of two or more characters, exact lengths."""

    name = "snowball"

    def __call__(self, text: str) -> list[str]:
        words = [w for w in re.findall(r"\b\w\w+\b", text.lower()) if w not in STOP_WORDS]
        with _stemming:
            return _snowball(words)

    @staticmethod
    def lengths(lengths: np.ndarray) -> np.ndarray:
        return lengths


def make_analyzer(name: str) -> LuceneEnglish | SnowballEnglish:
    """Return the analyzer `name`. RetrieverError: there is none."""
    for kind in (LuceneEnglish, SnowballEnglish):
        if kind.name == name:
            return kind()
    raise RetrieverError(f"analyzer is {name!r}; it must be lucene or snowball")
