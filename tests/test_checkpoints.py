"""distributed.py's checkpoints and exports: resumes are bit-equal, and survive what disks do."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny_training import MASK, TOKENS, loss_of, names, same, step, trained, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import distributed
from lora import LoRAConfig
from model import load_causal_lm
from packing import token_logprobs

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("dist")


def rng_draws():
    return torch.rand(3).tolist(), random.random()


def test_resume_is_bit_equal(dist, family_lm, tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    model, optimizer = trained(family_lm, 2, dist)
    path = distributed.save_checkpoint(
        str(tmp_path), 2, model, optimizer, {"best": 0.5, "note": "é"}
    )
    assert path == str(tmp_path / "checkpoint_000002")
    saved, draws = weights(model), rng_draws()
    step(model, optimizer, 2)
    further = weights(model)

    other, fresh = trained(family_lm, 0, dist)
    torch.manual_seed(99)
    found = distributed.latest_checkpoint(str(tmp_path))
    assert (
        found[0] == path
        and found[1].items() >= {"step": 2, "world": 1, "best": 0.5, "note": "é"}.items()
    )
    distributed.load_checkpoint(path, other, fresh)
    same(weights(other), saved)
    assert rng_draws() == draws
    step(other, fresh, 2)
    same(weights(other), further)
    assert not torch.equal(saved["model.norm.weight"], further["model.norm.weight"])


def test_optimizer_moments_are_restored_not_only_weights(dist, qwen_lm, tmp_path):
    model, optimizer = trained(qwen_lm, 3, dist)
    path = distributed.save_checkpoint(str(tmp_path), 3, model, optimizer, {})
    other, fresh = trained(qwen_lm, 1, dist)
    distributed.load_checkpoint(path, other, fresh)
    for p, q in zip(model.parameters(), other.parameters()):
        a, b = optimizer.state[p], fresh.state[q]
        assert float(a["step"]) == float(b["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert (
                torch.equal(distributed.full_tensor(a[key]), distributed.full_tensor(b[key]))
                and distributed.full_tensor(a[key]).any()
            )


def test_a_forward_pass_without_a_backward_pass_hides_nothing(dist, family_lm, tmp_path):
    """FSDP then keeps the root's parameters whole, other objects than the optimizer's: their moments were saved as zeros."""

    def look(model):
        with torch.no_grad():
            return loss_of(model)

    model, optimizer = trained(family_lm, 3, dist)
    look(model)
    path = distributed.save_checkpoint(str(tmp_path), 3, model, optimizer, {})
    assert len(optimizer.state) == len(list(model.parameters()))
    other, fresh = trained(family_lm, 0, dist)
    look(other)
    distributed.load_checkpoint(path, other, fresh)
    assert torch.equal(look(other), look(model))
    step(model, optimizer)
    step(other, fresh)
    same(weights(other), weights(model))
    plain, its = trained(family_lm, 4)
    same(weights(other), weights(plain), atol=2e-5)
    for m in (model, plain):
        m.zero_grad()
        loss_of(m).backward()
        look(m)
    assert distributed.clip_grad_norm(model, 1.0) == pytest.approx(
        distributed.clip_grad_norm(plain, 1.0), rel=1e-4
    )


def test_saving_before_the_first_step_changes_nothing(dist, qwen_lm, tmp_path):
    model, optimizer = trained(qwen_lm, 0, dist)
    distributed.save_checkpoint(str(tmp_path), 0, model, optimizer, {})
    step(model, optimizer, 2)
    same(weights(model), weights(trained(qwen_lm, 2, dist)[0]))


@pytest.fixture()
def saver(dist, qwen_lm):
    model, optimizer = trained(qwen_lm, 1, dist)
    return (
        lambda run_dir, n, **kw: distributed.save_checkpoint(
            str(run_dir), n, model, optimizer, {"mark": n}, **kw
        ),
        model,
        optimizer,
    )


def test_only_the_newest_are_kept_in_the_order_of_steps(saver, tmp_path):
    save = saver[0]
    for n in (1, 2, 3):
        save(tmp_path, n, keep=2)
    assert names(tmp_path) == ["checkpoint_000002", "checkpoint_000003"]
    for n in (999_999, 1_000_000, 1_000_001):  # as text, 1000000 comes before 999999
        save(tmp_path, n, keep=2)
        assert distributed.latest_checkpoint(str(tmp_path))[1]["mark"] == n
    assert names(tmp_path) == ["checkpoint_1000000", "checkpoint_1000001"]
    save(tmp_path, 1_000_002, keep=1)
    assert names(tmp_path) == ["checkpoint_1000002"]


def test_the_same_step_is_replaced(saver, tmp_path):
    save, model, optimizer = saver
    save(tmp_path, 1)
    step(model, optimizer)
    save(tmp_path, 1)
    other, fresh = trained(model.config._name_or_path, 0, distributed.setup())
    distributed.load_checkpoint(str(tmp_path / "checkpoint_000001"), other, fresh)
    same(weights(other), weights(model))
    assert names(tmp_path) == ["checkpoint_000001"]


def test_no_checkpoint_yet(dist, tmp_path):
    (tmp_path / "checkpoint_12").mkdir()
    (tmp_path / "checkpoint_000012.tmp").mkdir()
    assert (
        distributed.latest_checkpoint(str(tmp_path)) is None
        and distributed.latest_checkpoint(str(tmp_path / "none")) is None
    )


@pytest.mark.parametrize("content", ['{"step": 12', "", "[]", '{"step": 11}', "{}", None])
def test_a_corrupt_state_file_is_passed_over(saver, tmp_path, capsys, content):
    save = saver[0]
    save(tmp_path, 10)
    save(tmp_path, 12)
    state = tmp_path / "checkpoint_000012" / "state.json"
    state.unlink() if content is None else state.write_text(content)
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 10
    assert str(state) in capsys.readouterr().err
    save(tmp_path, 11, keep=1)  # the damaged one does not push the new one out
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 11
    shutil.rmtree(tmp_path / "checkpoint_000011")
    with pytest.raises(
        distributed.CheckpointError, match="checkpoint_000012"
    ):  # never a silent restart at step 0
        distributed.latest_checkpoint(str(tmp_path))


class Malicious:
    def __reduce__(self):
        return print, ("this has run",)


@pytest.mark.parametrize(
    "what",
    [
        "rng cut",
        "rng empty",
        "shard cut",
        "shard gone",
        "metadata gone",
        "metadata cut",
        "shard flipped",
        "metadata flipped",
        "rng flipped",
        "metadata replaced",
        "another model",
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_it(
    saver, dist, qwen_lm, tmp_path, capfd, what
):
    path = Path(saver[0](tmp_path, 1))
    shards = sorted(path.glob("*.distcp"))
    assert shards
    if what == "shard cut":
        shards[0].write_bytes(shards[0].read_bytes()[:1000])
    elif what in ("rng cut", "rng empty"):
        (path / "rng_rank000.pt").write_bytes(
            (path / "rng_rank000.pt").read_bytes()[: 100 if what == "rng cut" else 0]
        )
    elif what == "shard gone":
        shards[0].unlink()
    elif what == "metadata gone":
        (path / ".metadata").unlink()
    elif what == "metadata cut":
        (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:50])
    elif what.endswith("flipped"):
        name = {"shard": shards[0], "metadata": path / ".metadata", "rng": path / "rng_rank000.pt"}[
            what.split()[0]
        ]
        content = bytearray(name.read_bytes())
        for at in range(len(content) // 2, len(content) // 2 + 200):
            content[at] ^= 1
        name.write_bytes(content)
    elif what == "metadata replaced":
        (path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    source = qwen_lm
    if what == "another model":
        source = str(tmp_path / "lm")
        tiny.tiny_lm(source, hidden_size=64)
    model, optimizer = trained(source, 0, dist)
    with pytest.raises(distributed.CheckpointError, match=str(path)):
        distributed.load_checkpoint(str(path), model, optimizer)
    assert "this has run" not in capfd.readouterr().out


def test_a_checkpoint_without_checksums_loads(saver, dist, qwen_lm, tmp_path):
    """Of a run that an earlier version began."""
    path = Path(saver[0](tmp_path, 1))
    state = json.loads((path / "state.json").read_text())
    assert set(state.pop("checksums")) == {p.name for p in path.iterdir()} - {"state.json"}
    (path / "state.json").write_text(json.dumps(state))
    model, optimizer = trained(qwen_lm, 0, dist)
    distributed.load_checkpoint(str(path), model, optimizer)
    same(weights(model), weights(saver[1]))


def test_what_killed_runs_left_is_cleared_and_what_they_replaced_comes_back(tmp_path):
    for name in (
        "checkpoint_000002",
        "checkpoint_000001.tmp",
        "checkpoint_000003.tmp",
        "best.tmp",
        "best.old.tmp",
        "final",
        "final.old.tmp",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    for name in ("notes.tmp", "metrics.jsonl.123.tmp"):
        (tmp_path / name).write_text("a file")
    distributed.clear_temporaries(str(tmp_path))
    assert names(tmp_path) == [
        "best",
        "checkpoint_000002",
        "final",
        "metrics.jsonl.123.tmp",
        "notes.tmp",
    ]
    assert (tmp_path / "best" / "of").read_text() == "best.old.tmp" and (
        tmp_path / "final" / "of"
    ).read_text() == "final"
    distributed.clear_temporaries(str(tmp_path / "none"))


def test_free_space_is_checked_against_what_a_run_writes(saver, qwen_lm, tmp_path, monkeypatch):
    save, model, _ = saver
    parameters = sum(p.numel() for p in load_causal_lm(qwen_lm).parameters())
    needed = distributed.run_bytes(model, 2, 2, torch.bfloat16)
    assert needed == 12 * parameters * 3 + 2 * parameters * 3
    adapted = load_causal_lm(qwen_lm, lora=LoRAConfig(r=4))
    trained_ = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert (
        distributed.run_bytes(adapted, 1, 1, torch.float32) == 12 * trained_ * 2 + 4 * trained_ * 2
    )
    save(tmp_path / "run", 1)
    written = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert (
        12 * parameters < written < 1.5 * 12 * parameters + 100_000
    )  # the arithmetic is that of the files
    usage = type(shutil.disk_usage(tmp_path))
    for free, enough in ((needed - written, True), (needed - written - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free))
        if enough:
            distributed.check_free_space(str(tmp_path / "run"), needed)
        else:
            with pytest.raises(
                distributed.CheckpointError,
                match="run needs up to .* GB, holds .* free; free some space",
            ):
                distributed.check_free_space(str(tmp_path / "run"), needed)
    distributed.check_free_space(str(tmp_path / "not" / "there"), 0)


def test_a_full_disk_leaves_earlier_checkpoints(saver, tmp_path, monkeypatch):
    save = saver[0]
    save(tmp_path, 1)
    small = None
    if os.geteuid() == 0:  # a real full disk where mounting is allowed
        small = tmp_path / "small"
        small.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], capture_output=True
        ).returncode:
            small = None
    if small is not None:
        try:
            (small / "fill").write_bytes(b"x" * 250_000)
            shutil.copytree(
                tmp_path / "checkpoint_000001",
                small / "checkpoint_000000",
                ignore=lambda *a: [n for n in a[1] if n.endswith("distcp")],
            )
            (small / "checkpoint_000000" / "state.json").write_text('{"step": 0}')
            before = names(small)
            with pytest.raises(distributed.CheckpointError, match="checkpoint_000002.*No space"):
                save(small, 2)
            assert (
                names(small) == before and distributed.latest_checkpoint(str(small))[1]["step"] == 0
            )
            with pytest.raises(distributed.CheckpointError, match="final.*No space"):
                distributed.export_hf(saver[1], tiny.tiny_tokenizer(), str(small / "final"))
            assert names(small) == before
        finally:
            subprocess.run(["umount", str(small)], check=True)
            small.rmdir()
    for function in ("torch.save", "json.dump"):  # the disk fills up later: RNG state, state.json
        with monkeypatch.context() as patch:

            def full(*args, **kwargs):
                raise OSError(28, "No space left on device", "x")

            patch.setattr(function, full)
            with pytest.raises(distributed.CheckpointError, match="checkpoint_000002.*No space"):
                save(tmp_path, 2)
        assert (
            names(tmp_path) == ["checkpoint_000001"]
            and distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 1
        )
    save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]


def test_an_error_inside_torchs_own_saving_is_ours_too(saver, tmp_path, monkeypatch):
    """torch wraps it in a BaseException, which `except Exception` would let through."""
    save = saver[0]
    save(tmp_path, 1)
    from torch.distributed.checkpoint import FileSystemWriter

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(
        distributed.CheckpointError,
        match="checkpoint_000002.*No space.*earlier checkpoints are intact",
    ):
        save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint_000001"]


def test_an_unwritable_run_folder(saver, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(distributed.CheckpointError, match="could not be written"):
        saver[0](tmp_path / "file" / "run", 1)


KILLED = """
    import os, shutil, signal, sys
    sys.path.insert(0, {root!r})
    import torch, distributed

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die(when, run):
        dist = distributed.setup()
        net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8), 2)
        net = distributed.shard_model(net, dist)
        optimizer = torch.optim.AdamW(net.parameters())
        distributed.save_checkpoint(run, 1, net, optimizer, {{}})
        rename = os.rename
        if when == "data":
            os.fsync = lambda fd: (os.ftruncate(fd, 1000), die())
        elif when == "rename":
            os.rename = lambda a, b: die() if str(b).endswith("checkpoint_000002") else rename(a, b)
        elif when == "cleaning":
            shutil.rmtree = lambda path, **kw: (os.remove(path + "/.metadata"), die()) if os.path.isdir(path) else None
        distributed.save_checkpoint(run, 2, net, optimizer, {{}}, keep=1)

    for when in ("data", "rename", "cleaning"):
        child = os.fork()  # torch is imported once
        if not child:
            save_and_die(when, {out!r} + "/" + when)
            os._exit(0)
        print(when, os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Run folders, by name, of processes that were killed while they saved checkpoint 2."""
    out = tmp_path_factory.mktemp("killed")
    code = textwrap.dedent(KILLED.format(root=str(ROOT), out=str(out)))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["data", "9", "rename", "9", "cleaning", "9"], done.stderr
    return out


@pytest.mark.parametrize("when, newest", [("data", 1), ("rename", 1), ("cleaning", 2)])
def test_a_kill_in_the_middle_of_a_save(dist, killed, saver, when, newest):
    run = killed / when
    left = [n for n in names(run) if n != f"checkpoint_{newest:06d}"]
    # something is there, and it bears no checkpoint's name
    assert left and all(n.endswith(".tmp") for n in left)
    found, state = distributed.latest_checkpoint(str(run))
    assert state["step"] == newest
    net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8), 2)
    net = distributed.shard_model(net, dist)
    distributed.load_checkpoint(found, net, torch.optim.AdamW(net.parameters()))
    saver[0](run, 3)  # the next save sweeps it up
    assert names(run) == [f"checkpoint_{newest:06d}", "checkpoint_000003"]


def test_a_second_resume_starts_where_the_first_one_ended(saver, tmp_path):
    saver[0](tmp_path, 30)
    start = distributed.latest_checkpoint(str(tmp_path))[1]["step"]
    saver[0](tmp_path, start + 10)
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 40


# ------------------------------------------------------------------------------------------------------ export


def test_export_loads_in_stock_transformers(dist, family_lm, tmp_path):
    model, _ = trained(family_lm, 2, dist)
    wanted = weights(model)
    tokenizer = AutoTokenizer.from_pretrained(family_lm)
    distributed.export_hf(model, tokenizer, str(tmp_path / "final"))
    assert names(tmp_path) == ["final"]
    stock, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert not any(report.values())
    tied = model.config.tie_word_embeddings
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) == tied
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert list(wanted) == [n for n in wanted if n in stored] and len(stored) == len(wanted)
    same({n: p.detach() for n, p in stock.named_parameters()}, wanted)
    settings = json.loads((tmp_path / "final" / "config.json").read_text())
    assert settings["architectures"] == [
        type(AutoModelForCausalLM.from_pretrained(family_lm)).__name__
    ]
    assert (
        settings["use_cache"] is True
        and settings["dtype"] == "float32"
        and settings["tie_word_embeddings"] == tied
    )
    with torch.no_grad():
        ours = token_logprobs(model, TOKENS, MASK)
        theirs = torch.log_softmax(stock.eval()(input_ids=TOKENS[:, :-1]).logits, -1).gather(
            -1, TOKENS[:, 1:, None]
        )[..., 0]
    keep = MASK[:, 1:].bool()
    torch.testing.assert_close(ours[keep], theirs[keep], atol=1e-5, rtol=0)
    again = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert (
        again("é")["input_ids"] == tokenizer("é")["input_ids"]
        and again.chat_template == tokenizer.chat_template
    )
    assert again.eos_token_id == tokenizer.eos_token_id


def test_export_dtype_leaves_the_trainer_alone(dist, qwen_lm, tmp_path):
    model, _ = trained(qwen_lm, 0, dist)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.001)
    before = weights(model)
    distributed.export_hf(
        model, AutoTokenizer.from_pretrained(qwen_lm), str(tmp_path / "half"), torch.bfloat16
    )
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16} and float(
        stored["model.norm.weight"][0]
    ) == 1.0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    same(weights(model), before)
    assert model.config.use_cache is False and model.config.dtype == torch.float32


def test_export_of_an_unsharded_model_from_a_bare_config(tmp_path):
    model = tiny.tiny_lm(seed=4)  # never loaded from a folder: its config names no architecture
    distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "x"))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]


def test_export_of_a_model_whose_generation_config_transformers_refuses_to_save(
    dist, qwen_lm, tmp_path
):
    model, _ = trained(qwen_lm, 0, dist)
    model.generation_config = GenerationConfig(
        temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=[2, 4]
    )
    with pytest.raises(ValueError):
        model.generation_config.save_pretrained(tmp_path)
    distributed.export_hf(model, AutoTokenizer.from_pretrained(qwen_lm), str(tmp_path / "x"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert (
        stock.generation_config.eos_token_id == [2, 4]
        and stock.generation_config.temperature == 0.6
    )


@pytest.mark.parametrize("where_it_fails", ["weights", "tokenizer", "rename"])
def test_a_failing_export_leaves_the_previous_one(
    dist, qwen_lm, tmp_path, monkeypatch, where_it_fails
):
    model, optimizer = trained(qwen_lm, 0, dist)
    tokenizer = AutoTokenizer.from_pretrained(qwen_lm)
    target = tmp_path / "best"
    distributed.export_hf(model, tokenizer, str(target))
    before = {n: (target / n).read_bytes() for n in names(target)}
    step(model, optimizer)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "x")

    if where_it_fails == "weights":
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    elif where_it_fails == "tokenizer":
        monkeypatch.setattr(tokenizer, "save_pretrained", full)
    else:
        rename = os.rename
        monkeypatch.setattr(
            os,
            "rename",
            lambda a, b: full() if str(b) == str(target) and "old" not in str(a) else rename(a, b),
        )
    with pytest.raises(distributed.CheckpointError, match="best could not be written: .*No space"):
        distributed.export_hf(model, tokenizer, str(target))
    monkeypatch.undo()
    assert (
        names(tmp_path) == ["best"]
        and {n: (target / n).read_bytes() for n in names(target)} == before
    )
    distributed.export_hf(model, AutoTokenizer.from_pretrained(qwen_lm), str(target))
    assert (target / "model.safetensors").read_bytes() != before["model.safetensors"] and names(
        tmp_path
    ) == ["best"]
