"""JSON services over HTTP, and the client of serve.py: a retriever elsewhere, with the methods of
one that is here.

Copies out with search/passages.py and what that needs; no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from functools import partial
from typing import Any, Callable, Sequence

from search.passages import FAILED, Hits, RetrieverError, check_k, check_queries, gold_lists

IDS = 10_000  # passage ids of a request


class RetrieverAway(RetrieverError):
    """A service gave no answer, however often it was asked: a technical failure."""

    exit_status = 1


class RemoteIds:
    """The ids of a served index: `id in ids`, `len(ids)`, and `set & ids`. Keeps answers."""

    def __init__(self, remote: RemoteRetriever):
        self._remote, self._known = remote, {}

    def __len__(self) -> int:
        return self._remote.health["count"]

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and bool({id_} & self)

    def __rand__(self, ids: set[str]) -> set[str]:
        unknown = sorted(ids - self._known.keys())
        for start in range(0, len(unknown), IDS):
            part = unknown[start : start + IDS]
            self._known |= zip(part, self._remote.ask("has_ids", {"ids": part}, "has", _read_flag))
        return {id_ for id_ in ids if self._known[id_]}


class Service:
    """A server that is asked for JSON over HTTP. No proxy is used; threads may share it.

    What can pass (no connection, a time-out, a status of 5xx, 408, 425 or 429, a page that is no
    JSON) is tried again `retries` times, after `backoff` seconds, doubling up to 30; then it is
    RetrieverAway. A refusal is a RetrieverError at once.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        retries: int = 8,
        backoff: float = 1.0,
        headers: dict[str, str] | None = None,
    ):
        """timeout: seconds for one answer"""
        import httpx2

        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.backoff, self.counts = backoff, {"retries": 0, "failed": 0}  # failed: without rank
        if not re.match(r"https?://[^/]", self.url):
            raise RetrieverError(f"url is {url!r}; give a url such as http://127.0.0.1:8000")
        self._client = httpx2.Client(timeout=timeout, trust_env=False, headers=headers)

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
            raise RetrieverAway(f"{url} gave no whole answer within {self.timeout:g} s") from e
        except httpx2.RequestError as e:  # refused, reset, cut short
            raise RetrieverAway(f"{url} can't be reached ({type(e).__name__}: {e})") from e
        status, said = response.status_code, " ".join(text[:300].decode("utf-8", "replace").split())
        if status != 200:
            passing = status >= 500 or status in (408, 425, 429)
            kind = RetrieverAway if passing else RetrieverError
            raise kind(f"{url} answered with status {status}: {said}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            raise RetrieverAway(f"{url} answered with status 200 and no JSON: {said}") from e

    def fetch(self, path: str, body: dict | None = None, tries: int | None = None) -> Any:
        """The JSON that is answered, after `tries` tries at most; unset: 1 + `retries`."""
        for attempt in itertools.count(1):
            try:
                return self._post(path, body)
            except RetrieverAway as e:
                if attempt >= (1 + self.retries if tries is None else tries):
                    problem = f"{e} (asked {attempt} times); look at the server, or start it again"
                    raise RetrieverAway(problem) from e
                if attempt == 1:
                    print(f"warning: {e}; trying again", file=sys.stderr, flush=True)
                self.counts["retries"] += 1
                time.sleep(min(self.backoff * 2 ** (attempt - 1), 30))


class RemoteRetriever(Service):
    """The retriever that serve.py serves at `url`, with the same methods.

    An answer that is not serve.py's is a RetrieverError at once.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        retries: int = 8,
        backoff: float = 1.0,
        batch: int = 128,
    ):
        """batch: queries of a request, as far as allowed there"""
        super().__init__(url, timeout, retries, backoff)
        check_k(batch, "batch")
        self.health = self.ask("health")
        self.batch = min(batch, self.health["max_batch"])
        self.passage_ids = RemoteIds(self)

    @property
    def cut_queries(self) -> int:
        """Queries that the server has cut since this client began, for any of its clients."""
        return self.ask("health")["cut_queries"] - self.health["cut_queries"]

    def ask(
        self,
        path: str,
        body: dict | None = None,
        key: str = "",
        read: Callable | None = None,
        tries: int | None = None,
    ) -> Any:
        """The entries of `key`, one for each of the body's first list, each through `read`.

        Without a key: what is needed of the server's /health.
        """
        answer = self.fetch(path, body, tries)
        try:
            if not key:
                return {k: int(answer[k]) for k in ("count", "max_batch", "cut_queries")}
            asked, entries = len(next(iter(body.values()))), answer[key]
            if len(entries) != asked:
                raise ValueError(f"{len(entries)} entries instead of {asked}")
            return [read(entry) for entry in entries]
        except (KeyError, TypeError, ValueError) as e:
            raise RetrieverError(
                f"{self.url}/{path} answered with status 200, but not as serve.py does "
                f"({type(e).__name__}: {e}); give the address of a serve.py of this version"
            ) from e

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best k passages of every query, as the served retriever orders them."""
        check_k(k)
        queries, out = check_queries(queries), []
        for start in range(0, len(queries), self.batch):
            body = {"queries": queries[start : start + self.batch], "k": k}
            out += self.ask("hits", body, "hits", partial(_read_hits, k=k))
        return out

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> list[int | float | None]:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED where there is none.

        FAILED is a NaN score, or a request without an answer; after one of these, the next gets one
        try until the server is back. RetrieverAway: no request had an answer.
        """
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        golds = gold_lists(queries, gold_ids)
        read, out, failed, problem, tries = partial(_read_rank, cutoff=cutoff), [], 0, None, None
        for start in range(0, len(queries), self.batch):
            part = slice(start, start + self.batch)
            body = {"queries": queries[part], "gold_ids": golds[part], "cutoff": cutoff}
            try:
                out += self.ask("gold_ranks", body, "ranks", read, tries)
                tries = None
            except RetrieverAway as e:
                out += [FAILED] * len(body["queries"])
                failed, problem, tries = failed + len(body["queries"]), e, 1
        self.counts["failed"] += failed
        if problem:
            if failed == len(queries):
                raise problem
            print(f"no rank for {failed} of {len(queries)} queries: {problem}", file=sys.stderr)
        return out


def _read_hits(hits: Any, k: int) -> Hits:
    number = (int, float)
    good = isinstance(hits, list) and all(
        isinstance(i, str) and type(s) in number and math.isfinite(s) for i, s in hits
    )
    if not good or len(hits) > k:
        raise ValueError(f"{str(hits)[:80]} is no list of at most {k} hits [id, score]")
    return [(id_, float(score)) for id_, score in hits]


def _read_flag(flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise ValueError(f"{str(flag)[:80]} is neither true nor false")
    return flag


def _read_rank(rank: Any, cutoff: int) -> int | float | None:
    if rank == "failed":
        return FAILED
    if rank is not None and not (type(rank) is int and 1 <= rank <= cutoff):
        raise ValueError(f"{rank!r} is no rank from 1 to {cutoff}")
    return rank
