"""Rewards of model-written text. Standard library only, no sibling: copy this file alone anywhere.

1. `parse_response`: think block and rewrite block of a response (task `rewrite`).
2. `rank_incentive` and its alternatives in `REWARDS`, joined with the parser in `score_rewrite`.
3. Answers (tasks `search` and `agent`): normalisation, EM, F1, extraction, format of a trajectory.

Sources: ConvSearch-R1 (arXiv 2505.15776, equations 1 and 2, and its released reward function),
ReSearch (arXiv 2503.19470), the SQuAD scorer as FlashRAG has it. Where this file differs from them:

* The strict parser accepts exactly one think block and one rewrite block. The original's expression
  (`parser="paper"`) lets an empty rewrite and a rewrite inside the think block pass.
* A malformed response has no rewrite (strict).
* Answers are compared without invisible marks and in compatibility form (`normalize_answer`), and a
  golden answer of which nothing is left ("???") is none. `published=True` gives FlashRAG's scores.
* The format check of a search trajectory does not read what stands inside result blocks.

Parsing takes linear time. No exception is caught and turned into a low score.
"""

from __future__ import annotations

import math
import operator
import re
import string
import unicodedata
from collections import Counter
from typing import Callable, Iterable, NamedTuple

# ---------------------------------------------------------------------------------------- responses


class Parsed(NamedTuple):
    """What a response holds; `think` and `rewrite` are None where it has none."""

    think: str | None
    rewrite: str | None
    well_formed: bool


TAGS = ("<think>", "</think>", "<rewrite>", "</rewrite>")


def parse_response(text: str, parser: str = "strict") -> Parsed:
    """Split a decoded response (special tokens removed) into its think block and its rewrite block.

    strict: well formed when the stripped text is one think block, white space or nothing, and one
    rewrite block that is not blank, and each of the four tags occurs once; bodies are stripped.
    paper: see `_parse_paper`; bodies as written, and a malformed response may have a rewrite.
    An empty think block is well formed under both. ValueError for an unknown parser.
    """
    if parser == "paper":
        return _parse_paper(text)
    if parser != "strict":
        raise ValueError(
            f"parser is {parser!r}; there are 'strict' and 'paper'. Choose one of them."
        )
    text = text.strip()
    malformed = Parsed(None, None, False)
    if any(text.count(tag) != 1 for tag in TAGS):
        return malformed
    if not (text.startswith("<think>") and text.endswith("</rewrite>")):
        return malformed
    think, _, rest = text[len("<think>") : -len("</rewrite>")].partition("</think>")
    # no opening: it stands inside the think block
    between, opening, rewrite = rest.partition("<rewrite>")
    rewrite = rewrite.strip()
    if not opening or between.strip() or not rewrite:
        return malformed
    return Parsed(think.strip(), rewrite, True)


def _parse_paper(text: str) -> Parsed:
    r"""The original's two searches in training (`rewrite_r1.py` of the ConvSearch-R1 repository).

    Format: `<think>.*?</think>\n<rewrite>.*?</rewrite>$` matched at character 0; dot matches
    newline, `$` every line end. Text: the first rewrite block anywhere, also when the format is
    wrong. Written with `find`, because the expression takes quadratic time on repeated tags.
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
    """The original's searches at inference (`infer.py` of the ConvSearch-R1 repository).

    Well formed when there is a closed think block anywhere and a closed rewrite block anywhere, in
    any order; the first of each counts, as written. A rewrite of a malformed response is offered
    too.
    """
    think, rewrite = (_first_block(text, name) for name in ("think", "rewrite"))
    return Parsed(think, rewrite, think is not None and rewrite is not None)


def _first_block(text: str, name: str) -> str | None:
    _, opening, rest = text.partition(f"<{name}>")
    body, closing, _ = rest.partition(f"</{name}>")
    return body if opening and closing else None


# ------------------------------------------------------------------------------------- rank rewards


def _rank(rank: int | None) -> int | None:
    """The rank, an int >= 1 or None; ValueError for anything else, a fault of the caller."""
    if rank is None:
        return None
    try:  # numpy integers pass, floats do not
        number = None if isinstance(rank, bool) else operator.index(rank)
    except TypeError:
        number = None
    if number is None or number < 1:
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

    ValueError for 0, negative numbers, floats (NaN too) and bools.
    """
    rank = _rank(rank)
    if rank is None or rank > 100:
        return 0.0
    return (19 - rank) / 9 if rank <= 10 else (100 - rank) / 90


def _reward(
    value: Callable[[int], float], cutoff: float = math.inf
) -> Callable[[int | None], float]:
    """A reward that is `value(rank)` up to the cut-off, 0.0 beyond it and for None."""

    def reward(rank: int | None) -> float:
        rank = _rank(rank)
        return value(rank) if rank is not None and rank <= cutoff else 0.0

    return reward


# The paper's ablation (figure 5, table 6), as functions of the best gold passage's rank alone. With
# one gold they are the metrics of the same name. With several, ndcg@3 is the DCG of the best gold
# over the ideal DCG of a single one, and recall is 1 as soon as one gold is in the list.
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
    """REWARDS[reward](rank), or `malformed_reward` when the response does not parse, whatever the
    rank.

    rank: of the best gold passage for this response's own rewrite; None beyond the cut-off, and
    when nothing was searched. ValueError for an unknown reward or parser and for an impossible
    rank.
    """
    if reward not in REWARDS:
        raise ValueError(
            f"reward is {reward!r}; there are {', '.join(REWARDS)}. Choose one of them."
        )
    return REWARDS[reward](rank) if parse_response(text, parser).well_formed else malformed_reward


# ------------------------------------------------------------------------------------------ answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = ("yes", "no", "noanswer")
ANSWER_METRICS = ("em", "f1", "acc", "precision", "recall")  # in the order of FlashRAG's files


def normalize_answer(s: str) -> str:
    """Fold, lower-case, delete ASCII punctuation, blank out a, an, the, collapse blanks (SQuAD).

    Punctuation is deleted, not turned into a blank: "1,000" is "1000", "O'Brien" is "obrien", and,
    by the same rule, "3.5" is "35". Curly quotes and dashes stay; accents count: "Cafe" is not
    "Café". Folding is ours, the SQuAD scorer lacks it: NFKC (composed accents, full width,
    ligatures) without format characters (category Cf: zero width, direction marks, soft hyphen,
    BOM).
    """
    return " ".join(_ARTICLES.sub(" ", _plain(s)).split())


def _plain(s: str) -> str:
    if not s.isascii():
        s = "".join(c for c in unicodedata.normalize("NFKC", s) if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFKC", s.lower()).translate(_PUNCTUATION)


def _comparable(s: str) -> str:
    """`normalize_answer(s)`, but articles alone stay: of four choices "A" can be right."""
    return normalize_answer(s) or " ".join(_plain(s).split())


def _published(s: str) -> str:
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def answer_metrics(
    prediction: str | None, golds: str | Iterable[str], published: bool = False
) -> dict[str, float]:
    """The five scores of one answer (ANSWER_METRICS), each the maximum over the golds.

    em         the normalised prediction equals a normalised gold
    f1         token F1 = 2PR / (P + R) of normalised words, counted as multisets
    acc        "sub-EM": a gold is a substring of the prediction ("no" is in "nothing")
    precision  P = common words / predicted words
    recall     R = common words / gold words

    P, R and F1 may come from different golds. In these three a gold gives 0 when either side is
    exactly yes, no or noanswer and the two differ. Tokens are what white space separates: in
    scripts without blanks (Chinese, Japanese, Thai) only an exact copy earns. All are 0.0 for an
    empty or missing prediction. A gold that comes out empty ("???") is passed over, one of articles
    alone ("A") is matched by just these.

    published: FlashRAG's own scores: SQuAD's normalisation alone, and a gold that comes out empty
    equals an empty prediction and is found inside every other.
    """
    normalise = _published if published else _comparable
    predicted = normalise(prediction or "")
    golds = list(map(normalise, [golds] if isinstance(golds, str) else golds))
    scores = dict.fromkeys(ANSWER_METRICS, 0.0)
    if published:
        inside = golds
    else:
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
    """1.0 when the normalised prediction equals a normalised gold, else 0.0 (`answer_metrics`)."""
    return answer_metrics(prediction, golds)["em"]


def f1_score(prediction: str | None, golds: str | Iterable[str]) -> float:
    """Token F1, the maximum over the golds (`answer_metrics`)."""
    return answer_metrics(prediction, golds)["f1"]


def sub_exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 when a normalised gold is inside the normalised prediction ("acc" of
    `answer_metrics`)."""
    return answer_metrics(prediction, golds)["acc"]


def gold_recall(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """Share of the gold passages among `retrieved`, the ids that all searches of an episode
    returned.

    ValueError without a gold passage: recall is defined for questions that have one.
    """
    if isinstance(retrieved, str) or isinstance(gold_ids, str):
        raise ValueError(
            f"retrieved={retrieved!r}, gold_ids={gold_ids!r}: give lists of ids, not one string"
        )
    golds = set(gold_ids)
    if not golds:
        raise ValueError(
            "gold_ids is empty; recall is defined for questions that have a gold passage"
        )
    return len(golds.intersection(retrieved)) / len(golds)


def all_gold(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """1.0 when every gold passage is among `retrieved`, else 0.0; errors as in `gold_recall`."""
    return float(gold_recall(retrieved, gold_ids) == 1.0)


def extract_answer(text: str) -> str | None:
    """Content of the last closed <answer> block, stripped, or None; the prompt is not part of
    `text`."""
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

    `\boxed{}` gives "". Of nested boxes the inner one is the last. `\boxed {x}` is no box. LaTeX
    inside is kept.
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


_SEARCH_TAG = re.compile(r"<(/?)(think|search|result|answer)>")


def check_search_format(text: str, results: int | None = None) -> bool:
    r"""Is this response a well-formed search trajectory (ReSearch)?

    The blocks think, search, result and answer do not nest; text around them is free. At least one
    think block; one result block after each search block and nowhere else; one answer block, the
    last, with a matched `\boxed{…}`. Whether the response ended with EOS is for the caller to
    check.

    text: the response with the result blocks that the episode inserted; what stands in them is not
    read.
    results: how many the episode inserted. The text alone cannot show that the model invented one.
    """
    blocks: list[str] = []
    position, answer = 0, ""
    while (opening := _SEARCH_TAG.search(text, position)) is not None:
        kind = opening.group(2)
        follows_search = bool(blocks) and blocks[-1] == "search"
        if opening.group(1) or (kind == "result") != follows_search or "answer" in blocks[-1:]:
            return False
        if kind == "result":
            end = text.find("</result>", opening.end())
        else:
            closing = _SEARCH_TAG.search(text, opening.end())
            end = closing.start() if closing is not None and closing.group() == f"</{kind}>" else -1
        if end < 0:
            return False
        answer = text[opening.end() : end]
        blocks.append(kind)
        position = end + len(f"</{kind}>")
    complete = (
        "think" in blocks and blocks[-1] == "answer" and results in (None, blocks.count("result"))
    )
    return complete and extract_boxed(answer) is not None


def search_well_formed(segments: Iterable[tuple[str, bool]]) -> bool:
    """`check_search_format` of an episode as (text, written by the model?) pieces.

    A piece that the model did not write counts as one empty result block, whatever it holds; a
    result tag that the model wrote is malformed.
    """
    segments = list(segments)
    own = "".join(text for text, written in segments if written)
    if "<result>" in own or "</result>" in own:
        return False
    text = "".join(text if written else "<result></result>" for text, written in segments)
    return check_search_format(text, sum(not written for _, written in segments))


ANSWER_REWARDS = ("research", "em", "f1")


def score_answer(
    prediction: str | None, golds: str | Iterable[str], well_formed: bool, reward: str
) -> float:
    """What the answer of an episode earns (None: there was none).

    research   0 unless well formed (its end with EOS included), then the F1, or 0.1 where that is 0
               (ReSearch's code; its paper has no format gate)
    em         exact match without a format gate (Search-R1)
    f1         F1 without a format gate (DeepSearch-RL, whose code doubles that of the first gold)
    """
    if reward not in ANSWER_REWARDS:
        raise ValueError(
            f"reward is {reward!r}; there are {', '.join(ANSWER_REWARDS)}. Choose one of them."
        )
    if reward == "research":
        return (f1_score(prediction, golds) or 0.1) if well_formed else 0.0
    return exact_match(prediction, golds) if reward == "em" else f1_score(prediction, golds)
