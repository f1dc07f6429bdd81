"""report.py: the statistics against slow counting, filters and exports, the page of a run, bad
input."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import statistics
import zlib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_trajectory_sft import agent_row, call, conversation  # noqa: F401  a fixture

import data
import report
from config import ConfigError
from config import run as run_entry
from episodes import trajectories
from runs import write_jsonl
from scoring import plots, run_page, tables

ROOT = Path(__file__).resolve().parent.parent


def many(count=60, seed=0):
    """Random rows, several a question, some failed for a technical reason, some without
    reasoning."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        turns = rng.randrange(1, 5)
        between = [
            m
            for _ in range(turns - 1)
            for m in (
                {
                    "role": "assistant",
                    "content": "",
                    "text": "",
                    "tool_calls": [call("x")] * rng.randrange(1, 3),
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            )
        ]
        messages = [
            {"role": "user", "content": f"q{i // 3}"},
            *between,
            {"role": "assistant", "content": "a", "text": "a"},
        ]
        if rng.random() < 0.5:
            messages[-1]["reasoning_content"] = "t" * rng.randrange(50)
        em = float(rng.random() < 0.4)
        f1 = 1.0 if em else rng.choice([0.0, 0.3, 0.8, 0.9])
        usage = [
            {"prompt_tokens": p, "completion_tokens": c, "total_tokens": p + c}
            for p, c in [(rng.randrange(900), rng.randrange(90)) for _ in range(2)]
        ]
        rows.append(
            {
                "rollout_id": f"q{i // 3}#{i % 3}",
                "id": f"q{i // 3}",
                "question": f"q{i // 3}",
                "messages": messages,
                "rounds": turns,
                "error": "tool_error: x" if rng.random() < 0.1 else None,
                "tools": [],
                "searches": 1,
                "metric_score": {"em": em, "f1": f1, "acc": em, "precision": f1, "recall": f1},
                "task": "agent",
                "well_formed": rng.random() < 0.5,
                "gold_recall": i % 3 / 2 if i % 2 else None,
                "status": rng.choice(["answered", "length"]),
                "response_meta": {"usage": usage[0]},
                "all_turns_tokens": usage[1],
            }
        )
    return rows


def slow_moments(values):
    mean = sum(values) / len(values)
    return {
        "mean": mean,
        "stdev": math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        if len(values) > 1
        else 0.0,
    }


def close(found, expected):
    return found["mean"] == pytest.approx(expected["mean"]) and found["stdev"] == pytest.approx(
        expected["stdev"]
    )


@pytest.mark.parametrize("rule", ["em", "f1"])
def test_statistics_against_slow_counting(rule):
    rows = many()
    s = report.statistics(rows, rule)
    won = [
        not r["error"]
        and (r["metric_score"]["em"] == 1 if rule == "em" else r["metric_score"]["f1"] >= 0.8)
        for r in rows
    ]
    assert (
        s["total"] == 60 and s["success_count"] == sum(won) and s["failure_count"] == 60 - sum(won)
    )
    assert s["technical_failures"] == sum(r["error"] is not None for r in rows) > 0
    assert (
        s["success_em"]
        == sum(not r["error"] and r["metric_score"]["em"] == 1 for r in rows)
        < s["success_f1"]
    )
    parts = {
        "all": rows,
        "success": [r for r, w in zip(rows, won) if w],
        "failure": [r for r, w in zip(rows, won) if not w],
    }
    for name, part in parts.items():
        calls = [sum(len(m.get("tool_calls", [])) for m in r["messages"]) for r in part]
        assert close(s["rounds"][name], slow_moments([r["rounds"] for r in part]))
        assert close(s["tool_calls"][name], slow_moments(calls))
        for value, n in s["rounds"]["distribution"][name].items():
            assert n == sum(r["rounds"] == int(value) for r in part)
        assert sum(s["tool_calls"]["distribution"][name].values()) == len(part)
        for kind in ("prompt", "completion", "total"):
            assert close(
                s["tokens_last_turn"][kind][name],
                slow_moments([r["response_meta"]["usage"][f"{kind}_tokens"] for r in part]),
            )
            assert close(
                s["tokens_all_turns"][kind][name],
                slow_moments([r["all_turns_tokens"][f"{kind}_tokens"] for r in part]),
            )
    thoughts = [
        len(m["reasoning_content"]) for r in rows for m in r["messages"] if "reasoning_content" in m
    ]
    assert close(s["reasoning"], slow_moments(thoughts)) and s["reasoning"]["count"] == len(
        thoughts
    )
    assert (
        s["well_formed"] == pytest.approx(sum(r["well_formed"] for r in rows) / 60)
        and s["all_gold"] is None
    )
    recall = [r["gold_recall"] for r in rows if r["gold_recall"] is not None]
    assert s["gold_recall"] == pytest.approx(sum(recall) / len(recall)) and 0 < len(recall) < 60
    assert all(
        s["status"][c].get(end, 0) == sum(r["status"] == end for r in p)
        for c, p in parts.items()
        for end in ("answered", "length")
    )
    f1 = [0.0 if r["error"] else r["metric_score"]["f1"] for r in rows]
    assert close(s["metrics"]["f1"], slow_moments(f1))
    low, high = s["metrics"]["f1"]["ci95"]
    assert low < s["metrics"]["f1"]["mean"] < high
    assert list(s["rounds"]["distribution"]["all"]) == ["1", "2", "3", "4"]  # in order, as strings


def test_a_question_without_a_row_is_a_failure():
    rows = many(3)
    s, t = report.statistics(rows, "f1"), report.statistics(rows, "f1", ["q7", "q8"])
    assert t["total"] == 5 and t["missing"] == 2 and t["failure_count"] == s["failure_count"] + 2
    assert t["metrics"]["f1"]["mean"] == pytest.approx(s["metrics"]["f1"]["mean"] * 3 / 5)
    one = report.statistics(rows[:1], "em")
    assert one["rounds"]["all"]["stdev"] == 0.0 and one["metrics"]["em"]["ci95"] is None


def test_tables_hold_what_the_original_shows():
    text = report.markdown("T", report.statistics(many(), "em"))
    assert re.findall(r"^## ([A-Z][a-z ]+)(?: \(|,|$)", text, re.MULTILINE) == [
        "Summary",
        "Answers",
        "Conversation",
        "Rounds",
        "Tool calls",
        "Ends",
    ]
    assert "EM = 1" in text and "█" in text
    assert re.search(r"f1 .*0\.\d{3} ± 0\.\d{3} .*\[0\.\d{3}, 0\.\d{3}\]", text)
    lines = text.split("## Rounds\n\n")[1].split("\n\n")[0].splitlines()
    rounds = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert rounds[0][0] == "1" and re.fullmatch(r"\d+ \(\d+\.\d %\)", rounds[0][1])
    assert sum(float(row[1].split("(")[1].split(" ")[0]) for row in rounds) == pytest.approx(
        100, abs=0.3
    )
    assert text.startswith("# T\n")
    assert all(line.count("|") == 6 for line in lines)


def test_files_filters_and_exports(tmp_path, capsys):
    rows = many() + [agent_row(77)]
    path = tmp_path / "run" / "trajectory.jsonl"
    write_jsonl(str(path), rows)
    result = report.main(
        report.ReportConfig(trajectories=str(path), success="f1", export=["openai", "swift"])
    )
    out = path.parent
    assert (
        result["total"] == 61
        and result["kept"] == result["success"]
        and sorted(result["files"]) == sorted(set(os.listdir(out)) - {"trajectory.jsonl"})
    )
    assert "## Summary" in capsys.readouterr().out
    kept = [row for _, row in data.read_jsonl(str(out / "trajectory_success.jsonl"))]
    assert kept == [r for r in rows if trajectories.succeeded(r, "f1")]  # unchanged, in order
    assert json.loads((out / "trajectory_stats.json").read_text())["success_count"] == len(kept)
    assert (
        trajectories.read_trajectories(str(out / "openai.jsonl"))[-1]["messages"][2]["tool_calls"][
            0
        ]["function"]["name"]
        == "search"
    )
    assert len(trajectories.read_trajectories(str(out / "swift.jsonl"))) == len(kept)
    fewer = report.main(
        report.ReportConfig(
            trajectories=str(path),
            success="f1",
            per_question=1,
            balance_by="rounds",
            cap=2,
            out=str(tmp_path / "b"),
        )
    )
    chosen = trajectories.read_trajectories(str(tmp_path / "b" / "trajectory_success.jsonl"))
    assert len({r["id"] for r in chosen}) == len(chosen) == fewer["kept"] < result["kept"]
    assert max([r["rounds"] for r in chosen].count(n) for n in range(1, 5)) == 2
    report.main(
        report.ReportConfig(
            trajectories=str(path),
            success="f1",
            well_formed=True,
            min_calls=2,
            out=str(tmp_path / "c"),
        )
    )
    strict = [row for _, row in data.read_jsonl(str(tmp_path / "c" / "trajectory_success.jsonl"))]
    assert 0 < len(strict) < len(kept) and strict == [
        r for r in kept if r.get("well_formed") and trajectories.tool_calls(r) >= 2
    ]


def test_questions_bring_types_and_what_is_missing(tmp_path):
    rows = [agent_row(i) for i in range(4)]
    path, questions = tmp_path / "t.jsonl", tmp_path / "q.jsonl"
    write_jsonl(str(path), rows)
    write_jsonl(
        str(questions),
        [
            {
                "id": f"q{i}",
                "question": "x",
                "golden_answers": ["y"],
                "metadata": {"type": "ab"[i // 3]},
            }
            for i in range(6)
        ],
    )
    cfg = dict(trajectories=str(path), out=str(tmp_path / "o"), balance_by="type", cap=1)
    with pytest.raises(data.DataError, match="no row has metadata.question_type"):
        report.main(report.ReportConfig(**cfg))
    result = report.main(report.ReportConfig(**cfg, questions=str(questions)))
    assert result["total"] == 6 and result["kept"] == 2 and result["em"] == pytest.approx(4 / 6)
    write_jsonl(str(questions), [{"id": "other", "question": "x", "golden_answers": ["y"]}])
    with pytest.raises(data.DataError, match="'q0' is not in"):
        report.main(report.ReportConfig(**cfg, questions=str(questions)))


def test_rows_without_id_number_ids_and_null_figures(tmp_path):
    path, questions = tmp_path / "t.jsonl", tmp_path / "q.jsonl"
    rows = many(6)
    for i, row in enumerate(rows):
        row["id"] = i // 3  # a number; the questions have it as a text
    rows[0] |= {
        "metric_score": {"em": None, "f1": None},
        "response_meta": None,
        "searches": None,
        "rounds": None,
        "status": None,
        "error": None,
    }
    rows[1] |= {
        "metric_score": None,
        "response_meta": {"usage": {"prompt_tokens": None}},
        "all_turns_tokens": None,
    }
    write_jsonl(str(path), rows)
    write_jsonl(
        str(questions), [{"id": str(i), "question": "x", "golden_answers": ["y"]} for i in range(3)]
    )
    result = report.main(
        report.ReportConfig(
            trajectories=str(path), questions=str(questions), out=str(tmp_path / "o")
        )
    )
    assert result["total"] == 7  # question 2 has no row
    for change, message in [
        ({"id": None}, "question None is not in"),
        ({"id": 7}, "question 7 is not in"),
        ({"metric_score": {"em": "1"}}, "em is '1'; it must be int or float or null"),
        ({"response_meta": {"usage": [1]}}, "usage is '.1.'; it must be dict or null"),
        ({"response_meta": {"usage": {"total_tokens": "7"}}}, "total_tokens is '7'"),
        ({"well_formed": "yes"}, "well_formed is 'yes'"),
        ({"rounds": "2"}, "rounds is '2'; it must be int or null"),
        ({"metric_score": [1]}, "it must be dict or null"),
    ]:
        write_jsonl(str(path), [rows[0] | change])
        with pytest.raises(data.DataError, match=message):
            report.main(
                report.ReportConfig(
                    trajectories=str(path), questions=str(questions), out=str(tmp_path / "o")
                )
            )
    del rows[2]["id"]
    write_jsonl(str(path), rows[2:3])
    assert (
        report.main(report.ReportConfig(trajectories=str(path), out=str(tmp_path / "o")))["total"]
        == 1
    )
    with pytest.raises(data.DataError, match="question None is not in"):
        report.main(
            report.ReportConfig(
                trajectories=str(path), questions=str(questions), out=str(tmp_path / "o")
            )
        )


def test_a_training_runs_folder_is_not_written_into(tmp_path):
    write_jsonl(str(tmp_path / "t.jsonl"), many(3))
    (tmp_path / "config.yaml").write_text("group_size: 8\n")
    for out in ("", str(tmp_path)):  # beside the trajectories too
        with pytest.raises(ConfigError, match="was made by grpo.py"):
            report.main(report.ReportConfig(trajectories=str(tmp_path / "t.jsonl"), out=out))


# -------------------------------------------------------------------------------- a run's page


class Page(HTMLParser):
    """The texts and the elements of a page, as a browser finds them."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.inside = [], [], ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, text):
        if self.inside not in ("script", "style"):
            self.words.append(text)

    def figures(self):
        return [attrs["aria-label"] for tag, attrs in self.tags if tag == "figure"]


def unpacked(text):
    """Step → groups, of the scripts of a page or of a file beside it."""
    found = re.findall(r'rollouts\[(\d+)\]="([^"]*)"', text)
    return {int(n): json.loads(zlib.decompress(base64.b64decode(code))) for n, code in found}


def rollout(query_id="s1", rank=1, reward=2.0, **more):
    return {
        "query_id": query_id,
        "group": 0,
        "response": f"<think>a & b</think><rewrite>{query_id} {rank}</rewrite>",
        "rewrite": f"{query_id} {rank}",
        "well_formed": True,
        "rank": rank,
        "reward": reward,
        "advantage": 0.0,
        "tokens": 9,
        "end": "eos",
    } | more


def run_folder(folder, metrics, rollouts=None, settings=""):
    write_jsonl(str(folder / "metrics.jsonl"), metrics)
    for step, rows in (rollouts or {}).items():
        write_jsonl(str(folder / f"rollouts/step_{step:06d}.jsonl"), rows)
    if settings:
        (folder / "config.yaml").write_text(settings)
    return folder


def page_of(folder, **settings):
    path = report.main(report.ReportConfig(run=str(folder), **settings))["report"]
    return Path(path).read_text()


def test_page_of_a_run(tmp_path):
    write_jsonl(
        str(tmp_path / "train.jsonl"),
        [
            {
                "query_id": f"s{n}",
                "conversation_id": "c",
                "turn": 2,
                "context": [["Who is Ann?", "A writer."]],
                "question": f"Who is {n}?",
                "gold_ids": [f"p{n}"],
            }
            for n in range(4)
        ],
    )
    write_jsonl(
        str(tmp_path / "corpus.jsonl"),
        [{"id": f"p{n}", "title": f"T{n}", "text": f"text {n}"} for n in range(9)],
    )
    dev = {0: 0.1, 25: 0.4, 50: 0.3}
    metrics = [{"step": 0, "dev_mrr": 0.1, "dev_format_rate": 1.0}]
    for i in range(1, 51):
        row = {"step": i, "reward": i / 10, "kl": i / 1000, "format_rate": 0.9, "clipped": 0.0}
        row["flat_groups"] = i / 50  # ends where a reader should look
        row |= {"seconds_sample": 3.0, "seconds_update": 1.0, "note": "x<y", "odd figure": i}
        metrics.append(row | ({"dev_mrr": dev[i]} if i in dev else {}))
    rollouts = {
        step: [rollout(f"s{n}", rank) for n in range(2) for rank in (1, 3, None)]
        for step in (1, 20, 50)
    }
    settings = f"task: rewrite\ntrain: {tmp_path}/train.jsonl\nlr: 1e-6\nmodel: <x>\n"
    settings += f"retriever: {{corpus: {tmp_path}/corpus.jsonl}}\n"
    folder = run_folder(tmp_path / "run", metrics, rollouts, settings)
    text = page_of(folder)
    page = Page(text)
    for words in (
        "dev MRR 10 % → 40 % best at step 25; 30 % at the last, 50",
        "reward 0.30 → 4.80 mean of the first and of the last 5 of 50 steps: +4.50 ± 0.20 (95 %)",
        "format rate 90 % → 90 %",
        "Always the same: clipped 0.",
        "sample 75 % 3 s 02:30",
        "lr: 1e-6",
        "model: <x>",
        "best: 40 % at step 25",
        "no end is recorded",
        "Look here. Equal rewards teach nothing",
    ):
        assert words in page.text, words
    for title in ("dev MRR", "Reward", "Ranks of the gold passage", "KL to the start"):
        assert title in page.figures()
    assert page.text.count("Look here") == 1
    assert "odd figure" in page.figures()  # what the page does not know is drawn all the same
    assert not re.search(r"https?://(?!www\.w3\.org)", text) and text.count("{{") == 0
    assert not [a for _, a in page.tags if "src" in a or "href" in a]  # nothing to load
    found = unpacked(text)
    assert list(found) == [1, 20, 50]
    rows = [row for group in found[20] for row in group["rows"]]
    kept = [{k: v for k, v in r.items() if k not in ("query_id", "group")} for r in rollouts[20]]
    assert [{k: v for k, v in r.items() if k != "band"} for r in rows] == kept
    assert [r["band"] for r in rows] == [0, 1, 4] * 2
    assert found[1][1]["prompt"] == {
        "context": [["Who is Ann?", "A writer."]],
        "question": "Who is 1?",
        "golds": [{"id": "p1", "title": "T1", "text": "text 1"}],
    }
    (folder / "final").mkdir()
    assert "; finished" in page_of(folder, title="Mine & yours")


@pytest.mark.parametrize(
    "row, label",
    [
        (rollout(rank=1), "rank 1"),
        (rollout(rank=2), "rank 2–3"),
        (rollout(rank=3), "rank 2–3"),
        (rollout(rank=4), "rank 4–10"),
        (rollout(rank=10), "rank 4–10"),
        (rollout(rank=11), "rank 11–100"),
        (rollout(rank=None), "not found"),
        (rollout(rank=None, well_formed=False), "malformed"),
        (rollout(reward=None), "failed"),
        ({"reward": 1.0, "f1": 1.0}, "F1 1"),
        ({"reward": 1.0, "f1": 0.99}, "F1 0.5 to 1"),
        ({"reward": 1.0, "f1": 0.5}, "F1 0.5 to 1"),
        ({"reward": 1.0, "f1": 0.4}, "F1 below 0.5"),
        ({"reward": 1.0, "f1": 0.0}, "F1 0"),
        ({"reward": 1.0, "f1": 1.0, "well_formed": False}, "malformed"),
        ({"reward": 1.0}, None),
    ],
)
def test_outcome_of_a_rollout(row, label):
    band = run_page.band(row)
    labels = run_page.ANSWERS if "f1" in row else run_page.RANKS
    assert (band is None) if label is None else labels[band] == label


def test_runs_of_every_kind(tmp_path):
    one = run_folder(tmp_path / "one", [{"step": 1, "reward": 0.5}], {1: [{"response": "x"}]})
    text = page_of(one)
    assert "reward 0.50" in Page(text).text and unpacked(text)[1][0]["rows"][0]["band"] == 6
    start = run_folder(tmp_path / "start", [{"step": 0, "dev_f1": 0.25}])
    assert "dev F1 25 % a single validation" in Page(page_of(start)).text
    killed = run_folder(tmp_path / "killed", [{"step": i, "kl": None} for i in (1, 2)])
    with open(killed / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "lr": 1.0}\n{"step": 4, "rew')
    (killed / "exit.json").write_text('{"status": 3, "reason": "the policy has <b>collapsed"}')
    (killed / "config.yaml").write_text("train: [1\n")  # no YAML: shown as it stands
    page = Page(page_of(killed))
    assert "3 steps; it ended with status 3: the policy has <b>collapsed" in page.text
    assert "train: [1" in page.text and page.figures() == ["lr"]
    odd = [{"step": i, "kl": 10**400, "lr": 1e308, "loss": 1.0 / i} for i in (1, 2)]
    page = Page(page_of(run_folder(tmp_path / "odd", odd, settings="day: 2024-99-99\n")))
    assert page.figures() == ["Loss"] and "2024-99-99" in page.text
    fine_tuned = [{"step": i, "loss": 1 / i, "heldout_loss": 2 / i, "seconds": 1.0} for i in (1, 2)]
    page = Page(page_of(run_folder(tmp_path / "sft", fine_tuned)))
    assert "heldout loss 2 → 1 best at step 2" in page.text and "Loss" in page.figures()
    episodes = {
        s: [rollout(f1=f, searches=1, prediction="a", group=g) for g, f in enumerate((0.0, 1.0))]
        for s in (1, 2)
    }
    figures = [{"step": s, "reward": 0.1, "em": s / 2, "end_length": s / 4} for s in (1, 2)]
    text = page_of(run_folder(tmp_path / "episodes", figures, episodes))
    assert {"Scores of the answers", "Answers", "How episodes end"} <= set(Page(text).figures())
    for name in ("empty", "none"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "empty":
            (folder / "metrics.jsonl").write_text("")
        with pytest.raises(data.DataError, match="no step is logged"):
            page_of(folder)


def test_hostile_texts_stay_texts(tmp_path):
    evil = "</script><script>evil()</script><img src=x onerror=evil()>{{title}}\u2028\"'&amp;"
    rows = [rollout(evil, response=evil * 1000, rewrite=evil, end=evil) for _ in range(2)]
    metrics = [{"step": i, evil: i, "reward": 1.0} for i in (1, 2)]
    folder = run_folder(tmp_path / "run", metrics, {1: rows, 2: rows}, f"model: {evil!r}\n")
    text = page_of(folder, title=evil)
    page, plain = Page(text), Page(page_of(folder))
    scripts = [tag for tag, _ in page.tags if tag == "script"]
    assert len(scripts) == 2 + 2 and not [t for t, _ in page.tags if t == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert evil.split("\u2028")[0] in page.text and len(plain.tags) == len(page.tags)
    assert unpacked(text)[2][0]["rows"][1]["response"] == evil * 1000


def test_many_rollouts_lie_beside_the_page(tmp_path, monkeypatch):
    rollouts = {step: [rollout()] for step in (1, 2)}
    folder = run_folder(tmp_path / "run", [{"step": 1, "reward": 1.0}], rollouts)
    whole = unpacked(page_of(folder))
    monkeypatch.setattr(run_page, "PAGE_BYTES", 100)
    text = page_of(folder)
    beside = sorted((folder / run_page.BESIDE).iterdir())
    assert unpacked(text) == {} and [p.name for p in beside] == ["1.js", "2.js"]
    assert {k: v for p in beside for k, v in unpacked(p.read_text()).items()} == whole
    monkeypatch.undo()
    page_of(folder)
    assert not (folder / run_page.BESIDE).exists()


def test_a_page_keeps_its_rollouts_until_the_next_is_written(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run", [{"step": 1, "reward": 1.0}], {1: [rollout()]})
    monkeypatch.setattr(run_page, "PAGE_BYTES", 100)
    text, script = page_of(folder), folder / run_page.BESIDE / "1.js"
    rows = script.read_text()
    monkeypatch.undo()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_page.plots, "page", killed)
    with pytest.raises(KeyboardInterrupt):
        page_of(folder)
    assert (folder / "report.html").read_text() == text and script.read_text() == rows


def test_a_rollout_of_another_form_is_named(tmp_path):
    rollouts = {1: [rollout(), rollout(rank="7")]}
    with pytest.raises(data.DataError, match="step_000001.jsonl:2: rank is '7'; it must be int"):
        page_of(run_folder(tmp_path / "run", [{"step": 1, "reward": 1.0}], rollouts))


def test_prompts_that_are_followed(tmp_path):
    """Of prompts seen in every epoch: the largest gain, the middle one, the largest loss."""
    gains = {"up": 1.5, "little": 0.5, "same": 0.0, "down": -0.5, "far down": -1.0}
    rollouts = {
        step: [
            rollout(name, rank, reward=0.5 + gain * (step - 1) / 2)
            for name, gain in gains.items()
            for rank in (1, 20)
        ]
        for step in (1, 2, 3)
    }
    rollouts[1].append(rollout("once", reward=9.0))
    folder = run_folder(tmp_path / "run", [{"step": 3, "reward": 1.0}], rollouts)
    words = Page(page_of(folder)).text
    assert "the one that gained most: up" in words and "a typical one: same" in words
    assert "the one that lost most: far down" in words and "once" not in words
    assert words.count("“") == 0 and "rank 20 up 20" in words  # the middle one of two: the lower


def test_stack_and_intervals_are_drawn_to_scale():
    picture = plots.stack("t", [1, 2], {"a": [0.25, 0.5], "b": [0.75, 0.5]}, percent=True)
    top, bottom = plots.TOP, plots.BOTTOM
    paths = re.findall(r'class="f(\d)" d="M[\d.]+ ([\d.]+)V([\d.]+)H[\d.]+V([\d.]+)', picture.body)
    heights = {i: [(bottom - float(v)) / (bottom - top) for v in ys] for i, *ys in paths}
    assert heights["0"] == pytest.approx([0, 0.25, 0.5], abs=1e-3)
    assert heights["1"] == pytest.approx([0.25, 1, 1], abs=1e-3)
    picture = plots.intervals("t", [("x", [(0.5, (0.25, 1.0))]), ("y", [(0.0, None)])])
    half, zero = (float(x) for x in re.findall(r'<circle class="f0" cx="([\d.]+)"', picture.body))
    low, high = map(float, re.search(r'd="M([\d.]+) [\d.]+H([\d.]+)"/><c', picture.body).groups())
    assert (low - zero) / (half - zero) == pytest.approx(0.5, abs=1e-2)
    assert (high - zero) / (half - zero) == pytest.approx(2, abs=1e-2)


RANGES = [(0, 1), (-3e-6, 7e-6), (12, 12.4), (0, 98765), (0.1, 0.3), (0.997, 1), (98765, 98766)]


@pytest.mark.parametrize("low, high", RANGES)
def test_ticks_cover_and_are_few(low, high):
    marks = plots.ticks(low, high)
    assert marks[0] <= low + 1e-9 * abs(low) and marks[-1] >= high * (1 - 1e-9)
    assert 4 <= len(marks) <= 8
    for percent in (False, True):
        assert len(set(plots.labels(marks, percent))) == len(marks)
    assert plots.labels([0.997, 0.9975, 0.998]) == ["0.997", "0.9975", "0.998"]
    assert plots.labels([0, 0.0025, 0.005], True) == ["0 %", "0.25 %", "0.5 %"]


def test_rolling_mean_has_the_interval_of_its_window():
    rng = random.Random(0)
    points = [(i, rng.random()) for i in range(50)]
    means, band = plots.rolling(points, 5)
    near = [y for _, y in points[18:23]]
    error = statistics.stdev(near) / math.sqrt(5)
    assert means[20] == (20, pytest.approx(statistics.fmean(near)))
    assert band[20][1:] == (
        pytest.approx(means[20][1] - 1.96 * error),
        pytest.approx(means[20][1] + 1.96 * error),
    )
    assert len(plots.thinned([(i, 2.0 * i) for i in range(10_000)])) <= plots.POINTS


def test_pictures_of_the_readme_are_what_the_committed_figures_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import pictures

    for name, draw in (("learning", pictures.learning), ("followed", pictures.followed)):
        drawn = draw()
        assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == drawn
        ElementTree.fromstring(drawn)
        assert f"docs/{name}.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_page_of_tables():
    row = {"mrr": 0.5, "queries": 9, "ci": {"mrr": [0.4, 0.6]}}
    part = {"mrr": 0.25, "queries": 4, "ci": {"mrr": [0.1, 0.4]}}
    rows = {f"s<{n}>": row | {"groups": {"depth": {"1": part, "2": part}}} for n in range(8)}
    text = tables.tables(rows, ".")
    page = Page(tables.tables_page("a & b", text, rows))
    assert page.figures() == ["MRR", "MRR by turn of the conversation"]
    assert "s<7> 50.0 [40.0, 60.0] 9" in page.text and "1 (4)" in page.text
    assert "s<0>" in page.text and [t for t, _ in page.tags].count("table") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give trajectories=FILE or run=FOLDER"),
        (["trajectories=a", "run=b"], "one of them"),
        (["run=nowhere"], "is no folder"),
        (["trajectories=a", "cap=3"], "set both, or neither"),
        (["trajectories=a", "balance_by=rounds"], "set both"),
        (["trajectories=a", "per_question=0"], "at least 1"),
        (["trajectories=nowhere.jsonl"], "No such file"),
        (["trajectories=x/trajectory_success.jsonl"], "give another out=FOLDER"),
        (["trajectories=a", "export=[x]"], "one of openai, swift"),
    ],
)
def test_bad_input_leaves_with_status_2_and_a_way_out(arguments, message, capsys):
    with pytest.raises(SystemExit) as e:
        run_entry(report.ReportConfig, report.main, arguments)
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_last_line_of_the_command_is_json(tmp_path, capsys):
    write_jsonl(str(tmp_path / "t.jsonl"), many(6))
    words = [f"trajectories={tmp_path / 't.jsonl'}"]
    run_entry(report.ReportConfig, report.main, words)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["total"] == 6


def test_what_never_moves_alarms_too_and_the_middle_response_is_the_middle_one(tmp_path):
    sick = [{"step": i, "kl": 3.0, "failed": 0, "skipped": i > 2, "lr": 1.0} for i in (1, 2, 3)]
    sick = [row | {"skipped": int(row["skipped"])} for row in sick]
    rows = [
        rollout(rewrite=name, reward=reward, rank=rank, well_formed=rank is not None)
        for name, reward, rank in (("best", 2.0, 1), ("middle", 0.0, None), ("worst", -0.1, None))
    ]
    page = Page(page_of(run_folder(tmp_path / "run", sick, {1: rows, 3: rows})))
    assert page.text.count("Look here") == 2  # KL, always 3; skipped, behind failed
    said = page.text.split("What the middle one of its responses said, at step")[1]
    assert "middle" in said.split("</ol>")[0][:40] and "worst" not in said[:40]
    bare = [{"response": "x", "reward": 1.0, "query_id": "q", "group": 0}]
    assert (
        "Prompts followed"
        in Page(page_of(run_folder(tmp_path / "bare", sick, {1: bare, 2: bare}))).text
    )
