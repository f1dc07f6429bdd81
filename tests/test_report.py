"""report.py: the statistics against slow counting, filters and exports, the page of a run, bad
input."""

from __future__ import annotations

import json
import math
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_trajectory_sft import agent_row, call, conversation  # noqa: F401  a fixture

import data
import report
from config import ConfigError
from config import run as run_entry
from episodes import trajectories
from runs import write_jsonl


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
        ({"metric_score": {"em": "1"}}, "metric_score.em must be a number"),
        ({"rounds": "2"}, "rounds must be of type int"),
        ({"metric_score": [1]}, "metric_score must be of type dict"),
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


class Balanced(HTMLParser):
    """Raises where a closing tag has no opening one; collects text."""

    def __init__(self):
        super().__init__()
        self.open, self.words = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def test_page_of_a_run(tmp_path):
    folder = tmp_path / "run"
    write_jsonl(
        str(folder / "metrics.jsonl"),
        [{"step": 0, "dev_mrr": 0.1}]
        + [
            {"step": i, "reward": i / 10, "kl": None, "flag": True, "name": "x<y"}
            for i in range(1, 50)
        ]
        + [{"step": 50, "reward": 5.0, "dev_mrr": 0.3}],
    )
    for step in (1, 20, 50):
        write_jsonl(
            str(folder / f"rollouts/step_{step:06d}.jsonl"),
            [
                {
                    "query_id": f"s{step}",
                    "response": "<think>a & b</think>",
                    "reward": r,
                    "end": "eos",
                }
                for r in (0.0, 1.0, None, 0.5)
            ],
        )
    (folder / "config.yaml").write_text("lr: 1e-6\nmodel: <x>\n")
    page = Path(report.main(report.ReportConfig(run=str(folder)))["report"])
    parser = Balanced()
    parser.feed(text := page.read_text())
    assert page.name == "report.html" and parser.open == []
    words = "".join(parser.words)
    assert (
        "<think>a & b</think>" in words
        and "lr: 1e-6" in words
        and "step 000050" in words
        and "step 000020" not in words
    )
    assert text.count("<figure>") == 2 and "kl" not in [
        w.strip() for w in parser.words
    ]  # reward, dev_mrr; nothing measured of kl
    assert "http" not in text and "<script" not in text  # nothing to load
    points = re.findall(r'points="([^"]*)"', text)
    assert len(points[0].split()) == 2 and len(points[1].split()) == 50
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(data.DataError, match="no step is logged"):
        report.main(report.ReportConfig(run=str(folder)))


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
        (["trajectories=x/trajectory_success.jsonl"], "give out=FOLDER"),
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
