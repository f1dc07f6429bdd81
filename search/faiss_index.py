"""Approximate and compressed search by FAISS: less memory or time, some passages not found.

The kind of index is FAISS's factory string (Flat, SQfp16, IVF4096,PQ64, HNSW32, …). It lies in a
folder of its own beside the exact index. A GPU build of FAISS is used where one is installed.

Shapes: Q queries, D embedding size, K list length.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from runs import atomic_folder
from search.passages import RetrieverError, check_k, check_same, opening, read_meta, write_meta

FORMAT = "faiss-1"
BLOCK = 65536  # vectors that are added at a time, in float32
GPU_K = 2048  # the longest list that FAISS gives on a GPU


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as e:
        raise RetrieverError(
            "an approximate index needs FAISS: pip install faiss-cpu, or a GPU build of it; exact "
            "search (faiss unset) needs nothing more"
        ) from e
    return faiss


def _on_gpus(faiss: Any, index: Any, factory: str) -> Any:
    """The index in the memory of all GPUs, where FAISS was built for them and has this kind."""
    if getattr(faiss, "get_num_gpus", lambda: 0)() and "HNSW" not in factory:
        return faiss.index_cpu_to_all_gpus(index)
    return index


def _size(folder: Path) -> int:
    """Bytes of the index file in a folder; 0 where it is missing."""
    return (folder / "index.faiss").stat().st_size if (folder / "index.faiss").is_file() else 0


def build_faiss(
    folder: str | os.PathLike,
    shards: Sequence[np.ndarray],
    factory: str,
    source: dict,
    nprobe: int | None = None,
    ef_search: int | None = None,
) -> int:
    """Build an index of the vectors of `shards`; the vectors added now, 0 where it stood there.

    source: what of the dense index must be the same when this one is opened
    nprobe, ef_search: lists of an IVF index (None: 32) and width of the front in an HNSW graph
    (None: 128) of a search that is not told otherwise
    """
    folder, settings = Path(folder), {"format": FORMAT, "factory": factory, **source}
    search = {"nprobe": 32 if nprobe is None else nprobe}
    search["ef_search"] = 128 if ef_search is None else ef_search
    for name, value in search.items():
        check_k(value, name)
    if (meta := read_meta(folder)) is not None:
        check_same(folder, meta, settings, "Choose another folder, or delete this one.")
        if _size(folder) == meta["bytes"]:
            return 0
    faiss = _faiss()
    count, dim = sum(map(len, shards)), shards[0].shape[1]
    try:
        on_cpu = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as e:
        raise RetrieverError(
            f"faiss is {factory!r}, which FAISS does not take for {dim} dimensions "
            f"({str(e).strip().splitlines()[-1]}); give a factory string such as IVF4096,PQ64"
        ) from e
    lists = getattr(faiss.try_extract_index_ivf(on_cpu), "nlist", 0)
    if count < lists:
        raise RetrieverError(
            f"faiss is {factory!r} with {lists} lists, but there are {count:,} passages; a list "
            "needs dozens of them: give a smaller number"
        )
    index = _on_gpus(faiss, on_cpu, factory)
    step = max(-(-count // max(64 * lists, 1 << 18)), 1)  # a sample, evenly over the shards
    index.train(np.concatenate([shard[::step] for shard in shards]).astype(np.float32))
    for shard in shards:
        for start in range(0, len(shard), BLOCK):
            index.add(shard[start : start + BLOCK].astype(np.float32))
    if index is not on_cpu:
        index = faiss.index_gpu_to_cpu(index)
    with atomic_folder(os.fspath(folder)) as temporary:
        faiss.write_index(index, os.path.join(temporary, "index.faiss"))
        write_meta(Path(temporary), settings | {"bytes": _size(Path(temporary))} | search)
    return count


class FaissIndex:
    """A saved index; `nprobe` and `ef_search` may be set anew at any time (`set`)."""

    def __init__(
        self,
        folder: str | os.PathLike,
        source: dict,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ):
        """RetrieverError: there is no index, a damaged one, or one of another source.

        source: what `build_faiss` was given; nprobe, ef_search: None: as saved
        """
        faiss, folder = _faiss(), Path(folder)
        with opening(folder, format=FORMAT, **source) as self.meta:
            if (size := _size(folder)) != self.meta["bytes"]:
                raise ValueError(f"index.faiss has {size:,} of its {self.meta['bytes']:,} bytes")
            index = faiss.read_index(str(folder / "index.faiss"))
        self.count, self._lists = index.ntotal, faiss.try_extract_index_ivf(index) is not None
        self._index, self._on_cpu = _on_gpus(faiss, index, self.meta["factory"]), index
        self._parameters = [(faiss.ParameterSpace(), index)]
        if self._index is not index:
            self._parameters.append((faiss.GpuParameterSpace(), self._index))
        self.set(
            self.meta["nprobe"] if nprobe is None else nprobe,
            self.meta["ef_search"] if ef_search is None else ef_search,
        )

    def set(self, nprobe: int, ef_search: int) -> None:
        """How much of the index a search looks at: more finds more and takes longer."""
        check_k(nprobe, "nprobe")
        check_k(ef_search, "ef_search")
        for space, index in self._parameters:
            if self._lists:
                space.set_index_parameter(index, "nprobe", nprobe)
            if "HNSW" in self.meta["factory"]:
                space.set_index_parameter(index, "efSearch", ef_search)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) float32 → (Q, K) scores and passage numbers, best first; -1: none was found.

        Lists that are too long for a GPU come from the index in the CPU's memory.
        """
        k = min(k, self.count)
        index = self._index if k <= GPU_K else self._on_cpu
        return index.search(np.ascontiguousarray(queries, dtype=np.float32), k)
