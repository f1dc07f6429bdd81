"""LoRA: adapters beside a frozen model, the reference with the adapter off, merged weights in engines and files, PEFT's
format both ways, FSDP on one and two processes, SFT and GRPO whole runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_grpo import write_formatted_lm, write_world
from test_infer import exit_status, write_turns
from test_sft import Crash, crash_at, metrics, record
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import config
import data
import distributed
import grpo
import infer
import sft
import training
from engines.base import EngineConfig, Sampling
from lora import LoRAConfig, ModelError, adapter_base, add_adapter, starting_weights
from model import load_causal_lm, load_tokenizer, make_optimizer
from packing import token_logprobs
from prompts import encode_example, response_text
from rollout import open_engine
from runs import fingerprint, write_jsonl

peft = pytest.importorskip("peft")
ROOT = Path(__file__).resolve().parent.parent
LORA = LoRAConfig(r=4)
TOKENS = torch.randint(5, 261, (4, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(TOKENS)
MASK[1, 7:] = MASK[3, 10:] = 0
FAMILIES = [("qwen2", True), ("llama", False), ("qwen3", True)]


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """These are CPU tests, on a machine with a GPU too; those marked gpu excepted."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def dist(on_the_cpu):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield distributed.setup()
        distributed.cleanup()


@pytest.fixture(scope="module", params=FAMILIES, ids=[k for k, _ in FAMILIES])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    tiny.tiny_lm(path, *request.param, seed=3)
    return str(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    tiny.tiny_lm(path)
    return str(path)


def loss_of(model, rows=slice(None)):
    logprobs = token_logprobs(model, TOKENS[rows], MASK[rows])
    return -(logprobs * MASK[rows][:, 1:]).sum() / float(MASK[:, 1:].sum())


def step(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        distributed.clip_grad_norm(model, 1.0)
        optimizer.step()


def trained(folder, steps=3, shard=None, lora=LORA, **changes):
    """(model, optimizer) with an adapter that has moved."""
    model = load_causal_lm(folder, lora=lora, **changes)
    model = model if shard is None else distributed.shard_model(model, shard)
    optimizer = make_optimizer(model, 0.01)
    step(model, optimizer, steps)
    return model, optimizer


def logprobs_of(model):
    with torch.no_grad():
        return token_logprobs(model, TOKENS, MASK)


def weights(model) -> dict:
    return {n: t.clone() for n, t in distributed.full_parameters(model)}


def greedy(model, count=24):
    return model.generate(
        TOKENS[:1, :6],
        attention_mask=torch.ones(1, 6, dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    ).tolist()


# ------------------------------------------------------------------------------------------------------------ the adapter


def test_rank_64_on_all_linear_layers_of_qwen3_4b():
    with torch.device("meta"):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=151936,
                hidden_size=2560,
                intermediate_size=9728,
                num_hidden_layers=36,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                tie_word_embeddings=True,
            )
        )
        add_adapter(model, LoRAConfig(r=64))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 132_120_576
    assert model.peft_config["default"].lora_alpha == 128


def test_a_new_adapter_changes_nothing_and_is_the_same_everywhere(folder):
    state = torch.get_rng_state()
    base, model, again, other = (
        load_causal_lm(folder),
        *(load_causal_lm(folder, lora=LORA, seed=s) for s in (0, 0, 1)),
    )
    assert torch.equal(state, torch.get_rng_state())  # draws of its own
    assert torch.equal(logprobs_of(base), logprobs_of(model))
    a, b, c = (
        {n: p for n, p in m.named_parameters() if ".lora_" in n} for m in (model, again, other)
    )
    assert all(torch.equal(a[n], b[n]) for n in a) and not all(torch.equal(a[n], c[n]) for n in a)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters()) and {
        p.dtype for p in a.values()
    } == {torch.float32}
    named = {n.split(".lora_")[0].rpartition(".")[2] for n in a}
    assert (
        named == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        and len(a) == 2 * 2 * 7
    )  # not the head
    assert all(not p.any() for n, p in a.items() if "lora_B" in n)


def test_it_computes_w_plus_scaling_b_a(folder):
    """Against the formula, written out on the plain model's weights."""
    model, _ = trained(folder, lora=LoRAConfig(r=3, alpha=12))
    plain = load_causal_lm(folder)
    state = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        at = name.removesuffix(".weight")
        if f"{at}.lora_A.default.weight" in state:
            p.data += (
                4.0
                * state[f"{at}.lora_B.default.weight"].data
                @ state[f"{at}.lora_A.default.weight"].data
            )
    assert (logprobs_of(plain) - logprobs_of(model)).abs().max() < 1e-5
    assert (logprobs_of(plain) - logprobs_of(load_causal_lm(folder))).abs().max() > 0.01
    merged = weights(model)
    assert list(merged) == [n for n, _ in plain.named_parameters()]
    assert all((merged[n] - p).abs().max() < 1e-6 for n, p in plain.named_parameters())


def test_with_the_adapter_off_it_is_the_base_exactly_and_still_trains(folder):
    model, optimizer = trained(folder)
    before = logprobs_of(model)
    with starting_weights(model):
        assert torch.equal(logprobs_of(model), logprobs_of(load_causal_lm(folder)))
    assert torch.equal(logprobs_of(model), before)
    with pytest.raises(ZeroDivisionError), starting_weights(model):
        1 / 0
    assert torch.equal(logprobs_of(model), before) and all(
        p.requires_grad == (".lora_" in n) for n, p in model.named_parameters()
    )
    step(model, optimizer)
    assert not torch.equal(logprobs_of(model), before)
    plain = load_causal_lm(folder)
    with starting_weights(plain):  # a model without one: nothing happens
        assert all(p.requires_grad for p in plain.parameters())


def test_recomputed_activations_give_the_same_gradients(qwen):
    found = []
    for share in (0.0, 1.0):
        model, _ = trained(qwen, gradient_checkpointing=share)
        loss_of(model).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and all(
        torch.allclose(found[0][n], found[1][n], atol=1e-6) for n in found[0]
    )


# --------------------------------------------------------------------------------------------------- files, PEFT and merging


@pytest.fixture(scope="module")
def exported(qwen, tmp_path_factory):
    """(the model with its trained adapter, the adapter's folder)."""
    model, _ = trained(qwen)
    path = str(tmp_path_factory.mktemp("adapter") / "final")
    distributed.export_adapter(model, tiny.tiny_tokenizer(), path)
    return model, path


def test_peft_loads_what_is_exported(qwen, exported):
    model, path = exported
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(qwen), path)
    assert torch.equal(theirs(TOKENS).logits, model(TOKENS).logits)
    settings = json.loads(Path(path, "adapter_config.json").read_text())
    assert (
        settings["base_model_name_or_path"] == qwen
        and settings["r"] == 4
        and settings["lora_alpha"] == 8
    )
    assert (
        settings["peft_type"] == "LORA"
        and settings["task_type"] == "CAUSAL_LM"
        and settings["inference_mode"] is True
    )
    keys = list(load_file(os.path.join(path, "adapter_model.safetensors")))
    assert (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in keys and len(keys) == 28
    )
    assert tiny.tiny_tokenizer().get_vocab().items() <= load_tokenizer(path).get_vocab().items()


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_exports_loads_here(qwen, tmp_path, rslora):
    settings = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        use_rslora=rslora,
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(qwen), settings)
    torch.manual_seed(0)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    theirs.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        merged = load_causal_lm(str(tmp_path / "a"))
        assert (merged(TOKENS).logits - logits).abs().max() < 1e-5 and not any(
            ".lora_" in n for n, _ in merged.named_parameters()
        )
        unmerged = load_causal_lm(str(tmp_path / "a"), merge=False)
        assert torch.equal(unmerged(TOKENS).logits, logits)
    assert (
        load_tokenizer(str(tmp_path / "a")).get_vocab() == load_tokenizer(qwen).get_vocab()
    )  # the base's: it has none


def peft_adapter(base, folder, **settings):
    """An adapter that peft made, trained a little and wrote; returns its logits."""
    settings = (
        dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        | settings
    )
    torch.manual_seed(1)
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings)
    )
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p += 0.1 * torch.randn(p.shape)
        theirs.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert torch.allclose(again(TOKENS).logits, theirs(TOKENS).logits, atol=1e-4)
        return theirs(TOKENS).logits


@pytest.mark.parametrize(
    "settings",
    [
        dict(init_lora_weights="pissa"),
        dict(init_lora_weights="olora"),
        dict(init_lora_weights="orthogonal"),
        dict(init_lora_weights="gaussian", use_rslora=True),
        dict(use_dora=True),
        dict(rank_pattern={"down_proj": 2}),
        dict(alpha_pattern={"q_proj": 20}),
        dict(layers_to_transform=[1]),
        dict(exclude_modules="model.layers.0.mlp.down_proj"),
        dict(init_lora_weights="pissa", use_rslora=True),
    ],
    ids=lambda s: ",".join(s) + "=" + str([*s.values()][0]),
)
def test_what_an_adapters_settings_say_is_honoured(qwen, tmp_path, settings):
    """Of pissa and olora the base weights are changed too, of DoRA the lengths of rows."""
    logits = peft_adapter(qwen, tmp_path / "a", **settings)
    path = tmp_path / "a" / "adapter_config.json"  # a later peft writes fields that are off
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"a_field_of_tomorrow": None, "another": False})
    )
    with torch.no_grad():
        for merge in (True, False):
            ours = load_causal_lm(str(tmp_path / "a"), merge=merge)(TOKENS).logits
            assert (ours - logits).abs().max() < 1e-4
    base = load_causal_lm(qwen)(TOKENS).logits
    assert (logits - base).abs().max() > 0.1
    result = sft.main(
        sft.SFTConfig(stage="merge", model=str(tmp_path / "a"), out=str(tmp_path / "m"))
    )
    assert result["gap"] < 1e-4 and result["same"] > 0.9


@pytest.mark.parametrize(
    "settings",
    [dict(init_lora_weights="pissa"), dict(use_dora=True), dict(alpha_pattern={"q_proj": 20})],
)
def test_an_adapter_that_is_no_plain_product_is_merged_but_not_trained_further(
    qwen, tmp_path, settings
):
    peft_adapter(qwen, tmp_path / "a", **settings)
    with pytest.raises(ModelError, match=f"{[*settings][0]}=.* is not supported here.*stage=merge"):
        load_causal_lm(
            str(tmp_path / "a"), lora=LoRAConfig(r=4, alpha=6, target="q_proj,down_proj")
        )


def test_merging_rounds_once(qwen, exported):
    """W + scaling B A in float32, then bfloat16: not a rounded sum of rounded parts."""
    exact, half = (
        dict(load_causal_lm(exported[1], dtype).named_parameters())
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(exact[n].to(torch.bfloat16), half[n]) for n in exact)


def test_greedy_outputs_of_merged_and_unmerged_agree(qwen, exported, tmp_path):
    model, path = exported
    for dtype in (torch.float32, torch.bfloat16):
        distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "m"), dtype)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype)
        assert next(stock.parameters()).dtype == dtype
        unmerged = load_causal_lm(path, dtype, lora=LORA)
        with torch.no_grad():
            a, b = stock(TOKENS).logits.float(), unmerged(TOKENS).logits.float()
        if dtype == torch.float32:
            assert (a - b).abs().max() < 1e-5
            assert greedy(stock) == greedy(unmerged) != greedy(load_causal_lm(qwen))
        assert (a.argmax(-1) == b.argmax(-1))[MASK.bool()].double().mean() > 0.95 and (
            a - b
        ).abs().mean() < 0.05


def test_merge_command(qwen, exported, tmp_path):
    for dtype in ("float32", "bfloat16"):
        result = sft.main(
            sft.SFTConfig(
                stage="merge", model=exported[1], out=str(tmp_path / dtype), export_dtype=dtype
            )
        )
        assert (
            result["base"] == qwen
            and result["gap"] < (1e-5 if dtype == "float32" else 0.05)
            and result["same"] > 0.9
        )
    stock, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float32", output_loading_info=True
    )
    assert not any(report.values()) and torch.allclose(
        stock(TOKENS).logits, exported[0](TOKENS).logits, atol=1e-5
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(exported[1])
    for cfg, message in (
        (dict(model=qwen, out=str(tmp_path / "x")), "no adapter's folder"),
        (
            dict(model=str(tmp_path / "run"), out=str(tmp_path / "x")),
            "the run's adapter is model=.*run/final",
        ),
        (dict(model=exported[1], out=str(tmp_path / "float32")), "is there already"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            sft.main(sft.SFTConfig(stage="merge", **cfg))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_dora=True), "lora_magnitude_vector"),
        (dict(peft_type="LOHA"), "peft_type='LOHA'"),
        (dict(base_model_name_or_path=None), "names no base_model"),
        (None, "is damaged"),
        (
            dict(base_model_name_or_path="nowhere/at/all"),
            "the base model of .* at 'nowhere/at/all'",
        ),
        *[
            ({key: value}, f"{key}={re.escape(repr(value))} is not supported")
            for key, value in (
                ("modules_to_save", ["lm_head"]),
                ("bias", "all"),
                ("fan_in_fan_out", True),
                ("lora_bias", True),
                ("init_lora_weights", "pissa_niter_4"),
                ("init_lora_weights", "loftq"),
                ("init_lora_weights", "corda"),
                ("init_lora_weights", "lora_ga"),
                ("init_lora_weights", "of_tomorrow"),
                ("revision", "abc"),
                ("loftq_config", {"loftq_bits": 4}),
                ("layer_replication", [[0, 1], [0, 1]]),
                ("target_parameters", ["x"]),
                ("trainable_token_indices", [1]),
                ("alora_invocation_tokens", [1]),
                ("use_qalora", True),
                ("a_field_of_tomorrow", 3),
            )
        ],
    ],
)
def test_adapters_that_cannot_be_used(exported, tmp_path, change, message):
    folder = tmp_path / "a"
    subprocess.run(["cp", "-r", exported[1], str(folder)], check=True)
    path = folder / "adapter_config.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_causal_lm(str(folder))


def test_an_adapter_of_another_model_or_shape(exported, tmp_path):
    tiny.tiny_lm(tmp_path / "wide", hidden_size=64)
    folder = tmp_path / "a"
    subprocess.run(["cp", "-r", exported[1], str(folder)], check=True)
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "wide")}
        )
    )
    with pytest.raises(
        ModelError, match="weights do not fit .*wide .*; mend base_model_name_or_path"
    ):
        load_causal_lm(str(folder))
    for lora in (LoRAConfig(r=8), LoRAConfig(r=4, alpha=4), LoRAConfig(r=4, target="q_proj")):
        with pytest.raises(
            ModelError, match="is an adapter with r=4, alpha=8 on down_proj.*; lora asks for"
        ):
            load_causal_lm(exported[1], lora=lora)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds its weights there"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["lora.r=0"], "lora.r=0: it must be at least 1"),
        (["lora.alpha=32"], "lora.r=None: it must be given with alpha, dropout or target"),
        (["lora.r=4", "lora.dropout=1"], "below 1"),
        (["lora.r=4", "lora.alpha=0"], "lora.alpha=0"),
        (["lora.r=4", "lora.target=nothing"], "lora.target='nothing'"),
        (["lora.r=4", "lora.target=lm_head"], "names the embeddings or the head"),
    ],
)
def test_bad_settings(qwen, tmp_path, capsys, arguments, message):
    write_jsonl(str(tmp_path / "r.jsonl"), [record(i) for i in range(3)])
    words = [
        "stage=train",
        f"model={qwen}",
        f"records={tmp_path / 'r.jsonl'}",
        f"out={tmp_path / 'o'}",
        *arguments,
    ]
    status, err = exit_status(words, capsys, sft, sft.SFTConfig)
    assert status == 2 and message in err


COPIED = """
import sys
import lora, torch, transformers
config = transformers.Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                  num_attention_heads=2, num_key_value_heads=2)
lm, tokens = transformers.Qwen2ForCausalLM(config).eval(), torch.tensor([[7, 8, 9, 10]])
before = lm(tokens).logits
lora.add_adapter(lm, lora.LoRAConfig(r=2))
trained = [p for p in lm.parameters() if p.requires_grad]
assert torch.equal(lm(tokens).logits, before) and len(trained) == 28
lm(tokens).logits[0, 0, 5].backward()
for p in trained:
    p.data -= 0.1 * p.grad
after = lm(tokens).logits
with lora.starting_weights(lm):
    assert torch.equal(lm(tokens).logits, before)
lora.merge_adapter(lm)
assert (lm(tokens).logits - after).abs().max() < 1e-5 < (after - before).abs().max()
print(sorted(set(sys.modules) & {"config", "data", "model", "packing", "distributed", "grpo", "rollout"}))
"""


def test_lora_py_works_copied_alone_into_an_empty_folder(tmp_path):
    assert tiny.run_copied("lora.py", tmp_path, COPIED) == "[]"


# ------------------------------------------------------------------------------------------------------------ engines


def probe(engine):
    return engine.generate([TOKENS[0, :6].tolist()], Sampling(max_tokens=12, temperature=0.0))[0]


def test_a_thousand_syncs_leave_the_frozen_weights_as_they_were(qwen):
    model = load_causal_lm(qwen, torch.bfloat16, lora=LORA)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    first = weights(model)
    for _ in range(1000):
        for _ in distributed.full_parameters(model):
            pass
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters())
    assert all(torch.equal(value, first[n]) for n, value in distributed.full_parameters(model))
    merged = {n for n, v in first.items() if v.dtype == torch.float32}
    assert len(merged) == 14 and all(
        "proj" in n for n in merged
    )  # merged in float32, sent in the engine's dtype


def test_the_engine_follows_every_update(dist, qwen):
    model, optimizer = trained(qwen, shard=dist)
    engine = open_engine(EngineConfig(), qwen, tiny.tiny_tokenizer(), [2], 0, torch.device("cpu"))
    seen = [probe(engine)]
    for _ in range(2):
        engine.sync_weights(distributed.full_parameters(model))
        rollout = probe(engine)
        tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        with torch.no_grad():
            ours = token_logprobs(model, tokens, torch.ones_like(tokens))[0, 5:]
            with starting_weights(model):
                base = token_logprobs(model, tokens, torch.ones_like(tokens))[0, 5:]
        engines = torch.tensor(rollout.logprobs)
        assert (ours - engines).abs().max() < 1e-4 and (base - engines).abs().mean() > 0.05
        assert all(rollout.logprobs != earlier.logprobs for earlier in seen)
        seen.append(rollout)
        step(model, optimizer, 3)


def test_an_engine_and_infer_take_an_adapters_folder(qwen, exported, tmp_path):
    model, path = exported
    distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "m"))
    engines = [
        open_engine(EngineConfig(), f, tiny.tiny_tokenizer(), [2], 0, torch.device("cpu"))
        for f in (path, str(tmp_path / "m"), qwen)
    ]
    assert (
        probe(engines[0]).response_ids
        == probe(engines[1]).response_ids
        != probe(engines[2]).response_ids
    )
    empty = open_engine(
        EngineConfig(), path, tiny.tiny_tokenizer(), [2], 0, torch.device("cpu"), weights=False
    )
    empty.sync_weights(distributed.full_parameters(model))
    assert probe(empty).response_ids == probe(engines[0]).response_ids
    turns = write_turns(tmp_path / "t.jsonl", {"q0": "who?"})
    for name, folder in (("a", path), ("b", str(tmp_path / "m"))):
        infer.main(
            infer.InferConfig(
                model=folder,
                turns=turns,
                out=str(tmp_path / f"{name}.jsonl"),
                max_response_tokens=8,
            )
        )
    rows = [
        [row["response"] for _, row in data.read_jsonl(str(tmp_path / f"{name}.jsonl"))]
        for name in "ab"
    ]
    assert rows[0] == rows[1]
    assert fingerprint(path) != fingerprint(qwen)


def test_an_engine_that_never_gets_the_adapter_is_noticed():
    training.check_engine_follows(0.004, 0.001, 0.3)  # rounding alone
    training.check_engine_follows(0.03, 0.4, 0.3)  # moved, and the engine with it
    training.check_engine_follows(0.2, float("nan"), 0.3)  # no reference to compare with
    for gaps in ((0.1, 0.03, 0.3), (0.01, 0.00001, 0.02)):
        with pytest.raises(grpo.Stopped, match="the weights that are sent do not reach it"):
            training.check_engine_follows(*gaps)


@pytest.mark.vllm
@pytest.mark.gpu
def test_vllm_gets_the_merged_weights(tmp_path):
    """On a GPU: tokens and log-probabilities of vLLM after a sync are the adapter's, not the base's."""
    tiny.tiny_lm(tmp_path / "lm", hidden_size=256, intermediate_size=512, head_dim=64)
    model = load_causal_lm(str(tmp_path / "lm"), torch.bfloat16, "cuda", lora=LoRAConfig(r=8))
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    engine = open_engine(
        EngineConfig("vllm", gpu_memory=0.2),
        str(tmp_path / "lm"),
        tiny.tiny_tokenizer(),
        [2],
        0,
        torch.device("cuda"),
        256,
        dtype=torch.bfloat16,
        weights=False,
    )
    engine.sync_weights(distributed.full_parameters(model))
    rollout = probe(engine)
    tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids], device="cuda")
    with torch.no_grad():
        ours = token_logprobs(model, tokens, torch.ones_like(tokens))[0, 5:].cpu()
        with starting_weights(model):
            base = token_logprobs(model, tokens, torch.ones_like(tokens))[0, 5:].cpu()
    engines = torch.tensor(rollout.logprobs)
    assert (
        (ours - engines).abs().mean()
        < 0.1
        < 3 * (ours - engines).abs().mean() + 0.1
        < (base - engines).abs().mean()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_sharded_in_bfloat16(dist, tmp_path, compiled):
    """A bfloat16 base with float32 adapters under FSDP, layers compiled or not: it learns, the reference stays, the
    engine follows."""
    tiny.tiny_lm(tmp_path / "lm", hidden_size=128, intermediate_size=256)
    model = load_causal_lm(
        str(tmp_path / "lm"), torch.bfloat16, "cpu", lora=LORA, compiled=compiled
    ).to("cuda")
    distributed.shard_model(model, dist, bf16=True, gather_once=True)
    base = load_causal_lm(str(tmp_path / "lm"), torch.bfloat16, "cuda")
    groups = (torch.full((4,), 3), torch.arange(4))
    inputs = dict(tokens=TOKENS, attention_mask=MASK, positions=MASK[:, 1:].bool(), groups=groups)
    with torch.no_grad():
        with starting_weights(model):
            start = token_logprobs(model, **inputs)
        assert (start - token_logprobs(base, **inputs)).abs().mean() < 0.1
    distributed.reshard(model)
    optimizer, losses = make_optimizer(model, 0.01), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = -token_logprobs(model, **inputs).sum() / float(MASK[:, 1:].sum())
        loss.backward()
        losses.append(float(loss.detach()))
        assert 0 < distributed.clip_grad_norm(model, 1.0) < float("inf")
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5 and {
        p.dtype for p in model.parameters() if p.requires_grad
    } == {torch.float32}
    with torch.no_grad(), starting_weights(model):
        assert (
            token_logprobs(model, **inputs) - start
        ).abs().mean() < 0.01  # not a weight of it has moved
    distributed.reshard(model)
    engine = open_engine(
        EngineConfig(),
        str(tmp_path / "lm"),
        tiny.tiny_tokenizer(),
        [2],
        0,
        torch.device("cuda"),
        256,
        dtype=torch.bfloat16,
    )
    untrained = probe(engine)
    engine.sync_weights(distributed.full_parameters(model, torch.bfloat16))
    rollout = probe(engine)
    tokens = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    with torch.no_grad():
        ours = token_logprobs(model, tokens, torch.ones_like(tokens))[0, 5:].cpu()
    assert (
        ours - torch.tensor(rollout.logprobs)
    ).abs().mean() < 0.15 and rollout.response_ids != untrained.response_ids
    distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "m"), torch.bfloat16)
    distributed.export_adapter(model, tiny.tiny_tokenizer(), str(tmp_path / "a"))
    result = sft.merge(
        sft.SFTConfig(
            stage="merge",
            model=str(tmp_path / "a"),
            out=str(tmp_path / "n"),
            export_dtype="bfloat16",
        ),
        dist,
    )
    assert result["gap"] < 0.1 and result["same"] > 0.9


@pytest.mark.gpu
def test_grpo_run_from_an_adapter_on_a_gpu(world):
    grpo_run(world, "gpu", "sft", steps=3)
    steps = [row for row in rows_of(world, "gpu") if row["step"]]
    assert (
        abs(steps[0]["kl"]) < 1e-3
        and steps[-1]["kl"] > steps[0]["kl"]
        and all(row["engine_gap"] < 0.3 for row in steps)
    )


# ------------------------------------------------------------------------------------------------------------ processes


def test_one_process_fsdp_is_the_plain_model(dist, folder):
    (plain, a), (sharded, b) = trained(folder), trained(folder, shard=dist)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    one, two = weights(plain), weights(sharded)
    assert list(one) == list(two) and all(torch.allclose(one[n], two[n], atol=1e-6) for n in one)
    assert len(a.state) == len(b.state) == 28  # moments of the adapter alone
    before = logprobs_of(sharded)
    with starting_weights(sharded):
        assert torch.equal(logprobs_of(sharded), logprobs_of(load_causal_lm(folder)))
    assert torch.equal(logprobs_of(sharded), before)


def test_the_reference_first_then_training(dist, qwen):
    """FSDP takes over requires_grad at the first pass: it must not be the one with the adapter switched off."""
    model = distributed.shard_model(load_causal_lm(qwen, lora=LORA), dist, gather_once=True)
    with starting_weights(model):
        logprobs_of(model)
    distributed.reshard(model)
    optimizer = make_optimizer(model, 0.01)
    step(model, optimizer, 3)
    plain = trained(qwen)[0]
    one, two = weights(plain), weights(model)
    assert all(torch.allclose(one[n], two[n], atol=1e-6) for n in one)


def test_a_bfloat16_base_with_float32_adapters(dist, qwen):
    """As on a GPU: the base is frozen in bfloat16 and stays as it is, adapters and their gradients are float32."""
    model = distributed.shard_model(
        load_causal_lm(qwen, torch.bfloat16, lora=LORA), dist, bf16=True
    )
    frozen = {
        n: distributed.full_tensor(p.detach()).clone()
        for n, p in model.named_parameters()
        if not p.requires_grad
    }
    assert (
        {p.dtype for n, p in model.named_parameters() if ".lora_" in n}
        == {torch.float32}
        != {v.dtype for v in frozen.values()}
    )
    optimizer = make_optimizer(model, 0.01)
    first = float(loss_of(model).detach())
    loss_of(model).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    optimizer.zero_grad()
    step(model, optimizer, 5)
    assert float(loss_of(model).detach()) < first - 0.2
    assert all(
        torch.equal(distributed.full_tensor(p.detach()), frozen[n])
        for n, p in distributed._named_parameters(model)
        if n in frozen
    )
    full = load_causal_lm(qwen, torch.bfloat16)
    with starting_weights(model):
        assert (logprobs_of(model) - logprobs_of(full)).abs().max() < 1e-6


WORKER = """
import json, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
import distributed, tiny
from lora import starting_weights
from model import load_causal_lm, make_optimizer
from test_lora import LORA, TOKENS, MASK, loss_of, logprobs_of, weights
torch.set_num_threads(1)
out, dist = sys.argv[1], distributed.setup()
model = distributed.shard_model(load_causal_lm(os.path.join(out, "lm"), lora=LORA), dist)
optimizer = make_optimizer(model, 0.01)
norms = []
for _ in range(2):
    optimizer.zero_grad()
    (loss_of(model, slice(dist.rank, None, 2)) * 2).backward()
    norms.append(distributed.clip_grad_norm(model, 0.5))
    optimizer.step()
state = weights(model)
with starting_weights(model):
    base = logprobs_of(model)
folder = distributed.save_checkpoint(out, 2, model, optimizer, {{}})
distributed.export_adapter(model, tiny.tiny_tokenizer(), os.path.join(out, "adapter"))
if dist.rank == 0:
    torch.save({{"weights": state, "norms": norms, "base": base, "after": logprobs_of(model)}}, os.path.join(out, "two.pt"))
else:
    logprobs_of(model)
distributed.cleanup()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    tiny.tiny_lm(out / "lm")
    (out / "worker.py").write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(out / "worker.py"),
            str(out),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out, torch.load(out / "two.pt")


def test_two_processes_take_the_steps_of_one(two, dist):
    out, theirs = two
    model = load_causal_lm(str(out / "lm"), lora=LORA)
    optimizer, norms = make_optimizer(model, 0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        norms.append(distributed.clip_grad_norm(model, 0.5))
        optimizer.step()
    assert theirs["norms"] == pytest.approx(norms, rel=1e-4)
    ours = weights(model)
    assert list(ours) == list(theirs["weights"]) and all(
        torch.allclose(ours[n], v, atol=2e-5) for n, v in theirs["weights"].items()
    )
    assert (theirs["after"] - logprobs_of(model)).abs().max() < 1e-3
    assert (theirs["base"] - logprobs_of(load_causal_lm(str(out / "lm")))).abs().max() < 1e-5
    assert (
        logprobs_of(load_causal_lm(str(out / "adapter"))) - theirs["after"]
    ).abs().max() < 1e-4  # exported whole


def test_a_checkpoint_of_two_is_loaded_by_one_and_holds_the_adapter_alone(two, dist):
    out, theirs = two
    model = distributed.shard_model(load_causal_lm(str(out / "lm"), lora=LORA, seed=9), dist)
    optimizer = make_optimizer(model, 0.01)
    distributed.load_checkpoint(str(out / "checkpoint_000002"), model, optimizer)
    ours = weights(model)
    assert all(torch.allclose(ours[n], v, atol=1e-7) for n, v in theirs["weights"].items())
    assert all(float(s["step"]) == 2 for s in optimizer.state.values())
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(str(out / "checkpoint_000002")).read_metadata().state_dict_metadata
    assert sum(n.startswith("model.") for n in names) == 28 and all(".lora_" in n for n in names)


# ------------------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture
def short_prompt(monkeypatch):
    monkeypatch.setattr("prompts.INSTRUCTION", "Rewrite.")


def sft_config(lm, records, output, **changes):
    values = dict(
        stage="train",
        model=lm,
        records=records,
        out=str(output),
        epochs=2,
        lr=1e-2,
        sequences_per_step=3,
        micro_batch_tokens=600,
        heldout_fraction=0.25,
        save_every=1,
        lora=LoRAConfig(r=4, dropout=0.1),
    )
    return sft.SFTConfig(**values | changes)


def test_sft_run_resumes_bit_for_bit_and_goes_on_with_its_adapter(
    qwen, tmp_path, monkeypatch, short_prompt
):
    """Dropout and all: a crash behind step 3, then the same numbers and the same adapter."""
    path = str(tmp_path / "r.jsonl")
    write_jsonl(path, [record(i) for i in range(7)])
    whole = sft.main(sft_config(qwen, path, tmp_path / "whole"))["train"]
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_at(patch, 3)
        sft.main(sft_config(qwen, path, tmp_path / "run"))
    sft.main(sft_config(qwen, path, tmp_path / "run"))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    files = [
        (tmp_path / name / "final/adapter_model.safetensors").read_bytes()
        for name in ("run", "whole")
    ]
    assert (
        files[0] == files[1]
        and whole["heldout_loss"] < metrics(tmp_path / "whole")[0]["heldout_loss"]
    )
    with pytest.raises(data.DataError, match="lora.dropout was 0.1 and is 0.0.*overwrite=true"):
        sft.main(sft_config(qwen, path, tmp_path / "whole", lora=LORA))
    # from the adapter, without merging it: the held-out loss begins dist it ended
    again = sft.main(sft_config(whole["model"], path, tmp_path / "again", epochs=1, seed=0))[
        "train"
    ]
    assert metrics(tmp_path / "again")[0]["heldout_loss"] == pytest.approx(
        whole["heldout_loss"], rel=1e-6
    )
    assert (
        json.loads(Path(again["model"], "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
        == qwen
    )
    plain = sft.main(
        sft_config(whole["model"], path, tmp_path / "full", epochs=1, lora=LoRAConfig())
    )["train"]  # all weights, from the merged
    assert metrics(tmp_path / "full")[0]["heldout_loss"] == pytest.approx(
        whole["heldout_loss"], rel=1e-5
    )
    assert Path(plain["model"], "model.safetensors").exists()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, a model that keeps the form, and an adapter on it that prefers one answer (an SFT adapter)."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    write_formatted_lm(folder / "lm")
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = "{{ '!' }}"  # token 5
    tokenizer.save_pretrained(folder / "lm")
    model = load_causal_lm(str(folder / "lm"), lora=LORA)
    optimizer = make_optimizer(model, 5e-3)
    ids, mask = encode_example(tokenizer, [5], response_text("a", "alpha3"), 2)
    for _ in range(3):
        logprobs = token_logprobs(
            model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)
        )
        (-(logprobs * torch.tensor(mask)).sum() / sum(mask)).backward()
        optimizer.step()
        optimizer.zero_grad()
    distributed.export_adapter(model, tokenizer, str(folder / "sft"))
    return folder


def grpo_run(world, out, model, **changes):
    cfg = grpo.GRPOConfig(
        model=str(world / model),
        train=str(world / "train.jsonl"),
        dev=str(world / "dev.jsonl"),
        out=str(world / out),
        prompts_per_step=4,
        group_size=4,
        max_response_tokens=64,
        micro_batch_tokens=256,
        steps=3,
        validate_every=2,
        save_every=1,
        lr=1e-2,
        warmup_steps=1,
        kl_coef=0.01,
        lora=LORA,
    )
    cfg.retriever.kind, cfg.retriever.corpus = "bm25", str(world / "corpus.jsonl")
    for key, value in changes.items():
        setattr(cfg, key, value)
    try:
        return grpo.main(cfg)
    finally:
        distributed.cleanup()


def rows_of(world, out):
    return [
        {k: v for k, v in row.items() if not k.startswith("seconds_")}
        for _, row in data.read_jsonl(str(world / out / "metrics.jsonl"))
    ]


def test_rl_from_an_sft_adapter_has_that_adapter_as_its_reference(world):
    """KL at the first step is 0; to the bare base model it would not be.  The engine is the trained policy throughout."""
    result = grpo_run(world, "rl", "sft", lr=5e-2)
    steps = [row for row in rows_of(world, "rl") if row["step"]]
    assert abs(steps[0]["kl"]) < 1e-4 and steps[0]["start_gap"] == pytest.approx(
        steps[0]["engine_gap"], abs=1e-6
    )
    assert steps[-1]["kl"] > 1e-3 and steps[-1]["start_gap"] > 10 * steps[-1]["engine_gap"]
    assert all(row["engine_gap"] < 1e-3 for row in steps)
    base, start, final = (
        load_causal_lm(str(p)) for p in (world / "lm", world / "sft", result["final"])
    )
    tokens = torch.tensor(
        [encode_example(tiny.tiny_tokenizer(), [5], response_text("a", "alpha3"), 2)[0]]
    )
    one = torch.ones_like(tokens)
    assert (
        token_logprobs(base, tokens, one) - token_logprobs(start, tokens, one)
    ).abs().mean() > 0.01
    assert (
        token_logprobs(final, tokens, one) - token_logprobs(start, tokens, one)
    ).abs().mean() > 0.01
    assert adapter_base(result["final"]) == str(world / "lm") == adapter_base(str(world / "sft"))
    peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(world / "lm"), result["final"]
    )
    assert not any(
        ".start." in key
        for key in load_file(os.path.join(result["final"], "adapter_model.safetensors"))
    )


def test_grpo_run_from_a_plain_model_resumes_bit_for_bit(world):
    grpo_run(world, "whole", "lm", steps=4)
    grpo_run(world, "parts", "lm", steps=2)
    (world / "parts/final").rename(world / "parts/first")
    grpo_run(world, "parts", "lm", steps=4)
    whole, parts = rows_of(world, "whole"), rows_of(world, "parts")
    keys = ("reward", "kl", "loss", "grad_norm", "entropy", "engine_gap")
    assert [[row[k] for k in keys] for row in whole if row["step"]] == [
        [row[k] for k in keys] for row in parts if row["step"]
    ]
    final = [
        load_file(world / name / "final/adapter_model.safetensors") for name in ("whole", "parts")
    ]
    assert all(torch.equal(final[0][k], final[1][k]) for k in final[0]) and any(
        v.any() for k, v in final[0].items() if "lora_B" in k
    )
    assert abs(whole[1]["kl"]) < 1e-6 and whole[-1]["kl"] > 0  # the reference: its adapter off


def test_dropout_has_no_place_in_grpo(world):
    with pytest.raises(config.ConfigError, match="lora.dropout=0.1: .*set lora.dropout=0"):
        grpo_run(world, "x", "lm", lora=LoRAConfig(r=4, dropout=0.1))
