"""RemoteRetriever: faults of a server and of the way to it."""

from __future__ import annotations

import http.server
import json
import math
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from prompts import response_text
from retriever import RetrieverConfig, open_retriever
from search import client
from search.client import RemoteRetriever, RetrieverAway
from search.passages import FAILED, RetrieverError


class Faulty:
    """A little server that answers /health and then, request by request, as `plan` says; "ok" once the plan is over."""

    def __init__(self, *plan: str):
        self.plan, self.asked, self.released = list(plan), [], threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(
                self,
                status: int,
                body: bytes,
                kind: str = "application/json",
                length: int | None = None,
            ):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.answer(
                    200, json.dumps({"count": 9, "max_batch": 100, "cut_queries": 0}).encode()
                )

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked["queries"])
                what = outer.plan.pop(0) if outer.plan else "ok"
                ranks = [len(q) for q in asked["queries"]]
                hits = [[[q, 1.0]] for q in asked["queries"]]
                right = {"ranks": ranks, "hits": hits}
                if what == "hang":
                    outer.released.wait(60)
                elif what == "drip":
                    self.send_response(200)
                    self.end_headers()
                    while not outer.released.wait(0.05):
                        try:
                            self.wfile.write(b" ")
                        except OSError:
                            return
                elif what == "reset":
                    self.connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                    )
                    self.connection.close()
                elif what == "cut":
                    self.answer(200, b'{"ranks": [', length=500)
                    self.close_connection = True
                elif what == "html":
                    self.answer(200, b"<html>busy</html>", "text/html")
                elif what == "502":
                    self.answer(502, b"<html>bad gateway</html>", "text/html")
                elif what in ("400", "404", "429", "500", "503"):
                    self.answer(int(what), json.dumps({"detail": f"reason {what}"}).encode())
                else:
                    self.answer(
                        200,
                        json.dumps(
                            {
                                "ok": right,
                                "short": {"ranks": ranks[:-1], "hits": hits[:-1]},
                                "list": [1],
                                "null": None,
                                "empty": {},
                                "text": {"ranks": ["1"] * len(ranks), "hits": ["ab"] * len(ranks)},
                                "two": {
                                    "ranks": [True] * len(ranks),
                                    "hits": [["p1", "p2"]] * len(ranks),
                                },
                                "no id": {
                                    "ranks": [1.0] * len(ranks),
                                    "hits": [[[None, 1.0]]] * len(ranks),
                                },
                                "nan": {
                                    "ranks": [float("nan")] * len(ranks),
                                    "hits": [[["p", float("nan")]]] * len(ranks),
                                },
                                "score": {
                                    "ranks": [-1] * len(ranks),
                                    "hits": [[["p", "1.0"]]] * len(ranks),
                                },
                                "more": {
                                    "ranks": ranks + [1],
                                    "hits": [[["p", 1.0], ["q", 1.0]]] * len(ranks),
                                },
                                "zero": {"ranks": [0] * len(ranks), "hits": [[["x"]]] * len(ranks)},
                                "beyond": {"ranks": [101] * len(ranks), "hits": [3] * len(ranks)},
                                "number": {"ranks": 3, "hits": 3},
                                "failed": {"ranks": ["failed"] + ranks[1:], "hits": hits},
                            }[what]
                        ).encode(),
                    )

            def handle(self):
                try:
                    super().handle()
                except OSError:
                    pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.server.handle_error = lambda *_: None
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def client(self, **changes) -> RemoteRetriever:
        return RemoteRetriever(
            self.url, **({"timeout": 20, "retries": 2, "backoff": 0.01} | changes)
        )


FAULTS = ["500", "502", "503", "429", "hang", "drip", "html", "reset", "cut"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_costs_a_retry_and_a_lasting_one_is_named(fault):
    queries, golds = ["a", "bb"], [["g"], ["g"]]
    with Faulty(fault) as faulty:
        remote = faulty.client(timeout=0.8 if fault in ("hang", "drip") else 20)
        assert remote.gold_ranks(queries, golds) == [1, 2]
        assert remote.counts == {"retries": 1, "failed": 0} and faulty.asked == [queries] * 2
        faulty.plan = [fault, fault]
        assert remote.search(queries, 1) == [[("a", 1.0)], [("bb", 1.0)]]
        faulty.plan = [fault] * 6
        for attempt in (
            lambda: remote.gold_ranks(queries, golds),
            lambda: remote.search(queries, 1),
        ):
            with pytest.raises(RetrieverAway, match=faulty.url) as e:
                attempt()
            assert "asked 3 times" in str(e.value) and e.value.exit_status == 1
            if fault.isdigit():
                assert f"status {fault}" in str(e.value)
        assert not faulty.plan  # three tries each, no more


@pytest.mark.parametrize(
    "fault",
    [
        "short",
        "list",
        "null",
        "empty",
        "text",
        "zero",
        "beyond",
        "number",
        "two",
        "no id",
        "nan",
        "score",
        "more",
    ],
)
def test_an_answer_of_another_shape_is_refused_at_once(fault):
    """A server that answers differently does so again: no retry, and no hit or rank is made of it."""
    queries, golds = ["a", "bb"], [["g"], ["g"]]
    with Faulty(fault, fault) as faulty:
        remote = faulty.client()
        for attempt in (
            lambda: remote.gold_ranks(queries, golds),
            lambda: remote.search(queries, 1),
        ):
            with pytest.raises(
                RetrieverError, match=f"{faulty.url}/.* status 200, but not as serve.py does"
            ) as e:
                attempt()
            assert not isinstance(e.value, RetrieverAway)
        assert remote.counts == {"retries": 0, "failed": 0} and len(faulty.asked) == 2


@pytest.mark.parametrize("hits", [{}, "", None, [["p1", 1.0], ["p2", 0.5]], [["p1", math.nan]]])
def test_hits_of_another_shape_are_no_hits(hits):
    assert not client._are_hits(hits, 1)


@pytest.mark.parametrize("flag", ["false", None, 1])
def test_a_flag_is_true_or_false(flag):
    assert not client._is_flag(flag)


def test_an_html_page_gives_url_and_status():
    with Faulty(*["html"] * 3) as faulty:
        with pytest.raises(RetrieverError) as e:
            faulty.client(retries=2).search(["a"], 1)
        assert (
            faulty.url in str(e.value)
            and "status 200" in str(e.value)
            and "<html>busy</html>" in str(e.value)
        )
        assert len(faulty.asked) == 3


def test_a_hanging_service_is_given_up():
    with Faulty("hang", "hang") as faulty:
        remote, started = faulty.client(timeout=1, retries=1), time.monotonic()
        with pytest.raises(RetrieverError, match="no whole answer within 1 s"):
            remote.search(["a"], 1)
        assert time.monotonic() - started < 10


def test_a_refused_request_is_not_repeated():
    with Faulty("400", "404") as faulty:
        remote = faulty.client()
        for status in ("400", "404"):
            with pytest.raises(
                RetrieverError, match=f"answered with status {status}: .*reason {status}"
            ) as e:
                remote.gold_ranks(["a"], [["g"]])
            assert not isinstance(e.value, RetrieverAway)
        assert len(faulty.asked) == 2


def test_failed_batches_have_no_rank_and_the_rest_is_right(capsys):
    with Faulty("ok", "500", "500", "500", "500", "ok", "html", "failed") as faulty:
        remote = faulty.client(batch=2, retries=2)
        queries = ["a", "bb", "ccc", "dddd", "e", "ff", "ggg", "h", "ii", "jjj"]
        ranks = remote.gold_ranks(queries, [["g"]] * 10)
        # the second batch fails three times; the third, while the server is away, once; then it is back and the fifth
        # batch has its retries again
        assert [r if r is not FAILED else "failed" for r in ranks] == [
            1,
            2,
            "failed",
            "failed",
            "failed",
            "failed",
            3,
            1,
            "failed",
            3,
        ]
        assert remote.counts == {"retries": 3, "failed": 4} and len(faulty.asked) == 8
        assert "no rank for 4 of 10 queries" in capsys.readouterr().err


def test_a_rollout_without_a_rank_is_left_out_and_counted():
    import tiny

    import grpo
    import tasks
    from data import Turn
    from engines.base import Rollout

    tokenizer = tiny.tiny_tokenizer()

    def rollouts() -> list:
        texts = [response_text("t", query) for query in ("a", "bb", "ccc", "dddd")]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [Rollout([1], i, [0.0] * len(i), [1] * len(i), 0, "eos") for i in ids]

    turns = [
        Turn(query_id="q", conversation_id="c", turn=1, context=[], question="x", gold_ids=["g"])
    ]
    with Faulty("ok", "500", "ok", "ok") as faulty:
        remote = faulty.client(batch=1, retries=0)
        task = tasks.Rewrite(grpo.GRPOConfig(), tokenizer)
        task.retriever, run = remote, SimpleNamespace(task=task)
        scores = grpo.score(run, rollouts(), turns)
        assert [s.figures.get("rank") for s in scores] == [1, None, 3, 4]
        assert scores[1].reward is None  # not the 0 of a bad rewrite
        assert [s.reward for s in scores if s.reward is not None] == pytest.approx(
            [2.0, 16 / 9, 15 / 9]
        )
        assert remote.counts["failed"] == 1
        faulty.plan = ["500"] * 4
        with pytest.raises(
            RetrieverAway, match=f"{faulty.url}/gold_ranks answered with status 500"
        ):  # training stops
            grpo.score(run, rollouts(), turns)


def test_a_wrong_address_is_a_clear_error_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(
        RetrieverAway, match=rf"http://127.0.0.1:{port}/health can.t be reached .*refused"
    ):
        RemoteRetriever(f"http://127.0.0.1:{port}", retries=1, backoff=0)
    for wrong in ("", "localhost:8000", "ftp://x", "http://"):
        with pytest.raises(RetrieverError, match="give a url such as"):
            open_retriever(RetrieverConfig(kind="remote", url=wrong))
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    other.RequestHandlerClass.log_message = lambda *_: None
    threading.Thread(target=other.serve_forever, daemon=True).start()
    with pytest.raises(RetrieverError, match="status 404"):
        RemoteRetriever(f"http://127.0.0.1:{other.server_port}", retries=0)
    other.shutdown()
    other.server_close()


def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Faulty() as faulty:
        assert faulty.client().gold_ranks(["abc"], [["g"]]) == [3]
