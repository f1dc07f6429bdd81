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
MODULES = sorted(p.stem for p in ROOT.glob("*.py"))
LEAVES = ["reward", "config", "data", "model", "distributed"]
HEAVY = ["vllm", "faiss", "flash_attn", "mcp", "wandb", "peft", "fastapi"]


def tracked() -> list[Path]:
    """What git holds or would hold; every file where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and ".git" not in p.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def imports(source: str, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(source)
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports have no place in a flat layout"
            found.add(node.module.split(".")[0])
    return found


GRAPH = {m: imports((ROOT / f"{m}.py").read_text(encoding="utf-8")) & set(MODULES) for m in MODULES}


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that comes back to where it began, or None."""
    def walk(node, path):
        if node in path:
            return path[path.index(node):] + [node]
        return next((found for n in sorted(graph[node]) if (found := walk(n, path + [node]))), None)
    return next((found for n in graph if (found := walk(n, []))), None)


def test_imports_have_no_cycle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})  # the check can fail
    assert cycle(GRAPH) is None
    assert any(GRAPH.values())


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_import_no_sibling(name):
    assert GRAPH[name] == set()


def test_reward_needs_the_standard_library_alone():
    assert imports((ROOT / "reward.py").read_text(encoding="utf-8")) <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(name):
    assert imports((ROOT / f"{name}.py").read_text(encoding="utf-8"), top_level_only=True) & set(HEAVY) == set()


def python(*words, **kw):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, **kw)


@pytest.mark.skipif("grpo" not in MODULES, reason="no grpo.py")
def test_import_grpo_loads_no_heavy_package():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import grpo; print(sorted(m for m in {HEAVY!r} if m in sys.modules))"
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------ copies out alone

def mathematics() -> str:
    """What stands between the first two banner lines of grpo.py."""
    lines = (ROOT / "grpo.py").read_text(encoding="utf-8").splitlines()
    banners = [i for i, line in enumerate(lines) if line.startswith("# " + "=" * 20)]
    assert len(banners) >= 2 and "mathematics" in lines[banners[0]]
    return "\n".join(lines[banners[0] + 1:banners[1]])


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


@pytest.mark.skipif("grpo" not in MODULES, reason="no grpo.py")
def test_the_mathematics_of_grpo_runs_with_torch_alone(tmp_path):
    (tmp_path / "block.py").write_text(MATHEMATICS.format(block=mathematics()), encoding="utf-8")
    done = python("-P" if sys.version_info >= (3, 11) else "-s", "block.py", cwd=tmp_path,
                  env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


def test_reward_runs_copied_alone_on_the_bare_standard_library(tmp_path):
    (tmp_path / "reward.py").write_bytes((ROOT / "reward.py").read_bytes())
    code = "import reward; print(reward.score_rewrite('<think>a</think><rewrite>b</rewrite>', 1), reward.score_rewrite('b', 1))"
    done = python("-S", "-E", "-c", code, cwd=tmp_path)  # -S: no site-packages at all
    assert done.returncode == 0 and done.stdout.split() == ["2.0", "-0.1"], done.stdout + done.stderr


@pytest.mark.parametrize("name", ["config", "data", "distributed"])
def test_the_other_leaves_import_copied_alone(tmp_path, name):
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    done = python("-c", f"import {name}; print({name}.__file__)", cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0 and str(tmp_path) in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------------ papers

MACHINE_PATH = re.compile(r"(?<![\w.~$}*])/(?:work|root|home|Users|mnt|scratch|tmp/[\w-]+)/[\w.-]+")


def test_no_path_of_a_machine():
    assert all(MACHINE_PATH.search(f'see "/{top}/jane"') for top in ("home", "work", "root"))
    assert not MACHINE_PATH.search("net/work/jane")
    found = []
    for path in tracked():
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".txt", ".sh", ".cff", ".toml", ".cfg", ".ini", ""} and path != Path(__file__).resolve():
            for number, line in enumerate(path.read_bytes().decode("utf-8", "ignore").splitlines(), 1):
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
        assert operators & {"==", "~="} or (operators & {">=", ">"} and operators & {"<", "<="}), f"{requirement}: give a tested range"


README = ROOT / "README.md"


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_readme_lists_exactly_the_top_level_files():
    there = {p.relative_to(ROOT).parts[0] for p in tracked()}
    there = {n + "/" if (ROOT / n).is_dir() else n for n in there
             if not n.startswith(".") and n not in {"README.md", "LICENSE", "CITATION.cff"}}  # paperwork: named in its own sections
    rows = [line.split("|")[1] for line in README.read_text(encoding="utf-8").splitlines() if re.match(r"\|\s*`", line)]
    listed = {name.strip() for row in rows for name in re.findall(r"`([^`]+)`", row)}
    files = {n if n.endswith("/") or not (ROOT / n).is_dir() else n + "/" for n in listed if (ROOT / n).exists() or re.search(r"\.(py|sh|txt|cff)$|/$", n)}
    files = {n if n in there else n.split("/")[0] + "/" if "/" in n else n for n in files}
    assert files == there, f"not in the README: {sorted(there - files)}; not in the folder: {sorted(files - there)}"


CITATION = ROOT / "CITATION.cff"


@pytest.mark.skipif(not CITATION.exists(), reason="no CITATION.cff yet")
def test_citation_is_valid_enough_to_cite():
    cff = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= cff.keys() and cff["license"] == "Apache-2.0"
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
    subprocess.run(["bash", "run.sh", "setup"], cwd=tmp_path, env=os.environ | {"PYTHON": str(tmp_path / "python")},
                   capture_output=True)
    assert "-m venv --clear .venv" in asked.read_text()