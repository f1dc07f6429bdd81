"""sources/files.py: counts, broken and missing files, restarts, downloads."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from official import lines, make, put, topiocqa_source

from data import DataError, read_array
from runs import only_writer, write_jsonl
from sources import files


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_the_share_held_out_is_about_what_was_asked_for():
    five, none = (files.DevConfig("source", "out", dev_percent=percent) for percent in (5, 0))
    held = sum(five.split("train", f"topiocqa-train_{i}") == "dev" for i in range(3509))
    assert 120 < held < 230 and {none.split("train", str(i)) for i in range(100)} == {"train"}


def test_counts_are_asserted_and_a_difference_is_kept_when_told_to_go_on(tmp_path, capsys):
    raw = topiocqa_source(tmp_path / "raw")
    with pytest.raises(
        DataError, match=r"train_turns: 13 found but 45,450 published.*strict=false"
    ):
        make("topiocqa", source=raw, out=f"{tmp_path}/out")
    assert os.listdir(tmp_path) == ["raw"]  # nothing half-made
    result = make("topiocqa", source=raw, out=f"{tmp_path}/out", strict=False)
    assert result["differs_from_published"]["passages"] == {"found": 7, "published": 25_700_592}
    assert "passages: 7 found" in capsys.readouterr().err
    with open(f"{tmp_path}/out/made.json") as f:
        assert json.load(f)["result"]["differs_from_published"]["test_turns"] == {
            "found": 13,
            "published": 2514,
        }


def test_published_counts_are_those_of_the_papers():
    assert files.published()["topiocqa"]["counts"] == {
        "passages": 25_700_592,
        "train_turns": 45_450,
        "train_conversations": 3509,
        "test_turns": 2514,
        "test_conversations": 205,
    }
    assert (
        files.published()["qrecc"]["counts"].items()
        >= {"passages": 54_573_064, "train_turns": 29_596, "test_turns": 8209}.items()
    )


def test_missing_files_are_listed_with_their_addresses(tmp_path):
    raw = topiocqa_source(tmp_path / "raw")
    os.remove(f"{raw}/full_wiki_segments.tsv")
    os.remove(f"{raw}/retriever/all_history/dev.json")
    with pytest.raises(DataError) as e:
        make("topiocqa", source=raw, out=f"{tmp_path}/out")
    assert "zenodo.org/records/6149599/files/data/wikipedia_split/full_wiki_segments.tsv" in str(
        e.value
    )
    assert "zenodo.org/records/6151011/files/data/retriever/all_history/dev.json" in str(e.value)
    assert f"{raw}/full_wiki_segments.tsv" in str(e.value) and "topiocqa_train.json" not in str(
        e.value
    )
    for name in ("qrecc", "canard", "mtrag", "cast19", "cast20", "cast21"):
        with pytest.raises(DataError, match="(?s)files are missing.*https?://"):
            make(name, f"{tmp_path}/nowhere", f"{tmp_path}/out")


def broken(tmp_path, file, change):
    """A TopiOCQA source where `file` went through `change`."""
    raw = topiocqa_source(tmp_path / "raw")
    with open(f"{raw}/{file}", "rb") as f:
        content = f.read()
    put(f"{raw}/{file}", change(content))
    return raw


@pytest.mark.parametrize(
    "file, change, said",
    [
        ("topiocqa_dev.json", lambda b: b[: len(b) // 2], "topiocqa_dev.json: object .* cut off"),
        (
            "topiocqa_dev.json",
            lambda b: b.replace(b"}, {", b"} {", 1),
            "after 1 objects .* stands '{.*, not , or \\]",
        ),
        ("topiocqa_dev.json", lambda b: b'{"a": 1}', "json:1: .*row by row"),
        ("topiocqa_dev.json", lambda b: b"[1]", "after 0 objects .*, not { or \\]"),
        (
            "topiocqa_dev.json",
            lambda b: b.replace(b'"Turn_no": 3', b'"Turn_no": 4', 1),
            "row by row",
        ),
        ("topiocqa_dev.json", lambda b: json.dumps(json.loads(b)[:-1]).encode(), "row by row"),
        (
            "topiocqa_dev.json",
            lambda b: b.replace(b'"Topic_section"', b'"Section"', 1),
            "'Topic_section' is missing.*fields found",
        ),
        (
            "retriever/all_history/dev.json",
            lambda b: json.dumps(json.loads(b)[:-1]).encode(),
            "row by row",
        ),
        (
            "retriever/all_history/train.json",
            lambda b: json.dumps([r | {"positive_ctxs": []} for r in json.loads(b)]).encode(),
            "no positive passage",
        ),
        (
            "full_wiki_segments.tsv",
            lambda b: b + b"11\tonly two\n",
            r"full_wiki_segments.tsv:\d+: 2 columns",
        ),
        ("full_wiki_segments.tsv", lambda b: b + b"11\t\xff\xfe\tx\n", "not UTF-8"),
        (
            "full_wiki_segments.tsv",
            lambda b: b.replace(b"\n2\t", b"\n22\t"),
            "gold passages not in the corpus: 1 found.*example 2",
        ),
    ],
)
def test_broken_files_are_named_with_the_place(tmp_path, topiocqa_counts, file, change, said):
    with pytest.raises(DataError, match=said):
        make("topiocqa", broken(tmp_path, file, change), f"{tmp_path}/out")
    assert os.listdir(tmp_path) == ["raw"]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_arrays_are_read_in_pieces_wherever_they_are_cut(tmp_path, block):
    rows = [{"a": 'x "quoted" [1, {2}]', "ä": "東" * 20}, {}, {"n": [1, {"b": None}], "s": "\\\n"}]
    put(f"{tmp_path}/a.json", "\ufeff \n" + json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
    assert [row for _, row in read_array(f"{tmp_path}/a.json", block)] == rows
    put(f"{tmp_path}/empty.json", " [ ] ")
    assert list(read_array(f"{tmp_path}/empty.json", block)) == []


def test_tsv_blank_lines_count_inside_quotes_alone(tmp_path):
    put(
        f"{tmp_path}/a.tsv",
        'id\ttext\ttitle\r\n1\t"a\r\n\r\nb \x85"\tT\r\n2\ta "lone quote\t\r\n\r\n',
    )
    rows = [(row.location.rpartition(":")[2], row) for row in files.table_rows(f"{tmp_path}/a.tsv")]
    assert rows == [
        ("4", {"id": "1", "text": "a\n\nb \x85", "title": "T"}),
        ("5", {"id": "2", "text": 'a "lone quote', "title": ""}),
    ]


def test_a_conversion_without_a_single_turn_is_refused(tmp_path):
    put(f"{tmp_path}/raw/dev.json", "[]")
    with pytest.raises(DataError, match="result would be empty.*cut off"):
        make("canard", source=f"{tmp_path}/raw", out=f"{tmp_path}/out", strict=False)
    assert os.listdir(tmp_path) == ["raw"]


def test_a_second_run_does_nothing_even_without_the_sources(tmp_path, topiocqa_counts):
    source, out = topiocqa_source(tmp_path / "raw"), f"{tmp_path}/out"
    assert not make("topiocqa", source, out)["already_there"]
    os.remove(f"{tmp_path}/raw/full_wiki_segments.tsv")
    before = os.stat(f"{tmp_path}/out/corpus.jsonl").st_mtime_ns
    assert make("topiocqa", source, out)["already_there"]
    assert os.stat(f"{tmp_path}/out/corpus.jsonl").st_mtime_ns == before


@pytest.mark.parametrize("stamp", ["[1]", "null", '{"command": "topiocqa", "files": [1]}', "{"])
def test_a_damaged_made_json_is_named_and_nothing_overwritten(tmp_path, topiocqa_counts, stamp):
    source, out = topiocqa_source(tmp_path / "raw"), f"{tmp_path}/out"
    make("topiocqa", source, out)
    put(f"{out}/made.json", stamp)
    held = sorted(os.listdir(out))
    with pytest.raises(DataError, match="made.json: 'files' is|holds .* not written by"):
        make("topiocqa", source, out)
    assert sorted(os.listdir(out)) == held


KILLED = """
import signal, sys
sys.path.insert(0, {root!r})
import prepare
from sources import files
def passages(rows, total):
    yield next(rows)
    print("writing", flush=True)
    signal.pause()
files.with_progress = passages
prepare.command_line(["topiocqa", "source={raw}", "out={out}", "strict=false"])
"""


@pytest.mark.parametrize("number", [15, 9])
def test_a_killed_run_starts_over_cleanly(tmp_path, topiocqa_counts, number):
    raw, out = topiocqa_source(tmp_path / "raw"), f"{tmp_path}/out"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(root=ROOT, raw=raw, out=out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(number)
    assert child.wait(10) == (143 if number == 15 else -9)
    child.stdout.close()
    left = [n for n in os.listdir(tmp_path) if n.endswith(".tmp")]
    assert bool(left) == (number == 9) and not os.path.exists(
        out
    )  # kill -9 leaves its folder; nothing looks finished
    make("topiocqa", source=raw, out=out)
    assert sorted(os.listdir(tmp_path)) == ["out", "raw"] and len(lines(f"{out}/corpus.jsonl")) == 7


def test_two_runs_never_write_one_folder(tmp_path, topiocqa_counts):
    source, out = topiocqa_source(tmp_path / "raw"), f"{tmp_path}/out"
    with (
        only_writer(str(tmp_path), "out"),
        pytest.raises(DataError, match="another process is writing .*out"),
    ):
        make("topiocqa", source, out)
    for name in ("out.999999999.tmp", "out.notes.tmp", "out2.999999999.tmp"):
        os.mkdir(f"{tmp_path}/{name}")
    make("topiocqa", source, out)
    assert sorted(os.listdir(tmp_path)) == [
        "out",
        "out.notes.tmp",
        "out2.999999999.tmp",
        "raw",
    ]  # a killed run's goes


class Server(http.server.BaseHTTPRequestHandler):
    """Serves bytes with ranges; breaks off the first answer in the middle."""

    content, broken, ranges = b"0123456789" * 1000, False, []

    def do_GET(self):
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        type(self).ranges.append(begin)
        if self.path == "/gone":
            return self.send_error(404)
        if begin >= len(self.content):
            return self.send_error(416)
        part = self.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[:3000] if not type(self).broken else part)
        type(self).broken = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Server.broken, Server.ranges = False, []
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_a_broken_download_is_continued(tmp_path, server):
    path = f"{tmp_path}/deep/file.bin"
    with pytest.raises(DataError, match="broke off at 3,000 of 10,000|run the same command again"):
        files.fetch(f"{server}/file.bin", path)
    assert not os.path.exists(path) and os.path.getsize(f"{path}.part") == 3000
    files.fetch(f"{server}/file.bin", path)
    assert Server.ranges == [0, 3000]
    with open(path, "rb") as f:
        assert f.read() == Server.content
    os.rename(path, f"{path}.part")  # killed between the last byte and the renaming: begun again
    with pytest.raises(DataError, match="416|run the same command again"):
        files.fetch(f"{server}/file.bin", path)
    files.fetch(f"{server}/file.bin", path)
    assert os.path.getsize(path) == 10_000


def test_a_refused_download_says_where_to_put_the_file(tmp_path, server):
    with pytest.raises(DataError, match="download of .*/gone failed .*fetch it by hand to"):
        files.fetch(f"{server}/gone", f"{tmp_path}/x")
    assert not os.path.exists(f"{tmp_path}/x")


def test_download_fills_only_what_is_missing(tmp_path, topiocqa_counts, monkeypatch):
    raw, asked = topiocqa_source(tmp_path / "raw"), []
    with open(f"{raw}/topiocqa_dev.json", "rb") as f:
        content = f.read()
    os.remove(f"{raw}/topiocqa_dev.json")
    monkeypatch.setattr(files, "fetch", lambda url, path: (asked.append(url), put(path, content)))
    make("topiocqa", source=raw, out=f"{tmp_path}/out", download=True)
    assert asked == ["https://zenodo.org/records/7709644/files/topiocqa_dev.json?download=1"]
    with pytest.raises(
        DataError, match="unpack it there"
    ):  # an archive is fetched and unpacked by hand
        make("cast19", source=f"{tmp_path}/cast", out=f"{tmp_path}/c", download=True, strict=False)


def test_memory_does_not_grow_with_the_passages(tmp_path):
    """25,000 passages, 6.5 MB of TSV: what Python holds at its peak stays below 2.5 MB
    (bench/prepare_scale.py: 2 M).
    """
    import tracemalloc

    path = f"{tmp_path}/big.tsv"
    words = " ".join(f"word{i}" for i in range(30))
    with open(path, "w", encoding="utf-8") as f:
        f.write("id\ttext\ttitle\n")
        f.writelines(f"{i}\t{words} {i}\tTitle [SEP] {i}\n" for i in range(25_000))
    tracemalloc.start()
    count = write_jsonl(
        f"{tmp_path}/corpus.jsonl", files.with_progress(files.table_rows(path), 25_000)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 25_000 and peak < 2.5e6, peak


def test_command_line(tmp_path, topiocqa_counts):
    raw = topiocqa_source(tmp_path / "raw")
    done = subprocess.run(
        [
            sys.executable,
            "prepare.py",
            "topiocqa",
            f"source={raw}",
            f"out={tmp_path}/out",
            "strict=false",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["passages"] == 7, (
        done.stderr
    )
    done = subprocess.run(
        [sys.executable, "prepare.py", "qrecc", f"source={raw}", f"out={tmp_path}/q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 2
        and "zenodo.org/records/5115890" in done.stderr
        and "Traceback" not in done.stderr
    )
