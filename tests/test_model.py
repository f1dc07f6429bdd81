"""model.py: token_logprobs against a float64 loop, whatever the padding, the chunks and the family; loading; schedules.

The oracle runs each sequence alone, unpadded, through the stock model's own forward in float64.
"""

from __future__ import annotations

import ast
import json
import math
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lora import LoRAConfig, ModelError, adapter_dropout, add_adapter
from model import load_causal_lm, load_tokenizer, lr_at, make_optimizer, prepare_causal_lm
from packing import token_logprobs

ROOT = Path(__file__).resolve().parent.parent
KINDS = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("qwen3", False),
    ("llama", True),
    ("llama", False),
]
LENGTHS = [9, 6, 2, 12]  # T + 1 of each sequence, before padding


@pytest.fixture(
    scope="module", params=KINDS, ids=[f"{k}-{'tied' if t else 'untied'}" for k, t in KINDS]
)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    tiny.tiny_lm(path, *request.param, seed=3)
    return str(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    tiny.tiny_lm(path)
    return str(path)


def sequences(lengths=LENGTHS, seed=0, low=5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, 261, (n,), generator=generator).tolist() for n in lengths]


def pad(rows, side, fill=0):
    """Token lists → tokens (B, T+1), attention_mask (B, T+1)."""
    width = max(map(len, rows))
    blank = [[fill] * (width - len(r)) for r in rows]
    pads = [[0] * len(b) for b in blank]
    ones = [[1] * len(r) for r in rows]
    if side == "right":
        return torch.tensor([r + b for r, b in zip(rows, blank)]), torch.tensor(
            [o + p for o, p in zip(ones, pads)]
        )
    return torch.tensor([b + r for r, b in zip(rows, blank)]), torch.tensor(
        [p + o for o, p in zip(ones, pads)]
    )


def real(values, rows, side):
    """The entries of (B, T) that predict a real token from a real one, a list a sequence."""
    width = values.shape[1]
    return [
        v[: len(r) - 1] if side == "right" else v[width - len(r) + 1 :]
        for v, r in zip(values, rows)
    ]


def oracle(model, rows, temperature=1.0):
    """A loop over single positions in float64: (log-probabilities, entropies), a list of floats a sequence."""
    logprobs, entropies = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0].detach() / temperature
        p = torch.log_softmax(logits, -1)
        logprobs.append([float(p[t, row[t + 1]]) for t in range(len(row) - 1)])
        entropies.append(
            [-sum(float(x) * math.exp(float(x)) for x in p[t]) for t in range(len(row) - 1)]
        )
    return logprobs, entropies


# ------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_float64_loop_on_either_padding(folder, temperature):
    rows = sequences()
    logprobs, entropies = oracle(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), rows, temperature
    )
    model = load_causal_lm(folder)
    for side in ("right", "left"):
        with torch.no_grad():
            got, entropy = token_logprobs(model, *pad(rows, side), temperature, with_entropy=True)
        assert (
            got.shape == entropy.shape == (len(rows), max(LENGTHS) - 1)
            and got.dtype == entropy.dtype == torch.float32
        )
        assert torch.isfinite(got).all() and torch.isfinite(entropy).all()
        for values, wanted in ((got, logprobs), (entropy, entropies)):
            for a, b in zip(real(values, rows, side), wanted):
                torch.testing.assert_close(
                    a.double(), torch.tensor(b, dtype=torch.float64), atol=2e-5, rtol=0
                )
    assert (
        min(map(min, entropies)) > 0.1 and max(map(max, logprobs)) - min(map(min, logprobs)) > 1
    )  # the oracle is not flat


def test_temperature_changes_the_result(qwen):
    model, batch = load_causal_lm(qwen), pad(sequences(), "right")
    with torch.no_grad():
        assert (
            token_logprobs(model, *batch, 1.0) - token_logprobs(model, *batch, 0.7)
        ).abs().max() > 0.1
    for bad in (0, -1.0):
        with pytest.raises(ValueError, match="above 0"):
            token_logprobs(model, *batch, bad)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_content_and_width_never_matter(folder, side):
    rows, model = sequences(), load_causal_lm(folder)
    with torch.no_grad():
        plain = real(token_logprobs(model, *pad(rows, side, fill=0)), rows, side)
        eos = real(token_logprobs(model, *pad(rows, side, fill=2)), rows, side)  # pad = eos
        tokens, mask = pad(rows + sequences([30], seed=9), side, fill=77)
        wide = real(token_logprobs(model, tokens, mask)[:-1], rows, side)
    for a, b, c in zip(plain, eos, wide):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_eos_inside_a_sequence_is_a_token_like_any_other(qwen, side):
    rows = sequences()
    rows[1][2], rows[3][0], rows[3][-1], rows[0][5] = (
        2,
        2,
        2,
        0,
    )  # eos and pad ids in the middle, and at both ends
    wanted, _ = oracle(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float64).eval(), rows)
    with torch.no_grad():
        got = token_logprobs(load_causal_lm(qwen), *pad(rows, side, fill=2))
    for a, b in zip(real(got, rows, side), wanted):
        torch.testing.assert_close(a, torch.tensor(b), atol=2e-5, rtol=0)


def test_positions_choose_where_the_head_runs(qwen, monkeypatch):
    model, (tokens, mask) = load_causal_lm(qwen), pad(sequences(), "right")
    keep = torch.zeros(4, 11, dtype=torch.bool)
    keep[0, 3:8] = keep[3, 10] = keep[3, 0] = True
    heads = []
    model.get_output_embeddings().register_forward_hook(
        lambda m, args, out: heads.append(out.shape)
    )
    with torch.no_grad():
        every, entropy = token_logprobs(model, tokens, mask, with_entropy=True)
        heads.clear()
        for positions in (keep, keep.long()):
            some, some_entropy = token_logprobs(
                model, tokens, mask, positions=positions, with_entropy=True
            )
            torch.testing.assert_close(some, torch.where(keep, every, 0.0), atol=1e-5, rtol=0)
            torch.testing.assert_close(
                some_entropy, torch.where(keep, entropy, 0.0), atol=1e-5, rtol=0
            )
    assert sum(s[0] for s in heads) == 2 * int(keep.sum())


def test_one_predicted_position(qwen):
    rows = sequences([2, 2])
    wanted, _ = oracle(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float64).eval(), rows)
    with torch.no_grad():
        got = token_logprobs(load_causal_lm(qwen), *pad(rows, "right"))
    torch.testing.assert_close(got, torch.tensor(wanted), atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------ gradients, memory


def gradients(model, weights, tokens, mask, naive, positions=None):
    """Gradients of Σ weights · log-probabilities + entropies / 7, by token_logprobs or the plain way, by parameter name."""
    model.zero_grad()
    if naive:
        position_ids = (mask[:, :-1].cumsum(-1) - 1).clamp(min=0)
        logits = (
            model(
                input_ids=tokens[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=position_ids,
                use_cache=False,
            ).logits
            / 0.7
        )
        p = torch.log_softmax(logits.float(), -1)
        logprobs, entropy = p.gather(-1, tokens[:, 1:, None])[..., 0], -(p.exp() * p).sum(-1)
    else:
        logprobs, entropy = token_logprobs(model, tokens, mask, 0.7, positions, with_entropy=True)
    ((logprobs + entropy / 7) * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(a, b, atol=2e-5):
    assert a.keys() == b.keys() and len(a) > 5
    for name in a:
        torch.testing.assert_close(
            a[name],
            b[name],
            atol=atol * max(1.0, float(b[name].abs().max())),
            rtol=0,
            msg=lambda m: f"{name}: {m}",
        )


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradients_equal_the_plain_computation(folder, side):
    rows = sequences()
    tokens, mask = pad(rows, side)
    weights = torch.zeros(tokens.shape[0], tokens.shape[1] - 1)
    for w in real(weights, rows, side):
        w.copy_(torch.randn(len(w), generator=torch.Generator().manual_seed(len(w))))
    model = load_causal_lm(folder)
    plain = gradients(model, weights, tokens, mask, naive=True)
    assert max(float(g.abs().max()) for g in plain.values()) > 0.1
    close(gradients(model, weights, tokens, mask, naive=False), plain)
    close(gradients(model, weights, tokens, mask, naive=False, positions=weights != 0), plain)


@pytest.mark.parametrize("chunk", [1, 3, 44])
def test_chunks_change_nothing_and_bound_the_head(qwen, monkeypatch, chunk):
    model, (tokens, mask) = load_causal_lm(qwen), pad(sequences(), "right")
    weights = torch.randn(4, 11, generator=torch.Generator().manual_seed(1)) * mask[:, 1:]
    whole = gradients(model, weights, tokens, mask, naive=False)
    with torch.no_grad():
        values = token_logprobs(model, tokens, mask)
    rows = []
    model.get_output_embeddings().register_forward_hook(
        lambda m, args, out: rows.append(out.shape[:-1].numel())
    )
    monkeypatch.setattr("packing.CHUNK_TOKENS", chunk)
    close(gradients(model, weights, tokens, mask, naive=False), whole)
    # once forward, once more in the backward pass; a single chunk is kept
    assert max(rows) <= chunk and sum(rows) == (44 if chunk == 44 else 2 * 44)
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(model, tokens, mask), values, atol=1e-5, rtol=0)


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass(qwen, monkeypatch):
    """Neither saved by autograd nor returned by any operation: nothing as large as M × V exists once chunks are smaller."""
    monkeypatch.setattr("packing.CHUNK_TOKENS", 4)
    model, (tokens, mask) = load_causal_lm(qwen), pad(sequences(), "right")
    largest, saved = [], []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and value.shape[-1] == 261
                    and value.shape != (32, 261)
                ):
                    largest.append(value.numel())
            return out

    with (
        Watch(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t),
    ):
        logprobs, entropy = token_logprobs(model, tokens, mask, with_entropy=True)
        in_forward = list(saved)
        (logprobs + entropy).sum().backward()
    assert max(largest) == 4 * 261  # 44 rows in all; (32, 261) is the head's own matrix
    assert not any(len(s) and s[-1] == 261 for s in in_forward)


def test_gradient_checkpointing_recomputes_the_layers_and_changes_nothing(folder):
    (tokens, mask), results = pad(sequences(), "right"), []
    weights = torch.randn(4, 11, generator=torch.Generator().manual_seed(1)) * mask[:, 1:]
    for checkpointing in (False, True):
        model = load_causal_lm(folder, gradient_checkpointing=checkpointing)
        model.train()  # transformers recomputes in training mode only
        calls = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *a: calls.append(1))
        results.append(gradients(model, weights, tokens, mask, naive=False))
        assert len(calls) == (2 if checkpointing else 1)
    close(*results, atol=1e-6)


def test_nothing_to_predict_still_has_a_backward_pass(qwen):
    model, (tokens, mask) = load_causal_lm(qwen), pad(sequences(), "right")
    logprobs, entropy = token_logprobs(
        model, tokens, mask, positions=torch.zeros(4, 11), with_entropy=True
    )
    assert logprobs.shape == (4, 11) and not logprobs.any() and not entropy.any()
    logprobs.sum().backward()
    grads = [p.grad for n, p in model.named_parameters() if "layers" in n]
    assert all(g is not None and not g.any() for g in grads)


def test_inputs_are_not_changed(qwen):
    tokens, mask = pad(sequences(), "left")
    before = tokens.clone(), mask.clone()
    token_logprobs(load_causal_lm(qwen), tokens, mask).sum().backward()
    assert torch.equal(tokens, before[0]) and torch.equal(mask, before[1])


def test_bool_mask_and_a_row_of_padding_alone(qwen):
    rows = sequences([6, 4])
    for side in ("right", "left"):
        tokens, mask = pad(rows, side)
        tokens, mask = (
            torch.cat([tokens, tokens[:1]]),
            torch.cat([mask, torch.zeros_like(mask[:1])]),
        )
        model = load_causal_lm(qwen)
        with torch.no_grad():
            alone = token_logprobs(model, *pad(rows, side))
        got = token_logprobs(model, tokens, mask.bool())
        for a, b in zip(real(got[:2], rows, side), real(alone, rows, side)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert torch.isfinite(got).all()
        sum(r.sum() for r in real(got[:2], rows, side)).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------ loading


def test_dropout_is_forced_to_zero_in_training_mode_too(tmp_path):
    tiny.tiny_lm(tmp_path / "a", attention_dropout=0.5)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ).save_pretrained(tmp_path / "b")
    for name in ("a", "b"):
        model = load_causal_lm(str(tmp_path / name))
        assert not model.training
        with torch.no_grad():
            still = token_logprobs(model, *pad(sequences(), "right"))
            moving = token_logprobs(model.train(), *pad(sequences(), "right"))
        torch.testing.assert_close(still, moving, atol=1e-6, rtol=0)


def test_a_family_whose_body_has_another_name(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=261, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2
        )
    ).save_pretrained(tmp_path)
    rows = sequences()
    wanted, _ = oracle(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval(), rows
    )
    for side in ("right", "left"):
        with torch.no_grad():
            got = token_logprobs(load_causal_lm(str(tmp_path)), *pad(rows, side))
        for a, b in zip(real(got, rows, side), wanted):
            torch.testing.assert_close(a, torch.tensor(b), atol=2e-5, rtol=0)


def test_dtype_and_tied_weights(folder):
    model = load_causal_lm(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ) == model.config.tie_word_embeddings
    with torch.no_grad():
        got = token_logprobs(model, *pad(sequences(), "right"))
        exact = token_logprobs(load_causal_lm(folder), *pad(sequences(), "right"))
    assert got.dtype == torch.float32 and 0 < (got - exact).abs().max() < 1.5


@pytest.mark.parametrize(
    "key, value, refused",
    [
        ("final_logit_softcapping", 30.0, True),
        ("logit_scale", 0.5, True),
        ("logits_scaling", 8.0, True),
        ("final_logit_softcapping", None, False),
        ("logit_scale", 1.0, False),
    ],
)
def test_heads_that_bend_their_logits_are_refused(tmp_path, key, value, refused):
    tiny.tiny_lm(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {key: value}))
    if refused:
        with pytest.raises(ModelError, match=f"{key}={value}"):
            load_causal_lm(str(tmp_path))
    else:
        load_causal_lm(str(tmp_path))


def damage(path: Path, how: str) -> None:
    weights, settings = path / "model.safetensors", json.loads((path / "config.json").read_text())
    if how == "no config":
        (path / "config.json").unlink()
    elif how == "config cut":
        (path / "config.json").write_text('{"a":')
    elif how == "unknown family":
        (path / "config.json").write_text(json.dumps(settings | {"model_type": "nosuch"}))
    elif how == "other shapes":
        (path / "config.json").write_text(json.dumps(settings | {"hidden_size": 64}))
    elif how == "no weights":
        weights.unlink()
    elif how == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "weights empty":
        weights.write_bytes(b"")
    elif how == "a weight lost":
        state = load_file(weights)
        del state["model.layers.1.mlp.up_proj.weight"]
        save_file(state, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "how",
    [
        "no config",
        "config cut",
        "unknown family",
        "other shapes",
        "no weights",
        "weights cut",
        "weights empty",
        "a weight lost",
    ],
)
def test_damaged_folders_are_an_error_that_names_them(qwen, tmp_path, how):
    shutil.copytree(qwen, tmp_path / "lm")
    load_causal_lm(str(tmp_path / "lm"))
    damage(tmp_path / "lm", how)
    with pytest.raises(ModelError, match=str(tmp_path / "lm")) as error:
        load_causal_lm(str(tmp_path / "lm"))
    assert "\n" not in str(error.value) and error.value.exit_status == 2


class Malicious:
    def __reduce__(self):
        return print, ("this has run",)


def test_code_in_a_model_folder_never_runs(qwen, tmp_path, capfd, monkeypatch):
    """Neither a pickle's, nor that which config.json names: nobody is asked whether it may."""
    shutil.copytree(qwen, tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save({"a": Malicious()}, tmp_path / "pickle" / "pytorch_model.bin")
    shutil.copytree(qwen, tmp_path / "remote")
    (tmp_path / "remote" / "code.py").write_text("print('this has run')")
    names = {
        "AutoConfig": "code.C",
        "AutoModelForCausalLM": "code.M",
        "AutoTokenizer": ["code.T", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        path = tmp_path / "remote" / name
        path.write_text(
            json.dumps(
                json.loads(path.read_text())
                | {"auto_map": names, "model_type": "not_known", "tokenizer_class": "T"}
            )
        )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for folder, load in (
        ("pickle", load_causal_lm),
        ("remote", load_causal_lm),
        ("remote", load_tokenizer),
    ):
        with pytest.raises(ModelError, match=str(tmp_path / folder)) as error:
            load(str(tmp_path / folder))
        assert error.value.exit_status == 2 and "\n" not in str(error.value)
    assert "this has run" not in capfd.readouterr().out


def test_everything_that_loads_a_folder_refuses_its_code():
    """`trust_remote_code` left to transformers asks on the terminal; every call passes False."""
    found = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        if path.parent.name == "tests":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
            ):
                owner = ast.unparse(node.func.value)
                if owner.rpartition(".")[2].startswith(
                    "Auto"
                ) and "trust_remote_code=False" not in ast.unparse(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_tokenizer_comes_from_files(tmp_path, kind):
    """transformers makes one of a few tokens where the files are missing."""
    tiny.tiny_lm(tmp_path, kind)
    load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="it has no tokenizer.json; give a Hugging Face folder"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("another kind's")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    with pytest.raises(ModelError, match="tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert kind == "llama" or "tokenizer.json (nor vocab.json and merges.txt)" in str(error.value)


def test_a_tokenizer_fits_the_models_embeddings(tmp_path):
    tiny.tiny_lm(tmp_path, vocab=261)
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"pad_token": "<|late|>"}
    )  # replaced by EOS where it has no embedding
    tokenizer.save_pretrained(tmp_path)
    load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["word"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="token 262 .'word'., outside the vocabulary of 261"):
        load_tokenizer(str(tmp_path))


def test_paths_without_a_model(tmp_path):
    for path in ("", "no where/at all", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(ModelError):
            load_causal_lm(path)
        with pytest.raises(ModelError):
            load_tokenizer(path)
    tiny.tiny_encoder(tmp_path / "encoder")
    with pytest.raises(ModelError, match="encoder"):  # its head would be random numbers
        load_causal_lm(str(tmp_path / "encoder"))


def test_tokenizer_loads(qwen):
    assert load_tokenizer(qwen)("é")["input_ids"] == tiny.tiny_tokenizer()("é")["input_ids"]


# ------------------------------------------------------------------------------------------------------ optimizer, schedule


@pytest.mark.parametrize(
    "schedule, values",
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (
            "cosine",
            [
                0.25,
                0.5,
                0.75,
                1.0,
                1.0,
                0.5 + 0.5 * math.sqrt(0.5),
                0.5,
                0.5 - 0.5 * math.sqrt(0.5),
                0.0,
            ],
        ),
    ],
)
def test_lr_at(schedule, values):
    for step, value in enumerate(values):  # 4 warm-up steps, 12 in all; every second of the last 8
        at = step if step < 4 else 2 * step - 4
        assert lr_at(at, 2e-6, 4, 12, schedule) == pytest.approx(2e-6 * value, abs=1e-12)


def test_lr_edges():
    assert (
        lr_at(0, 1.0, 0, 5) == 1.0 and lr_at(0, 1.0, 1, 5) == 1.0
    )  # no warm-up; the first step moves
    assert lr_at(2, 1.0, 10, 5, "cosine") == pytest.approx(0.3)  # a warm-up longer than the run
    with pytest.raises(ValueError, match="cosin"):
        lr_at(0, 1.0, 0, 5, "cosin")


def test_optimizer_step_is_adamw_by_hand(qwen):
    model = load_causal_lm(qwen)
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = make_optimizer(model, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    p = model.model.norm.weight
    before = p.detach().clone().double()
    grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    grad[0] = 1e-8  # as small as epsilon
    for q in model.parameters():
        q.grad = torch.zeros_like(q) if q.requires_grad else None
    p.grad = grad
    frozen = model.model.embed_tokens.weight.clone()
    optimizer.step()
    wanted = before * (1 - 0.01 * 0.1) - 0.01 * torch.sign(grad.double()) / (
        1 + 1e-8 / grad.double().abs()
    )  # first step: m̂/√v̂ = sign
    torch.testing.assert_close(p.detach().double(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(model.model.embed_tokens.weight, frozen)


@pytest.mark.gpu
def test_cuda_equals_cpu(folder):
    rows = sequences()
    with torch.no_grad():
        here = token_logprobs(load_causal_lm(folder), *pad(rows, "right"), 0.7)
        tokens, mask = (x.cuda() for x in pad(rows, "right"))
        there = token_logprobs(load_causal_lm(folder, device="cuda"), tokens, mask, 0.7).cpu()
    for a, b in zip(real(here, rows, "right"), real(there, rows, "right")):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind, more",
    [
        ("qwen3_next", {"linear_num_key_heads": 2, "linear_num_value_heads": 2}),
        ("mamba", {}),
        ("falcon_h1", {}),
        ("minimax", {"num_local_experts": 2, "head_dim": 8}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 8}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("falcon", {"alibi": False}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("stablelm", {}),
    ],
)
def test_models_whose_layers_are_not_plain_attention_are_refused(kind, more):
    """Their state would leak from one packed sequence into the next, and be lost between an engine's steps."""
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | more))
    with pytest.raises(ModelError, match="layers that are not plain attention"):
        prepare_causal_lm(model, kind)


def test_only_an_adapters_dropout_can_be_on():
    model = prepare_causal_lm(tiny.tiny_lm())
    add_adapter(model, LoRAConfig(r=2, dropout=0.5))
    adapter_dropout(model, True)
    on = [name for name, module in model.named_modules() if module.training]
    assert on and all("lora_dropout" in name for name in on)
    adapter_dropout(model, False)
    assert not any(module.training for module in model.modules())
