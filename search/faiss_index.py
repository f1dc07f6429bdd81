"""Approximate search by FAISS: less memory or time, but some passages are not found.

A FAISS factory string (Flat, SQfp16, IVF4096,PQ64, HNSW32, …) sets the kind of index. A GPU build
of FAISS is used if installed.

Shapes: Q queries, D embedding size, K list length.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from runs import atomic_folder, write_json
from search.passages import RetrieverError, check_k, check_same, opening, read_meta

FORMAT = "faiss-1"
BLOCK = 65536  # vectors added at a time
GPU_K = 2048  # longest list of FAISS on a GPU


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as e:
        raise RetrieverError(
            "an approximate index needs FAISS: pip install faiss-cpu, or leave faiss unset"
        ) from e
    return faiss


def _on_gpus(faiss: Any, index: Any, factory: str) -> Any:
    """Copy the index to all GPUs if this FAISS and index type can."""
    if getattr(faiss, "get_num_gpus", lambda: 0)() and "HNSW" not in factory:
        return faiss.index_cpu_to_all_gpus(index)
    return index


def _size(folder: Path) -> int:
    return (folder / "index.faiss").stat().st_size if (folder / "index.faiss").is_file() else 0


def build_faiss(
    folder: str | os.PathLike,
    shards: Sequence[np.ndarray],
    factory: str,
    source: dict,
    nprobe: int | None = None,
    ef_search: int | None = None,
) -> int:
    """Build an index of the vectors in `shards`; return how many were added, 0 if it exists.

    source: settings of the dense index that must match at opening
    nprobe, ef_search: default IVF lists searched (None: 32) and HNSW search width (None: 128)
    """
    folder, settings = Path(folder), {"format": FORMAT, "factory": factory, **source}
    search = {"nprobe": 32 if nprobe is None else nprobe}
    search["ef_search"] = 128 if ef_search is None else ef_search
    for name, value in search.items():
        check_k(value, name)
    if (meta := read_meta(folder)) is not None:
        check_same(folder, meta, settings)
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
    step = max(-(-count // max(64 * lists, 1 << 18)), 1)  # an even sample
    index.train(np.concatenate([shard[::step] for shard in shards]).astype(np.float32))
    for shard in shards:
        for start in range(0, len(shard), BLOCK):
            index.add(shard[start : start + BLOCK].astype(np.float32))
    if index is not on_cpu:
        index = faiss.index_gpu_to_cpu(index)
    with atomic_folder(os.fspath(folder)) as temporary:
        faiss.write_index(index, os.path.join(temporary, "index.faiss"))
        write_json(f"{temporary}/meta.json", settings | {"bytes": _size(Path(temporary))} | search)
    return count


class FaissIndex:
    """A saved index; `set` changes its search settings at any time."""

    def __init__(
        self,
        folder: str | os.PathLike,
        source: dict,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ):
        """source: as for `build_faiss`; nprobe, ef_search: None uses the saved values

        RetrieverError: the index is missing, damaged or of another source.
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
        """Set how much of the index is searched: more finds more but takes longer."""
        check_k(nprobe, "nprobe")
        check_k(ef_search, "ef_search")
        for space, index in self._parameters:
            if self._lists:
                space.set_index_parameter(index, "nprobe", nprobe)
            if "HNSW" in self.meta["factory"]:
                space.set_index_parameter(index, "efSearch", ef_search)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) float32 → (Q, K) scores and passage numbers, best first; -1: none was found.

        Lists longer than GPU_K are searched on the CPU.
        """
        k = min(k, self.count)
        index = self._index if k <= GPU_K else self._on_cpu
        return index.search(np.ascontiguousarray(queries, dtype=np.float32), k)
