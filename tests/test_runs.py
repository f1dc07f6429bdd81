"""runs.py: which tool a folder belongs to; JSON files of it."""

import dataclasses
import os

import pytest

from config import ConfigError, save_config
from data import DataError
from evaluate import EvaluateConfig
from grpo import GRPOConfig
from infer import InferConfig
from report import ReportConfig
from retriever import RetrieverConfig
from runs import OWN_KEYS, claim_folder, folder_owner, read_json
from serve import ServeConfig
from sft import SFTConfig

CONFIGS = {
    "grpo.py": GRPOConfig,
    "sft.py": SFTConfig,
    "retriever.py": RetrieverConfig,
    "evaluate.py": EvaluateConfig,
}


def test_a_key_names_one_tool_alone():
    for tool, key in OWN_KEYS.items():
        has = [
            c
            for c in (*CONFIGS.values(), InferConfig, ReportConfig, ServeConfig)
            if key in {f.name for f in dataclasses.fields(c)}
        ]
        assert has == [CONFIGS[tool]]


@pytest.mark.parametrize("tool", CONFIGS)
def test_a_folder_belongs_to_the_tool_that_made_it(tmp_path, tool):
    folder = str(tmp_path / "out")
    claim_folder(folder, tool)  # nothing is there
    os.makedirs(folder)
    claim_folder(folder, tool)
    (tmp_path / "out/notes.txt").write_text("mine")  # made by no tool
    claim_folder(folder, tool)
    save_config(CONFIGS[tool](), f"{folder}/config.yaml")
    assert folder_owner(folder) == tool
    for other in (*CONFIGS, "prepare.py", "report.py", "infer.py"):
        if other == tool:
            claim_folder(folder, other)
        else:
            with pytest.raises(
                ConfigError, match=f"out={folder} was made by {tool}.*give {other} another one"
            ):
                claim_folder(folder, other)


def test_indexes_data_folders_and_files(tmp_path):
    os.makedirs(tmp_path / "index/dense")
    (tmp_path / "index/dense/meta.json").write_text(
        "{}"
    )  # a build that was killed has no config.yaml yet
    os.makedirs(tmp_path / "data")
    (tmp_path / "data/made.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for name, message in (
        ("index", "made by retriever.py"),
        ("data", "made by prepare.py"),
        ("file", "is a file; name a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            claim_folder(str(tmp_path / name), "grpo.py")
    claim_folder(str(tmp_path / "index"), "retriever.py")
    claim_folder(str(tmp_path / "data"), "prepare.py")
    (tmp_path / "data/made.json").unlink()
    (tmp_path / "data/config.yaml").write_bytes(b"\xff")  # unreadable: tells nothing
    claim_folder(str(tmp_path / "data"), "grpo.py")


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"value": 1', b"\xff\x00"])
def test_a_damaged_json_file_is_named_with_the_way_out(tmp_path, content):
    (tmp_path / "best.json").write_bytes(content)
    with pytest.raises(DataError, match="best.json.* JSON.*; mend or remove it"):
        read_json(str(tmp_path / "best.json"))
