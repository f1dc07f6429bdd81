"""serve.py in a process of its own: every format, MCP, files, start and end."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import serve
from config import ConfigError
from data import DataError, read_corpus
from retriever import RetrieverConfig, open_retriever
from search.bm25 import BM25Retriever
from search.client import RemoteRetriever, RetrieverAway
from search.passages import RetrieverError, Texts
from served import PASSAGES, QRELS, QUERIES, ROOT, Server, call, contents

for package in ("starlette", "uvicorn", "mcp"):
    pytest.importorskip(package, reason="pip install -r requirements-serve.txt")
import mcp as MCP  # noqa: E402


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


@pytest.fixture(scope="module")
def server(files):
    server = Server(files, "max_batch=50", "max_k=200", "topk=4")
    yield server
    assert server.stop()[0] == 0


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
    "path,body,reason",
    [
        ("retrieve", {"queries": ["a"] * 51}, "queries: List should have at most 50 items"),
        ("retrieve", {"queries": ["a"], "topk": 0}, "topk: Input should be greater.*got 0"),
        ("retrieve", {"queries": ["a"], "query_ids": ["q1"], "topk": 201}, "topk: .*got 201"),
        ("retrieve", {"queries": ["a", "b"], "query_ids": ["q1"]}, "2 queries but 1"),
        ("retrieve", {"queries": ["a"], "query_ids": ["q9"]}, "'q9' has no gold passage in"),
        ("retrieve", {"queries": ["a"], "query_ids": ["q4"]}, "'q4' has no gold"),  # gain 0
        ("retrieve", {"query_ids": ["q1"]}, "queries: Field required"),
        ("retrieve", {"queries": "red"}, "queries: Input should be a valid list"),
        ("retrieve", {"queries": ["a"], "topk": "many"}, "topk: Input should be a valid integer"),
        ("batch_search", {"query": ["a"], "top_n": -1}, "top_n: .*got -1"),
        ("search", {"query": "a", "top_n": 201}, "top_n: Input should be less than.*got 201"),
        ("search", {"query": ["a"]}, "query: Input should be a valid string"),
        ("hits", {"queries": ["a"], "k": 0}, "k: Input should be greater.*got 0"),
        ("hits", {"queries": [None], "k": 1}, "queries.0: Input should be a valid string"),
        ("gold_ranks", {"queries": ["a"], "gold_ids": [["p99"]]}, "'p99' is not among the 60"),
        ("gold_ranks", {"queries": ["a", "b"], "gold_ids": [["p01"], []]}, "query 1"),
        ("gold_ranks", {"queries": ["a"], "gold_ids": []}, "1 queries but 0"),
        ("gold_ranks", {"queries": ["a"], "gold_ids": [["p01"]], "cutoff": 0}, "cutoff: .*got 0"),
        ("has_ids", {}, "ids: Field required"),
        ("has_ids", {"ids": ["a"] * 10_001}, "ids: List should have at most 10000 items"),
    ],
)
def test_bad_requests_get_a_422_with_the_reason(server, path, body, reason):
    status, answer = call(f"{server.url}/{path}", body)
    assert status == 422 and re.search(reason, answer["detail"]), answer


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
    assert 7 not in remote.passage_ids and {"p01", "x", "p02"} & remote.passage_ids == {
        "p01",
        "p02",
    }
    assert remote.counts == {"retries": 0, "failed": 0} and remote.cut_queries == 0
    for wrong, message in (
        (
            lambda: remote.gold_ranks(["a"], [["p99"]]),
            "/gold_ranks answered with status 422: .*gold.*p99",
        ),
        (lambda: remote.gold_ranks(["a", "b"], [["p01"]]), "2 queries but 1"),
        (lambda: remote.gold_ranks(["a"], [[]]), "has no gold passage"),
        (lambda: remote.search(["a"], 0), "k is 0"),
        (lambda: remote.search("red", 3), "queries is the text 'red'"),
        (lambda: remote.gold_ranks("a", [["p01"]]), "queries is the text 'a'"),
        (lambda: remote.search([None], 3), "query 0 is None"),
        (lambda: remote.search(["a"], 500), "less than or equal to 200 .got 500"),
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
    assert [answer.is_error for answer in answers] == [False, False, False, True, True]
    assert all(len(answer.content) == 1 and answer.structured_content is None for answer in answers)
    shown = [contents(id_).replace('"', "") for id_, _ in bm25.search(["red fox"], 4)[0]]
    assert (
        texts[0] == "\n\n".join(f"[{i}] {text}" for i, text in enumerate(shown, 1))
        and "Title" in texts[0]
    )
    assert texts[1] == "No passage was found." and texts[2].startswith("[1] ")
    assert "query is empty" in texts[3] and "query" in texts[4]
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
            (ConfigError, "port=70000", {"port": 70000}),
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
    (tmp_path / "starlette.py").write_text("raise ImportError('No module named starlette')")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import config, serve; "
        "assert not {'mcp', 'uvicorn', 'starlette'} & set(sys.modules); "
        "config.run(serve.ServeConfig, serve.main, ['port=0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 2
        and "requirements-serve.txt" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_the_help_loads_neither_torch_nor_a_server():
    heavy = {"torch", "transformers", "mcp", "uvicorn", "starlette"}
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import config, serve\n"
        "try: config.load_config(serve.ServeConfig, ['--help'])\n"
        f"except SystemExit: print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]" and "max_batch" in done.stdout, done.stderr


def test_sigterm_answers_what_it_has_and_a_client_survives_the_restart(files, bm25, capsys):
    server = Server(files, "mcp=off", "max_batch=20000")
    remote = RemoteRetriever(server.url, timeout=60, retries=40, backoff=0.25, batch=20_000)
    many = QUERIES * 500  # the server is busy with it for a while
    remote_ranks = bm25.gold_ranks(QUERIES, [["p03"]] * len(QUERIES))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(remote.search, many, 3)
        while call(server.url + "/health")[1]["waiting"] == 0:
            pass
        status, last = server.stop()
        assert under_way.result() == bm25.search(many, 3) and remote.counts["retries"] == 0
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
