"""serve.py and RemoteRetriever: the server in its own process, every format, faults of both."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import serve
from config import ConfigError
from data import DataError, Passage, read_corpus
from prompts import response_text
from retriever import RetrieverConfig, open_retriever
from search.bm25 import BM25Retriever
from search.client import RemoteRetriever, RetrieverAway
from search.exact import FAILED
from search.passages import RetrieverError, Texts

fastapi = pytest.importorskip(
    "fastapi", reason="fastapi is not installed: pip install -r requirements-serve.txt"
)
pytest.importorskip(
    "uvicorn", reason="uvicorn is not installed: pip install -r requirements-serve.txt"
)
MCP = pytest.importorskip(
    "mcp", reason="mcp is not installed: pip install -r requirements-serve.txt"
)

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "red blue green fox dog bird tree wine river stone cloud music paper engine garden winter"
).split()


def make_passages(n: int = 60) -> list[Passage]:
    rng = random.Random(0)
    return [
        Passage(
            f"p{i:02d}",
            rng.choice(["", f"Title {i}"]),
            " ".join(rng.choices(WORDS, k=rng.randint(2, 9))),
        )
        for i in range(n)
    ]


PASSAGES = make_passages()
QRELS = {"q1": ["p01"], "q2": ["p02", "p05"], "q3": ["p03"]}
QUERIES = [" ".join(random.Random(i).choices(WORDS, k=3)) for i in range(40)]


def contents(id_: str) -> str:
    """As wiki-18 and the servers of FlashRAG and Search-R1 have it."""
    passage = PASSAGES[int(id_[1:])]
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


@pytest.fixture(scope="module")
def bm25():
    """The oracle: the same retriever in this process."""
    return BM25Retriever(PASSAGES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    rows = [
        {"id": p.id, "title": p.title, "text": p.text}
        if p.title
        else {"id": p.id, "contents": p.text}
        for p in PASSAGES
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.qrels").write_text(
        "".join(f"{q} 0 {p} 1\n" for q, golds in QRELS.items() for p in golds)
        + "q1 0 p09 0\nq4 0 p01 0\n"
    )
    return folder


class Server:
    """serve.py in a process of its own."""

    def __init__(self, folder: Path, *words: str, port: int = 0):
        command = [
            sys.executable,
            str(ROOT / "serve.py"),
            f"retriever.corpus={folder / 'corpus.jsonl'}",
            f"qrels={folder / 'test.qrels'}",
            f"port={port}",
            *words,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        if not line.startswith("serving 60 passages") or " at http://127.0.0.1:" not in line:
            self.process.kill()  # its stderr has an end then
            raise AssertionError(line + self.process.stderr.read())
        assert ("/mcp" in line) != ("mcp=off" in words)
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, dict]:
        """(exit status, last line of stdout)."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        assert "Traceback" not in err, err
        return self.process.returncode, json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def server(files):
    server = Server(files, "max_batch=50", "max_query_chars=1000", "max_k=200", "topk=4")
    yield server
    assert server.stop()[0] == 0


def call(
    url: str, body=None, raw: bytes | None = None, kind: str = "application/json"
) -> tuple[int, object]:
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": kind}), timeout=30
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


# ----------------------------------------------------------------------------------------- dialects


def test_convsearch_r1_gets_ranks_by_query_id(server, bm25):
    queries = ["red fox", "wine river", "a red fox", "engine", "red fox", ""]
    ids = [
        "q1",
        "q2",
        "q1",
        "q3",
        "q2",
        "q1",
    ]  # ids repeat, as rollouts of one prompt do: every query has its own rank
    for topk in (1, 5, 100):
        expected = [
            -1 if r is None else r for r in bm25.gold_ranks(queries, [QRELS[i] for i in ids], topk)
        ]
        body = {"queries": queries, "query_ids": ids, "topk": topk}
        assert call(server.url + "/retrieve", body) == (200, {"result": expected})
        scores = [[score for _, score in hits] for hits in bm25.search(queries, topk)]
        assert call(server.url + "/retrieve", body | {"return_scores": True}) == (
            200,
            {"result": [expected, scores]},
        )
    assert len(set(expected)) > 2 and -1 in expected
    assert call(server.url + "/retrieve", {"queries": queries, "query_ids": ids}) == (
        200,
        {"result": expected},
    )
    long = "dog paper" + " wine" * 9
    assert bm25.gold_ranks(["dog paper", long], [QRELS["q1"]] * 2) == [1, 17]
    for words, rank in ((2, 1), (1024, 17), (None, 17)):
        body = {"queries": [long], "query_ids": ["q1"], "max_length": words}
        assert call(server.url + "/retrieve", body) == (200, {"result": [rank]})
    assert call(server.url + "/retrieve", {"queries": [], "query_ids": []}) == (200, {"result": []})


def test_search_r1_gets_documents(server, bm25):
    queries = ["red fox", "zzz", "wine river"]
    hits = bm25.search(queries, 2)
    status, answer = call(
        server.url + "/retrieve", {"queries": queries, "topk": 2, "return_scores": True}
    )
    assert (status, answer) == (
        200,
        {
            "result": [
                [
                    {"document": {"id": id_, "contents": contents(id_)}, "score": score}
                    for id_, score in one
                ]
                for one in hits
            ]
        },
    )
    assert answer["result"][1] == [] and "\n" in "".join(
        d["document"]["contents"] for d in answer["result"][0]
    )
    default = call(
        server.url + "/retrieve", {"queries": ["red"], "topk": None, "return_scores": True}
    )[1]["result"]
    assert [len(one) for one in default] == [4]


def test_search_r1_without_scores_gets_a_list_of_lists(server, bm25):
    status, answer = call(
        server.url + "/retrieve", {"queries": ["red", "fox dog"], "return_scores": False}
    )
    assert (status, answer) == (
        200,
        {
            "result": [
                [{"id": id_, "contents": contents(id_)} for id_, _ in one]
                for one in bm25.search(["red", "fox dog"], 4)
            ]
        },
    )
    assert call(server.url + "/retrieve", {"queries": ["red", "fox dog"]}) == (status, answer)
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.port
    )  # as requests.post(url, data=json.dumps(…)) does
    connection.request("POST", "/retrieve", json.dumps({"queries": ["red", "fox dog"]}))
    assert json.load(connection.getresponse()) == answer
    connection.close()


def test_research_gets_flashrags_shapes(server, bm25):
    status, health = call(server.url + "/health")
    assert (
        status == 200
        and health["status"] == "healthy"
        and health["retrievers"] == {"total": 1, "available": 1}
    )
    queries = ["red fox", "", "wine"]
    for n in (3, None):
        hits = bm25.search(queries, n or 10)
        lists = [[{"id": id_, "contents": contents(id_)} for id_, _ in one] for one in hits]
        scores = [[score for _, score in one] for one in hits]
        body, url = {"top_n": n} if n else {}, server.url
        assert call(url + "/batch_search", body | {"query": queries}) == (200, lists)
        assert call(url + "/search", body | {"query": "red fox"}) == (200, lists[0])
        body["return_score"] = True
        assert call(url + "/batch_search", body | {"query": queries}) == (200, [lists, scores])
        assert call(url + "/search", body | {"query": "red fox"}) == (200, [lists[0], scores[0]])
    assert call(server.url + "/search", {"query": "  "}) == (
        400,
        {"detail": "Query content cannot be empty"},
    )
    assert call(server.url + "/search", {"query": "zzz"}) == (200, [])


@pytest.mark.parametrize(
    "path,body,status,reason",
    [
        (
            "retrieve",
            {"queries": ["a"] * 51},
            413,
            "queries: List should have at most 50 items after validation, not 51",
        ),
        (
            "retrieve",
            {"queries": ["a", "b" * 1001]},
            413,
            "queries.1: String should have at most 1000 characters",
        ),
        (
            "retrieve",
            {"queries": ["a"], "topk": 0},
            422,
            "topk: Input should be greater than or equal to 1, not 0",
        ),
        (
            "retrieve",
            {"queries": ["a"], "query_ids": ["q1"], "topk": 201},
            422,
            "topk: Input should be less than or equal to 200, not 201",
        ),
        ("retrieve", {"queries": ["a", "b"], "query_ids": ["q1"]}, 422, "2 queries but 1"),
        (
            "retrieve",
            {"queries": ["a"], "query_ids": ["q9"]},
            422,
            "'q9' has no gold passage in the qrels",
        ),
        (
            "retrieve",
            {"queries": ["a"], "query_ids": ["q4"]},
            422,
            "'q4' has no gold",
        ),  # judged, with gain 0
        ("retrieve", {"query_ids": ["q1"]}, 422, "queries: Field required"),
        ("retrieve", {"queries": "red"}, 422, "queries: Input should be a valid list"),
        (
            "retrieve",
            {"queries": ["a"], "topk": "many"},
            422,
            "topk: Input should be a valid integer",
        ),
        (
            "batch_search",
            {"query": ["a"], "top_n": -1},
            422,
            "top_n: Input should be greater than or equal to 1, not -1",
        ),
        (
            "search",
            {"query": "a", "top_n": 201},
            422,
            "top_n: Input should be less than or equal to 200, not 201",
        ),
        ("search", {"query": ["a"]}, 422, "query: Input should be a valid string"),
        (
            "hits",
            {"queries": ["a"], "k": 0},
            422,
            "k: Input should be greater than or equal to 1, not 0",
        ),
        ("hits", {"queries": [None], "k": 1}, 422, "queries.0: Input should be a valid string"),
        (
            "gold_ranks",
            {"queries": ["a"], "gold_ids": [["p99"]]},
            422,
            "'p99' of query 0 is not among the 60 passages",
        ),
        ("gold_ranks", {"queries": ["a", "b"], "gold_ids": [["p01"], []]}, 422, "query 1"),
        ("gold_ranks", {"queries": ["a"], "gold_ids": []}, 422, "1 queries but 0"),
        (
            "gold_ranks",
            {"queries": ["a"], "gold_ids": [["p01"]], "cutoff": 0},
            422,
            "cutoff: Input should be greater than or equal to 1, not 0",
        ),
        (
            "has_ids",
            {"ids": ["x"] * 100_001},
            413,
            "ids: List should have at most 100000 items after validation, not 100001",
        ),
        ("has_ids", {}, 422, "ids: Field required"),
        ("elsewhere", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_get_a_4xx_with_the_reason(server, path, body, status, reason):
    got, answer = call(f"{server.url}/{path}", body)
    assert got == status and reason in answer["detail"], answer


def test_bodies_that_are_no_json_object_get_a_4xx(server):
    for raw in (b"{", b"", b"[1]", b'"a"', b"\xff\xfe", b"null"):
        status, answer = call(server.url + "/retrieve", raw=raw)
        assert 400 <= status < 500 and isinstance(answer["detail"], str) and answer["detail"], (
            raw,
            answer,
        )
    assert call(server.url + "/hits", {"queries": ["red"], "k": 1})[0] == 200


def test_remote_retriever_is_the_served_one(server, bm25):
    remote = open_retriever(RetrieverConfig(kind="remote", url=server.url + "/", request_queries=7))
    golds = [
        random.Random(i).sample([p.id for p in PASSAGES], 1 + i % 3) for i in range(len(QUERIES))
    ]
    queries, golds = QUERIES + QUERIES[:5] + [""], golds + golds[-5:] + [["p01"]]
    assert remote.search(queries, 9) == bm25.search(queries, 9)
    for cutoff in (1, 4, 100):
        assert remote.gold_ranks(queries, golds, cutoff) == bm25.gold_ranks(queries, golds, cutoff)
    assert remote.gold_ranks(["red fox"], ["p01"]) == bm25.gold_ranks(
        ["red fox"], ["p01"]
    )  # a bare id
    assert remote.search([], 3) == [] == remote.gold_ranks([], [])
    assert (
        len(remote.passage_ids) == 60
        and "p07" in remote.passage_ids
        and "p99" not in remote.passage_ids
    )
    assert 7 not in remote.passage_ids and remote.passage_ids.among(["p01", "x", "p02", "p01"]) == {
        "p01",
        "p02",
    }
    assert remote.counts == {"retries": 0, "failed": 0} and remote.cut_queries == 0
    assert (
        remote.search(["red " + "x" * 2000], 3) == bm25.search(["red"], 3)
        and remote.cut_queries == 1
    )
    for wrong, message in (
        (lambda: remote.gold_ranks(["a"], [["p99"]]), "/gold_ranks refused .* 422: gold.*p99"),
        (lambda: remote.gold_ranks(["a", "b"], [["p01"]]), "2 queries but 1"),
        (lambda: remote.gold_ranks(["a"], [[]]), "422"),
        (lambda: remote.search(["a"], 0), "k is 0"),
        (lambda: remote.search("red", 3), "queries is the text 'red'"),
        (lambda: remote.gold_ranks("a", [["p01"]]), "queries is the text 'a'"),
        (lambda: remote.search([None], 3), "query 0 is None"),
        (lambda: remote.search(["a"], 500), "less than or equal to 200, not 500"),
    ):
        with pytest.raises(RetrieverError, match=message) as e:
            wrong()
        assert not isinstance(e.value, RetrieverAway)
    assert RemoteRetriever(server.url, batch=1000).batch == 50  # no more than the server takes


def test_answers_of_concurrent_clients_are_not_mixed(server, bm25):
    expected = {q: bm25.search([q], 5)[0] for q in QUERIES}
    ranks = {q: bm25.gold_ranks([q], [["p03"]])[0] for q in QUERIES}

    def client(number: int) -> int:
        rng, remote, right = random.Random(number), RemoteRetriever(server.url), 0
        for _ in range(20):
            queries = rng.choices(QUERIES, k=rng.randint(1, 3))
            if rng.random() < 0.4:
                right += remote.search(queries, 5) == [expected[q] for q in queries]
            elif rng.random() < 0.5:
                right += remote.gold_ranks(queries, [["p03"]] * len(queries)) == [
                    ranks[q] for q in queries
                ]
            else:
                lists = call(server.url + "/batch_search", {"query": queries, "top_n": 5})[1]
                right += [[d["id"] for d in one] for one in lists] == [
                    [i for i, _ in expected[q]] for q in queries
                ]
        return right

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(client, range(20))) == [20] * 20


@pytest.mark.slow
def test_a_hundred_clients_for_a_minute(files, bm25):
    """Nothing fails and nothing is mixed up."""
    expected = {q: [i for i, _ in bm25.search([q], 5)[0]] for q in QUERIES}
    server, end = Server(files, "mcp=off"), time.monotonic() + 60

    def client(number: int) -> int:
        rng, count = random.Random(number), 0
        while time.monotonic() < end:
            queries = rng.choices(QUERIES, k=4)
            status, lists = call(server.url + "/batch_search", {"query": queries, "top_n": 5})
            found = [[document["id"] for document in one] for one in lists]
            assert status == 200 and found == [expected[q] for q in queries]
            count += 1
        return count

    with ThreadPoolExecutor(100) as pool:
        count = sum(pool.map(client, range(100)))
    status, last = server.stop()
    assert status == 0 and last["requests"] == count and last["failed"] == last["refused"] == 0


# ---------------------------------------------------------------------------------------------- MCP


async def use_mcp(target, **options) -> list:
    async with MCP.Client(target, **options) as client:
        tools = (await client.list_tools()).tools
        answers = [
            await client.call_tool("retrieve", arguments)
            for arguments in (
                {"query": "red fox"},
                {"query": "zzz"},
                {"query": "fox", "with_meta": False},
                {"query": "  "},
                {"query": "x" * 1001},
                {},
            )
        ]
        unknown = await asyncio.gather(
            client.call_tool("search", {"query": "a"}), return_exceptions=True
        )
        return [tools, answers, unknown[0]]


def check_mcp(found: list, bm25) -> None:
    tools, answers, unknown = found
    assert [tool.name for tool in tools] == ["retrieve"] and tools[0].description
    assert tools[0].input_schema["required"] == ["query"] and list(
        tools[0].input_schema["properties"]
    ) == ["query"]
    texts = [answer.content[0].text for answer in answers]
    assert [answer.is_error for answer in answers] == [False, False, False, True, True, True]
    assert all(len(answer.content) == 1 and answer.structured_content is None for answer in answers)
    shown = [contents(id_).replace('"', "") for id_, _ in bm25.search(["red fox"], 4)[0]]
    assert (
        texts[0] == "\n\n".join(f"[{i}] {text}" for i, text in enumerate(shown, 1))
        and "Title" in texts[0]
    )
    assert texts[1] == "No passage was found." and texts[2].startswith("[1] ")
    assert "query is empty" in texts[3] and "1001 characters" in texts[4] and "query" in texts[5]
    assert isinstance(unknown, Exception) or unknown.is_error


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_mcp_over_http(server, bm25, mode):
    check_mcp(asyncio.run(use_mcp(server.url + "/mcp", mode=mode)), bm25)


def test_mcp_over_stdio(files, bm25, tmp_path):
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = [
        "mcp=stdio",
        f"retriever.corpus={files / 'corpus.jsonl'}",
        "topk=4",
        "max_query_chars=1000",
    ]
    parameters = StdioServerParameters(
        command=sys.executable, args=[str(ROOT / "serve.py"), *words]
    )
    with open(tmp_path / "err", "w+") as err:
        check_mcp(asyncio.run(use_mcp(stdio_client(parameters, errlog=err))), bm25)
        err.seek(0)
        last = json.loads(err.read().splitlines()[-1])
    assert (
        last["requests"] == 3 and last["failed"] == 0
    )  # the client closed stdin: a clean end, its line on stderr


def test_a_client_that_leaves_in_the_middle_ends_a_stdio_server_quietly(files):
    """Its pipes break while an answer is written: no traceback, status 0."""
    words = ["mcp=stdio", f"retriever.corpus={files / 'corpus.jsonl'}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "serve.py"), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.write(
        json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": {"name": "t", "version": "0"},
                },
            }
        )
        + "\n"
    )
    process.stdin.flush()
    process.stdin.close()
    assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()


def test_sigterm_over_stdio_leaves_stdout_to_the_protocol(files):
    words = ["mcp=stdio", f"retriever.corpus={files / 'corpus.jsonl'}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "serve.py"), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(
        json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": {"name": "t", "version": "0"},
                },
            }
        )
        + "\n"
    )
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "retriever"
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert process.returncode == 0 and process.stdout.read() == ""
    assert json.loads(process.stderr.read().splitlines()[-1])["count"] == 60


# ----------------------------------------------------------------------------- one thread, gathered


class Stub:
    """A retriever whose calls wait for `go` and are kept; "bad" raises, "nan" has a NaN score."""

    passage_ids = {"g": 0, "h": 1}

    def __init__(self):
        self.go, self.begun, self.calls = threading.Event(), threading.Event(), []

    def _enter(self, queries):
        self.calls.append(list(queries))
        self.begun.set()
        assert self.go.wait(30)
        if "bad" in queries:
            raise ZeroDivisionError("a bad query")

    def search(self, queries, k):
        self._enter(queries)
        return [[(q, 1.0)] * k for q in queries] if queries != ["short", "short"] else []

    def gold_ranks(self, queries, golds, cutoff):
        self._enter(queries)
        return [
            FAILED if q == "nan" else len(q) if gold == ["g"] else None
            for q, gold in zip(queries, golds)
        ]


async def ask(app, path: str, body: dict, host: str = "127.0.0.1") -> tuple[int, dict]:
    """One request to an ASGI application, without a socket."""
    sent, parts = (
        [],
        [json.dumps(body).encode()[i : i + 1000] for i in range(0, len(json.dumps(body)), 1000)],
    )

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "client": ("t", 1),
            "server": ("t", 80),
            "headers": [(b"content-type", b"application/json"), (b"host", host.encode())],
        },
        receive,
        send,
    )
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def service_of(stub, **changes) -> serve.Service:
    return serve.Service(serve.ServeConfig(mcp="off", **changes), stub, qrels={"n": ["g"]})


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
        tasks = [asyncio.create_task(ask(app, *body)) for body in bodies]
        while service.waiting < 17:
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
    ]
    together = [f"{side}{i}" for i in range(5) for side in "ab"] + ["bad"]
    assert stub.calls[1] == together and stub.calls[2:8] == [
        together[i : i + 2] for i in range(0, 10, 2)
    ] + [["bad"]]
    assert stub.calls[8:] == [["other k"], ["xxx", "xxxx", "nan", "y"]]
    status = service.close()
    assert (
        status["requests"] == 11
        and status["queries"] == 17
        and status["failed"] == 1
        and service.waiting == 0
    )


def test_limits_of_a_call_of_waiting_and_of_a_body(monkeypatch):
    stub = Stub()
    service = service_of(stub, max_batch=4, timeout=0.2, window_ms=0)
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
    monkeypatch.setattr(serve, "MAX_BODY", 2000)
    status, answer = asyncio.run(ask(app, "/hits", {"queries": ["x" * 3000], "k": 1}))
    assert status == 413 and "larger than 2000 bytes" in answer["detail"]
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
    ):
        status, answer = asyncio.run(ask(app, path, body))
        assert status == expected[0] and answer["detail"].endswith(expected[1])
    body = {"queries": ["bb", "b"], "query_ids": ["n", "n"]}
    assert asyncio.run(ask(app, "/retrieve", body)) == (200, {"result": [2, 1]})
    for path, body in (("/retrieve", {"queries": ["a"]}), ("/search", {"query": "a"})):
        status, answer = asyncio.run(ask(app, path, body))
        assert status == 501 and "corpus=FILE" in answer["detail"]
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


def test_connections_that_keep_the_server_waiting_are_closed(listening):
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
        assert status == (200 if allowed else 421), host
        assert allowed or f"Host is {host!r}" in answer["detail"] and service.counts["refused"] == 1
    app = serve.make_app(service_of(stub, host="0.0.0.0"))
    assert asyncio.run(ask(app, "/hits", body, "search.example"))[0] == 200
    for path in ("/docs", "/redoc", "/openapi.json", "/elsewhere"):
        assert asyncio.run(ask(app, path, {}))[0] == 404


# ----------------------------------------------------------------- files, start and end of a server


@pytest.mark.parametrize(
    "name,text",
    [
        (
            "a.jsonl",
            '\ufeff{"id": "1", "title": " Ü ", "text": "é\\ud83d x"}\r\n\r\n'
            '{"id": 2, "contents": "\\"T\\"\\nbody"}\n\n{"id": "3", "title": null, "text": "last"}',
        ),
        (
            "numbers.jsonl",
            '{"id": 1, "title": 1984, "text": "a novel"}\n'
            '{"id": 2, "title": "T", "contents": "body"}\n{"id": "3", "text": 2001}',
        ),
        ("b.tsv", '\ufeffid\ttext\ttitle\r\n1\té x\t Ü \r\n\n2\t"body\t\n3\tlast\t'),
    ],
)
def test_texts_are_those_of_read_corpus(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    passages = list(read_corpus(str(path)))
    assert [p.id for p in passages] == ["1", "2", "3"]
    texts = Texts(str(path), BM25Retriever(passages).passage_ids)
    for p in reversed(passages):
        expected = f'"{p.title}"\n{p.text}' if p.title else p.text
        assert texts.document(p.id) == {"id": p.id, "contents": expected}
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match=f"{name}"):
        texts.document("3")


def test_wrong_settings_and_files_are_named_before_anything_is_served(files, tmp_path):
    corpus = RetrieverConfig(corpus=str(files / "corpus.jsonl"))
    lines = (files / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "less.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
    (tmp_path / "other.qrels").write_text("q1 0 nowhere 1\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for error, message, changes in (
            (
                DataError,
                "59 passages, but the index has 60",
                {"corpus": str(tmp_path / "less.jsonl")},
            ),
            (
                DataError,
                "'p59' stands where the index has 'p00'",
                {"corpus": str(tmp_path / "turned.jsonl")},
            ),
            (DataError, "'nowhere' is not in the index", {"qrels": str(tmp_path / "other.qrels")}),
            (ConfigError, "choose another port", {"port": taken.getsockname()[1]}),
            (ConfigError, "port 70000", {"port": 70000}),
            (ConfigError, "topk=2000 must not be above max_k=1000", {"topk": 2000}),
            (
                ConfigError,
                "kind=remote",
                {"retriever": RetrieverConfig(kind="remote", url="http://localhost:1")},
            ),
            (
                ConfigError,
                "give corpus=FILE",
                {"retriever": RetrieverConfig(index="x"), "mcp": "stdio"},
            ),
            (RetrieverError, "kind=bm25 needs an index", {"retriever": RetrieverConfig()}),
        ):
            with pytest.raises(error, match=message):
                serve.main(serve.ServeConfig(**({"retriever": corpus, "port": 0} | changes)))
    with pytest.raises(RetrieverError, match="has no index here"):
        import retriever

        retriever.main(
            RetrieverConfig(kind="remote", url="http://localhost:1", corpus="c", index="i")
        )


def test_a_corpus_file_that_changed_is_not_served_beside_its_old_index(files, tmp_path):
    import retriever

    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes((files / "corpus.jsonl").read_bytes())
    retriever.main(RetrieverConfig(corpus=str(corpus), index=str(tmp_path / "i")))
    corpus.write_text(corpus.read_text().replace("red", "maroon"))
    for config in (
        serve.ServeConfig(
            retriever=RetrieverConfig(index=str(tmp_path / "i")), corpus=str(corpus), port=0
        ),
        serve.ServeConfig(
            retriever=RetrieverConfig(index=str(tmp_path / "i"), corpus=str(corpus)), port=0
        ),
    ):
        with pytest.raises(RetrieverError, match="i/bm25 was not built from .*c.jsonl"):
            serve.main(config)


def test_a_missing_package_is_named_with_the_requirements_file(tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('No module named fastapi')")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import config, serve; "
        "assert not {'mcp', 'uvicorn', 'fastapi'} & set(sys.modules); "
        "config.run(serve.ServeConfig, serve.main, ['port=0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 2
        and "requirements-serve.txt" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_sigterm_answers_what_it_has_and_a_client_survives_the_restart(files, bm25, capsys):
    server = Server(files, "mcp=off", "window_ms=700")
    remote = RemoteRetriever(server.url, timeout=20, retries=40, backoff=0.25)
    remote_ranks = bm25.gold_ranks(QUERIES, [["p03"]] * len(QUERIES))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(remote.search, ["red fox"], 3)
        while call(server.url + "/health")[1]["waiting"] == 0:
            time.sleep(0.01)
        status, last = server.stop()
        assert under_way.result() == bm25.search(["red fox"], 3) and remote.counts["retries"] == 0
        assert status == 0 and last["count"] == 60 and last["requests"] == last["calls"] == 1
        waiting = pool.submit(
            remote.gold_ranks, QUERIES, [["p03"]] * len(QUERIES)
        )  # while no server is there
        while remote.counts["retries"] == 0:
            time.sleep(0.01)
        server = Server(files, port=server.port)
        assert waiting.result() == remote_ranks
    assert "trying again" in capsys.readouterr().err and remote.counts["failed"] == 0
    assert server.stop(signal.SIGINT)[0] == 0
    remote.retries = 1
    with pytest.raises(RetrieverAway, match=rf"{server.url}/hits can.t be reached .*refused"):
        remote.search(["a"], 1)


# ----------------------------------------------------------------------- faults that a client meets


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
                    200, json.dumps({"count": 9, "max_batch": 100, "max_query_chars": 999}).encode()
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
            self.url, **({"timeout": 0.4, "retries": 2, "backoff": 0.01} | changes)
        )


FAULTS = ["500", "502", "503", "429", "hang", "drip", "html", "reset", "cut"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_costs_a_retry_and_a_lasting_one_is_named(fault):
    queries, golds = ["a", "bb"], [["g"], ["g"]]
    with Faulty(fault) as faulty:
        remote = faulty.client()
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
                RetrieverError, match=f"refused the request with status {status}: reason {status}"
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
        scores = grpo.score_rewrites(rollouts(), turns, remote, tokenizer, grpo.GRPOConfig())
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
            grpo.score_rewrites(rollouts(), turns, remote, tokenizer, grpo.GRPOConfig())


def test_a_wrong_address_is_a_clear_error_at_the_start(files):
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
