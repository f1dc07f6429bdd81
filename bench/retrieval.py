"""Dense retrieval measured: gold ranks, encoding, exact search and compressed indexes, each against what others do.

    python bench/retrieval.py mode=gold-ranks out=bench/results/gold_ranks.json
    python bench/retrieval.py mode=tune
    python bench/retrieval.py mode=encode out=bench/results/encode.json
    torchrun --nproc-per-node 8 bench/retrieval.py mode=across out=across_8.json      shared out over the processes
    torchrun --nproc-per-node 8 bench/retrieval.py mode=encode passages=1000000 out=encode_8.json
    python bench/retrieval.py mode=search-gpu out=bench/results/search_gpu.json
    python bench/retrieval.py mode=search-cpu out=bench/results/search_cpu.json
    python bench/retrieval.py mode=faiss out=bench/results/faiss.json

`small=true` rehearses a mode with sizes that take seconds anywhere.  gold-ranks, tune and search-gpu make their vectors
on the card: 10 million of 768 numbers are 15.4 GB.  Times on a GPU are medians between CUDA events after a warm-up.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Callable, Literal

import numpy as np
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import distributed  # noqa: E402
from config import ConfigError, run  # noqa: E402
from runs import atomic_write  # noqa: E402
from search.dense_index import Index, VectorRetriever  # noqa: E402
from search.exact import exact_gold_ranks, exact_search  # noqa: E402
from search.passages import PassageIds  # noqa: E402


@dataclass
class BenchConfig:
    mode: Literal["gold-ranks", "across", "tune", "encode", "search-gpu", "search-cpu", "faiss"]
    """what is measured"""
    passages: int = 0
    """passages; 0: 10,000,000 on a GPU, 1,000,000 on a CPU, 98,304 to encode"""
    dim: int = 0
    """numbers of a vector; 0: 768 on a GPU, 384 on a CPU"""
    queries: list[int] = field(default_factory=list)
    """numbers of queries; empty: as the mode has them"""
    threads: int = 2
    """search-cpu, faiss: threads of either side"""
    peer_passages: int = 12_288
    """encode: how many of the passages sentence-transformers encodes too (in float32 a quarter of them); 0: none"""
    batch_tokens: int = 65536
    """encode: tokens of one batch"""
    workers: int = -1
    """encode: tokenising processes; -1: all cores but one"""
    factories: list[str] = field(
        default_factory=lambda: ["Flat", "SQfp16", "IVF4096,Flat", "OPQ64,IVF4096,PQ64", "HNSW32"]
    )
    """faiss: index kinds by factory string"""
    index: str = ""
    """faiss: a dense index whose vectors are taken, some of them as queries; empty: synthetic vectors in clusters"""
    nprobe: list[int] = field(default_factory=lambda: [8, 32, 128])
    """faiss: lists of an IVF index that are searched (and the width of an HNSW search)"""
    small: bool = False
    """tiny sizes: a rehearsal, no figures to quote"""
    out: str = ""
    """JSON file for the result"""


def pick(
    cfg: BenchConfig, passages: int, dim: int, queries: list[int]
) -> tuple[int, int, list[int]]:
    """Sizes of a run: what was asked for, else these, else tiny ones."""
    if cfg.small:
        passages, queries = min(passages, 3000), [min(q, 40) for q in queries]
    return cfg.passages or passages, cfg.dim or dim, cfg.queries or queries


def gpu_ms(call: Callable[[], object], repeats: int = 7) -> float:
    """Median milliseconds of a call on the current GPU, after two calls to warm up; on a CPU by the clock."""
    if not torch.cuda.is_available():
        call()
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def make_vectors(
    passages: int, dim: int, queries: int
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Random passages (M, D) fp16, queries (Q, D) float32 near a passage each, and that passage: ranks from 1 on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    matrix = torch.empty(passages, dim, dtype=torch.float16, device=device)
    for part in matrix.split(1 << 20):
        part.normal_()
    gold = torch.randint(passages, (queries,), device=device)
    near = torch.linspace(0.1, 0.3, queries, device=device)[:, None] * (768 / dim) ** 0.5
    q = matrix[gold].float() * near + torch.randn(queries, dim, device=device)
    return matrix, q.half().float(), [[row] for row in gold.tolist()]


def blocked_product(q: torch.Tensor, matrix: torch.Tensor, rows: int) -> None:
    """The product alone, written over itself block by block."""
    out = torch.empty(len(q), rows, dtype=q.dtype, device=q.device)
    for part in matrix.split(rows):
        torch.mm(q, part.T, out=out if len(part) == rows else None)


def blocked_topk(q: torch.Tensor, matrix: torch.Tensor, rows: int, k: int = 100) -> torch.Tensor:
    """What a rank costs with a list: product, the 100 best of every block, merged."""
    best = torch.empty(len(q), 0, dtype=q.dtype, device=q.device)
    for part in matrix.split(rows):
        best = torch.cat([best, (q @ part.T).topk(min(k, len(part)), dim=1).values], 1)
    return best.topk(min(k, best.shape[1]), dim=1).values


def float64_ranks(
    q: torch.Tensor, matrix: torch.Tensor, golds: list[list[int]]
) -> tuple[list[int], list[int]]:
    """Ranks by float64 scores, and how many other passages are so near to the gold that float32 sums may swap them."""
    q, rows = q.double(), torch.tensor([g[0] for g in golds], device=q.device)
    gold = (q * matrix[rows].double()).sum(1, keepdim=True)
    rank = torch.zeros(len(q), dtype=torch.long, device=q.device)
    near = torch.zeros_like(rank)
    margin = 1e-5 * (q.abs().sum(1, keepdim=True))  # far above what float32 sums of such terms lose
    for part in matrix.split(1 << 17):
        scores = q @ part.double().T
        rank += (scores >= gold).sum(1)
        near += ((scores - gold).abs() < margin).sum(1)
    return rank.tolist(), (near - 1).tolist()


def gold_ranks(cfg: BenchConfig) -> dict:
    """The kernel against a cuBLAS product and a blocked top-k, and its ranks against a float64 sort."""
    passages, dim, sizes = pick(cfg, 10_000_000, 768, [2048, 256])
    matrix, queries, golds = make_vectors(passages, dim, max(sizes))
    result: dict = {"passages": passages, "dim": dim, "sizes": []}
    for n in sizes:
        q, half, gold = queries[:n], queries[:n].to(matrix.dtype), golds[:n]
        blocks = [
            max(min(scores // n, passages), 64) for scores in (1 << 29, 1 << 27)
        ]  # scores of 1 GiB and 256 MiB
        row = {
            "queries": n,
            "cublas_product_ms": min(
                gpu_ms(lambda: blocked_product(half, matrix, rows), 5) for rows in blocks
            ),
            "blocked_topk_ms": min(
                gpu_ms(lambda: blocked_topk(half, matrix, rows), 3) for rows in blocks
            ),
        }
        row["gold_ranks_call_ms"] = gpu_ms(lambda: exact_gold_ranks(q, [matrix], gold), 5)
        if torch.cuda.is_available():
            from search import gold_ranks as kernel

            score = kernel.own_scores(half, matrix[[g[0] for g in gold]])
            count = torch.zeros(n, dtype=torch.int32, device=matrix.device)
            row["kernel_ms"] = gpu_ms(lambda: kernel.add_counts(count, half, matrix, score))
            row["own_scores_ms"] = gpu_ms(lambda: kernel.own_scores(half, matrix[:n]))
        ours = row.get("kernel_ms", row["gold_ranks_call_ms"])
        row |= {
            "over_cublas": ours / row["cublas_product_ms"],
            "topk_over_ours": row["blocked_topk_ms"] / ours,
            "tflops": 2 * n * passages * dim / ours / 1e9,
            "memory_tb_s": passages * dim * 2 / ours / 1e9,
            "floor_ms": max(2 * n * passages * dim / 790e12, passages * dim * 2 / 3.0e12) * 1e3,
        }
        row["over_floor"] = ours / row["floor_ms"]
        result["sizes"].append(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        )
    checked = list(range(0, max(sizes), max(max(sizes) // 256, 1)))
    got = exact_gold_ranks(queries[checked], [matrix], [golds[i] for i in checked], cutoff=passages)
    truth, near = float64_ranks(queries[checked], matrix, [golds[i] for i in checked])
    wrong = [i for i, (a, b) in enumerate(zip(got, truth)) if a != b]
    result["against_float64"] = {
        "queries": len(checked),
        "ranks_up_to_100": sum(t <= 100 for t in truth),
        "different": len(wrong),
        "largest_difference": max((abs(got[i] - truth[i]) for i in wrong), default=0),
        "different_beyond_rounding": sum(abs(got[i] - truth[i]) > near[i] for i in wrong),
    }
    return result


class Numbers(PassageIds):
    """Ids that are the passages' numbers: millions of them need no memory."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def _find(self, id_: object) -> int | None:
        return int(id_) if int(id_) < self.count else None


class SyntheticRetriever(VectorRetriever):
    """An index of random vectors; a query is a number, which stands for one of 4,096 random vectors."""

    def questions(self, numbers: range) -> tuple[list[str], list[list[str]]]:
        """Queries with those numbers, and a gold passage for each, spread over the index."""
        golds = [[str(n * 1_000_003 % len(self.passage_ids))] for n in numbers]
        return [str(n) for n in numbers], golds

    def prepare(self, queries: list[str]) -> tuple[torch.Tensor, list[bool]]:
        return self.vectors[[int(q) % len(self.vectors) for q in queries]], [False] * len(queries)


def synthetic_retriever(passages: int, dim: int, where: distributed.Dist) -> SyntheticRetriever:
    """`passages` random vectors (D,), the same for any number of processes; a process makes its own share."""
    rows = min(65536, -(-passages // 64))
    sizes = [min(rows, passages - first) for first in range(0, passages, rows)]
    shards = [np.broadcast_to(np.float16(0), (size, dim)) for size in sizes]  # no memory
    generator = torch.Generator(where.device)
    first, last = (len(sizes) * r // where.world for r in (where.rank, where.rank + 1))
    for n in range(first, last):
        shape, how = (sizes[n], dim), dict(generator=generator.manual_seed(n), device=where.device)
        shards[n] = torch.randn(shape, dtype=torch.float32, **how).half().cpu().numpy()
    retriever = SyntheticRetriever(Index(Numbers(passages), shards), where.device, where.world > 1)
    torch.manual_seed(0)
    retriever.vectors = torch.randn(4096, dim).half().float()
    return retriever


def across(cfg: BenchConfig) -> dict:
    """Gold ranks as a step asks for them, of an index that the processes share out: each brings its part of the queries.

    Encoding the queries is not in it.  Ranks are exact, of all passages: their sum and digest are those of one process.
    """
    where = distributed.setup()
    passages, dim, (n, *_) = pick(cfg, 25_700_592, 768, [2048])
    retriever = synthetic_retriever(passages, dim, where)
    own = range(n * where.rank // where.world, n * (where.rank + 1) // where.world)
    ranks, seconds = [], []
    for _ in range(8):
        distributed.all_reduce_sum([0.0])  # all begin together
        began = time.perf_counter()
        ranks = retriever.gold_ranks(*retriever.questions(own), cutoff=passages)
        seconds.append(max(distributed.gather_objects(time.perf_counter() - began)))
    ranks = sum(distributed.gather_objects(ranks), [])
    result = {
        "passages": passages,
        "dim": dim,
        "queries": n,
        "processes": where.world,
        "ms": round(statistics.median(seconds[1:]) * 1e3, 1),
        "ms_all": [round(s * 1e3, 1) for s in seconds],
        "in_memory_of_the_card": isinstance(retriever.shards[0], torch.Tensor),
        "sum_of_ranks": sum(ranks),
        "digest_of_ranks": hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16],
    }
    distributed.cleanup()
    return result


def tune(cfg: BenchConfig) -> dict:
    """The kernel's tiles at both numbers of queries; each is compared with a product before it is timed."""
    from search import gold_ranks as kernel

    passages, dim, sizes = pick(cfg, 10_000_000, 768, [2048, 256])
    matrix, queries, golds = make_vectors(passages, dim, max(sizes))
    rows = []
    for tiles in (
        (256, 64, 4),
        (256, 64, 3),
        (256, 32, 8),
        (256, 128, 2),
        (128, 64, 6),
        (128, 128, 3),
    ):
        kernel.TILE_M, kernel.TILE_D, kernel.STAGES = tiles
        row: dict = {"tile_m, tile_d, stages": tiles}
        for n in sizes:
            q, gold = queries[:n].half(), [g[0] for g in golds[:n]]
            score, count = (
                kernel.own_scores(q, matrix[gold]),
                torch.zeros(n, dtype=torch.int32, device=matrix.device),
            )
            kernel.add_counts(count, q, matrix[: 1 << 16], score)
            row[f"wrong_of_{n}"] = int(
                ((count - count_by_product(q, matrix[: 1 << 16], score)).abs() > 1).sum()
            )
            row[f"ms_{n}"] = round(gpu_ms(lambda: kernel.add_counts(count, q, matrix, score)), 3)
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return {"passages": passages, "dim": dim, "configs": rows}


def count_by_product(q: torch.Tensor, matrix: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """(Q,) passages that score at least as high, by a float32 product."""
    count = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    for part in matrix.split(1 << 14):
        count += (q.float() @ part.float().T >= score[:, None]).sum(1, dtype=torch.int32)
    return count


WORDS = [f"w{i:05}" for i in range(30000)]


def random_roberta(folder: Path, small: bool) -> None:
    """A RoBERTa-base shape with random weights and a tokenizer of 30,000 words, as the peer's script has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    core = Tokenizer(
        models.WordLevel(special | {word: i + 4 for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
    ).save_pretrained(folder)
    shape = (
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
        if small
        else {}
    )
    torch.manual_seed(0)
    RobertaModel(
        RobertaConfig(
            vocab_size=50265,
            max_position_embeddings=514,
            type_vocab_size=1,
            pad_token_id=1,
            **shape,
        ),
        add_pooling_layer=False,
    ).save_pretrained(folder)


def write_texts(path: Path, passages: int) -> list[np.ndarray]:
    """Passages of 182 tokens on average (10 to 382), lengths as the peer's script draws them; their token ids."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(180, 60, passages).astype(int), 8, 380)
    words = np.frombuffer("".join(f"{word} " for word in WORDS).encode(), np.uint8).reshape(
        len(WORDS), -1
    )
    ids = []
    with open(path, "wb") as f:
        for i, n in enumerate(lengths.tolist()):
            drawn = rng.integers(0, len(WORDS), n, dtype=np.int32)
            f.write(
                b'{"id": "p%d", "title": "", "text": "%s"}\n' % (i, words[drawn].tobytes().rstrip())
            )
            ids.append(np.concatenate([[0], drawn + 4, [2]]).astype(np.int32))
    return ids


def encode(cfg: BenchConfig) -> dict:
    """Text to shards on disk, the encoder alone on the same tokens, and sentence-transformers on some of the texts.

    What a process does once, however long its corpus, is measured by itself (`warm_up_s`: a small index, with it the
    encoder is compiled); the index then made from file to file in `seconds`; and in it, from the end of the first
    window of passages to the end of the last, `steady_passages_s`.
    """
    forkserver.ensure_running()  # imports what tokenising processes need, meanwhile
    import retriever as R

    world = distributed.setup().world if "RANK" in os.environ else 1
    passages, _, _ = pick(cfg, 98_304, 0, [])
    work = distributed.on_rank_0(lambda: Path(tempfile.mkdtemp(prefix="encode_")))
    ids: list[np.ndarray] = []

    def make() -> int:
        random_roberta(work / "encoder", cfg.small)
        ids[:] = write_texts(work / "corpus.jsonl", passages)
        with open(work / "corpus.jsonl") as f, open(work / "first.jsonl", "w") as g:
            g.writelines(islice(f, 2048))
        return sum(map(len, ids))

    try:
        tokens = distributed.on_rank_0(make)
        model, tokenizer, encoder = R.load_encoder(
            str(work / "encoder"), pooling="first", normalise=False, passage_length=384
        )
        workers = max(os.cpu_count() // world - 1, 1) if cfg.workers < 0 else cfg.workers
        batch_tokens = min(cfg.batch_tokens, 4096) if cfg.small else cfg.batch_tokens
        began = time.perf_counter()
        R.build_index(
            work / "warm",
            str(work / "first.jsonl"),
            model,
            tokenizer,
            encoder,
            shard_size=2048 // world,
            batch_tokens=batch_tokens,
        )
        warm = time.perf_counter() - began
        windows: list = []  # (passages, host's time, mark behind its work on the device)
        encode_tokens = R.encode_tokens

        def timed(model, window, *args):
            began = time.perf_counter()
            out = encode_tokens(model, window, *args)
            windows.append((len(window), began, mark()))
            return out

        R.encode_tokens = timed
        began = time.perf_counter()
        index = R.build_index(
            work / "index",
            str(work / "corpus.jsonl"),
            model,
            tokenizer,
            encoder,
            shard_size=min(65536, -(-passages // world)),
            batch_tokens=batch_tokens,
            workers=workers,
        )
        whole, R.encode_tokens = time.perf_counter() - began, encode_tokens
        result = {
            "passages": passages,
            "processes": world,
            "mean_tokens": round(tokens / passages, 1),
            "workers": workers,
            "batch_tokens": batch_tokens,
            "warm_up_s": round(warm, 1),
            "seconds": round(whole, 2),
            "seconds_to_first_window": round(windows[0][1] - began, 2),
            "passages_s": round(passages / whole),
            "tokens_s": round(tokens / whole),
            "shards": len(index.shards),
        }
        steady, own = passages / whole, None
        if len(windows) > 1:
            seconds = seconds_between(windows[0][2], windows[-1][2])
            own = sum(n for n, _, _ in windows[1:]) / seconds
        rates = distributed.gather_objects(own) if world > 1 else [own]
        if all(rates):
            steady = sum(rates)
            result |= {
                "steady_passages_s": round(steady),
                "hours_for_25.7M": round(25.7e6 / steady / 3600, 2),
            }
        if world > 1:
            distributed.cleanup()
            return result
        write(cfg, result)  # nothing that follows costs what is measured
        alone = encoder_alone(R, ids, model, encoder, batch_tokens)
        result |= {
            "encoder_alone_passages_s": round(alone),
            "of_encoder_alone": round(passages / whole / alone, 3),
            "steady_of_encoder_alone": round(steady / alone, 3),
        }
        write(cfg, result)
        if cfg.peer_passages:
            with open(work / "corpus.jsonl") as f:
                texts = [json.loads(line)["text"] for line in islice(f, cfg.peer_passages)]
            try:
                peer = sentence_transformers_rates(
                    str(work / "encoder"), model.config.hidden_size, texts
                )
                result["over_peer_bf16"] = round(steady / peer["bf16_passages_s"], 2)
            except ImportError as e:
                peer = {"failed": f"sentence-transformers: {e}"}
            result["peer"] = peer
        return result
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(work, ignore_errors=True)


def mark() -> float | torch.cuda.Event:
    """The time at which the device is done with what was asked of it so far; doesn't wait for it."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds from one mark to another."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def encoder_alone(R, tokens: list[np.ndarray], model, encoder, batch_tokens: int) -> float:
    """Passages a second of the same compiled encoder on the same batches, with tokens ready and nothing written."""
    packed = None
    if R.can_pack(model):
        model = copy.deepcopy(model).to(torch.bfloat16)
        packed = R.PackedModel(model, batch_tokens, 384, compiled=True)
    windows = [tokens[i : i + R.WINDOW] for i in range(0, len(tokens), R.WINDOW)]
    call = lambda window: R.encode_tokens(model, window, encoder, 1, batch_tokens, packed)  # noqa: E731
    call(windows[0][:2048])  # compiled, or its compilation found again
    if packed is None:
        began = time.perf_counter()
        for window in windows:
            call(window)
        return len(tokens) / (time.perf_counter() - began)
    batches = []
    for window in windows:
        window = sorted(window, key=lambda ids: -len(ids))
        batches += [window[part] for part in packed.batches([len(ids) for ids in window])]
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        for batch in batches:
            packed.vectors(batch, encoder)
    torch.cuda.synchronize()
    return len(tokens) / (time.perf_counter() - began)


def sentence_transformers_rates(folder: str, size: int, texts: list[str]) -> dict:
    """Passages a second of sentence-transformers' `encode` with the same encoder, as the peer's script calls it."""
    import sentence_transformers
    from sentence_transformers import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [
        models.Transformer(folder, max_seq_length=384),
        models.Pooling(size, pooling_mode="cls"),
    ]
    model = sentence_transformers.SentenceTransformer(modules=parts, device=device)
    rates: dict = {
        "sentence_transformers": sentence_transformers.__version__,
        "passages": len(texts),
    }
    for name, dtype, some in (
        ("fp32", torch.float32, texts[: len(texts) // 4]),
        ("bf16", torch.bfloat16, texts),
    ):
        model.to(dtype)

        def call(part: list[str]) -> float:
            began = time.perf_counter()
            model.encode(part, batch_size=256, convert_to_tensor=True, show_progress_bar=False)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        call(some[:2048])
        rates[f"{name}_passages_s"] = round(len(some) / call(some))
    return rates


def search_gpu(cfg: BenchConfig) -> dict:
    """Exact top-100 on a GPU: queries a second, over vectors that lie in its memory."""
    passages, dim, sizes = pick(cfg, 10_000_000, 768, [2048, 256, 1])
    matrix, queries, golds = make_vectors(passages, dim, max(sizes))
    order = torch.arange(passages, device=matrix.device)
    rows = []
    for n in sizes:
        ms = gpu_ms(lambda: exact_search(queries[:n], [matrix], 100, order), 3)
        rows.append({"queries": n, "ms": round(ms, 2), "queries_s": round(n / ms * 1e3)})
    found = exact_search(queries, [matrix], 100, order)[1]
    ranks = exact_gold_ranks(queries, [matrix], golds)
    agree = sum(
        (g[0] in hits) == (rank is not None) for g, hits, rank in zip(golds, found.tolist(), ranks)
    )
    return {
        "passages": passages,
        "dim": dim,
        "bytes_a_passage": dim * 2,
        "sizes": rows,
        "gold_in_list_as_ranked": f"{agree} of {len(golds)}",
    }


def best_of(call: Callable[[], object], repeats: int = 3) -> float:
    """Shortest of a few runs, in seconds: what other work on the machine adds is left out."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def search_cpu(cfg: BenchConfig) -> dict:
    """Exact top-100 on CPU cores, from a memory-mapped fp16 file, against faiss's float32 IndexFlatIP in memory."""
    import faiss

    passages, dim, sizes = pick(cfg, 1_000_000, 384, [1, 16, 256])
    torch.set_num_threads(cfg.threads)
    faiss.omp_set_num_threads(cfg.threads)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as work:
        vectors = np.lib.format.open_memmap(f"{work}/v.npy", "w+", np.float16, (passages, dim))
        index = faiss.IndexFlatIP(dim)
        for start in range(0, passages, 65536):
            part = rng.standard_normal((min(65536, passages - start), dim), dtype=np.float32)
            part /= np.linalg.norm(part, axis=1, keepdims=True)
            vectors[start : start + len(part)] = part
            index.add(vectors[start : start + len(part)].astype(np.float32))
        vectors.flush()
        mapped, order = np.load(f"{work}/v.npy", mmap_mode="c"), torch.arange(passages)
        rows = []
        for n in sizes:
            q = rng.standard_normal((n, dim), dtype=np.float32)
            q /= np.linalg.norm(q, axis=1, keepdims=True)
            ours, theirs = [], []
            for _ in range(3):  # by turns, so that other work on the machine meets both
                ours.append(
                    best_of(lambda: exact_search(torch.from_numpy(q), [mapped], 100, order), 1)
                )
                theirs.append(best_of(lambda: index.search(q, 100), 1))
            found = exact_search(torch.from_numpy(q), [mapped], 100, order)[1].numpy()
            same = np.mean(
                [len(set(a) & set(b)) / 100 for a, b in zip(found, index.search(q, 100)[1])]
            )
            golds = [[int(row[0])] for row in found]
            ranks = best_of(lambda: exact_gold_ranks(torch.from_numpy(q), [mapped], golds), 2)
            rows.append(
                {
                    "queries": n,
                    "ours_s": round(min(ours), 3),
                    "faiss_s": round(min(theirs), 3),
                    "faiss_over_ours": round(min(theirs) / min(ours), 2),
                    "overlap_at_100": round(float(same), 5),
                    "gold_ranks_s": round(ranks, 3),
                }
            )
    return {
        "passages": passages,
        "dim": dim,
        "threads": cfg.threads,
        "faiss": faiss.__version__,
        "bytes_a_passage": {"ours": dim * 2, "faiss": dim * 4},
        "sizes": rows,
    }


def clustered(rng: np.random.Generator, centres: np.ndarray, rows: int) -> np.ndarray:
    """Unit vectors (rows, D) around random centres: what approximate search makes use of, and random ones lack."""
    part = centres[rng.integers(len(centres), size=rows)]
    part += rng.standard_normal(part.shape, dtype=np.float32)
    return part / np.linalg.norm(part, axis=1, keepdims=True)


def faiss_table(cfg: BenchConfig) -> dict:
    """Kinds of FAISS indexes against exact search: recall of its first 10 and 100, queries/s, bytes a passage."""
    import faiss

    from search.faiss_index import FaissIndex, build_faiss

    passages, dim, (n, *_) = pick(cfg, 1_000_000, 384, [256])
    factories = ["Flat", "IVF16,PQ8", "HNSW8"] if cfg.small else cfg.factories
    torch.set_num_threads(cfg.threads)
    faiss.omp_set_num_threads(cfg.threads)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(passages // 200, 4), dim), dtype=np.float32)
    source, rows = {"count": passages}, []
    with tempfile.TemporaryDirectory() as work:
        if cfg.index:
            from retriever import open_index

            shards = open_index(cfg.index).shards
            passages, dim = sum(map(len, shards)), shards[0].shape[1]
            some = [s[rng.integers(len(s), size=-(-n // len(shards)))] for s in shards]
            q = np.concatenate(some)[:n].astype(np.float32)
        else:
            vectors = np.lib.format.open_memmap(f"{work}/v.npy", "w+", np.float16, (passages, dim))
            for start in range(0, passages, 65536):
                vectors[start : start + 65536] = clustered(
                    rng, centres, min(65536, passages - start)
                )
            q, shards = clustered(rng, centres, n), [vectors]
        order = torch.arange(passages)
        truth = exact_search(torch.from_numpy(q), shards, 100, order)[1].numpy()
        seconds = best_of(lambda: exact_search(torch.from_numpy(q), shards, 100, order), 2)
        rows.append(
            {
                "index": "exact fp16 (ours)",
                "recall@10": 1.0,
                "recall@100": 1.0,
                "queries_s": round(n / seconds, 1),
                "bytes_a_passage": dim * 2,
            }
        )
        for factory in factories:
            began = time.perf_counter()
            build_faiss(f"{work}/f", shards, factory, source)
            built, index = time.perf_counter() - began, FaissIndex(f"{work}/f", source)
            for probe in cfg.nprobe if "IVF" in factory or "HNSW" in factory else [0]:
                index.set(probe, max(probe, 100))  # an HNSW search is at least as wide as its list
                seconds = best_of(lambda: index.search(q, 100), 2)
                found = index.search(q, 100)[1]
                recall = {
                    k: np.mean(
                        [
                            len(set(a[:k].tolist()) & set(b[:k].tolist())) / k
                            for a, b in zip(found, truth)
                        ]
                    )
                    for k in (10, 100)
                }
                rows.append(
                    {
                        "index": factory,
                        "nprobe_or_ef": probe or None,
                        "recall@10": round(float(recall[10]), 4),
                        "recall@100": round(float(recall[100]), 4),
                        "queries_s": round(n / seconds, 1),
                        "bytes_a_passage": round(index.meta["bytes"] / passages, 1),
                        "built_s": round(built, 1),
                    }
                )
            shutil.rmtree(f"{work}/f")
    return {
        "vectors": "of an index of passages" if cfg.index else "synthetic, in clusters",
        "passages": passages,
        "dim": dim,
        "queries": n,
        "threads": cfg.threads,
        "faiss": faiss.__version__,
        "gpus_in_faiss": getattr(faiss, "get_num_gpus", lambda: 0)(),
        "indexes": rows,
    }


MODES = {
    "gold-ranks": gold_ranks,
    "across": across,
    "tune": tune,
    "encode": encode,
    "search-gpu": search_gpu,
    "search-cpu": search_cpu,
    "faiss": faiss_table,
}


def main(cfg: BenchConfig) -> dict | None:
    if cfg.mode == "tune" and not torch.cuda.is_available():
        raise ConfigError("mode=tune measures a kernel for a Hopper GPU, and there is none here")
    result = MODES[cfg.mode](cfg)
    return write(cfg, result) if os.environ.get("RANK", "0") == "0" else None


def write(cfg: BenchConfig, measured: dict) -> dict:
    """The result with its circumstances, in `out` if that is set."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    words = [w for w in sys.argv[1:] if not w.startswith(("out=", "index="))]
    result = {
        "command": " ".join(["python bench/retrieval.py", *words]),
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        **measured,
    }
    if torch.cuda.is_available():
        import triton

        result["triton"] = triton.__version__
    if cfg.out:
        with atomic_write(cfg.out) as f:
            json.dump(result, f, indent=1)
    return result


if __name__ == "__main__":
    run(BenchConfig, main)
