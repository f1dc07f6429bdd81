"""infer.py: statuses and fallbacks, restart, settings, the same file from any number of processes."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_lm, tiny_tokenizer
import config
import data
import infer
from distributed import Dist
from engines.base import EngineConfig, Rollout
from prompts import response_text
from runs import begin_output, changed_setting, fingerprint, only_writer, write_jsonl

ROOT = Path(__file__).resolve().parent.parent
CPU = Dist(0, 1, torch.device("cpu"))


def response(rewrite, think="she = Ann"):
    return response_text(think, rewrite)


class Scripted:
    """An engine that answers by question: text, or an end that is no answer; remembers what it was asked."""

    max_length = 4096

    def __init__(self, answers):
        self.answers, self.tokenizer, self.asked = answers, tiny_tokenizer(), []

    def generate(self, prompts, sampling, progress=None):
        out = []
        for group, ids in enumerate(prompts):
            question = self.tokenizer.decode(ids).rpartition("Question: ")[2].split("<|im_end|>")[0]
            self.asked.append(question)
            for i in range(sampling.n):
                text = self.answers[question]
                text = text[i % len(text)] if isinstance(text, list) else text
                end = "engine_error" if text is None else "eos"
                ids_out = [] if text is None else self.tokenizer(text)["input_ids"] + [2]
                out.append(
                    Rollout(ids, ids_out, [0.0] * len(ids_out), [1] * len(ids_out), group, end)
                )
            if progress:
                progress(len(out), len(prompts) * sampling.n, 1.0)
        return out

    def sleep(self):
        pass


def write_turns(path, questions, context=()):
    write_jsonl(
        str(path),
        [
            {
                "query_id": q,
                "conversation_id": "c" + q,
                "turn": 1,
                "context": list(context),
                "question": text,
                "gold_ids": ["p1"],
            }
            for q, text in questions.items()
        ],
    )
    return str(path)


def read(path):
    return [row for _, row in data.read_jsonl(str(path))]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    tiny_lm(folder)
    return str(folder)


@pytest.fixture
def scripted(monkeypatch):
    def use(answers):
        engine = Scripted(answers)
        monkeypatch.setattr(infer, "open_engine", lambda cfg, tokenizer, dist: engine)
        return engine

    return use


def test_every_turn_gets_a_line_with_its_status(lm, tmp_path, scripted, capsys):
    """one line of text a rewrite; an unclosed one falls back to the question, flagged, never empty."""
    turns = write_turns(
        tmp_path / "t.jsonl", {"a": "who wrote it?", "b": "unclosed", "c": "broken", "d": "x" * 900}
    )
    scripted(
        {
            "who wrote it?": response("who wrote\nDune\t ?"),
            "unclosed": "<think>a</think>\n<rewrite>who wrote Dune",
            "broken": None,
        }
    )
    result = infer.main(
        infer.InferConfig(
            model=lm,
            turns=turns,
            out=str(tmp_path / "o.jsonl"),
            max_response_tokens=64,
            max_prompt_tokens=1000,
        )
    )
    assert "warning: 1 of 4 are ok; a model that was not trained" in capsys.readouterr().out
    rows = read(tmp_path / "o.jsonl")
    assert [(r["query_id"], r["status"], r["rewrite"]) for r in rows] == [
        ("a", "ok", "who wrote Dune ?"),
        ("b", "malformed", "unclosed"),
        ("c", "engine_error", "broken"),
        ("d", "too_long", "x" * 900),
    ]
    assert (rows[0]["think"], rows[0]["end"], rows[0]["tokens"]) == (
        "she = Ann",
        "eos",
        len(rows[0]["response"]) + 1,
    )
    assert (
        rows[1]["response"] == "<think>a</think>\n<rewrite>who wrote Dune"
        and rows[3]["tokens"] == 0
    )
    counts = {
        k: result[k] for k in ("lines", "ok", "malformed", "engine_error", "too_long", "generated")
    }
    assert counts == {
        "lines": 4,
        "ok": 1,
        "malformed": 1,
        "engine_error": 1,
        "too_long": 1,
        "generated": 4,
    }
    assert sorted(os.listdir(tmp_path)) == [
        "o.jsonl",
        "o.jsonl.config.yaml",
        "o.jsonl.meta.json",
        "t.jsonl",
    ]


def test_restart_after_a_crash_samples_only_what_is_missing(lm, tmp_path, scripted):
    """a and b are done, c is half written: only c is sampled, and the file equals an undisturbed one."""
    questions = {k: f"question {k}" for k in "abc"}
    turns = write_turns(tmp_path / "t.jsonl", questions)
    answers = {q: [response(f"first {q}"), response(f"second {q}")] for q in questions.values()}
    cfg = dict(model=lm, turns=turns, samples=2, temperature=0.7, max_response_tokens=64)
    engine = scripted(answers)
    infer.main(infer.InferConfig(out=str(tmp_path / "whole.jsonl"), **cfg))
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    output = str(tmp_path / "o.jsonl")
    infer.main(infer.InferConfig(out=output, **cfg))
    os.remove(output)  # what a killed run of two processes leaves
    (tmp_path / "o.jsonl.rank000").write_bytes(lines[0] + lines[1] + lines[4][:-1] + b"\n")
    (tmp_path / "o.jsonl.rank001").write_bytes(lines[2] + lines[3] + lines[5][:30])
    engine.asked.clear()
    result = infer.main(infer.InferConfig(out=output, **cfg))
    assert engine.asked == ["question c"] and result["generated"] == 2
    assert open(output, "rb").read() == b"".join(lines)
    assert not glob.glob(output + ".rank*") and not os.path.exists(output + ".done")
    open(output, "wb").write(b"".join(lines[:4]) + lines[4][:50])  # the final file itself, cut
    engine.asked.clear()
    infer.main(infer.InferConfig(out=output, **cfg))
    assert engine.asked == ["question c"] and open(output, "rb").read() == b"".join(lines)
    engine.asked.clear()
    assert infer.main(infer.InferConfig(out=output, **cfg))["generated"] == 0 and not engine.asked


def test_an_output_never_mixes_two_settings(lm, tmp_path, scripted):
    turns = write_turns(tmp_path / "t.jsonl", {"a": "one", "b": "two"})
    engine = scripted({"one": response("1"), "two": response("2"), "three": response("3")})
    cfg = infer.InferConfig(
        model=lm, turns=turns, out=str(tmp_path / "o.jsonl"), max_response_tokens=64
    )
    infer.main(cfg)
    with pytest.raises(
        data.DataError, match="max_response_tokens was 64 and is 65.*overwrite=true"
    ):
        infer.main(infer.InferConfig(**{**vars(cfg), "max_response_tokens": 65}))
    other = tmp_path / "lm"
    tiny_lm(other, seed=1)
    with pytest.raises(data.DataError, match="model was"):
        infer.main(infer.InferConfig(**{**vars(cfg), "model": str(other)}))
    write_turns(tmp_path / "t.jsonl", {"a": "one", "b": "three"})
    with pytest.raises(data.DataError, match="turn b .* had another prompt"):
        infer.main(cfg)
    engine.asked.clear()
    infer.main(infer.InferConfig(**{**vars(cfg), "max_response_tokens": 65, "overwrite": True}))
    assert engine.asked == ["one", "three"]


def test_two_runs_never_write_the_same_output(lm, tmp_path, scripted):
    """The second would take the first one's part file away, and the first would end with lines missing."""
    turns = write_turns(tmp_path / "t.jsonl", {"a": "question a"})
    scripted({"question a": response("a")})
    cfg = infer.InferConfig(
        model=lm, turns=turns, out=str(tmp_path / "o.jsonl"), max_response_tokens=64
    )
    with (
        only_writer(str(tmp_path), "o.jsonl"),
        pytest.raises(data.DataError, match="another process is writing"),
    ):
        infer.main(cfg)
    with only_writer(str(tmp_path), "other.jsonl"):
        assert infer.main(cfg)["lines"] == 1


def test_a_part_that_is_not_seen_is_an_error_not_a_shorter_file(lm, tmp_path):
    """Processes of several machines without a common folder."""
    cfg = infer.InferConfig(model=lm, out=str(tmp_path / "o.jsonl"))
    with pytest.raises(
        data.DataError, match="0 of 2 lines are there; let all processes see the same folder"
    ):
        infer.finish(cfg, {"a": [1], "b": [2]}, CPU)
    assert not os.path.exists(cfg.out)


def test_settings_differ_by_content_and_in_every_part():
    a, b, other = ({"path": p, "digest": d} for p, d in (("a", "1"), ("b", "1"), ("a", "2")))
    before = {"model": a, "betas": [0.9, 0.95], "lr": 1.0, "target": ["q_proj", "v_proj"]}
    assert changed_setting(before, before | {"model": b}) == ""
    assert changed_setting(before, {"target": ["k_proj", "v_proj"]}).startswith("target was")
    older = {"model": ["a", "another digest"], "qrels": ["c", "d"]}  # a list, or a configuration
    assert changed_setting(older, {"model": a, "qrels": {"path": "c,d", "digest": "3"}}) == ""
    assert changed_setting(older, {"model": b}) == "model was ['a', 'another digest'] and is 'b'"
    nested = {"episode": {"top_k": 5}}
    now, defaults = {"episode": {"top_k": 5, "penalty": 0.0}}, {"episode": {"penalty": 0.0}}
    assert changed_setting(nested, now, defaults) == ""  # an older version had no penalty
    now["episode"]["penalty"] = 0.5
    assert changed_setting(nested, now, defaults) == "episode.penalty was 0.0 and is 0.5"
    assert changed_setting(before, {"model": other}) == "model='a' has other content"
    assert (
        changed_setting(before, {"betas": [0.8, 0.95]})
        == "betas was [0.9, 0.95] and is [0.8, 0.95]"
    )


def test_few_shot_prompt_shows_the_examples(lm, tmp_path, scripted):
    write_jsonl(
        str(tmp_path / "e.jsonl"),
        [
            {
                "context": [["who is Ann?", "a painter"]],
                "question": "born?",
                "think": "Ann",
                "rewrite": "when was Ann born?",
            }
        ],
    )
    cfg = infer.InferConfig(
        model=lm,
        turns=write_turns(tmp_path / "t.jsonl", {"a": "one"}),
        prompt="few-shot",
        examples=str(tmp_path / "e.jsonl"),
        out=str(tmp_path / "o.jsonl"),
    )
    _, prompts = infer.open_prompts(cfg, data.read_turns(cfg.turns), tiny_tokenizer())
    text = tiny_tokenizer().decode(prompts["a"])
    assert "<rewrite>when was Ann born?</rewrite>" in text
    assert text.endswith("Question: one<|im_end|>\n<|im_start|>assistant\n")


def test_end_tokens_come_from_a_list_and_an_unknown_pad_becomes_eos(tmp_path):
    """both ids of the generation config end a response; a pad id without an embedding is not used."""
    model = tiny_lm()
    model.generation_config.eos_token_id = [2, 4]
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|late|>"})
    assert tokenizer.pad_token_id == model.config.vocab_size
    engine = infer.open_engine(infer.InferConfig(model=str(tmp_path)), tokenizer, CPU)
    assert engine.eos_ids == {2, 4} and engine.pad_id == 2


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seven")
    return write_turns(folder / "t.jsonl", {f"q{i}": "why " * (i + 1) for i in range(7)})


def test_batches_do_not_change_greedy_output(lm, seven, tmp_path):
    """temperature 0, batches of 1 and 4."""
    rows = []
    for batch in (1, 4):
        infer.main(
            infer.InferConfig(
                model=lm,
                turns=seven,
                out=str(tmp_path / f"{batch}.jsonl"),
                max_response_tokens=12,
                engine=EngineConfig(batch=batch),
                chunk=3,
            )
        )
        rows.append(
            [(r["query_id"], r["response"], r["tokens"]) for r in read(tmp_path / f"{batch}.jsonl")]
        )
    assert rows[0] == rows[1] and len(rows[0]) == 7


def test_two_processes_write_the_same_file_as_one(lm, seven, tmp_path):
    arguments = dict(
        model=lm, turns=seven, samples=2, temperature=0.7, max_response_tokens=12, chunk=2
    )
    infer.main(infer.InferConfig(out=str(tmp_path / "one.jsonl"), **arguments))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(ROOT / "infer.py"),
            f"out={tmp_path / 'two.jsonl'}",
            *(f"{k}={v}" for k, v in arguments.items()),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["lines"] == 14
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def exit_status(arguments, capsys, module=infer, cls=infer.InferConfig):
    with pytest.raises(SystemExit) as e:
        config.run(cls, module.main, arguments)
    return e.value.code, capsys.readouterr().err


def test_bad_input_leaves_with_status_2(lm, tmp_path, capsys):
    turns = write_turns(tmp_path / "t.jsonl", {"a": "one"})
    out = f"out={tmp_path / 'o.jsonl'}"
    (tmp_path / "empty.jsonl").write_text("")
    bare = tmp_path / "bare"
    tiny_lm(bare)
    tiny_tokenizer(chat=False).save_pretrained(bare)
    (bare / "chat_template.jinja").unlink()
    for arguments, text in [
        ([f"model={lm}", f"turns={tmp_path}/none.jsonl", out], "none.jsonl"),
        ([f"model={lm}", f"turns={tmp_path}/empty.jsonl", out], "no turns"),
        ([f"model={tmp_path}/nothing", f"turns={turns}", out], "nothing': there is no such folder"),
        ([f"model={bare}", f"turns={turns}", out], "chat template"),
        ([f"model={lm}", f"turns={turns}", out, "samples=2"], "temperature"),
        ([f"model={lm}", f"turns={turns}", out, "prompt=few-shot"], "examples=FILE"),
        ([f"model={lm}", f"turns={turns}", out, "max_response_token=3"], "max_response_tokens"),
        (
            [f"model={lm}", f"turns={turns}", out + "x", "max_response_tokens=4096"],
            "2048 positions",
        ),
        ([f"model={lm}", f"turns={turns}", f"out={turns}"], "turns file itself"),
        ([f"model={lm}", f"turns={turns}", f"out={tmp_path}"], "is a folder"),
        ([f"model={tmp_path}/nothing", f"turns={turns}", out, "top_p=2"], "top_p=2"),
        ([f"turns={turns}", out], "model is empty"),
    ]:
        status, err = exit_status(arguments, capsys)
        assert status == 2 and text in err and "Traceback" not in err, (arguments, err)
    assert not [p for p in tmp_path.iterdir() if p.name in ("o.jsonl", "o.jsonlx")]


def test_fingerprint_follows_content_not_path(tmp_path):
    for name, text in (("a", "x" * 200_000), ("b", "x" * 200_000), ("c", "x" * 199_999 + "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
    a, b, c = (fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b != c and fingerprint("some/hub-name") == "some/hub-name" and fingerprint("") == ""
    for name in ("README.md", "rewrites.jsonl", "rewrites.jsonl.meta.json"):
        (tmp_path / "a" / name).write_text("beside the model")
    assert fingerprint(str(tmp_path / "a")) == a


def test_any_edit_of_a_data_file_is_noticed(tmp_path):
    """A model is read in samples, data whole, whatever it is called."""
    text = bytearray(b"x" * (9 << 20))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(text)
    text[5 << 20 | 12345] += 1
    (tmp_path / "c").write_bytes(text)
    a, b, c = (fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b != c


def test_files_of_like_names_are_left_alone(tmp_path):
    paths = [tmp_path / f"o.jsonl.rank{end}" for end in ("000", "s.tsv", "ed")]
    for path in paths:
        path.write_text("")
    assert infer.parts_of(str(tmp_path / "o.jsonl")) == [str(paths[0])]


def test_output_of_another_tool_is_left_alone(tmp_path):
    (tmp_path / "x.jsonl").write_text("its line\n")
    with pytest.raises(
        data.DataError, match="there is output, but no .*meta.json.*choose another output$"
    ):
        begin_output(
            str(tmp_path / "x.jsonl.meta.json"),
            {"a": 1},
            [str(tmp_path / "x.jsonl*")],
            infer.InferConfig(),
        )
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_output_of_a_version_without_a_setting_goes_on_at_its_default(tmp_path):
    meta, out = str(tmp_path / "o.jsonl.meta.json"), str(tmp_path / "o.jsonl")
    (tmp_path / "o.jsonl").write_text("a line\n")
    (tmp_path / "o.jsonl.meta.json").write_text('{"temperature": 0.7}')
    now = {"temperature": 0.7, "episode.penalty": 0.0}
    begin_output(meta, now, [out], infer.InferConfig())
    with pytest.raises(data.DataError, match="episode.penalty was 0.0 and is 0.2"):
        begin_output(meta, now | {"episode.penalty": 0.2}, [out], infer.InferConfig())


def test_what_failed_for_a_technical_reason_is_asked_again(lm, tmp_path, scripted):
    turns = write_turns(tmp_path / "t.jsonl", {"a": "one", "b": "two"})
    engine = scripted({"one": response("1"), "two": None})
    cfg = infer.InferConfig(
        model=lm, turns=turns, out=str(tmp_path / "o.jsonl"), max_response_tokens=64
    )
    assert infer.main(cfg)["engine_error"] == 1
    engine.answers["two"] = response("2")
    engine.asked.clear()
    result = infer.main(cfg)
    assert engine.asked == ["two"] and (
        result["generated"],
        result["ok"],
        result["engine_error"],
    ) == (1, 2, 0)
    assert [row["rewrite"] for row in read(cfg.out)] == ["1", "2"]
    assert infer.main(cfg)["generated"] == 0


def test_the_instruction_of_a_file_takes_the_place_of_ours(lm, tmp_path):
    (tmp_path / "i.txt").write_text("Say it so that a search engine finds it.\n")
    turns = write_turns(tmp_path / "t.jsonl", {"a": "one"})
    cfg = infer.InferConfig(
        model=lm, turns=turns, instruction=str(tmp_path / "i.txt"), out=str(tmp_path / "o.jsonl")
    )
    text = tiny_tokenizer().decode(
        infer.open_prompts(cfg, data.read_turns(turns), tiny_tokenizer())[1]["a"]
    )
    assert (
        "Say it so that a search engine finds it.\n\nConversation:" in text
        and "Rewrite the last question" not in text
    )
