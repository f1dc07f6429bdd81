"""Rewards of model-written text. The file copies out alone: it needs only the standard library.

Sources: ConvSearch-R1 (arXiv 2505.15776, equations 1 and 2, released code), ReSearch (arXiv
2503.19470), FlashRAG's SQuAD scorer. Parsing takes linear time. Errors never become low scores.
"""

from __future__ import annotations

import math
import operator
import re
import string
import unicodedata
from collections import Counter
from typing import Callable, Iterable, NamedTuple


class Parsed(NamedTuple):
    think: str | None
    rewrite: str | None
    well_formed: bool


TAGS = ("<think>", "</think>", "<rewrite>", "</rewrite>")


def parse_response(text: str, parser: str = "strict") -> Parsed:
    """Split a decoded response (special tokens removed) into think and rewrite blocks.

    strict: the stripped text must be a think block and a non-blank rewrite block, with only
    whitespace between them and each tag once; else there is no rewrite. paper: see `_parse_paper`.
    """
    if parser == "paper":
        return _parse_paper(text)
    if parser != "strict":
        raise ValueError(f"parser is {parser!r}; choose 'strict' or 'paper'")
    text = text.strip()
    if (
        all(text.count(tag) == 1 for tag in TAGS)
        and text.startswith("<think>")
        and text.endswith("</rewrite>")
    ):
        think, _, rest = text[len("<think>") : -len("</rewrite>")].partition("</think>")
        between, _, rewrite = rest.partition("<rewrite>")
        if not between.strip() and rewrite.strip():
            return Parsed(think.strip(), rewrite.strip(), True)
    return Parsed(None, None, False)


def _parse_paper(text: str) -> Parsed:
    r"""Parse as in the paper's training (`rewrite_r1.py`), without stripping.

    Well formed: `<think>.*?</think>\n<rewrite>.*?</rewrite>$` matches at the start (DOTALL,
    MULTILINE). The rewrite is the first such block anywhere. The regex itself would take quadratic
    time on repeated tags.
    """
    start, _, tail = text.partition("</think>\n<rewrite>")
    closed = "</rewrite>\n" in tail or tail.endswith("</rewrite>")
    well_formed = start.startswith("<think>") and closed
    think = start.removeprefix("<think>") if well_formed else None
    return Parsed(think, _first_block(text, "rewrite"), well_formed)


def parse_paper_inference(text: str) -> Parsed:
    """Parse as in the paper's inference (`infer.py`): the first block of each kind, unstripped."""
    think, rewrite = (_first_block(text, name) for name in ("think", "rewrite"))
    return Parsed(think, rewrite, think is not None and rewrite is not None)


def _first_block(text: str, name: str) -> str | None:
    _, _, rest = text.partition(f"<{name}>")
    body, closing, _ = rest.partition(f"</{name}>")
    return body if closing else None


# ---- rank rewards


def _rank(rank: int | None) -> float:
    """Return the rank, infinity for None; ValueError unless it is an int >= 1."""
    if rank is None:
        return math.inf
    try:  # numpy integers pass, floats do not
        number = operator.index(rank)
    except TypeError:
        number = 0
    if number < 1 or isinstance(rank, bool):
        raise ValueError(
            f"rank is {rank!r}; a rank is an int counted from 1, or None when no gold was found. "
            "NaN marks a technical failure of the retriever: exclude that rollout and count it."
        )
    return number


def rank_incentive(rank: int | None) -> float:
    """Return the rank-incentive reward (ConvSearch-R1, equations 1 and 2) of the best gold rank.

    1 <= rank <= 10      (19 - rank) / 9       2.0 at rank 1, 1.0 at rank 10
    10 < rank <= 100     (100 - rank) / 90     0.9889 at rank 11, 0.0 at rank 100
    beyond, or None      0.0
    """
    rank = _rank(rank)
    return (19 - rank) / 9 if rank <= 10 else max(0.0, (100 - rank) / 90)


Reward = Callable[[int | None], float]


def _reward(value: Callable[[float], float], cutoff: float = math.inf) -> Reward:
    return lambda rank: value(_rank(rank)) if _rank(rank) <= cutoff else 0.0


# The paper's ablation (figure 5, table 6), by the best gold passage's rank alone: with one gold
# they equal the metrics of the same name.
REWARDS: dict[str, Reward] = {
    "rank_incentive": rank_incentive,
    "reciprocal": _reward(lambda rank: 1 / rank),
    "exponential": _reward(lambda rank: math.exp(1 - rank)),
    "mrr@3": _reward(lambda rank: 1 / rank, 3),
    "ndcg@3": _reward(lambda rank: 1 / math.log2(rank + 1), 3),
    "recall@10": _reward(lambda rank: 1.0, 10),
    "recall@100": _reward(lambda rank: 1.0, 100),
}


def score_rewrite(
    text: str,
    rank: int | None,
    malformed_reward: float = -0.1,
    reward: str = "rank_incentive",
    parser: str = "strict",
) -> float:
    """Return REWARDS[reward](rank), or `malformed_reward` if the response does not parse.

    rank: of the best gold passage for this rewrite; None beyond the cut-off.
    """
    if reward not in REWARDS:
        raise ValueError(f"reward is {reward!r}; choose one of {', '.join(REWARDS)}")
    return REWARDS[reward](rank) if parse_response(text, parser).well_formed else malformed_reward


# ---- answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = ("yes", "no", "noanswer")
ANSWER_METRICS = ("em", "f1", "acc", "precision", "recall")  # in the order of FlashRAG's files


def normalize_answer(s: str) -> str:
    """Normalise as SQuAD: lower-case, drop ASCII punctuation and articles, collapse blanks.

    Beyond SQuAD, text is NFKC without format characters (soft hyphen, BOM). "1,000" is "1000";
    "Cafe" is not "Café".
    """
    return _without_articles(_plain(s))


def _without_articles(s: str) -> str:
    return " ".join(_ARTICLES.sub(" ", s).split())


def _plain(s: str) -> str:
    if not s.isascii():
        s = "".join(c for c in unicodedata.normalize("NFKC", s) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", s.lower()).translate(_PUNCTUATION)


def _comparable(s: str) -> str:
    """Normalise, but keep articles that stand alone: "A" may be a choice."""
    return normalize_answer(s) or " ".join(_plain(s).split())


def answer_metrics(
    prediction: str | None, golds: str | Iterable[str], published: bool = False
) -> dict[str, float]:
    """Return ANSWER_METRICS of one answer, each the maximum over the golds.

    em         normalised prediction and gold are equal
    f1         2PR / (P + R) of normalised words, counted as multisets
    acc        the gold is a substring of the prediction ("no" is in "nothing")
    precision  P = common words / predicted words
    recall     R = common words / gold words

    f1, P and R are 0 where one side is yes, no or noanswer and the other differs. An empty
    prediction scores 0. Golds that normalise to nothing ("???") are skipped; a gold of articles
    ("A") matches only articles.

    published: FlashRAG's own scores, by SQuAD's normalisation; a gold that normalises to nothing
    equals an empty prediction and is part of every other.
    """
    texts = [prediction or "", *([golds] if isinstance(golds, str) else golds)]
    scores = dict.fromkeys(ANSWER_METRICS, 0.0)
    if published:
        plain = (text.lower().translate(_PUNCTUATION) for text in texts)
        predicted, *golds = map(_without_articles, plain)
        inside = golds
    else:
        predicted, *golds = map(_comparable, texts)
        golds = [gold for gold in golds if gold]
        inside = [gold for gold in golds if normalize_answer(gold)]
    scores["em"] = float(predicted in golds)
    scores["acc"] = float(predicted in golds or any(gold in predicted for gold in inside))
    for gold in golds:
        if predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
            continue
        words, gold_words = predicted.split(), gold.split()
        common = sum((Counter(words) & Counter(gold_words)).values())
        if common:
            p, r = common / len(words), common / len(gold_words)
            # FlashRAG's arithmetic, to the last bit
            found = {"f1": (2 * p * r) / (p + r), "precision": p, "recall": r}
            scores |= {name: max(value, scores[name]) for name, value in found.items()}
    return scores


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    return answer_metrics(prediction, golds)["em"]


def f1_score(prediction: str | None, golds: str | Iterable[str]) -> float:
    return answer_metrics(prediction, golds)["f1"]


def gold_recall(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """Return the share of gold passages in `retrieved`; ValueError without golds."""
    golds = set(gold_ids)
    if isinstance(retrieved, str) or isinstance(gold_ids, str) or not golds:
        raise ValueError(f"{retrieved=!r}, {gold_ids=!r}: give lists of ids, with a gold one")
    return len(golds.intersection(retrieved)) / len(golds)


def all_gold(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """Return 1.0 if all gold passages are in `retrieved`, else 0.0."""
    return float(gold_recall(retrieved, gold_ids) == 1.0)


def extract_answer(text: str) -> str | None:
    """Return the last closed <answer> block, stripped, or None."""
    before, _, _ = text.rpartition("</answer>")
    _, opening, block = before.rpartition("<answer>")
    return block.partition("</answer>")[0].strip() if opening else None


# Escaped braces and backslashes are plain characters, but "\\boxed{" may have a doubled backslash.
_BRACES = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` with matching braces, unstripped, or None.

    Of nested boxes, the inner one counts.
    """
    best = (-1, -1)
    unclosed = []  # per open brace: start of the box's content, or -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            unclosed.append(-1)
        elif token == "\\boxed{":
            unclosed.append(match.end())
        elif token == "}" and unclosed:
            best = max(best, (unclosed.pop(), match.start()))
    return text[best[0] : best[1]] if best[0] >= 0 else None


_SEARCH_TAGS = re.compile(r"<result>.*?</result>|</?(?:think|search|result|answer)>", re.DOTALL)
_SEARCH_FORM = re.compile(r"(?:<think></think>|<search></search>result)*<answer></answer>")


def check_search_format(text: str) -> bool:
    r"""Is this response a well-formed search trajectory (ReSearch)?

    It needs a think block, a result block after each search block and nowhere else, and one answer
    block at the end with a closed `\boxed{…}`. Blocks do not nest; text around them and in results
    is free. Invented results and a missing EOS are not detected.
    """
    if text.rfind("<result>") > text.rfind("</result>"):  # not closed
        return False
    tags = ["result" if t.startswith("<result>") else t for t in _SEARCH_TAGS.findall(text)]
    return (
        _SEARCH_FORM.fullmatch("".join(tags)) is not None
        and "<think>" in tags
        and extract_boxed(extract_answer(text)) is not None
    )


def search_well_formed(segments: list[tuple[str, bool]]) -> bool:
    """Apply `check_search_format` to an episode's segments (text, written by the model?).

    Other segments count as empty result blocks; result tags by the model are malformed.
    """
    own = "".join(text for text, written in segments if written)
    text = "".join(text if written else "<result></result>" for text, written in segments)
    return "<result>" not in own and check_search_format(text)


def score_answer(scores: dict[str, float], well_formed: bool, reward: str) -> float:
    """Return an episode's reward from its `answer_metrics`.

    research   0 unless well formed (with EOS), else F1, or 0.1 if F1 is 0 (ReSearch's code; its
               paper has no format gate)
    em         exact match, no format gate (Search-R1)
    f1         F1, no format gate (DeepSearch-RL, whose code doubles that of the first gold)
    """
    if reward == "research":
        return (scores["f1"] or 0.1) if well_formed else 0.0
    if reward not in ("em", "f1"):
        raise ValueError(f"reward is {reward!r}; choose one of research, em, f1")
    return scores[reward]
