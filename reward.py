"""Rewards of model-written text. Standard library only, no sibling: copy this file alone anywhere.

Sources: ConvSearch-R1 (arXiv 2505.15776, equations 1 and 2, and its released reward function),
ReSearch (arXiv 2503.19470), the SQuAD scorer as FlashRAG has it. Parsing takes linear time; no
exception becomes a low score.
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
    """Split a decoded response (special tokens removed) into its think block and its rewrite block.

    strict: well formed when the stripped text is one think block, white space or nothing, and one
    rewrite block that is not blank, and each tag occurs once; a malformed response has no rewrite.
    paper: see `_parse_paper`.
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
        between, opening, rewrite = rest.partition("<rewrite>")
        if opening and not between.strip() and rewrite.strip():
            return Parsed(think.strip(), rewrite.strip(), True)
    return Parsed(None, None, False)


def _parse_paper(text: str) -> Parsed:
    r"""The original's two searches in training (its `rewrite_r1.py`), bodies as written.

    Format: `<think>.*?</think>\n<rewrite>.*?</rewrite>$` matched at character 0; dot matches
    newline, `$` every line end. Text: the first rewrite block anywhere. Written with `find`: the
    expression takes quadratic time on repeated tags.
    """
    rewrite = _first_block(text, "rewrite")
    joint = "</think>\n<rewrite>"
    middle = text.find(joint, len("<think>")) if text.startswith("<think>") else -1
    if middle < 0:
        return Parsed(None, rewrite, False)
    tail = text[middle + len(joint) :]
    well_formed = "</rewrite>\n" in tail or tail.endswith("</rewrite>")
    return Parsed(text[len("<think>") : middle] if well_formed else None, rewrite, well_formed)


def parse_paper_inference(text: str) -> Parsed:
    """The original's searches at inference (its `infer.py`): the first closed block of either kind,
    anywhere, as written."""
    think, rewrite = (_first_block(text, name) for name in ("think", "rewrite"))
    return Parsed(think, rewrite, think is not None and rewrite is not None)


def _first_block(text: str, name: str) -> str | None:
    _, opening, rest = text.partition(f"<{name}>")
    body, closing, _ = rest.partition(f"</{name}>")
    return body if opening and closing else None


# ---- rank rewards


def _rank(rank: int | None) -> float:
    """The rank, an int >= 1, or infinity for None; ValueError for what the caller got wrong."""
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
    """The rank-incentive reward (ConvSearch-R1, equations 1 and 2) of the best gold passage's rank.

    1 <= rank <= 10      (19 - rank) / 9       2.0 at rank 1, 1.0 at rank 10
    10 < rank <= 100     (100 - rank) / 90     0.9889 at rank 11, 0.0 at rank 100
    beyond, or None      0.0
    """
    rank = _rank(rank)
    return (19 - rank) / 9 if rank <= 10 else max(0.0, (100 - rank) / 90)


def _reward(
    value: Callable[[float], float], cutoff: float = math.inf
) -> Callable[[int | None], float]:
    """A reward that is `value(rank)` up to the cut-off and 0.0 beyond it."""

    def reward(rank: int | None) -> float:
        rank = _rank(rank)
        return value(rank) if rank <= cutoff else 0.0

    return reward


# The paper's ablation (figure 5, table 6), as functions of the best gold passage's rank alone: with
# one gold they are the metrics of the same name.
REWARDS: dict[str, Callable[[int | None], float]] = {
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
    """REWARDS[reward](rank), or `malformed_reward` when the response does not parse.

    rank: of the best gold passage for this response's own rewrite; None beyond the cut-off.
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
    """Fold, lower-case, delete ASCII punctuation, blank out a, an, the, collapse blanks (SQuAD).

    "1,000" is "1000"; accents count: "Cafe" is not "Café". Folding, which the SQuAD scorer lacks,
    is NFKC (composed accents, full width, ligatures) without format characters (soft hyphen, BOM).
    """
    return _without_articles(_plain(s))


def _without_articles(s: str) -> str:
    return " ".join(_ARTICLES.sub(" ", s).split())


def _plain(s: str) -> str:
    if not s.isascii():
        s = "".join(c for c in unicodedata.normalize("NFKC", s) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", s.lower()).translate(_PUNCTUATION)


def _comparable(s: str) -> str:
    """`normalize_answer(s)`, but articles alone stay: of four choices "A" can be right."""
    return normalize_answer(s) or " ".join(_plain(s).split())


def answer_metrics(
    prediction: str | None, golds: str | Iterable[str], published: bool = False
) -> dict[str, float]:
    """The five scores of one answer (ANSWER_METRICS), each the maximum over the golds.

    em         the normalised prediction equals a normalised gold
    f1         token F1 = 2PR / (P + R) of normalised words, counted as multisets
    acc        "sub-EM": a gold is a substring of the prediction ("no" is in "nothing")
    precision  P = common words / predicted words
    recall     R = common words / gold words

    In f1, P and R a gold gives 0 when either side is exactly yes, no or noanswer and the two
    differ. All are 0.0 for an empty or missing prediction. A gold that comes out empty ("???") is
    passed over, one of articles alone ("A") is matched by just these.

    published: FlashRAG's own scores: SQuAD's normalisation alone, and a gold that comes out empty
    equals an empty prediction and is found inside every other.
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
        inside = [gold for gold in golds if normalize_answer(gold)] if predicted else []
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
    """Share of the gold passages among `retrieved`, the ids of an episode's searches."""
    golds = set(gold_ids)
    if isinstance(retrieved, str) or isinstance(gold_ids, str) or not golds:
        raise ValueError(
            f"retrieved={retrieved!r}, gold_ids={gold_ids!r}: give lists of ids, with a gold one"
        )
    return len(golds.intersection(retrieved)) / len(golds)


def all_gold(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """1.0 when every gold passage is among `retrieved`, else 0.0."""
    return float(gold_recall(retrieved, gold_ids) == 1.0)


def extract_answer(text: str) -> str | None:
    """Content of the last closed <answer> block, stripped, or None."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


# An escaped brace is a character, and so is an escaped backslash, unless "\\boxed{" was written
# with a doubled one.
_BRACES = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces match, as written; None when there is none.

    Of nested boxes the inner one is the last.
    """
    best = (-1, -1)
    unclosed = []  # for each open brace: where the box's content starts, or -1 for a plain brace
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

    The blocks think, search, result and answer do not nest; text around them is free. At least one
    think block; one result block after each search block and nowhere else, whose content is not
    read; one answer block, the last, with a matched `\boxed{…}`. The text cannot show that the
    model invented a result, or ended with EOS.
    """
    if text.rfind("<result>") > text.rfind("</result>"):  # not closed
        return False
    tags = ["result" if t.startswith("<result>") else t for t in _SEARCH_TAGS.findall(text)]
    return (
        _SEARCH_FORM.fullmatch("".join(tags)) is not None
        and "<think>" in tags
        and extract_boxed(extract_answer(text)) is not None
    )


def search_well_formed(segments: Iterable[tuple[str, bool]]) -> bool:
    """`check_search_format` of an episode as (text, written by the model?) pieces.

    What the model did not write counts as one empty result block; a result tag that it wrote is
    malformed.
    """
    segments = list(segments)
    own = "".join(text for text, written in segments if written)
    if "<result>" in own or "</result>" in own:
        return False
    return check_search_format(
        "".join(text if written else "<result></result>" for text, written in segments)
    )


def score_answer(scores: dict[str, float], well_formed: bool, reward: str) -> float:
    """What the answer of an episode earns for its `answer_metrics`.

    research   0 unless well formed (its end with EOS included), then the F1, or 0.1 where that is 0
               (ReSearch's code; its paper has no format gate)
    em         exact match without a format gate (Search-R1)
    f1         F1 without a format gate (DeepSearch-RL, whose code doubles that of the first gold)
    """
    if reward == "research":
        return (scores["f1"] or 0.1) if well_formed else 0.0
    if reward not in ("em", "f1"):
        raise ValueError(f"reward is {reward!r}; choose one of research, em, f1")
    return scores[reward]
