"""Logging to TensorBoard, Weights & Biases and Trackio, under metrics.jsonl's names."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import uuid
from collections.abc import Iterator
from itertools import islice

from config import ConfigError, to_dict
from data import read_jsonl
from distributed import print0
from runs import read_json, write_json
from scoring.tables import markdown_table


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError if a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log_to={name} is not installed; run pip install {name}")


class Trackers:
    """The trackers of a run whose next step is `first`; one that fails is dropped.

    `out`/trackers.json keeps the run id and the last step; wandb and trackio skip steps up to it.
    """

    def __init__(self, names: list[str], cfg, first: int):
        self.names, self.cfg, self.first, self.open = set(names), cfg, first, {}
        self.file = os.path.join(cfg.out, "trackers.json")
        fresh = {"id": uuid.uuid4().hex[:8], "step": -1}
        self.state = (names and first and read_json(self.file)) or fresh

    def start(self, name: str):
        """Return TensorBoard's writer, purged from `first` on, or a module with its run."""
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(os.path.join(self.cfg.out, name), purge_step=self.first)
        module, id_ = importlib.import_module(name), self.state["id"]
        how = {"config": to_dict(self.cfg), "resume": "allow"}
        how |= {"id": id_, "dir": self.cfg.out} if name == "wandb" else {}
        project = os.environ.get("WANDB_PROJECT", "nanosearch-r1")
        module.init(project=project, name=f"{os.path.basename(self.cfg.out)} {id_}", **how)
        return module

    def log(self, row: dict) -> None:
        """Log a row; for step 1 and validations also a table of 16 rollouts."""
        step, new = row["step"], row["step"] > self.state["step"]
        path = os.path.join(self.cfg.out, "rollouts", f"step_{step:06d}.jsonl")
        validated = any(key.startswith("dev_") for key in row)
        shown = os.path.exists(path) and (step == 1 or validated)
        rollouts = [r for _, r in islice(read_jsonl(path), 16)] if shown and self.names else []
        head = list(rollouts[0]) if rollouts else []
        cells = [[" ".join(str(v).split()).replace("|", "¦") for v in r.values()] for r in rollouts]
        figures = {k: v for k, v in row.items() if k != "step" and math.isfinite(v)}
        if self.names and new:
            write_json(self.file, self.state | {"step": step})
            self.state["step"] = step
        for name in list(self.names):
            with self.dropping(name):
                there = self.open[name] = self.open.get(name) or self.start(name)
                if name == "tensorboard":
                    for key, value in figures.items():
                        there.add_scalar(key, value, step)
                    if cells:
                        text = markdown_table(head, cells).replace("<", "&lt;")  # no HTML
                        there.add_text("rollouts", text, step)
                    there.flush()
                elif new:
                    table = {"rollouts": there.Table(head, cells)} if cells else {}
                    there.log(figures | table, step=step)

    def close(self) -> None:
        for name in self.names & self.open.keys():
            with self.dropping(name):
                self.open[name].close() if name == "tensorboard" else self.open[name].finish()

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """Drop a tracker that raises in the block, so that it does not end the run."""
        try:
            yield
        except Exception as e:
            self.names.remove(name)
            print0(f"warning: {name} failed, nothing more is logged there: {e!r}")
