"""The client of serve.py: a retriever elsewhere, with the methods of one that is here.

Copies out with search/passages.py and what that needs; no torch.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from typing import Any, Callable, Iterable, Sequence

from search.passages import FAILED, Hits, RetrieverError, check_k, check_queries, gold_lists


class RetrieverAway(RetrieverError):
    """A retrieval service gave no answer, however often it was asked: a technical failure."""

    exit_status = 1


class RemoteIds:
    """The ids of a served index: `id in ids`, `len(ids)`, and `ids.among(many)`. Keeps answers."""

    def __init__(self, remote: RemoteRetriever):
        self._remote, self._known = remote, {}

    def __len__(self) -> int:
        return self._remote.health["count"]

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and bool(self.among([id_]))

    def among(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that are in the index."""
        ids = list(dict.fromkeys(ids))
        unknown = [id_ for id_ in ids if id_ not in self._known]
        for start in range(0, len(unknown), 10_000):
            part = unknown[start : start + 10_000]
            self._known |= zip(
                part, self._remote.ask("has_ids", {"ids": part}, "has", len(part), _read_flag)
            )
        return {id_ for id_ in ids if self._known[id_]}


class RemoteRetriever:
    """The retriever that serve.py serves at `url`, with the same methods. No proxy is used.

    What can pass (no connection, a reset, a time-out, a status of 5xx, 408, 425 or 429, a page that
    is no JSON) is tried again `retries` times, after `backoff` seconds, doubling up to 30; then it
    is RetrieverAway. A request that the server refuses (other 4xx) and an answer that is not
    serve.py's are a RetrieverError at once. `counts` has the retries, and the queries without rank.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        retries: int = 8,
        backoff: float = 1.0,
        batch: int = 128,
    ):
        """timeout: seconds for one answer; batch: queries of a request, if the server takes them"""
        import httpx2

        self.url, self.timeout, self.retries, self.backoff = (
            url.rstrip("/"),
            timeout,
            retries,
            backoff,
        )
        if not re.match(r"https?://[^/]", self.url):
            raise RetrieverError(f"url is {url!r}; give a url such as http://127.0.0.1:8000")
        check_k(batch, "batch")
        self.counts = {"retries": 0, "failed": 0}
        self._cut = 0
        self._client = httpx2.Client(timeout=timeout, trust_env=False)
        self.health = self.ask("health")
        self.batch = min(batch, self.health["max_batch"])
        self.passage_ids = RemoteIds(self)

    @property
    def cut_queries(self) -> int:
        """Queries cut so far: here to what the server takes, and there for any of its clients."""
        before, now = (health.get("cut_queries", 0) for health in (self.health, self.ask("health")))
        return self._cut + now - before

    def _post(self, path: str, body: dict | None) -> Any:
        """One try: the JSON of the answer, or of GET where there is no body."""
        import httpx2

        url, deadline, text = f"{self.url}/{path}", time.monotonic() + self.timeout, b""
        try:
            with self._client.stream("GET" if body is None else "POST", url, json=body) as response:
                for chunk in response.iter_bytes():
                    text += chunk
                    if time.monotonic() > deadline:
                        raise httpx2.ReadTimeout("the answer came in drops")
        except httpx2.TimeoutException as e:
            raise RetrieverAway(
                f"{url} gave no whole answer within {self.timeout:g} s ({type(e).__name__})"
            ) from e
        except httpx2.RequestError as e:  # refused, reset, cut short
            raise RetrieverAway(f"{url} can't be reached ({type(e).__name__}: {e})") from e
        status = response.status_code
        try:
            answer = json.loads(text)
        except ValueError as e:
            said = repr(" ".join(text[:200].decode("utf-8", "replace").split()))
            if status == 200:
                raise RetrieverAway(
                    f"{url} answered with status 200, but not with JSON: {said}. Is that address "
                    "serve.py's, and nothing between that puts its own page there?"
                ) from e
            answer = {"detail": said}
        said = answer.get("detail", "") if isinstance(answer, dict) else answer
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise RetrieverError(f"{url} refused the request with status {status}: {said}")
        if status != 200:
            raise RetrieverAway(f"{url} answered with status {status}: {said}")
        return answer

    def ask(
        self,
        path: str,
        body: dict | None = None,
        key: str = "",
        count: int = 0,
        read: Callable | None = None,
        tries: int | None = None,
    ) -> Any:
        """The `count` entries of `key`, each through `read`; without a key the server's /health."""
        tries = 1 + self.retries if tries is None else tries
        problem: RetrieverAway | None = None
        for attempt in range(tries):
            if attempt:
                if attempt == 1:
                    message = f"warning: {problem}; trying again, at most {tries - 1} times"
                    print(message, file=sys.stderr, flush=True)
                self.counts["retries"] += 1
                time.sleep(min(self.backoff * 2 ** (attempt - 1), 30))
            try:
                answer = self._post(path, body)
                break
            except RetrieverAway as e:
                problem = e
        else:
            message = f"{problem} (asked {tries} times). Look at the server, or start it again."
            raise RetrieverAway(message) from problem
        try:
            if not key:
                return answer | {
                    k: int(answer[k]) for k in ("count", "max_batch", "max_query_chars")
                }
            if len(answer[key]) != count:
                raise ValueError(f"{len(answer[key])} entries instead of {count}")
            return [read(entry) for entry in answer[key]]
        except (KeyError, TypeError, ValueError) as e:
            raise RetrieverError(
                f"{self.url}/{path} answered with status 200, but not as serve.py does "
                f"({type(e).__name__}: {e}); give the address of a serve.py of this version"
            ) from e

    def _fitting(self, queries: Iterable[str]) -> list[str]:
        """The queries, none longer than the server takes."""
        queries, most = check_queries(queries), self.health["max_query_chars"]
        self._cut += sum(len(query) > most for query in queries)
        return [query[:most] for query in queries]

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best k passages of every query, as the served retriever orders them."""
        check_k(k)
        queries, out = self._fitting(queries), []
        for start in range(0, len(queries), self.batch):
            part = queries[start : start + self.batch]
            body = {"queries": part, "k": k}
            out += self.ask("hits", body, "hits", len(part), lambda hits: _read_hits(hits, k))
        return out

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> list[int | float | None]:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED where there is none.

        FAILED is a NaN score, or a request without an answer; after one of these, the next gets one
        try until the server is back. RetrieverAway: no request had an answer.
        """
        check_k(cutoff, "cutoff")
        queries = self._fitting(queries)
        golds = gold_lists(queries, gold_ids)
        out, failed, problem, away = [], 0, None, False
        for start in range(0, len(queries), self.batch):
            part = slice(start, start + self.batch)
            body = {"queries": queries[part], "gold_ids": golds[part], "cutoff": cutoff}
            count, tries = len(body["queries"]), 1 if away else None
            try:
                read = lambda rank: _read_rank(rank, cutoff)  # noqa: E731
                out += self.ask("gold_ranks", body, "ranks", count, read, tries)
                away = False
            except RetrieverAway as e:
                out += [FAILED] * count
                failed, problem, away = failed + count, e, True
        self.counts["failed"] += failed
        if problem is not None:
            if failed == len(queries):
                raise problem
            message = f"no rank for {failed} of {len(queries)} queries: {problem}"
            print(message, file=sys.stderr, flush=True)
        return out


def _read_flag(flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise ValueError(f"{flag!r} is neither true nor false")
    return flag


def _read_hits(hits: Any, k: int) -> Hits:
    if not isinstance(hits, list) or len(hits) > k:
        raise ValueError(f"{str(hits)[:80]} is no list of at most {k} hits")
    for hit in hits:
        good = isinstance(hit, list) and len(hit) == 2 and isinstance(hit[0], str)
        if not (good and type(hit[1]) in (int, float) and math.isfinite(hit[1])):
            raise ValueError(f"{str(hit)[:80]} is no hit [id, score]")
    return [(id_, float(score)) for id_, score in hits]


def _read_rank(rank: Any, cutoff: int) -> int | float | None:
    if rank == "failed":
        return FAILED
    if rank is not None and not (type(rank) is int and 1 <= rank <= cutoff):
        raise ValueError(f"{rank!r} is no rank from 1 to {cutoff}")
    return rank
