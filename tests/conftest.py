"""Paths, markers and one thread: `import config` and `import tiny` work from any folder, a loaded machine stays usable."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402

from official import cast21_source, cast_source, topiocqa_counts  # noqa: E402,F401  fixtures


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    config.addinivalue_line("markers", "vllm: needs vLLM; skipped where it is not installed")
    config.addinivalue_line("markers", "slow: minutes long; left out unless -m slow asks for it")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup and & they are ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    import importlib.util

    skip = {}
    if not torch.cuda.is_available():
        skip["gpu"] = "no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        skip["vllm"] = "vLLM is not installed"
    if "slow" not in config.getoption("-m"):
        skip["slow"] = "slow: run with -m slow"
    for item in items:
        for marker, reason in skip.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def dist():
    """This process as the only one of a group, on the CPU, on a machine with a GPU too."""
    import distributed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield distributed.setup()
        distributed.cleanup()


FAMILIES = [("qwen2", True), ("llama", False), ("qwen3", True)]


@pytest.fixture(scope="session", params=FAMILIES, ids=["qwen2-tied", "llama-untied", "qwen3-tied"])
def family_lm(request, tmp_path_factory):
    """A folder with a tiny language model, for each family."""
    import tiny

    path = tmp_path_factory.mktemp("lm")
    tiny.tiny_lm(path, *request.param, seed=3)
    return str(path)


@pytest.fixture(scope="session")
def qwen_lm(tmp_path_factory):
    import tiny

    path = tmp_path_factory.mktemp("qwen")
    tiny.tiny_lm(path)
    return str(path)
