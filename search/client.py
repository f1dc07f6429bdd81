"""Client of JSON services over HTTP, and the retriever that asks a serve.py server.

Copies out with search/passages.py and what that needs; no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from typing import Any, Callable, Sequence

from search.passages import (
    FAILED,
    Hits,
    Ranks,
    RetrieverError,
    check_golds,
    check_k,
    check_queries,
)

IDS = 10_000  # passage ids per request


class RetrieverAway(RetrieverError):
    """A service did not answer after all retries."""

    exit_status = 1


class RemoteIds:
    """Ids of a served index: `id in ids`, `len(ids)`, `set & ids`. Answers are cached."""

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
            self._known |= zip(part, self._remote.ask("has_ids", {"ids": part}, "has", _is_flag))
        return {id_ for id_ in ids if self._known[id_]}


class Service:
    """Thread-safe client of a JSON service over HTTP. It uses no proxy.

    No connection, a time-out, status 5xx, 408, 425 or 429 and a non-JSON answer are retried
    `retries` times, after `backoff` seconds, doubling up to 30; then RetrieverAway is raised.
    Another status is a RetrieverError at once.
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
        """Request JSON, trying at most `tries` times (None: 1 + `retries`)."""
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
    """The retriever served at `url`. RetrieverError: an answer is not as serve.py's."""

    def __init__(self, url: str, *service, batch: int = 128, **named):
        """service, named: see `Service`; batch: queries per request, at most the server's limit"""
        super().__init__(url, *service, **named)
        check_k(batch, "batch")
        self.health = self.ask("health")
        self.batch = min(batch, self.health["max_batch"])
        self.passage_ids = RemoteIds(self)

    @property
    def cut_queries(self) -> int:
        """Queries the server has cut, for all clients, since this one began."""
        return self.ask("health")["cut_queries"] - self.health["cut_queries"]

    def ask(
        self,
        path: str,
        body: dict | None = None,
        key: str = "",
        fits: Callable[[Any], bool] = bool,
        tries: int | None = None,
    ) -> Any:
        """Return list `key` of the answer: per item of the body's first list an entry that `fits`.

        Without a key: count, max_batch and cut_queries of /health.
        """
        answer = self.fetch(path, body, tries)
        try:
            if not key:
                return {k: int(answer[k]) for k in ("count", "max_batch", "cut_queries")}
            asked, entries = len(next(iter(body.values()))), answer[key]
            if len(entries) != asked:
                raise ValueError(f"{len(entries)} entries instead of {asked}")
            for entry in entries:
                if not fits(entry):
                    raise ValueError(f"{str(entry)[:80]} among {key}")
            return entries
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise RetrieverError(
                f"{self.url}/{path} answered with status 200, but not as serve.py does "
                f"({type(e).__name__}: {e}); give the address of a serve.py of this version"
            ) from e

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best k passages of every query, in the server's order."""
        check_k(k)
        queries, out = check_queries(queries), []
        for start in range(0, len(queries), self.batch):
            body = {"queries": queries[start : start + self.batch], "k": k}
            lists = self.ask("hits", body, "hits", lambda hits: _are_hits(hits, k))
            out += [[(id_, float(score)) for id_, score in hits] for hits in lists]
        return out

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> Ranks:
        """Return every query's best gold rank: None beyond `cutoff`, FAILED if unknown.

        FAILED: a NaN score or an unanswered request, after which requests are tried once until one
        is answered. RetrieverAway: none was.
        """
        queries, golds = check_golds(queries, gold_ids, cutoff)
        ranks, failed, problem, tries = [], 0, None, None

        def fits(rank: Any) -> bool:
            return rank in (None, "failed") or type(rank) is int and 1 <= rank <= cutoff

        for start in range(0, len(queries), self.batch):
            part = slice(start, start + self.batch)
            body = {"queries": queries[part], "gold_ids": golds[part], "cutoff": cutoff}
            try:
                ranks += self.ask("gold_ranks", body, "ranks", fits, tries)
                tries = None
            except RetrieverAway as e:
                ranks += ["failed"] * len(body["queries"])
                failed, problem, tries = failed + len(body["queries"]), e, 1
        self.counts["failed"] += failed
        if problem:
            if failed == len(queries):
                raise problem
            print(f"no rank for {failed} of {len(queries)} queries: {problem}", file=sys.stderr)
        return [FAILED if rank == "failed" else rank for rank in ranks]


def _is_flag(flag: Any) -> bool:
    return isinstance(flag, bool)


def _are_hits(hits: Any, k: int) -> bool:
    return (
        isinstance(hits, list)
        and len(hits) <= k
        and all(
            isinstance(id_, str) and type(score) in (int, float) and math.isfinite(score)
            for id_, score in hits
        )
    )
