"""Progress lines of a log: never a rate or a remaining time that nothing supports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import runs
import training

from engines.base import Rollout, Sampling
from engines.torch_engine import _Request, _share_done


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    return now


def test_nothing_done_has_no_rate(clock, capsys):
    progress = runs.Progress(100, "sampling", "responses")
    clock[0] = 20
    progress.update(0)
    assert capsys.readouterr().err == ""  # nothing for short work
    clock[0] = 31
    progress.update(0)
    assert capsys.readouterr().err == "sampling:   0% 0/100 [00:31<?, ? responses/s]\n"
    clock[0] = 60
    progress.update(50)
    progress.update(1)  # at most a line every half minute
    assert capsys.readouterr().err == ""
    clock[0] = 102
    progress.update(0)
    assert capsys.readouterr().err == "sampling:  51% 51/100 [01:42<01:38,  2.00s/ responses]\n"
    progress.close()


def test_a_batch_whose_responses_end_late_has_an_estimate_from_a_tenth_on(clock, capsys):
    progress = runs.Progress(200, "sampling", "responses", 0.1)
    clock[0] = 40
    progress.reach(19, 200, 5.0)
    progress.reach(18)  # never backwards
    assert capsys.readouterr().err == "sampling: 19/200 [00:40<?]\n"
    clock[0] = 80
    progress.reach(40)
    line = "sampling:  20% 40/200 [01:20<05:20,  2.00s/ responses]\n"
    assert progress.done == 40 and capsys.readouterr().err == line


def test_the_time_left_of_a_training_leaves_the_first_step_out():
    steps = [
        {"step": n, "seconds_sample": s, "seconds_update": 1.0}
        for n, s in enumerate([300.0, 4, 6], 1)
    ]
    run = SimpleNamespace(steps=13, history=[])
    assert training.time_left(run, steps[0]) == "?"
    run.history = steps[:2]
    assert training.time_left(run, steps[2]) == "01:00"  # 10 steps of 6 s


def test_the_share_of_a_batch_follows_its_tokens_and_its_ends():
    def request(tokens, end):
        rollout = Rollout([1], [2] * tokens, [], [], 0, end)
        return _Request(rollout, Sampling(max_tokens=40), None, 0)

    assert _share_done([request(9, ""), request(0, "")]) == 0
    # one of four has ended after 20 tokens; 60 tokens an end are above the limit of 40
    running = [request(20, "eos"), request(20, ""), request(20, ""), request(0, "")]
    assert _share_done(running) == pytest.approx((1 / 4 + 60 / (20 + 3 * 40)) / 2)
    assert _share_done([request(7, "eos"), request(40, "length")]) == 1
    assert _share_done([request(0, "engine_error")]) == 0.5


def test_an_unknown_total_has_no_share_and_no_remaining_time(clock, capsys):
    progress = runs.Progress(0, "download corpus", "bytes")
    clock[0] = 40
    progress.update(1000)
    assert capsys.readouterr().err == "download corpus: 1000 bytes [00:40, 25.00 bytes/s]\n"


def test_a_terminal_has_a_bar(clock, capsys, monkeypatch):
    monkeypatch.setattr(runs.sys.stderr, "isatty", lambda: True)
    progress = runs.Progress(4, "encode", "texts")
    progress.update(3)
    assert progress.bar.n == progress.done == 3
    progress.close()
