"""The project's shape: what imports what, what copies out alone, what the papers beside the code say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WINGS = ["engines", "search", "episodes", "scoring", "sources", "demo"]
FLOORS = [  # a file imports from lower floors alone; inside a wing any way but in a circle
    ["reward", "packing", "lora", "data", "config", "distributed"],
    ["engines", "model", "prompts", "runs"],
    ["rollout", "search", "sources", "demo"],
    ["batching", "retriever", "scoring", "prepare"],
    ["evaluate", "episodes"],
    ["tasks"],
    ["infer", "report", "serve"],
    ["training", "targets"],
    ["grpo", "sft"],
]
LEAVES = FLOORS[0]
HEAVY = ["vllm", "faiss", "flash_attn", "mcp", "wandb", "peft", "starlette"]


def tracked() -> list[Path]:
    """What git holds or would hold; every file where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and ".git" not in p.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


FILES = sorted([*ROOT.glob("*.py"), *(p for w in WINGS for p in (ROOT / w).glob("*.py"))])
SOURCES = {module_name(p): p.read_text(encoding="utf-8") for p in FILES if p.name != "__init__.py"}


def imports(source: str, top_level_only: bool = False) -> set[str]:
    """The modules that a source imports: `search.bm25` for `from search import bm25` and `from search.bm25 import x`."""
    tree = ast.parse(source)
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            found |= (
                {f"{node.module}.{a.name}" for a in node.names}
                if node.module in WINGS
                else {node.module}
            )
    return found


GRAPH = {name: imports(source) & set(SOURCES) for name, source in SOURCES.items()}


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that comes back to where it began, or None."""

    def walk(node, path):
        if node in path:
            return path[path.index(node) :] + [node]
        return next((found for n in sorted(graph[node]) if (found := walk(n, path + [node]))), None)

    return next((found for n in graph if (found := walk(n, []))), None)


def test_imports_have_no_cycle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not cycle(
        {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    )
    assert cycle(GRAPH) is None and any(GRAPH.values())


def test_imports_run_downwards():
    room = {name: name.split(".")[0] for name in SOURCES}
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    assert set(room.values()) == set(floor), "every file stands on a floor"
    upwards = [
        (a, b)
        for a, used in GRAPH.items()
        for b in used
        if room[a] != room[b] and floor[room[a]] <= floor[room[b]]
    ]
    assert upwards == []


def test_reward_needs_the_standard_library_alone():
    assert imports(SOURCES["reward"]) <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", SOURCES)
def test_heavy_packages_are_imported_where_they_are_used(name):
    top = {module.split(".")[0] for module in imports(SOURCES[name], top_level_only=True)}
    assert top & set(HEAVY) == set()


@pytest.mark.parametrize("name", SOURCES)
def test_files_and_functions_can_be_read(name):
    source = SOURCES[name]
    assert len(source.splitlines()) <= 650
    long = [line for line in source.splitlines() if len(line) > 100]
    assert long == []


def python(*words, **kw):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, **kw
    )


def test_import_grpo_loads_no_heavy_package():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import grpo; print(sorted(m for m in {HEAVY!r} if m in sys.modules))"
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------ copies out alone


def mathematics() -> str:
    """What stands between the banner of the mathematics in grpo.py and the next one."""
    lines = (ROOT / "grpo.py").read_text(encoding="utf-8").splitlines()
    banners = [i for i, line in enumerate(lines) if line.startswith("# " + "=" * 20)]
    first = next(i for i in banners if "mathematics" in lines[i])
    return "\n".join(lines[first + 1 : banners[banners.index(first) + 1]])


MATHEMATICS = """
from __future__ import annotations
import math, sys
import torch
from torch import Tensor
{block}

t = torch.tensor
a = group_advantages(t([1.0, 2.0, 3.0, 5.0, 5.0]), t([0, 0, 0, 1, 1]))
assert torch.allclose(a, t([-1.0, 0.0, 1.0, 0.0, 0.0]), atol=1e-5), a
kl = low_var_kl(t([[-1.0, -9.0]]), t([[-2.0, -1.0]]))
assert torch.allclose(kl, t([[math.exp(-1), math.exp(5) * (1 + 8 - 5) - 8 - 1]])), kl
loss, clipped = clipped_policy_loss(t([[0.0, math.log(1.5)]]), t([[0.0, 0.0]]), t([2.0]), 0.2)
assert torch.allclose(loss, t([[-2.0, -2.4]])) and clipped.tolist() == [[False, True]], (loss, clipped)
assert float(aggregate(t([[1.0, float("nan")], [2.0, 4.0]]), t([[1, 0], [1, 1]]), "token_mean", 4.0)) == 1.75
print(sorted(set(sys.modules) & {{"transformers", "yaml", "config", "data", "reward", "rollout"}}))
"""


def test_the_mathematics_of_grpo_runs_with_torch_alone(tmp_path):
    (tmp_path / "block.py").write_text(MATHEMATICS.format(block=mathematics()), encoding="utf-8")
    done = python(
        "-P" if sys.version_info >= (3, 11) else "-s",
        "block.py",
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


def test_reward_runs_copied_alone_on_the_bare_standard_library(tmp_path):
    (tmp_path / "reward.py").write_bytes((ROOT / "reward.py").read_bytes())
    code = "import reward; print(reward.score_rewrite('<think>a</think><rewrite>b</rewrite>', 1), reward.score_rewrite('b', 1))"
    done = python("-S", "-E", "-c", code, cwd=tmp_path)  # -S: no site-packages at all
    assert done.returncode == 0 and done.stdout.split() == ["2.0", "-0.1"], (
        done.stdout + done.stderr
    )


ALONE = {  # what each leaf does where no other file of the project is
    "config": """
import dataclasses, config
@dataclasses.dataclass
class Knobs:
    lr: float = 1.0
print(config.load_config(Knobs, ["lr=1e-3"]).lr)
""",
    "data": """
import json, data
open("turns.jsonl", "w").write(json.dumps({"query_id": "q", "question": "who?"}))
print(data.read_turns("turns.jsonl")[0].question)
""",
    "distributed": """
import torch, distributed
dist = distributed.setup()
print(distributed.all_reduce_sum([dist.world, 0.5]))
distributed.cleanup()
""",
    "packing": """
import torch, packing
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=1)).eval()
tokens = torch.tensor([[1, 2, 3, 4]])
found = packing.token_logprobs(model, tokens, torch.ones_like(tokens))
expected = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).T
print(bool((found - expected).abs().max() < 1e-5))
""",
    "lora": """
import torch, lora
from transformers import Qwen2Config, Qwen2ForCausalLM
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=1))
lora.add_adapter(model, lora.LoRAConfig(r=2))
trained = [name for name, p in model.named_parameters() if p.requires_grad]
print(bool(trained) and all(".lora_" in name for name in trained))
""",
}


@pytest.mark.parametrize("name", ALONE)
def test_leaves_run_copied_alone(tmp_path, name):
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    done = python(
        "-c",
        ALONE[name],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] in (
        "0.001",
        "who?",
        "[1.0, 0.5]",
        "True",
    ), done.stdout + done.stderr


def test_commands_that_need_no_model_start_without_torch():
    for command in (["evaluate.py", "--help"], ["report.py", "--help"], ["prepare.py", "--help"]):
        code = (
            f"import runpy, sys; sys.argv = {command!r}; sys.path.insert(0, {str(ROOT)!r})\n"
            f"try: runpy.run_path({str(ROOT / command[0])!r}, run_name='__main__')\n"
            "except SystemExit: pass\nprint('torch' in sys.modules)"
        )
        done = python("-c", code)
        assert done.stdout.strip().splitlines()[-1] == "False", (command, done.stderr)


# ------------------------------------------------------------------------------------------------------ papers

MACHINE_PATH = re.compile(r"(?<![\w.~$}*])/(?:work|root|home|Users|mnt|scratch|tmp/[\w-]+)/[\w.-]+")


def test_no_path_of_a_machine():
    assert all(MACHINE_PATH.search(f'see "/{top}/jane"') for top in ("home", "work", "root"))
    assert not MACHINE_PATH.search("net/work/jane")
    found = []
    for path in tracked():
        if (
            path.suffix
            in {".py", ".md", ".yaml", ".yml", ".txt", ".sh", ".cff", ".toml", ".cfg", ".ini", ""}
            and path != Path(__file__).resolve()
        ):
            for number, line in enumerate(
                path.read_bytes().decode("utf-8", "ignore").splitlines(), 1
            ):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


REQUIREMENTS = sorted(ROOT.glob("requirements*.txt"))


@pytest.mark.skipif(not REQUIREMENTS, reason="no requirements files yet")
@pytest.mark.parametrize("path", REQUIREMENTS, ids=[p.name for p in REQUIREMENTS])
def test_requirements_are_pinned_to_a_range(path):
    from packaging.requirements import Requirement

    lines = [line.split(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    assert wanted
    for requirement in wanted:
        operators = {s.operator for s in requirement.specifier}
        assert operators & {"==", "~="} or (operators & {">=", ">"} and operators & {"<", "<="}), (
            f"{requirement}: give a tested range"
        )


README = ROOT / "README.md"


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_readme_lists_exactly_the_top_level_files():
    there = {p.relative_to(ROOT).parts[0] for p in tracked()}
    there = {
        n + "/" if (ROOT / n).is_dir() else n
        for n in there
        if not n.startswith(".") and n not in {"README.md", "LICENSE", "CITATION.cff"}
    }  # paperwork: named in its own sections
    rows = [
        line.split("|")[1]
        for line in README.read_text(encoding="utf-8").splitlines()
        if re.match(r"\|\s*`", line)
    ]
    listed = {name.strip() for row in rows for name in re.findall(r"`([^`]+)`", row)}
    files = {
        n if n.endswith("/") or not (ROOT / n).is_dir() else n + "/"
        for n in listed
        if (ROOT / n).exists() or re.search(r"\.(py|sh|txt|cff)$|/$", n)
    }
    files = {n if n in there else n.split("/")[0] + "/" if "/" in n else n for n in files}
    assert files == there, (
        f"not in the README: {sorted(there - files)}; not in the folder: {sorted(files - there)}"
    )


CITATION = ROOT / "CITATION.cff"


@pytest.mark.skipif(not CITATION.exists(), reason="no CITATION.cff yet")
def test_citation_is_valid_enough_to_cite():
    cff = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= cff.keys() and cff[
        "license"
    ] == "Apache-2.0"
    assert re.fullmatch(r"1\.\d\.\d", str(cff["cff-version"])) and cff["authors"]
    assert all({"family-names", "name", "alias"} & author.keys() for author in cff["authors"])
    for reference in cff.get("references", []):
        assert {"type", "title", "authors"} <= reference.keys()


def test_an_environment_without_pip_is_made_again(tmp_path):
    """Killed between its making and that of its pip, an environment would fail every later ./run.sh."""
    (tmp_path / "run.sh").write_text((ROOT / "run.sh").read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    asked = tmp_path / "asked"
    for path, status in ((tmp_path / ".venv/bin/python", 1), (tmp_path / "python", 0)):
        path.write_text(f'#!/bin/sh\necho "$@" >> "{asked}"\nexit {status}\n')
        path.chmod(0o755)
    subprocess.run(
        ["bash", "run.sh", "setup"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": str(tmp_path / "python")},
        capture_output=True,
    )
    assert "-m venv --clear .venv" in asked.read_text()
