"""The service in this process: shared calls, limits, hosts, connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx2
import pytest

import serve
from data import DataError
from retriever import RetrieverConfig
from search.passages import FAILED, RetrieverError
from served import PASSAGES, QUERIES

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="pip install -r requirements-serve.txt")


class Stub:
    """A retriever whose calls wait for `go` and are kept; "bad" raises, "nan" has a NaN score."""

    passage_ids = {"g": 0, "h": 1}.keys()

    def __init__(self):
        self.go, self.begun, self.calls = threading.Event(), threading.Event(), []

    def _enter(self, queries):
        self.calls.append(list(queries))
        self.begun.set()
        assert self.go.wait(30)
        if "bad" in queries:
            raise ZeroDivisionError("a bad query")
        if "unknown" in queries:
            raise RetrieverError("not in this index")

    def search(self, queries, k):
        self._enter(queries)
        return [[(q, 1.0)] * k for q in queries] if queries != ["short", "short"] else []

    def gold_ranks(self, queries, golds, cutoff):
        self._enter(queries)
        return [
            FAILED if q == "nan" else len(q) if gold == ["g"] else None
            for q, gold in zip(queries, golds)
        ]


async def ask(app, path: str, body: dict, host: str = "127.0.0.1") -> tuple[int, object]:
    """One request to an ASGI application, without a socket: status; JSON or text."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post(path, json=body, headers={"host": host})
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json() if is_json else answer.text


def service_of(stub, **changes) -> serve.Service:
    return serve.Service(serve.ServeConfig(mcp="off", **changes), stub, qrels={"n": ["g"]})


def test_max_k_bounds_what_is_not_asked_for_too():
    class Numbers(Stub):
        def search(self, queries, k):
            return [[("g", 1.0)] * k for _ in queries]

        def gold_ranks(self, queries, golds, cutoff):
            return [cutoff for _ in queries]

    texts = type("Texts", (), {"document": lambda self, id_: {"id": id_, "contents": ""}})()
    cfg = serve.ServeConfig(mcp="off", max_k=2, topk=1)
    app = serve.make_app(serve.Service(cfg, Numbers(), texts, {"n": ["g"]}))

    async def answers():
        return [
            await ask(app, path, body)
            for path, body in (
                ("/batch_search", {"query": ["a"]}),
                ("/search", {"query": "a"}),
                ("/gold_ranks", {"queries": ["a"], "gold_ids": [["g"]]}),
                ("/retrieve", {"queries": ["a"], "query_ids": ["n"]}),
            )
        ]

    many, one, ranks, by_id = (answer for _, answer in asyncio.run(answers()))
    assert len(many[0]) == len(one) == 2 and ranks == {"ranks": [2]} and by_id == {"result": [2]}
    with pytest.raises(serve.ConfigError, match="topk=3 is above max_k=2"):
        serve.check_config(serve.ServeConfig(max_k=2))


def test_requests_that_wait_share_one_call_and_a_bad_one_fails_alone():
    stub = Stub()
    service = service_of(stub)
    app = serve.make_app(service)

    async def play():
        first = asyncio.create_task(ask(app, "/hits", {"queries": ["first"], "k": 1}))
        while not stub.begun.is_set():
            await asyncio.sleep(0.001)
        bodies = [("/hits", {"queries": [f"a{i}", f"b{i}"], "k": 2}) for i in range(5)]
        bodies += [
            ("/hits", {"queries": ["bad"], "k": 2}),
            ("/hits", {"queries": ["other k"], "k": 1}),
        ]
        bodies += [("/gold_ranks", {"queries": ["x" * i], "gold_ids": [["g"]]}) for i in (3, 4)]
        bodies += [("/gold_ranks", {"queries": ["nan", "y"], "gold_ids": [["g"], ["h"]]})]
        bodies += [("/gold_ranks", {"queries": ["unknown"], "gold_ids": [["x"]], "cutoff": 9})]
        tasks = [asyncio.create_task(ask(app, *body)) for body in bodies]
        while service.waiting < 18:
            await asyncio.sleep(0.001)
        stub.go.set()
        return await first, await asyncio.gather(*tasks)

    first, answers = asyncio.run(play())
    assert first == (200, {"hits": [[["first", 1.0]]]})
    assert answers[:5] == [
        (200, {"hits": [[[f"a{i}", 1.0]] * 2, [[f"b{i}", 1.0]] * 2]}) for i in range(5)
    ]
    assert answers[5] == (500, {"detail": "the retriever failed: ZeroDivisionError: a bad query"})
    assert answers[6] == (200, {"hits": [[["other k", 1.0]]]})
    assert answers[7:] == [
        (200, {"ranks": [3]}),
        (200, {"ranks": [4]}),
        (200, {"ranks": ["failed", None]}),
        (422, {"detail": "not in this index"}),
    ]
    together = [f"{side}{i}" for i in range(5) for side in "ab"] + ["bad"]
    assert stub.calls[1] == together and stub.calls[2:8] == [
        together[i : i + 2] for i in range(0, 10, 2)
    ] + [["bad"]]
    assert stub.calls[8:] == [["other k"], ["xxx", "xxxx", "nan", "y"], ["unknown"]]
    status = service.close()
    assert (
        status["requests"] == 12
        and status["queries"] == 18
        and status["failed"] == status["refused"] == 1
        and service.waiting == 0
    )


def test_limits_of_a_call_of_waiting_and_of_a_body(monkeypatch):
    stub = Stub()
    service = service_of(stub, max_batch=4, timeout=0.2)
    monkeypatch.setattr(serve, "MAX_BODY", 2000)
    app = serve.make_app(service)

    async def late():
        return await asyncio.gather(
            *(
                ask(app, "/hits", {"queries": [f"{i}{j}" for j in range(3)], "k": 1})
                for i in range(3)
            )
        )

    for status, answer in asyncio.run(late()):
        assert status == 504 and "no answer within 0.2 s" in answer["detail"]
    assert service.waiting == 0
    stub.go.set()
    assert asyncio.run(ask(app, "/hits", {"queries": ["next"], "k": 1})) == (
        200,
        {"hits": [[["next", 1.0]]]},
    )
    assert (
        stub.calls[-1] == ["next"] and max(map(len, stub.calls)) <= 6
    )  # what was given up is not searched
    status, answer = asyncio.run(ask(app, "/hits", {"queries": ["x" * 3000], "k": 1}))
    assert status == 413 and answer == "Content Too Large"
    assert asyncio.run(ask(app, "/hits", {"queries": ["x" * 1500], "k": 1}))[0] == 200


def test_a_failed_search_is_never_an_empty_answer():
    stub = Stub()
    stub.go.set()
    app = serve.make_app(service_of(stub))
    for path, body, expected in (
        (
            "/retrieve",
            {"queries": ["nan", "b"], "query_ids": ["n", "n"]},
            (500, "has a NaN score, so no rank"),
        ),
        (
            "/hits",
            {"queries": ["short", "short"], "k": 1},
            (500, "RuntimeError: 0 answers to 2 queries"),
        ),
        (  # as a retriever says that a query has a NaN score: no fault of the client
            "/hits",
            {"queries": ["unknown"], "k": 1},
            (500, "RetrieverError: not in this index"),
        ),
    ):
        status, answer = asyncio.run(ask(app, path, body))
        assert status == expected[0] and answer["detail"].endswith(expected[1])
    body = {"queries": ["bb", "b"], "query_ids": ["n", "n"]}
    assert asyncio.run(ask(app, "/retrieve", body)) == (200, {"result": [2, 1]})
    for path, body in (("/retrieve", {"queries": ["a"]}), ("/search", {"query": "a"})):
        status, answer = asyncio.run(ask(app, path, body))
        assert status == 501 and "corpus=FILE" in answer["detail"]

    class Changed:
        def document(self, id_):
            raise DataError("corpus.jsonl: another passage stands there")

    app = serve.make_app(serve.Service(serve.ServeConfig(mcp="off"), stub, texts=Changed()))
    assert asyncio.run(ask(app, "/retrieve", {"queries": ["a"]})) == (
        500,
        {"detail": "a passage can't be read: corpus.jsonl: another passage stands there"},
    )
    service = serve.Service(serve.ServeConfig(mcp="off"), stub)
    status, answer = asyncio.run(
        ask(serve.make_app(service), "/retrieve", {"queries": ["a"], "query_ids": ["n"]})
    )
    assert status == 501 and "qrels=FILE" in answer["detail"]


def test_a_dense_retriever_is_served_the_same(tmp_path):
    from tiny import tiny_encoder

    from retriever import DenseRetriever, build_index, load_encoder

    tiny_encoder(tmp_path / "e")
    model, tokenizer, encoder = load_encoder(str(tmp_path / "e"), "cpu")
    dense = DenseRetriever(
        build_index(tmp_path / "i", PASSAGES, model, tokenizer, encoder), model, tokenizer, encoder
    )
    service = serve.Service(
        serve.ServeConfig(mcp="off", retriever=RetrieverConfig(kind="dense")), dense
    )
    app, golds = serve.make_app(service), [["p01"], ["p02", "p05"]] * 4
    hits = asyncio.run(ask(app, "/hits", {"queries": QUERIES[:8], "k": 4}))
    assert hits == (
        200,
        {"hits": [[list(hit) for hit in one] for one in dense.search(QUERIES[:8], 4)]},
    )
    ranks = asyncio.run(
        ask(app, "/gold_ranks", {"queries": QUERIES[:8], "gold_ids": golds, "cutoff": 60})
    )
    assert (
        ranks == (200, {"ranks": dense.gold_ranks(QUERIES[:8], golds, 60)})
        and None not in ranks[1]["ranks"]
    )
    assert service.close()["kind"] == "dense"


# --------------------------------------------------------------------- connections of a real server


@pytest.fixture
def listening(monkeypatch):
    """(Stub, server, port) of a server in this process, whose patience is a fifth of a second."""
    monkeypatch.setattr(serve, "PATIENCE", 0.2)
    stub, cfg = Stub(), serve.ServeConfig(mcp="off", port=0)
    listener, server = serve.listen(cfg), serve.make_server(serve.Service(cfg, stub))
    listener.listen(64)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield stub, server, port
    stub.go.set()
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def raw_request(path: str, body: str, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n{body}"
    ).encode()


HITS = raw_request("/hits", '{"queries": ["red"], "k": 1}')


def test_connections_that_keep_the_server_waiting_are_closed(listening, caplog):
    stub, server, port = listening
    stub.go.set()
    begun = {
        "nothing": b"",
        "half a header": HITS[:40],
        "half a body": HITS[:-5],
        "idle after an answer": HITS,
        "half a request after an answer": HITS + HITS[:40],
    }
    for name, sent in begun.items():
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(sent)
            answer, part = b"", b"-"
            while part:  # until the server closes
                part = client.recv(65536)
                answer += part
        assert answer.startswith(b"HTTP/1.1 200" if "answer" in name else b""), name
        assert ("answer" in name) == bool(answer), name
    assert not caplog.records  # a client that leaves is no error


def test_a_peer_that_does_not_read_its_answer_is_given_up(listening):
    stub, server, port = listening
    stub.go.set()
    body = json.dumps({"queries": ["x" * 1000] * 4000, "k": 10})  # an answer of 40 MB
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(raw_request("/hits", body))
        assert stub.begun.wait(10)
        deadline = time.monotonic() + 15
        while server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not server.server_state.connections


def test_a_search_may_take_longer_than_a_connection_may_idle(listening):
    stub, server, port = listening
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(HITS)
        assert stub.begun.wait(10)
        time.sleep(1)
        stub.go.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        (connection,) = (
            server.server_state.connections
        )  # answers must not wait for acknowledgements
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_local_server_answers_to_local_names_alone():
    """A web page whose name was made to resolve to 127.0.0.1 sends its own name as Host."""
    stub = Stub()
    stub.go.set()
    body = {"queries": ["red"], "k": 1}
    for host, allowed in (
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:8000", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("", False),
    ):
        service = service_of(stub)
        status, answer = asyncio.run(ask(serve.make_app(service), "/hits", body, host))
        assert status == (200 if allowed else 400), host
        assert allowed or answer == "Invalid host header" and not service.counts["requests"]
    app = serve.make_app(service_of(stub, host="0.0.0.0"))
    assert asyncio.run(ask(app, "/hits", body, "search.example"))[0] == 200
    for path in ("/docs", "/redoc", "/openapi.json", "/elsewhere"):
        assert asyncio.run(ask(app, path, {}))[0] == 404
