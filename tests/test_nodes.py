"""A run over two nodes: a rank is killed, both nodes end and one tells why, and the same command goes on."""

from __future__ import annotations

import pytest
from test_grpo import metrics, run

from bench import nodes


def test_a_rank_of_another_node_is_killed_and_the_run_goes_on(tmp_path):
    nodes.make_world(tmp_path)
    found = nodes.killed(tmp_path, "two", processes=1, rank=1, node=False, wait=120)
    assert found["still_running"] == [] and found["statuses"] == [1, 1]
    assert "Signal 9 (SIGKILL) received" in found["torchrun_says"]
    assert found["exit.json"]["status"] == 1
    alone = run(tmp_path, "one")
    assert alone.returncode == 0, alone.stderr[-2000:]
    two, one = nodes.whole(tmp_path, "two", 2, 1), metrics(tmp_path, "one")
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 1, 2, 3, 4]
    for a, b in zip(two, one):
        for name in {"reward", "loss", "kl", "grad_norm", "dev_mrr"} & b.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), (a["step"], name)
