"""The dense index on disk: built, killed, shared out, damaged; and FAISS indexes beside it."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_encoder
from tiny_retrieval import (
    WORDS,
    NumberTokenizer,
    WordVectors,
    passages,
    sorted_rank,
    table_retriever,
    tiny_ance,
    write_corpus,
)

import retriever as R
from data import DataError, Passage
from retriever import (
    DenseRetriever,
    Encoder,
    RetrieverConfig,
    build_index,
    encode,
    load_encoder,
    open_index,
    open_retriever,
)
from runs import only_writer
from search import dense_index
from search import passages as shared
from search.bm25 import BM25Retriever
from search.faiss_index import FaissIndex
from search.fusion import HybridRetriever
from search.passages import Corpus, PassageIds, RetrieverError

ROOT = Path(__file__).resolve().parent.parent


def test_nan_is_refused_at_index_time(tmp_path):
    corpus = [Passage("a", "", "0"), Passage("b", "", "1")]
    for i, number in enumerate((math.nan, math.inf, 1e6)):  # the last is infinite in fp16
        model, settings = WordVectors(torch.tensor([[1.0, 0], [number, 0]])), Encoder("mean", False)
        with pytest.raises(RetrieverError, match="passage 'b' is not finite in fp16"):
            build_index(tmp_path / str(i), corpus, model, NumberTokenizer(), settings)
    assert not list(tmp_path.rglob("shard-*.npy")) and not list(tmp_path.rglob("*.tmp"))


def test_what_is_cut_is_counted(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"), "cpu", query_length=8, passage_length=20)
    corpus = [
        Passage("a", "", "short"),
        Passage("b", "", "longer than twenty bytes"),
        Passage("c", "", "red fox"),
    ]
    dense = DenseRetriever(build_index(tmp_path / "i", corpus, *parts), *parts)
    bm25 = BM25Retriever(corpus, query_words=3)
    hybrid = HybridRetriever(dense, bm25)
    assert (dense.cut_queries, dense.cut_passages) == (0, 1)
    dense.search(["123456", "1234567", "12345678"], 1)  # two special tokens beside the bytes
    dense.gold_ranks(["1234567"], [["a"]])
    assert (dense.cut_queries, hybrid.cut_queries, hybrid.cut_passages) == (3, 0, 1)
    hybrid.search(["a b c", "a b c d", "a red fox runs", "red foxes"], 1)
    assert hybrid.cut_queries == 3  # cut by none, by both sides (once) twice, by the encoder
    hybrid.gold_ranks(["a red fox runs"], [["a"]])
    assert hybrid.cut_queries == 4


def test_an_empty_corpus_and_an_id_that_stands_twice_are_named(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts, path = load_encoder(str(tmp_path / "e")), tmp_path / "c.jsonl"
    for build in (BM25Retriever, lambda corpus: build_index(tmp_path / "i", corpus, *parts)):
        with pytest.raises(RetrieverError, match="the corpus has no passages"):
            build([])
        path.write_text("\n")
        with pytest.raises(RetrieverError, match="c.jsonl has no passages"):
            build(str(path))
        write_corpus(path, [*passages(3), passages(3)[1]])
        with pytest.raises(
            RetrieverError,
            match="c.jsonl:4: passage id 'p0001' occurs more than once .first in line 2",
        ):
            build(str(path))


def test_index_roundtrip_and_refusals(tmp_path):
    tiny_encoder(tmp_path / "e")
    tiny_encoder(tmp_path / "other", seed=1)
    model, tokenizer, encoder = load_encoder(str(tmp_path / "e"), device="cpu", passage_length=16)
    corpus = passages(50)
    index = build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20)
    assert [len(s) for s in index.shards] == [20, 20, 10] and index.encoded == 50
    assert index.shards[0].dtype == np.float16
    assert sum(s["truncated"] for s in index.meta["shards"]) == sum(
        len(p.contents) + 2 > 16 for p in corpus
    )
    expected = encode(model, tokenizer, [p.contents for p in corpus], encoder)
    assert np.abs(np.concatenate(index.shards) - expected.numpy()).max() < 2e-3
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "i").iterdir()}
    again = build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20)
    assert again.encoded == 0 and before == {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / "i").iterdir()
    }

    one = build_index(
        tmp_path / "one", corpus, model, tokenizer, encoder
    )  # one shard = three shards
    queries, golds = ["red fox", "number7 tree", "wine"], [["p0003"], ["p0007", "p0001"], ["p0049"]]
    a, b = (DenseRetriever(i, model, tokenizer, encoder) for i in (index, one))
    assert a.gold_ranks(queries, golds) == b.gold_ranks(queries, golds)
    assert [[i for i, _ in h] for h in a.search(queries, 50)] == [
        [i for i, _ in h] for h in b.search(queries, 50)
    ]
    assert "p0003" in a.passage_ids and "p9999" not in a.passage_ids

    wrong = [
        (load_encoder(str(tmp_path / "other"), device="cpu", passage_length=16), "fingerprint"),
        ((model, tokenizer, replace(encoder, pooling="first")), "pooling"),
        ((model, tokenizer, replace(encoder, query_prefix="query: ")), "query_prefix"),
        ((model, tokenizer, replace(encoder, passage_prefix="x")), "passage_prefix"),
        ((model, tokenizer, replace(encoder, normalise=False)), "normalise"),
        ((model, tokenizer, replace(encoder, passage_length=17)), "passage_length"),
    ]
    for parts, message in wrong:
        for call in (
            lambda: open_index(tmp_path / "i", *parts),
            lambda: DenseRetriever(index, *parts),
            lambda: build_index(tmp_path / "i", corpus, *parts, shard_size=20),
        ):
            with pytest.raises(RetrieverError, match=message):
                call()
    with pytest.raises(RetrieverError, match="corpus"):
        build_index(
            tmp_path / "i",
            corpus[:-1] + passages(51)[-1:],
            model,
            tokenizer,
            encoder,
            shard_size=20,
        )
    with pytest.raises(RetrieverError, match="python retriever.py"):
        open_index(tmp_path / "nowhere")

    (tmp_path / "i/shard-00001.npy").write_bytes(
        b"damaged"
    )  # noticed, and only that is built again
    with pytest.raises(RetrieverError, match="damaged"):
        open_index(tmp_path / "i")
    assert (
        build_index(tmp_path / "i", corpus, model, tokenizer, encoder, shard_size=20).encoded == 20
    )
    meta = json.loads((tmp_path / "i/meta.json").read_text())
    (tmp_path / "i/meta.json").write_text(json.dumps(meta | {"complete": False}))
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(tmp_path / "i")


SLOW_BUILD = """
import sys, time, torch
torch.set_num_threads(1)
sys.path[:0] = [{root!r}]
import retriever
fast = retriever.encode_tokens


def slow(*args, **kwargs):
    time.sleep(0.05)
    return fast(*args, **kwargs)
retriever.encode_tokens = slow
parts = retriever.load_encoder({encoder!r}, device="cpu")
retriever.build_index({out!r}, {corpus!r}, *parts, shard_size=5)
"""


def test_killed_build_goes_on_byte_identical(tmp_path):
    tiny_encoder(tmp_path / "e")
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "killed"
    corpus.write_text(
        "".join(
            json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in passages(200)
        )
    )
    code = SLOW_BUILD.format(
        root=str(ROOT), encoder=str(tmp_path / "e"), out=str(out), corpus=str(corpus)
    )
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 120
    while (
        len(list(out.glob("shard-*.npy"))) < 3
        and time.monotonic() < deadline
        and child.poll() is None
    ):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(out)
    (out / "shard-00009.npy.12345.tmp").write_bytes(
        b"half a shard"
    )  # what a kill in the middle of a write leaves

    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed = build_index(out, str(corpus), *parts, shard_size=5)
        whole = build_index(tmp_path / "whole", str(corpus), *parts, shard_size=5)
    finally:
        torch.set_num_threads(threads)
    assert 0 < resumed.encoded <= 200 - 2 * 5 and whole.encoded == 200
    names = sorted(p.name for p in out.iterdir())
    assert names == sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert all((out / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


RANKS = """
import json, sys, torch
sys.path[:0] = [{root!r}]
torch.set_num_threads(1)
import distributed, retriever as R
cfg = R.RetrieverConfig(kind="dense", corpus={corpus!r}, index={index!r}, encoder={encoder!r},
                        shard_size=30, device="cpu")
where = distributed.setup()
built = R._build(cfg)  # main without its own process group: a group can't be joined twice
cfg.across_ranks = True
r = R.open_retriever(cfg)
queries = (["red fox", "number7 tree", "wine"], ["green garden"])[where.rank]
golds = [["p0003"], ["p0129", "p0050"], ["p0077"]][:len(queries)]
hits = r.search(queries, 40)
few = [] if where.rank else queries
out = dict(built=built, ranks=r.gold_ranks(queries, golds, 130), hits=hits,
           none=[r.search(few, 40), r.gold_ranks(few, golds[:len(few)])])
assert len(r.shards) in (2, 3)
json.dump(out, open(f"{index}/{{where.rank}}.json", "w"))
distributed.cleanup()
"""


def test_workers_and_ranks_make_the_same_bytes(tmp_path):
    """Tokenised by processes, built and searched by two ranks: as by one process alone."""
    tiny_encoder(tmp_path / "e")
    corpus = write_corpus(tmp_path / "c.jsonl", passages(130))
    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        build_index(tmp_path / "one/dense", corpus, *parts, shard_size=30)
        build_index(tmp_path / "workers/dense", corpus, *parts, shard_size=30, workers=2)
    finally:
        torch.set_num_threads(threads)
    code = RANKS.format(
        root=str(ROOT), corpus=corpus, index=str(tmp_path / "ranks"), encoder=str(tmp_path / "e")
    )
    (tmp_path / "ranks.py").write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(tmp_path / "ranks.py"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads((tmp_path / f"ranks/{rank}.json").read_text()) for rank in (0, 1)]
    assert (said[0]["built"]["count"], said[0]["built"]["indexed"]) == (130, 130) and said[1][
        "built"
    ] is None
    single = DenseRetriever(tmp_path / "one/dense", *parts)
    for rank, queries in enumerate((["red fox", "number7 tree", "wine"], ["green garden"])):
        golds = [["p0003"], ["p0129", "p0050"], ["p0077"]][: len(queries)]
        assert said[rank]["ranks"] == single.gold_ranks(queries, golds, 130)
        expected = [[i for i, _ in hits] for hits in single.search(queries, 40)]
        assert [[i for i, _ in hits] for hits in said[rank]["hits"]] == expected
        assert (
            said[rank]["none"] == [[], []] if rank else said[rank]["none"][0] == said[rank]["hits"]
        )
    for other in ("workers", "ranks"):
        names = sorted(p.name for p in (tmp_path / "one/dense").iterdir())
        assert names == sorted(p.name for p in (tmp_path / other / "dense").iterdir())
        for name in names:
            one, same = (tmp_path / folder / "dense" / name for folder in ("one", other))
            assert one.read_bytes() == same.read_bytes(), name


def test_full_disk_and_damage_are_told(tmp_path, monkeypatch):
    tiny_encoder(tmp_path / "e")
    parts = load_encoder(str(tmp_path / "e"), device="cpu")
    with monkeypatch.context() as m:
        m.setattr(dense_index.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        with pytest.raises(RetrieverError, match="disk has 0.0 GB free"):
            build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
    with monkeypatch.context() as m:
        save, saved = np.save, []

        def full(f, array):
            if len(saved) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            saved.append(len(array))
            save(f, array)

        m.setattr(dense_index.np, "save", full)
        with pytest.raises(OSError, match="No space left") as caught:
            build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
        assert caught.value.filename.endswith("shard-00001.npy")
    index = build_index(tmp_path / "i", passages(50), *parts, shard_size=20)
    assert index.encoded == 30  # the shard that was whole stays
    path = tmp_path / "i/shard-00001.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    open_index(tmp_path / "i")  # sizes and shapes alone
    with pytest.raises(RetrieverError, match="shard-00001.npy has another checksum"):
        open_index(tmp_path / "i", verify=True)


def test_stored_ids_are_those_in_memory(tmp_path):
    rng = random.Random(0)
    ids = list(
        dict.fromkeys("".join(rng.choices("ab1é東_", k=rng.randint(1, 5))) for _ in range(700))
    )
    in_memory = PassageIds(iter(ids))
    in_memory.save(tmp_path)
    place = {id_: i for i, id_ in enumerate(sorted(ids))}
    for found in (in_memory, PassageIds.open(tmp_path)):
        assert list(found) == ids and len(found) == len(ids) and found[-1] == ids[-1]
        assert found.order.tolist() == [place[id_] for id_ in ids]
        assert all(found.position(id_) == i for i, id_ in enumerate(ids))
        for missing in ("", "zz", "\ud83d", 5, "a" * 50):
            assert missing not in found
    with pytest.raises(RetrieverError, match="'東' occurs more than once"):
        PassageIds(["b", "東", "a", "東"])


def test_parts_of_a_corpus_are_its_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "PART", 7)
    given, path = passages(40), tmp_path / "c.jsonl"
    write_corpus(path, given)
    path.write_text(path.read_text().replace("\n", "\n\n"))
    corpora = Corpus(given), Corpus(str(path))
    for corpus in corpora:
        for start, stop in ((0, 40), (0, 7), (6, 8), (7, 14), (13, 30), (39, 40)):
            part = pickle.loads(
                pickle.dumps(corpus.part(range(start, stop)))
            )  # as a process gets it
            assert list(part) == given[start:stop]
    assert len({(corpus.count, corpus.digest) for corpus in corpora}) == 1


def test_faiss_indexes_beside_the_exact_one(tmp_path):
    """Flat finds what exact search finds, lists and codes most of it; each keeps its settings."""
    pytest.importorskip("faiss")
    tiny_encoder(tmp_path / "e")
    corpus = passages(400)
    cfg = RetrieverConfig(
        kind="dense",
        corpus=write_corpus(tmp_path / "c.jsonl", corpus),
        index=str(tmp_path / "i"),
        encoder=str(tmp_path / "e"),
        device="cpu",
    )
    queries, golds = [p.contents[:20] for p in corpus[:30]], [[p.id] for p in corpus[:30]]
    R.main(cfg)
    exact_retriever = open_retriever(cfg)
    truth, ranks = exact_retriever.search(queries, 10), exact_retriever.gold_ranks(queries, golds)
    for factory, least in (
        ("Flat", 1.0),
        ("SQfp16", 0.95),
        ("IVF8,Flat", 0.9),
        ("HNSW16", 0.9),
        ("OPQ8,IVF8,PQ8", 0.3),
    ):
        cfg.faiss, cfg.nprobe = factory, 7
        with pytest.raises(RetrieverError, match="no index at .*faiss-.*faiss=FACTORY"):
            open_retriever(cfg)
        assert R.main(cfg)["indexed"] == 0  # the vectors are there
        r = open_retriever(cfg)
        assert r.faiss.meta["nprobe"] == 7
        if factory == "IVF8,Flat":
            assert r.faiss._index.nprobe == 7
            cfg.nprobe = 3
            assert open_retriever(cfg).faiss._index.nprobe == 3  # of this opening
            cfg.nprobe = None
            assert open_retriever(cfg).faiss._index.nprobe == 7  # as saved
        if factory == "HNSW16":
            cfg.ef_search = 33
            assert open_retriever(cfg).faiss._index.hnsw.efSearch == 33
            cfg.ef_search = None
            assert open_retriever(cfg).faiss._index.hnsw.efSearch == 128
        found = r.search(queries, 10)
        overlap = (
            sum(len({i for i, _ in a} & {i for i, _ in b}) for a, b in zip(found, truth)) / 300
        )
        assert overlap >= least, (factory, overlap)
        if factory == "Flat":
            assert (
                sum(a != b for a, b in zip(r.gold_ranks(queries, golds), ranks)) <= 1
            )  # another order of sums
            assert (
                len(r.search(queries[:1], 5000)[0]) == 400
                and r.search([], 3) == []
                and r.gold_ranks([], []) == []
            )
            assert r.gold_ranks(queries[:1], [["p0001", "p0000"]], cutoff=1) in ([1], [None])
    file = tmp_path / "i/faiss-Flat/index.faiss"
    whole, cfg.faiss = file.read_bytes(), "Flat"
    for damage in (b"", whole[:100], b"x" * len(whole), None):
        file.write_bytes(damage) if damage is not None else file.unlink()
        with pytest.raises(RetrieverError, match="faiss-Flat is damaged .*builds it again"):
            open_retriever(cfg)
    R.main(cfg)  # the build sees that the file is gone
    assert file.read_bytes() == whole
    cfg.faiss = "IVF9999,Flat"
    with pytest.raises(RetrieverError, match="9999 lists"):
        R.main(cfg)
    cfg.faiss = "Nonsense7"
    with pytest.raises(RetrieverError, match="factory string"):
        R.main(cfg)
    cfg.faiss = "Flat"
    meta = json.loads((tmp_path / "i/faiss-Flat/meta.json").read_text())
    (tmp_path / "i/faiss-Flat/meta.json").write_text(json.dumps(meta | {"corpus": "another"}))
    with pytest.raises(RetrieverError, match="corpus"):
        open_retriever(cfg)


def test_faiss_misses_are_no_passages():
    """FAISS fills up a short list with -1, no passage; a gold that it misses has no rank."""
    dense = table_retriever([[3.0, 0], [2.0, 0], [1.0, 0], [0, 5.0]], list("abcd"))
    dense.faiss = SimpleNamespace(
        search=lambda q, k: (
            np.array([[6.0, 6.0, -9.0]] * len(q), dtype=np.float32),
            np.array([[1, 0, -1]] * len(q)),
        )
    )
    assert dense.search(["0"], 3) == [[("a", 6.0), ("b", 6.0)]]
    assert dense.gold_ranks(["0", "0", "0"], [["a"], ["d"], ["b", "a"]]) == [2, None, 1]


def test_a_list_too_long_for_faiss_on_a_gpu_comes_from_the_cpu():
    index = FaissIndex.__new__(FaissIndex)
    index.count = 5000
    index._index, index._on_cpu = (
        SimpleNamespace(search=lambda q, k, name=name: (name, k)) for name in ("gpu", "cpu")
    )
    assert index.search(np.zeros((1, 2)), 2048) == ("gpu", 2048) and index.search(
        np.zeros((1, 2)), 2049
    ) == ("cpu", 2049)
    assert index.search(np.zeros((1, 2)), 9999) == ("cpu", 5000)


def test_an_index_that_lacks_passages_or_checksums_is_named(tmp_path):
    tiny_encoder(tmp_path / "e")
    parts, folder = load_encoder(str(tmp_path / "e")), tmp_path / "i"
    build_index(folder, passages(9), *parts, shard_size=3)
    whole = json.loads((folder / "meta.json").read_text())
    for change, problem in (
        ({"shards": whole["shards"][:2]}, "9 ids and 6 vectors for 9 passages"),
        ({"shards": None}, "damaged"),
        ({"shards": [1]}, "damaged"),
    ):
        (folder / "meta.json").write_text(json.dumps(whole | change))
        with pytest.raises(RetrieverError, match=problem):
            open_index(folder)
    del whole["files"]  # as built before there were checksums
    (folder / "meta.json").write_text(json.dumps(whole))
    ids = (folder / "ids.txt").read_bytes()
    assert len(open_index(folder).ids) == 9
    with pytest.raises(RetrieverError, match="without checksums.*builds it again"):
        open_index(folder, verify=True)
    with pytest.raises(RetrieverError, match="was built with (count|corpus)"):
        build_index(folder, passages(8, seed=1), *parts, shard_size=3)
    assert (folder / "ids.txt").read_bytes() == ids  # what is refused changes nothing
    assert build_index(folder, passages(9), *parts, shard_size=3).encoded == 0
    open_index(folder, verify=True)


@pytest.mark.parametrize("value", [0, -1, 2.5, "3"])
def test_counts_set_from_python_are_checked(tmp_path, value):
    index = FaissIndex.__new__(FaissIndex)
    index._parameters = []
    for settings in ((value, 1), (1, value)):
        with pytest.raises(RetrieverError, match="whole number of at least 1"):
            index.set(*settings)
    with pytest.raises(RetrieverError, match="whole number of at least 1"):
        table_retriever([[1.0]], ["a"]).gold_ranks(["0"], [["a"]], cutoff=value)


def test_two_builders_do_not_share_a_folder(tmp_path):
    tiny_encoder(tmp_path / "e")
    with only_writer(str(tmp_path / "i")), pytest.raises(DataError, match="another process"):
        build_index(tmp_path / "i", passages(3), *load_encoder(str(tmp_path / "e")))


def test_dense_ranks_do_not_depend_on_the_batch(tmp_path):
    """Batches change the last bits of a vector: ranks differ only where scores are that close."""
    tiny_ance(tmp_path / "e")
    model, tokenizer, encoder = load_encoder(str(tmp_path / "e"), device="cpu")
    corpus = passages(120, most=6)
    index = build_index(tmp_path / "i", corpus, model, tokenizer, encoder)
    rng = random.Random(1)
    queries = [" ".join(rng.choices(WORDS, k=rng.randint(1, 8))) for _ in range(25)]
    golds = [[rng.choice(corpus).id] for _ in queries]
    whole = DenseRetriever(index, model, tokenizer, encoder).gold_ranks(queries, golds, cutoff=120)
    single = DenseRetriever(index, model, tokenizer, encoder, batch_tokens=1)
    vectors = encode(model.double(), tokenizer, queries, encoder).double().numpy()
    truth = vectors @ np.concatenate(index.shards).astype(float).T
    model.float()
    compared = 0
    for query, gold, rank, scores in zip(queries, golds, whole, truth):
        row = index.ids.position(gold[0])
        if (np.abs(np.delete(scores, row) - scores[row]) > 1e-4).all():
            compared += 1
            assert (
                single.gold_ranks([query], [gold], cutoff=120)
                == [rank]
                == [sorted_rank(scores, [row], 120)]
            )
    assert compared > 20


def test_k_above_the_corpus_of_vectors():
    assert len(table_retriever([[1.0, 0], [0, 1.0]], ["a", "b"]).search(["0"], 10)[0]) == 2


def test_empty_and_damaged_files_are_named_and_made_again(tmp_path):
    tiny_encoder(tmp_path / "e")
    cfg = RetrieverConfig(
        kind="hybrid",
        corpus=write_corpus(tmp_path / "c.jsonl", passages(20)),
        index=str(tmp_path / "i"),
        encoder=str(tmp_path / "e"),
        device="cpu",
    )
    R.main(cfg)
    for folder, opened in (
        (tmp_path / "i/dense", open_index),
        (tmp_path / "i/bm25", BM25Retriever.open),
    ):
        for path in sorted([*folder.glob("*.npy"), *folder.glob("*.txt")]):
            whole = path.read_bytes()
            for damage in (b"", b"rubbish", whole[:-1], whole[:40]):
                path.write_bytes(damage)
                with pytest.raises(
                    RetrieverError, match=f"{folder} is damaged.*{path.name}.*build"
                ):
                    opened(folder)
            R.main(cfg)  # makes that file again
            assert path.read_bytes() == whole
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # as long as before
            with pytest.raises(RetrieverError, match=f"{path.name} has another checksum"):
                opened(folder, verify=True)
            R.main(cfg)
            assert path.read_bytes() == whole
            opened(folder, verify=True)
        path = folder / "meta.json"
        whole = path.read_bytes()
        for damage in (b"", whole[:40], b"[1]", b"\xff"):
            path.write_bytes(damage)
            with pytest.raises(RetrieverError, match=f"{folder} is damaged .meta.json.*build"):
                opened(folder)
            R.main(cfg)
            assert path.read_bytes() == whole
    meta = json.loads((tmp_path / "i/dense/meta.json").read_text())
    (tmp_path / "i/dense/meta.json").write_text(
        json.dumps(meta | {"complete": False, "shards": []})
    )
    (tmp_path / "i/dense/shard-00000.json").write_text("")
    with pytest.raises(RetrieverError, match="unfinished"):
        open_index(tmp_path / "i/dense")
    assert R.main(cfg)["indexed"] == 20
