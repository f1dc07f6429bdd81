"""Rewards of model-written text. Standard library only, no sibling: copy this file alone into any project.

Three parts, in this order:

1. `parse_response`: think block and rewrite block of a response (task `rewrite`).
2. `rank_incentive` and its alternatives in `REWARDS`, joined with the parser in `score_rewrite`.
3. Answers (tasks `search` and `agent`): normalisation, EM, F1, extraction, the format of a search trajectory.

Sources: ConvSearch-R1 (arXiv 2505.15776, equations 1 and 2, and its released reward function), ReSearch
(arXiv 2503.19470), the SQuAD scorer. Where this file differs from them, and why:

* The strict parser accepts exactly one think block and one rewrite block. The original's expression lets an empty
  rewrite, a rewrite inside the think block and any text on later lines pass; it is kept as `parser="paper"`.
* A malformed response has no rewrite (strict). Whoever needs a query for it, inference for one, takes the raw question.
* Composed and decomposed accents compare equal (NFC on both sides). A golden answer that normalises to nothing ("The")
  is none: FlashRAG's functions let an empty prediction equal it, and find it inside every prediction.
* The format check of a search trajectory does not read what stands inside result blocks, so a document cannot break it.

Parsing takes time linear in the length of the text. No exception is caught and turned into a low score.
"""

from __future__ import annotations

import math
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

# ---------------------------------------------------------------------------------------------- responses


class Parsed(NamedTuple):
    """What a response holds. `think` and `rewrite` are None where the response has none to offer."""

    think: str | None
    rewrite: str | None
    well_formed: bool


TAGS = ("<think>", "</think>", "<rewrite>", "</rewrite>")


def parse_response(text: str, parser: str = "strict") -> Parsed:
    """Split a decoded response (special tokens removed) into its think block and its rewrite block.

    parser    well formed when                                     bodies        rewrite of a malformed response
    strict    the stripped text is one think block, white space    stripped      None
              or nothing, one rewrite block that is not blank;
              each of the four tags occurs exactly once
    paper     see `_parse_paper`                                   as written    first closed rewrite block, or None

    An empty think block is well formed under both. Tags are case-sensitive. Raises ValueError for an unknown parser.
    """
    if parser == "paper":
        return _parse_paper(text)
    if parser != "strict":
        raise ValueError(f"parser is {parser!r}; there are 'strict' and 'paper'. Choose one of them.")
    text = text.strip()
    malformed = Parsed(None, None, False)
    if any(text.count(tag) != 1 for tag in TAGS):
        return malformed
    if not (text.startswith("<think>") and text.endswith("</rewrite>")):
        return malformed
    think, _, rest = text[len("<think>") : -len("</rewrite>")].partition("</think>")
    between, opening, rewrite = rest.partition("<rewrite>")  # no opening: it stands inside the think block
    rewrite = rewrite.strip()
    if not opening or between.strip() or not rewrite:
        return malformed
    return Parsed(think.strip(), rewrite, True)


def _parse_paper(text: str) -> Parsed:
    r"""The original's two searches (`rewrite_r1.py` of the ConvSearch-R1 repository), loopholes included.

    Format: `<think>.*?</think>\n<rewrite>.*?</rewrite>$`, matched at character 0; dot matches newline, `$` every line
    end. Text: the first `<rewrite>.*?</rewrite>` anywhere, also when the format is wrong. Written with `find`: the
    expression takes quadratic time on repeated tags. It matches exactly when it does so from the first joint on.
    """
    rewrite = None
    start = text.find("<rewrite>")
    end = text.find("</rewrite>", start + len("<rewrite>")) if start >= 0 else -1
    if end >= 0:
        rewrite = text[start + len("<rewrite>") : end]

    joint = "</think>\n<rewrite>"
    middle = text.find(joint, len("<think>")) if text.startswith("<think>") else -1
    if middle < 0:
        return Parsed(None, rewrite, False)
    tail = text[middle + len(joint) :]
    well_formed = "</rewrite>\n" in tail or tail.endswith("</rewrite>")
    return Parsed(text[len("<think>") : middle] if well_formed else None, rewrite, well_formed)


# ---------------------------------------------------------------------------------------------- rank rewards


def _rank(rank: int | None) -> int | None:
    """Return a usable rank: an int >= 1 or None. Anything else is a fault of the caller and raises ValueError."""
    if rank is None:
        return None
    try:
        number = None if isinstance(rank, bool) else operator.index(rank)  # numpy integers pass, floats do not
    except TypeError:
        number = None
    if number is None or number < 1:
        raise ValueError(
            f"rank is {rank!r}; a rank is an int counted from 1, or None when no gold passage was found. "
            "NaN marks a technical failure of the retriever: exclude that rollout and count it."
        )
    return number


def rank_incentive(rank: int | None) -> float:
    """The rank-incentive reward (ConvSearch-R1, equations 1 and 2) of the best gold passage's 1-based rank.

    1 <= rank <= 10      (19 - rank) / 9       2.0 at rank 1, 1.0 at rank 10
    10 < rank <= 100     (100 - rank) / 90     0.9889 at rank 11, 0.0 at rank 100
    beyond, or None      0.0

    With several golds only the best rank counts. Raises ValueError for 0, negative numbers, floats (NaN too) and bools.
    """
    rank = _rank(rank)
    if rank is None or rank > 100:
        return 0.0
    return (19 - rank) / 9 if rank <= 10 else (100 - rank) / 90


def _reciprocal(rank: int | None, cutoff: float = math.inf) -> float:
    rank = _rank(rank)
    return 1 / rank if rank is not None and rank <= cutoff else 0.0


def _exponential(rank: int | None) -> float:
    rank = _rank(rank)
    return math.exp(1 - rank) if rank is not None else 0.0


def _ndcg_at_3(rank: int | None) -> float:
    rank = _rank(rank)
    return 1 / math.log2(rank + 1) if rank is not None and rank <= 3 else 0.0


def _hit(rank: int | None, cutoff: int) -> float:
    rank = _rank(rank)
    return 1.0 if rank is not None and rank <= cutoff else 0.0


# The rewards of the paper's ablation (its figure 5 and table 6), as functions of the best gold passage's rank alone.
# With one gold they are the metrics of the same name. With several:
#   reciprocal, exponential, mrr@3   unchanged: the metrics themselves look only at the first gold
#   ndcg@3                           DCG of the best gold over the ideal DCG of a single gold: further golds add nothing
#   recall@10, recall@100            1 as soon as one gold is in the list (success), not the share of golds found
REWARDS: dict[str, Callable[[int | None], float]] = {
    "rank_incentive": rank_incentive,
    "reciprocal": _reciprocal,  # 1 / rank
    "exponential": _exponential,  # exp(1 - rank)
    "mrr@3": lambda rank: _reciprocal(rank, 3),  # 1 / rank for rank <= 3
    "ndcg@3": _ndcg_at_3,  # 1 / log2(rank + 1) for rank <= 3
    "recall@10": lambda rank: _hit(rank, 10),
    "recall@100": lambda rank: _hit(rank, 100),
}


def score_rewrite(
    text: str,
    rank: int | None,
    malformed_reward: float = -0.1,
    reward: str = "rank_incentive",
    parser: str = "strict",
) -> float:
    """Reward of one response: REWARDS[reward](rank), or `malformed_reward` when it does not parse, whatever the rank.

    rank: 1-based rank of the best gold passage for this response's own rewrite; None when it is beyond the cut-off, or
    when nothing was searched because the response is malformed.
    Raises ValueError for an unknown reward or parser, and for an impossible rank (see `rank_incentive`).
    """
    if reward not in REWARDS:
        raise ValueError(f"reward is {reward!r}; there are {', '.join(REWARDS)}. Choose one of them.")
    return REWARDS[reward](rank) if parse_response(text, parser).well_formed else malformed_reward


# ---------------------------------------------------------------------------------------------- answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = ("yes", "no", "noanswer")
ANSWER_METRICS = ("em", "f1", "acc", "precision", "recall")  # in the order of FlashRAG's files


def normalize_answer(s: str) -> str:
    """Lower-case, NFC, delete ASCII punctuation, blank out the words a, an, the, collapse white space (the SQuAD rule).

    Punctuation is deleted, not turned into a blank: "1,000" is "1000", "O'Brien" is "obrien", and, by the same rule,
    "3.5" is "35" and "well-known" is "wellknown". Kept because published EM and F1 are computed so. Unicode punctuation
    (curly quotes, dashes) stays. Accents count: "Cafe" is not "Café". Only NFC is ours; FlashRAG's function lacks it.
    """
    return " ".join(_ARTICLES.sub(" ", _plain(s)).split())


def _plain(s: str) -> str:
    return unicodedata.normalize("NFC", s.lower()).translate(_PUNCTUATION)


def _comparable(s: str) -> str:
    """`normalize_answer(s)`; what is articles alone keeps them: of four choices "A" can be right, and "" cannot."""
    return normalize_answer(s) or " ".join(_plain(s).split())


def answer_metrics(prediction: str | None, golds: str | Iterable[str]) -> dict[str, float]:
    """The five scores of one answer, keys and order as in ANSWER_METRICS; each is the maximum over the golds.

    em         the normalised prediction equals a normalised gold
    f1         token F1 = 2PR / (P + R) of normalised words, counted as multisets
    acc        "sub-EM": a gold is a substring of the prediction, character by character ("no" is in "nothing")
    precision  P = common words / predicted words
    recall     R = common words / gold words

    P, R and F1 may come from different golds, so the F1 is not always that of the P and R beside it. In these three a
    gold gives 0 when either side is exactly yes, no or noanswer and the two differ. Tokens are what white space
    separates: scripts without blanks (Chinese, Japanese, Thai) earn an exact copy only. All are 0.0 for an empty or
    missing prediction (None: nothing could be extracted), and when no gold is left to match: one that comes out empty
    ("???") earns nothing, and one of articles alone ("A", "The") is matched by just these.
    """
    predicted = _comparable(prediction or "")
    golds = [gold for gold in map(_comparable, [golds] if isinstance(golds, str) else golds) if gold]
    scores = dict.fromkeys(ANSWER_METRICS, 0.0)
    if predicted:
        scores["em"] = float(predicted in golds)
        scores["acc"] = float(predicted in golds or any(gold in predicted for gold in golds if normalize_answer(gold)))
    for gold in golds:
        if predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
            continue
        words, gold_words = predicted.split(), gold.split()
        common = sum((Counter(words) & Counter(gold_words)).values())
        if common:
            p, r = common / len(words), common / len(gold_words)
            found = {"f1": (2 * p * r) / (p + r), "precision": p, "recall": r}  # FlashRAG's arithmetic, to the last bit
            scores |= {name: max(value, scores[name]) for name, value in found.items()}
    return scores


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 when the normalised prediction equals any normalised gold, else 0.0 (`answer_metrics`)."""
    return answer_metrics(prediction, golds)["em"]


def f1_score(prediction: str | None, golds: str | Iterable[str]) -> float:
    """Token F1, the maximum over the golds, with the guard for yes and no (`answer_metrics`)."""
    return answer_metrics(prediction, golds)["f1"]


def sub_exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    """1.0 when any normalised gold stands inside the normalised prediction, else 0.0: "acc" of `answer_metrics`."""
    return answer_metrics(prediction, golds)["acc"]


def gold_recall(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """Share of the gold passages that stand among `retrieved`, the ids that all searches of an episode returned.

    An id returned twice counts once. ValueError without a gold passage: there is nothing to recall, ask who is judged.
    """
    if isinstance(retrieved, str) or isinstance(gold_ids, str):
        raise ValueError(f"retrieved={retrieved!r}, gold_ids={gold_ids!r}: give lists of passage ids, not one string")
    golds = set(gold_ids)
    if not golds:
        raise ValueError("gold_ids is empty; recall of gold passages is defined for questions that have one")
    return len(golds.intersection(retrieved)) / len(golds)


def all_gold(retrieved: Iterable[str], gold_ids: Iterable[str]) -> float:
    """1.0 when every gold passage stands among `retrieved`, else 0.0: did the episode find all hops? Else as above."""
    return float(gold_recall(retrieved, gold_ids) == 1.0)


def extract_answer(text: str) -> str | None:
    """Content of the last closed <answer> block, stripped, or None. Pass the response without its prompt's example."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


# An escaped brace is a character, and so is an escaped backslash, unless "\\boxed{" was written with a doubled one.
_BRACES = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces match, as written; None when there is none.

    `\boxed{}` gives "". Of nested boxes the inner one is the last. `\boxed {x}` is no box. LaTeX inside is kept.
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

    The blocks think, search, result and answer do not nest; text around them is free. At least one think block; one
    result block after each search block and nowhere else; one answer block, the last, with a matched `\boxed{…}`.

    text: the response with the result blocks that the episode inserted. What stands inside those is not read: only what
    the model wrote is judged. They are still needed, because a search without a result is malformed (ReSearch gives it
    0): whoever has the text of the model alone puts an empty block where each result stood (`search_well_formed`).
    results: how many the episode inserted. When given, the text must hold exactly as many: it cannot show by itself
    that the model invented a result. Whether the response ended with EOS is for the caller to check.
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
    complete = "think" in blocks and blocks[-1] == "answer" and results in (None, blocks.count("result"))
    return complete and extract_boxed(answer) is not None


def search_well_formed(segments: Iterable[tuple[str, bool]]) -> bool:
    """`check_search_format` of an episode in (text, written by the model) pieces: the model's own text decides alone.

    Every piece that the model did not write counts as one empty result block, whatever it holds; a result tag that the
    model wrote is malformed.
    """
    segments = list(segments)
    own = "".join(text for text, written in segments if written)
    if "<result>" in own or "</result>" in own:
        return False
    text = "".join(text if written else "<result></result>" for text, written in segments)
    return check_search_format(text, sum(not written for _, written in segments))


ANSWER_REWARDS = ("research", "em", "f1")


def score_answer(prediction: str | None, golds: str | Iterable[str], well_formed: bool, reward: str) -> float:
    """What the answer of an episode earns (None: there was none).

    research   0 unless well formed (its end with EOS included), then the F1 if it is above 0, else 0.1 (ReSearch's
               code; its paper gives the F1 without the gate)
    em         exact match, 0 or 1, without a format gate (Search-R1)
    f1         F1 without a format gate (DeepSearch-RL, whose code takes the first gold alone, and twice the F1)
    """
    if reward not in ANSWER_REWARDS:
        raise ValueError(f"reward is {reward!r}; there are {', '.join(ANSWER_REWARDS)}. Choose one of them.")
    if reward == "research":
        return (f1_score(prediction, golds) or 0.1) if well_formed else 0.0
    return exact_match(prediction, golds) if reward == "em" else f1_score(prediction, golds)
