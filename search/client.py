"""The client of serve.py: a retriever elsewhere, with the methods of one that is here.

A file of its own because it needs nothing but the standard library and passages.py: it goes along with other projects.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from http.client import HTTPException
from typing import Any, Callable, Iterable, Sequence

from search.passages import check_k, check_queries, FAILED, gold_lists, Hits, RetrieverError


class RetrieverAway(RetrieverError):
    """A retrieval service gave no usable answer, however often it was asked: a technical failure, not bad input."""

    exit_status = 1


class RemoteIds:
    """The ids of a served index: `id in ids`, `len(ids)`; `ids.among(many)` asks for many at once.  Keeps answers."""

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
            part = unknown[start:start + 10_000]
            self._known |= zip(part, self._remote.ask("has_ids", {"ids": part}, "has", len(part), bool))
        return {id_ for id_ in ids if self._known[id_]}


class RemoteRetriever:
    """The retriever that serve.py serves at `url`, with the same methods.  Standard library alone; no proxy is used.

    What can pass (no connection, a reset, a time-out, a status of 5xx, 408 or 429, an answer that is not the JSON that
    was asked for or has another count) is tried again `retries` times, after `backoff` seconds, doubling up to 30: a
    restart of the server costs time and nothing else.  Then it is RetrieverAway, which names url and status.  A request
    that the server refuses (other 4xx) is a RetrieverError with its reason at once.
    """

    def __init__(self, url: str, timeout: float = 120.0, retries: int = 8, backoff: float = 1.0, batch: int = 128):
        """timeout: seconds for one answer; batch: queries of one request, where the server allows as many."""
        self.url, self.timeout, self.retries, self.backoff = url.rstrip("/"), timeout, retries, backoff
        if not re.match(r"https?://[^/]", self.url) or not timeout > 0 or retries < 0 or not backoff >= 0 or batch < 1:
            raise RetrieverError(f"url is {url!r}, timeout {timeout}, retries {retries}, backoff {backoff}, batch "
                                 f"{batch}; give a url such as http://127.0.0.1:8000, and timeout and batch above 0")
        self.counts: dict[str, int] = {"truncated": 0, "retries": 0, "failed": 0}
        self._opener = urllib.request.OpenerDirector()  # bare: no proxies, no redirects, a status is not an exception
        for handler in (urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
            self._opener.add_handler(handler())
        self.health = self.ask("health", None, None, 0, None)
        self.batch = min(batch, self.health["max_batch"])
        self.passage_ids = RemoteIds(self)

    def _post(self, path: str, body: dict | None) -> Any:
        """One try: the JSON of the answer, or of GET where there is no body."""
        url, deadline, chunks = f"{self.url}/{path}", time.monotonic() + self.timeout, []
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with self._opener.open(request, timeout=self.timeout) as response:
                while chunk := response.read1(1 << 20):
                    chunks.append(chunk)
                    if time.monotonic() > deadline:
                        raise TimeoutError("timed out")
                status, text = response.status, b"".join(chunks).decode("utf-8", "replace")
        except (OSError, HTTPException) as e:  # refused, reset, timed out, cut short
            reason = getattr(e, "reason", e)
            raise RetrieverAway(f"{url} does not answer within {self.timeout:g} s ({type(reason).__name__}: "
                                f"{reason})") from e
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        said = answer["detail"] if isinstance(answer, dict) and "detail" in answer else " ".join(text[:200].split())
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise RetrieverError(f"{url} refused the request with status {status}: {said}")
        if status != 200:
            raise RetrieverAway(f"{url} answered with status {status}: {said}")
        if not isinstance(answer, dict):
            raise RetrieverAway(f"{url} answered with status {status}, but not with a JSON object: {said!r}. Is that "
                                "address serve.py's, and nothing between that puts its own page there?")
        return answer

    def ask(self, path: str, body: dict | None, key: str | None, count: int, read: Callable | None,
            tries: int | None = None) -> Any:
        """The `count` entries of `key`, each through `read`; the whole answer where there is no key."""
        tries = 1 + self.retries if tries is None else tries
        problem: RetrieverAway | None = None
        for attempt in range(tries):
            if attempt:
                if attempt == 1:
                    print(f"warning: {problem}; trying again, at most {tries - 1} times", file=sys.stderr, flush=True)
                self.counts["retries"] += 1
                time.sleep(min(self.backoff * 2 ** (attempt - 1), 30))
            try:
                answer = self._post(path, body)
                try:
                    if key is None:
                        return answer | {k: int(answer[k]) for k in ("count", "max_batch", "max_query_chars")}
                    if len(answer[key]) == count:
                        return [read(entry) for entry in answer[key]]
                    wrong = f"{len(answer[key])} entries instead of {count}"
                except (KeyError, TypeError, ValueError) as e:
                    wrong = f"{type(e).__name__}: {e}"
                raise RetrieverAway(f"{self.url}/{path} answered with status 200, but not as serve.py does ({wrong})")
            except RetrieverAway as e:
                problem = e
        raise RetrieverAway(f"{problem} (asked {tries} times). Look at the server, or start it again.") from problem

    def _cut(self, queries: Sequence[str]) -> list[str]:
        """No query longer than the server takes: far beyond what a retriever reads of one."""
        most = self.health["max_query_chars"]
        self.counts["truncated"] += sum(len(query) > most for query in queries)
        return [query[:most] for query in queries]

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best k passages of every query, as the served retriever orders them.  RetrieverAway: no answer."""
        check_k(k)
        queries, out = self._cut(check_queries(queries)), []
        for start in range(0, len(queries), self.batch):
            part = queries[start:start + self.batch]
            out += self.ask("hits", {"queries": part, "k": k}, "hits", len(part),
                            lambda hits: [(str(id_), float(score)) for id_, score in hits])
        return out

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED on NaN and for a request without answer.

        RetrieverAway: no request had an answer.  After one without, the next gets one try until the server is back.
        """
        check_k(cutoff, "cutoff")
        queries = self._cut(check_queries(queries))
        golds = gold_lists(queries, gold_ids)
        out, failed, problem, away = [], 0, None, False

        def read(rank: Any) -> Any:
            if rank == "failed":
                return FAILED
            if rank is not None and not (type(rank) is int and 1 <= rank <= cutoff):
                raise ValueError(f"{rank!r} is no rank")
            return rank

        for start in range(0, len(queries), self.batch):
            part = slice(start, start + self.batch)
            body = {"queries": queries[part], "gold_ids": golds[part], "cutoff": cutoff}
            count = len(body["queries"])
            try:
                out += self.ask("gold_ranks", body, "ranks", count, read, tries=1 if away else None)
                away = False
            except RetrieverAway as e:
                out += [FAILED] * count
                failed, problem, away = failed + count, e, True
        self.counts["failed"] += failed
        if problem is not None:
            if failed == len(queries):
                raise problem
            print(f"no rank for {failed} of {len(queries)} queries: {problem}", file=sys.stderr, flush=True)
        return out
