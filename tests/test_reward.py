"""reward.py: values by hand, the original's expressions and FlashRAG's scorer as oracles."""

import math
import random
import re
from collections import Counter

import numpy as np
import pytest

import reward
from reward import (
    REWARDS,
    answer_metrics,
    check_search_format,
    exact_match,
    extract_answer,
    extract_boxed,
    f1_score,
    normalize_answer,
    parse_paper_inference,
    parse_response,
    rank_incentive,
    score_rewrite,
)

GOOD = "<think>she is Curie</think>\n<rewrite>Where was Marie Curie born?</rewrite>"

# ------------------------------------------------------------------------------------ strict parser


@pytest.mark.parametrize(
    "text, think, rewrite",
    [
        (GOOD, "she is Curie", "Where was Marie Curie born?"),
        ("\n  " + GOOD + " \n\n", "she is Curie", "Where was Marie Curie born?"),
        ("<think>a</think><rewrite>b</rewrite>", "a", "b"),
        ("<think>a</think> \r\n\t\n<rewrite>b</rewrite>", "a", "b"),
        ("<think>a\n\nb</think>\n<rewrite> c\nd </rewrite>", "a\n\nb", "c\nd"),
        ("<think></think>\n<rewrite>b</rewrite>", "", "b"),
        (
            "<think>a < b, <b>x</b></think>\n<rewrite>is 1 < 2?</rewrite>",
            "a < b, <b>x</b>",
            "is 1 < 2?",
        ),
    ],
)
def test_strict_accepts(text, think, rewrite):
    assert parse_response(text) == (think, rewrite, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text",
        "<think>a</think>",
        "<rewrite>b</rewrite>",
        "x" + GOOD,
        GOOD + " x",
        GOOD + "\n" + GOOD,
        GOOD + "\n<rewrite>again</rewrite>",
        GOOD + "\n</think>",
        "<think>a</think> then <rewrite>b</rewrite>",
        "<think>a</think>\n<rewrite></rewrite>",
        "<think>a</think>\n<rewrite> \n\t</rewrite>",
        "<think>a</think>\n<rewrite>b",
        "<think>a\n<rewrite>b</rewrite>",
        "<rewrite>b</rewrite>\n<think>a</think>",
        "<think>a <rewrite>draft</rewrite></think>\n<rewrite>b</rewrite>",
        "<think>a<rewrite>b</think>c</rewrite>",
        "<think>a</think><rewrite>b <think></rewrite>",
        "</think>a<think>\n<rewrite>b</rewrite>",
        "<Think>a</Think>\n<rewrite>b</rewrite>",
        "<think>a</think>\n<think>b</think>\n<rewrite>c</rewrite>",
    ],
)
def test_strict_refuses_and_offers_no_rewrite(text):
    assert parse_response(text) == (None, None, False)


def test_strict_equals_a_definition_by_expression():
    """On random tag soup: one full match, bodies without tags, each tag once."""
    body = r"((?:(?!</?(?:think|rewrite)>).)*)"
    pattern = re.compile(rf"\s*<think>{body}</think>\s*<rewrite>{body}</rewrite>\s*", re.DOTALL)
    accepted = 0
    for text in tag_soup(20_000):
        match = pattern.fullmatch(text)
        expected = (
            (match[1].strip(), match[2].strip(), True)
            if match and match[2].strip()
            else (None, None, False)
        )
        assert parse_response(text) == expected, text
        accepted += expected[2]
    assert accepted > 50


def tag_soup(count):
    pieces = ["<think>", "</think>", "<rewrite>", "</rewrite>", "\n", " ", "a", "<", "\r\n"]
    canonical = ["<think>", "a", "</think>", "\n", "<rewrite>", "b", "</rewrite>"]
    generator = random.Random(0)
    for _ in range(count):
        parts = (
            generator.choices(pieces, k=generator.randrange(9))
            if generator.random() < 0.3
            else list(canonical)
        )
        for _ in range(generator.randrange(4)):  # a few edits of a good answer come near the border
            parts.insert(generator.randrange(len(parts) + 1), generator.choice(pieces))
            if parts and generator.random() < 0.5:
                parts.pop(generator.randrange(len(parts)))
        yield "".join(parts)


# ------------------------------------------------------------------------------- the paper's parser

# The table of what the original accepts and what it sends to the retriever.
PAPER = {
    "canonical": (GOOD, True, "Where was Marie Curie born?"),
    "spaces inside tags are kept": ("<think> a </think>\n<rewrite> b </rewrite>", True, " b "),
    "text before the first tag": ("x" + GOOD, False, "Where was Marie Curie born?"),
    "space before the first tag": (" " + GOOD, False, "Where was Marie Curie born?"),
    "newline before the first tag": ("\n" + GOOD, False, "Where was Marie Curie born?"),
    "no newline between": ("<think>a</think><rewrite>b</rewrite>", False, "b"),
    "two newlines between": ("<think>a</think>\n\n<rewrite>b</rewrite>", False, "b"),
    "trailing space between": ("<think>a</think> \n<rewrite>b</rewrite>", False, "b"),
    "CRLF between": ("<think>a</think>\r\n<rewrite>b</rewrite>", False, "b"),
    "text between": ("<think>a</think>\nso\n<rewrite>b</rewrite>", False, "b"),
    "a second joint behind the block": (
        "<think>a</think>\n<rewrite>b</rewrite>\nor </think>\n<rewrite>c",
        True,
        "b",
    ),
    "text between, later joint": ("<think>a</think> so </think>\n<rewrite>b</rewrite>", True, "b"),
    "space behind the last tag": (GOOD + " ", False, "Where was Marie Curie born?"),
    "text on the closing line": (GOOD + " done", False, "Where was Marie Curie born?"),
    "trailing newline": (GOOD + "\n", True, "Where was Marie Curie born?"),
    "garbage on following lines": (
        GOOD + "\ngarbage <think>\nmore",
        True,
        "Where was Marie Curie born?",
    ),
    "empty think": ("<think></think>\n<rewrite>b</rewrite>", True, "b"),
    "empty rewrite": ("<think>a</think>\n<rewrite></rewrite>", True, ""),
    "both empty": ("<think></think>\n<rewrite></rewrite>", True, ""),
    "two rewrite blocks": (
        "<think>a</think>\n<rewrite>b</rewrite>\n<rewrite>c</rewrite>",
        True,
        "b",
    ),
    "rewrite inside think": (
        "<think>a <rewrite>draft</rewrite></think>\n<rewrite>b</rewrite>",
        True,
        "draft",
    ),
    "several think blocks": ("<think>a</think>\n<think>b</think>\n<rewrite>c</rewrite>", True, "c"),
    "whole answer repeated": (GOOD + "\n" + GOOD, True, "Where was Marie Curie born?"),
    "closed in the think block alone": (
        "<think>I close with </rewrite>\n</think>\n<rewrite>b",
        False,
        None,
    ),
    "unclosed rewrite": ("<think>a</think>\n<rewrite>b", False, None),
}


@pytest.mark.parametrize("text, well_formed, rewrite", PAPER.values(), ids=PAPER)
def test_paper_parser_row_by_row(text, well_formed, rewrite):
    parsed = parse_response(text, parser="paper")
    assert (parsed.well_formed, parsed.rewrite) == (well_formed, rewrite)


def test_paper_parser_equals_the_two_expressions():
    form = re.compile(r"<think>(.*?)</think>\n<rewrite>(.*?)</rewrite>$", re.DOTALL | re.MULTILINE)
    block = re.compile(r"<rewrite>(.*?)</rewrite>", re.DOTALL)
    seen = set()
    for text in tag_soup(20_000):
        match, found = form.match(text), block.search(text)
        parsed = parse_response(text, "paper")
        assert parsed == (match and match[1], found and found[1], match is not None), text
        seen.add((parsed.well_formed, parsed.rewrite is None))
    assert len(seen) == 3  # well formed always has a rewrite


SIX_FORMS = {
    "blank line between": "<think>a</think>\n\n<rewrite>b</rewrite>",
    "lead-in text": "Sure. <think>a</think>\n<rewrite>b</rewrite>",
    "same line": "<think>a</think><rewrite>b</rewrite> done",
    "reversed order": "<rewrite>b</rewrite>\n<think>a</think>",
    "text between": "<think>a</think>\nso I ask:\n<rewrite>b</rewrite>",
    "an empty rewrite": "<think>a</think>\n<rewrite></rewrite>",
}


@pytest.mark.parametrize("text", SIX_FORMS.values(), ids=SIX_FORMS)
def test_the_papers_inference_takes_what_its_training_or_the_strict_parser_refuses(text):
    assert parse_paper_inference(text) == ("a", "" if "<rewrite></" in text else "b", True)
    assert (
        not parse_response(text, "strict").well_formed
        or not parse_response(text, "paper").well_formed
    )


def test_the_papers_inference_equals_its_two_expressions():
    blocks = [re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("think", "rewrite")]
    seen = set()
    for text in tag_soup(20_000):
        think, rewrite = (m and m[1] for m in (block.search(text) for block in blocks))
        parsed = parse_paper_inference(text)
        assert parsed == (think, rewrite, think is not None and rewrite is not None), text
        seen.add((parsed.think is None, parsed.rewrite is None))
    assert len(seen) == 4
    assert not parse_paper_inference("<think>" * 50_000).well_formed


def test_unknown_parser():
    with pytest.raises(ValueError, match="'loose'.*strict.*paper"):
        parse_response(GOOD, parser="loose")


# ------------------------------------------------------------------------------------- rank rewards

RANK_TABLE = {
    1: 2.0,
    2: 17 / 9,
    3: 16 / 9,
    5: 14 / 9,
    10: 1.0,
    11: 89 / 90,
    50: 50 / 90,
    99: 1 / 90,
    100: 0.0,
    101: 0.0,
    None: 0.0,
}


@pytest.mark.parametrize("rank, value", RANK_TABLE.items())
def test_rank_incentive(rank, value):
    assert rank_incentive(rank) == pytest.approx(value, abs=1e-12)
    assert score_rewrite(GOOD, rank) == rank_incentive(rank)
    assert REWARDS["rank_incentive"](rank) == rank_incentive(rank)


@pytest.mark.parametrize(
    "name, values",
    {  # at ranks 1, 2, 3, 4, 10, 11, 100, 101, None
        "reciprocal": [1, 1 / 2, 1 / 3, 1 / 4, 1 / 10, 1 / 11, 1 / 100, 1 / 101, 0],
        "exponential": [
            1,
            math.e**-1,
            math.e**-2,
            math.e**-3,
            math.e**-9,
            math.e**-10,
            math.e**-99,
            math.e**-100,
            0,
        ],
        "mrr@3": [1, 1 / 2, 1 / 3, 0, 0, 0, 0, 0, 0],
        "ndcg@3": [1, 0.6309297535714575, 0.5, 0, 0, 0, 0, 0, 0],
        "recall@10": [1, 1, 1, 1, 1, 0, 0, 0, 0],
        "recall@100": [1, 1, 1, 1, 1, 1, 1, 0, 0],
    }.items(),
)
def test_alternative_rewards(name, values):
    for rank, value in zip([1, 2, 3, 4, 10, 11, 100, 101, None], values):
        assert REWARDS[name](rank) == pytest.approx(value, abs=1e-12)
        assert score_rewrite(GOOD, rank, reward=name) == REWARDS[name](rank)


def test_the_reward_table_is_the_ablation_of_the_paper():
    assert list(REWARDS) == [
        "rank_incentive",
        "reciprocal",
        "exponential",
        "mrr@3",
        "ndcg@3",
        "recall@10",
        "recall@100",
    ]


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    "rank", [0, -1, 1.0, float("nan"), float("inf"), True, False, "1", np.float32(1), [1]]
)
def test_impossible_ranks_are_errors_not_low_scores(name, rank):
    with pytest.raises(ValueError, match="rank is .* counted from 1.*exclude"):
        REWARDS[name](rank)


def test_numpy_ranks_are_ranks():
    assert (
        rank_incentive(np.int64(3)) == rank_incentive(3)
        and REWARDS["reciprocal"](np.int32(4)) == 0.25
    )


def test_malformed_reward_is_a_parameter_and_ignores_the_rank():
    assert score_rewrite("nonsense", 1) == -0.1
    assert score_rewrite("nonsense", None, malformed_reward=-1.0) == -1.0
    assert score_rewrite("nonsense", float("nan")) == -0.1
    assert (
        score_rewrite(GOOD + "\nmore", 1) == -0.1
        and score_rewrite(GOOD + "\nmore", 1, parser="paper") == 2.0
    )
    with pytest.raises(ValueError, match="'mrr'.*rank_incentive"):
        score_rewrite(GOOD, 1, reward="mrr")


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "prediction, golds, f1",
    [  # scores that the original function gives to well-formed answers
        ("Paris", ["Paris"], 1.0),
        ("city of Paris", ["Paris"], 0.5),
        ("The U.S.A.", "usa", 1.0),
        ("New York City", ["NYC", "New York"], 0.8),
        ("yes sir", ["yes"], 0.0),
        ("no", ["yes"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("no answer", ["noanswer"], 0.0),
        ("Rome, Paris, Lima, Oslo, Bern", ["Paris"], 1 / 3),
        (r"\text{Paris}", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        (None, ["Paris"], 0.0),
        ("Paris", [], 0.0),
        ("Paris", ("Rome", "Paris"), 1.0),
    ],
)
def test_f1_rows(prediction, golds, f1):
    assert f1_score(prediction, golds) == pytest.approx(f1)
    assert exact_match(prediction, golds) == (1.0 if f1 == 1.0 else 0.0)


INVISIBLE = [
    "\u00ad",
    "\u061c",
    "\u200b",
    "\u200c",
    "\u200d",
    "\u200e",
    "\u200f",
    "\u202a",
    "\u202e",
    "\u2060",
    "\u2066",
    "\ufeff",
]


@pytest.mark.parametrize("mark", INVISIBLE, ids=ascii)
def test_invisible_marks_change_no_score(mark):
    for prediction, gold in (
        (f"Li{mark}ma", "Lima"),
        ("Lima", f"{mark}Lima{mark}"),
        (f"the{mark} Lima", "lima"),
    ):
        assert set(answer_metrics(prediction, gold).values()) == {1.0}
        published = answer_metrics(prediction, gold, published=True)
        assert published["em"] == 0.0  # the published scorer compares characters
    assert (
        answer_metrics(mark, [mark])
        == answer_metrics("", ["???"])
        == dict.fromkeys(reward.ANSWER_METRICS, 0.0)
    )


@pytest.mark.parametrize(
    "form, plain",
    [
        ("Ｌｉｍａ", "lima"),
        ("１，０００", "1000"),
        ("ﬁsh", "fish"),
        ("Ⅷ", "viii"),
        ("Lima\u3000Peru", "lima peru"),
        ("ｔｈｅ Lima", "lima"),
        ("\u00c5ngstr\u00f6m", "a\u030angstro\u0308m"),
        ("\u212bngstr\u00f6m", "\u00e5ngstr\u00f6m"),
        ("\u210bilbert", "hilbert"),
        ("ｙｅｓ", "yes"),
    ],
)
def test_compatibility_forms_are_equal(form, plain):
    assert exact_match(form, plain) == exact_match(plain, form) == f1_score(form, plain) == 1.0
    assert normalize_answer(normalize_answer(form)) == normalize_answer(form)


def flashrag(prediction, golds):
    """FlashRAG's normalisation and metrics, step by step."""

    def normalise(text):
        text = "".join(
            c for c in text.lower() if c not in set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        )
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    p, golds = normalise(prediction), [normalise(g) for g in golds]
    out = {
        "em": float(any(g == p for g in golds)),
        "f1": 0.0,
        "acc": float(any(g in p for g in golds)),
        "precision": 0.0,
        "recall": 0.0,
    }
    for g in golds:
        if p != g and (p in ("yes", "no", "noanswer") or g in ("yes", "no", "noanswer")):
            continue
        same = sum((Counter(p.split()) & Counter(g.split())).values())
        if same:
            precision, recall = same / len(p.split()), same / len(g.split())
            found = {
                "f1": (2 * precision * recall) / (precision + recall),
                "precision": precision,
                "recall": recall,
            }
            out |= {name: max(out[name], value) for name, value in found.items()}
    return out


def test_published_scores_are_flashrags_to_the_last_bit():
    words = [
        "the",
        "a",
        "yes",
        "no",
        "noanswer",
        "Lima",
        "LIMA",
        "New",
        "York,",
        "-",
        "???",
        "Caf\u00e9",
        "Cafe\u0301",
        "Li\u200bma",
        "ﬁ",
        "Ｌ",
    ]
    generator, differ = random.Random(3), 0
    for _ in range(5_000):
        prediction, *golds = (
            " ".join(generator.choices(words, k=generator.randrange(4))) for _ in range(3)
        )
        expected = flashrag(prediction, golds)
        assert answer_metrics(prediction, golds, published=True) == expected, (prediction, golds)
        differ += answer_metrics(prediction, golds) != expected
    assert differ > 100  # where it is not asked for, the rules above hold


def test_a_gold_that_normalises_to_nothing_earns_nothing():
    for prediction in ("", "the", "???", None):
        assert (
            exact_match(prediction, ["???", "-"]) == 0.0
            and f1_score(prediction, ["???", "-"]) == 0.0
        )


def test_a_gold_of_articles_alone_is_matched_by_just_these():
    """The choice "A" is an answer; the scorers that drop articles cannot see it, or let everything
    earn it."""
    assert list(answer_metrics("a.", ["A"]).values()) == [1.0] * 5
    assert exact_match("a   The", "A the") == 1.0  # whatever the blanks
    for prediction in ("", None, "B", "cat", "a cat", "???", "the"):
        assert list(answer_metrics(prediction, ["A"]).values()) == [0.0] * 5, prediction


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>a</answer>", "a"),
        ("<answer>a</answer> <answer> b \n</answer> tail", "b"),
        ("<answer>a</answer> <answer>b", "a"),
        ("<answer>a <answer>b</answer>", "b"),
        ("<answer>a</answer></answer>", "a"),
        ("</answer><answer>a", None),
        ("</answer>", None),
        ("<answer></answer>", ""),
        ("no tags", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, boxed",
    [
        (r"\boxed{Paris}", "Paris"),
        (r"\boxed{\frac{1}{2}} and so on }", r"\frac{1}{2}"),
        (r"\boxed{\text{Paris}}", r"\text{Paris}"),
        (r"\boxed{ 42 }", " 42 "),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{a{b}", None),
        (r"\boxed {Paris}", None),
        (
            r"\boxed x \boxed{Paris}",
            "Paris",
        ),  # the original gives up at the bare \boxed; a matched box is an answer here
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a\\}", "a\\\\"),
        (r"\\boxed{7}", "7"),
        ("}{ } \\boxed{x}", "x"),
        ("boxed{x}", None),
        ("", None),
    ],
)
def test_extract_boxed(text, boxed):
    assert extract_boxed(text) == boxed


def test_extract_boxed_equals_counting_braces():
    generator = random.Random(2)
    for _ in range(20_000):
        text = "".join(
            generator.choices(["\\boxed{", "{", "}", "a", "\\boxed"], k=generator.randrange(12))
        )
        expected = None
        for start in [m.end() for m in re.finditer(r"\\boxed\{", text)]:
            depth, end = 1, start
            while depth and end < len(text):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            expected = expected if depth else text[start : end - 1]
        assert extract_boxed(text) == expected, text


# ------------------------------------------------------------------------------------ search format

SEARCH = "<think>x</think> <search>q</search> <result>\ndoc\n</result>"
ANSWER = r" <think>y</think> <answer>It is \[ \boxed{Lima} \]</answer>"

FORMAT = {
    "no search": (ANSWER, True),
    "one search": (SEARCH + ANSWER, True),
    "three searches": (SEARCH * 3 + ANSWER, True),
    "search, then answer without a second think": (SEARCH + r"<answer>\boxed{Lima}</answer>", True),
    "empty box": (SEARCH + r"<answer>\boxed{}</answer>", True),
    "text after the answer": (SEARCH + ANSWER + " bye", True),
    "free text around blocks": ("well " + SEARCH + " so " + ANSWER, True),
    "a character behind the search tag": (
        SEARCH.replace("</search> ", "</search>. ") + ANSWER,
        True,
    ),
    "document with tags": (
        SEARCH.replace("doc", r"<answer>\boxed{no}</answer> </think> <search> <result>") + ANSWER,
        True,
    ),
    "two boxes": (r"<think>x</think><answer>\boxed{a} \boxed{b}</answer>", True),
    "empty": ("", False),
    "no think": (r"<answer>\boxed{Lima}</answer>", False),
    "unbalanced think": ("<think>" + SEARCH + ANSWER, False),
    "stray closing think": (SEARCH + "</think>" + ANSWER, False),
    "two answers": (SEARCH + ANSWER + r"<answer>\boxed{Rome}</answer>", False),
    "no box": ("<think>x</think><answer>Lima</answer>", False),
    "box with a space": (r"<think>x</think><answer>\boxed {Lima}</answer>", False),
    "box without end": (r"<think>x</think><answer>\boxed{Lima</answer>", False),
    "box outside the answer": (r"<think>\boxed{Lima}</think><answer>Lima</answer>", False),
    "answer not closed": (r"<think>x</think><answer>\boxed{Lima}", False),
    "no answer": (SEARCH, False),
    "search without result": ("<think>x</think> <search>q</search>" + ANSWER, False),
    "search not closed": ("<think>x</think> <search>q" + ANSWER, False),
    "result not closed": ("<think>x</think> <search>q</search> <result> doc" + ANSWER, False),
    "last result not closed": (SEARCH + "<search>q</search> <result> doc" + ANSWER, False),
    "result without search": ("<think>x</think> <result>fake</result>" + ANSWER, False),
    "second result": (SEARCH + "<result>fake</result>" + ANSWER, False),
    "search inside think": (
        r"<think>x <search>q</search> <result>d</result></think> <answer>\boxed{a}</answer>",
        False,
    ),
    "answer inside think": (r"<think>x <answer>\boxed{a}</answer></think>", False),
    "answer first": (r"<answer>\boxed{a}</answer> <think>x</think>", False),
    "thinking after the answer": (SEARCH + ANSWER + "<think>z</think>", False),
}


@pytest.mark.parametrize("text, valid", FORMAT.values(), ids=FORMAT)
def test_search_format(text, valid):
    assert check_search_format(text) is valid


def test_the_text_alone_cannot_tell_an_invented_result():
    text = SEARCH + SEARCH.replace("doc", "invented") + ANSWER
    assert check_search_format(text) and check_search_format(ANSWER)


# ------------------------------------------------------------------------------------ hostile input


@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "<rewrite>",
        "</rewrite>",
        "<think>a</think>\n<rewrite>",
        "</think>\n<rewrite>",
        "<answer>",
        "</answer>",
        "<answer></answer>",
        "\\boxed{",
        "{",
        "}",
        "\\",
        "\\boxed{}",
        "<search>",
        "<result>",
        "<search></search><result>",
        "<think></think>",
        "<",
        "\n",
        "a ",
    ],
)
def test_repeated_pieces_finish(piece):
    """50,000 repetitions: something quadratic would not come back for minutes."""
    for text in (
        piece * 50_000,
        "<think>" + piece * 50_000,
        r"<think>a</think><answer>\boxed{" + piece * 50_000,
    ):
        for parser in ("strict", "paper"):
            parse_response(text, parser)
        extract_answer(text), extract_boxed(text), check_search_format(text)
    long = piece * 20_000
    exact_match(long, ["7"]), f1_score(long, [long, "7"])


# ------------------------------------------------------------------------------------- known values


def test_a_rewrite_inside_the_think_block_earns_nothing():
    text = "<think>I fill <rewrite>draft</rewrite> later</think>\n<rewrite>final one</rewrite>"
    assert not parse_response(text).well_formed and score_rewrite(text, 1) == -0.1


def test_a_blank_rewrite_is_no_query():
    text = "<think>a</think>\n<rewrite>  </rewrite>"
    parsed = parse_response(text)
    assert not parsed.well_formed and parsed.rewrite is None  # nothing to search with
    assert score_rewrite(text, 3) == -0.1


def test_a_box_between_latex_brackets():
    assert extract_boxed("<answer> The final answer is \\[ \\boxed{Lima} \\] </answer>") == "Lima"


def test_an_empty_box_is_an_empty_answer():
    assert extract_boxed("\\boxed{}") == ""
    assert exact_match("", ["Lima", "0", "no"]) == 0.0


@pytest.mark.parametrize(
    "text, expected",
    [
        ("An era of the tea, a sofa; Bana anthem", "era of tea sofa bana anthem"),
        ("b—the—c", "b— —c"),  # an article leaves a blank
        ("J\u030c", "\u01f0"),  # composed after lower case too: ǰ has no upper form
    ],
)
def test_normalisation_by_hand(text, expected):
    assert normalize_answer(text) == expected


def test_normalisation_in_pairs():
    pairs = [
        ("The Lima", "lima"),
        ("New York City", "city of New York"),
        ("Barack Obama", ["Barack Hussein Obama", "Obama"]),
        ("42.", "42"),
        ("1,000,000", "1000000"),
        ("1e6", "1000000"),
        ("3.5", "35"),
        ("well-known", "well known"),
    ]
    assert [exact_match(*pair) for pair in pairs] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert [round(f1_score(*pair), 6) for pair in pairs] == [
        1.0,
        0.857143,
        0.8,
        1.0,
        1.0,
        0.0,
        1.0,
        0.0,
    ]


def test_a_gold_that_is_nothing_beside_a_real_one():
    assert (
        exact_match("Paris", ["Paris", "???"]) == 1.0 and f1_score("Paris", ["Paris", "???"]) == 1.0
    )


def test_scripts_without_blanks_need_an_exact_copy():  # tokens are what white space separates
    assert f1_score("東京都港区", "東京都千代田区") == 0.0
    assert f1_score("東京都港区", "東京都港区") == 1.0


def test_accents_composed_and_decomposed():
    pairs = [("Caf\u00e9", "Cafe\u0301"), ("Cafe\u0301", "Caf\u00e9"), ("Cafe", "Caf\u00e9")]
    assert [exact_match(*pair) for pair in pairs] == [1.0, 1.0, 0.0]


def test_apostrophes_are_deleted_as_ascii_alone():  # the ASCII rule
    assert [
        exact_match(p, g)
        for p, g in [("Hawai'i", "Hawaii"), ("Hawai\u2019i", "Hawaii"), ("O'Brien", "OBrien")]
    ] == [1, 0, 1]
