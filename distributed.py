"""Process group, FSDP2, collectives, checkpoints, exports: one path for one process or many.

Needs torch and safetensors (huggingface_hub to export), and no other file of the project. A
checkpoint is a folder `checkpoint_000120/`, complete once it has this name: sharded weights and
optimizer state for any number of processes, random states, and `state.json` with checksums. torch
unpickles a part of it: load only checkpoints that you trust.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as c10d
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

DEVICE_WAIT = timedelta(minutes=15)  # timeout of the model's collectives
HOST_WAIT = timedelta(hours=12)  # timeout of this file's: ranks may sample for hours


class CheckpointError(ValueError):
    """A checkpoint or export cannot be written or read."""

    exit_status = 2


@dataclass(frozen=True)
class Dist:
    """Rank, number of processes and device of this process."""

    rank: int
    world: int
    device: torch.device


# ---- process group

_host: c10d.ProcessGroup | None = None  # gloo, all ranks


def setup() -> Dist:
    """Join torchrun's process group, or create one of this process alone."""
    global _host
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not c10d.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=c10d.HashStore(), rank=0, world_size=1)
        c10d.init_process_group(backend, timeout=DEVICE_WAIT, **alone)
        _host = c10d.new_group(backend="gloo", timeout=HOST_WAIT)
    return Dist(c10d.get_rank(), c10d.get_world_size(), device)


def cleanup() -> None:
    global _host
    if c10d.is_initialized():
        c10d.destroy_process_group()
        _host = None
        # uncollected sharded models hold gloo threads that may abort the exit
        atexit.register(gc.collect)


def _rank() -> int:
    return c10d.get_rank() if c10d.is_initialized() else 0


def print0(*words: Any) -> None:
    """Print to stdout on rank 0 only."""
    if _rank() == 0:
        print(*words, flush=True)


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks (a collective)."""
    total = torch.tensor(values, dtype=torch.float64)
    c10d.all_reduce(total, group=_host)
    return total.tolist()


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order (a collective)."""
    out: list[Any] = [None] * c10d.get_world_size()
    c10d.all_gather_object(out, value, group=_host)
    return out


def gather_rows(rows: list) -> list:
    """The rows of all ranks, in rank order (a collective)."""
    return [row for part in gather_objects(rows) for row in part]


def broadcast_object(value: Any) -> Any:
    """Rank 0's value on every rank (a collective)."""
    box = [value]
    c10d.broadcast_object_list(box, src=0, group=_host)
    return box[0]


def on_rank_0(function: Callable, *args: Any) -> Any:
    """Call `function` on rank 0; all ranks return its result or raise its error (a collective)."""
    if not c10d.is_initialized():
        return function(*args)
    result, error = None, None
    if _rank() == 0:
        try:
            result = function(*args)
        except Exception as e:  # raised on all ranks below
            error = e
    result, error = broadcast_object((result, error))
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def held_by_rank_0(manager: contextlib.AbstractContextManager) -> Iterator[None]:
    """Run the block within a context that rank 0 enters; all ranks raise its error (a
    collective)."""
    with contextlib.ExitStack() as stack:
        on_rank_0(stack.enter_context, manager)
        yield


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Run the block in one process per host at a time (a collective): to load models in turn."""
    turn = int(os.environ.get("LOCAL_RANK", 0))
    turns = 1 + max(gather_objects(turn))  # nodes may differ in processes
    for _ in range(turn):
        c10d.barrier(group=_host)
    try:
        yield
    finally:
        for _ in range(turns - turn):
            c10d.barrier(group=_host)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect signals in a list, so that a step can finish; one that comes over two seconds after
    the first raises KeyboardInterrupt (sooner ones may be torchrun's copies)."""
    noted: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        noted.append(number)
        if time.monotonic() - first > 2:
            raise KeyboardInterrupt
        os.write(2, b"stopping after this step; a second signal stops at once\n")

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of_any(noted: list[int]) -> int:
    """A signal that any rank has noted, else 0 (a collective)."""
    return max(gather_objects(noted[0] if noted else 0))


# ---- sharding


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the module list with most parameters."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def shard_model(
    model: nn.Module,
    dist: Dist,
    bf16: bool = False,
    gather_once: bool = False,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shard with FSDP2 over all ranks, one unit per decoder layer; gradients are averaged.

    bf16: compute in bf16, reduce gradients in float32; the dtype of shards stays.
    gather_once: keep gathered weights, 2 bytes a parameter, until `reshard` or a backward pass with
        `set_reshard_after_backward(True)`: less traffic.
    cpu_offload: keep shards, gradients and moments in pinned host memory.
    """
    settings: dict[str, Any] = {"mesh": init_device_mesh(dist.device.type, (dist.world,))}
    if bf16:
        settings["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if cpu_offload:
        settings["offload_policy"] = fsdp.CPUOffloadPolicy(dist.device.type == "cuda")
    model.computes_on = dist.device, torch.bfloat16 if bf16 else next(model.parameters()).dtype
    for layer in decoder_layers(model):
        fsdp.fully_shard(layer, **settings, reshard_after_forward=not gather_once)
    fsdp.fully_shard(model, **settings)
    if hasattr(model, "logprobs_forward"):
        fsdp.register_fsdp_forward_method(model, "logprobs_forward")
    return model


_WRAPPERS = re.compile(
    r"^((module|base_model\.model|_orig_mod|_fsdp_wrapped_module)\.)+"
    r"|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)


def clean_name(name: str) -> str:
    """A parameter's Hugging Face name, without what compile, DDP, FSDP and PEFT add."""
    return _WRAPPERS.sub("", name)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective); others as they are."""
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh.size() == 1:  # saves 0.1 ms per tensor
        return value.to_local()
    return value.full_tensor()


def reshard(model: nn.Module) -> None:
    """Free gathered weights; shards stay."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, not gathered ones that a forward pass left."""
    reshard(model)
    yield from model.named_parameters()


GATHER_BYTES = 2**28  # per collective, about: many small ones are slow


def full_parameters(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of all parameters, tied ones once, and saved buffers.

    A collective; few tensors are whole at a time. Shards are cast to `dtype` before the gather. A
    layer with a LoRA adapter gives W + scaling · B·A, computed in float32.
    """
    layers = [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]
    adapted = {f"{name}.base_layer.weight": layer for name, layer in layers}
    pairs = [(n, p.detach()) for n, p in _named_parameters(model) if ".lora_" not in n]
    ends = itertools.accumulate(p.nbytes for _, p in pairs)
    keys = [(p.dtype, n in adapted, end // GATHER_BYTES) for (n, p), end in zip(pairs, ends)]
    for (own, merged, _), part in itertools.groupby(zip(keys, pairs), lambda x: x[0]):
        names, shards = zip(*(pair for _, pair in part))
        for name, whole in zip(names, gather(shards, own if merged else dtype or own)):
            if merged:
                whole = _merged(whole, adapted[name]).to(dtype or torch.float32)
            yield clean_name(name), whole
    kept = model.state_dict().keys()
    yield from ((clean_name(n), full_tensor(b)) for n, b in model.named_buffers() if n in kept)


def gather(shards: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield whole tensors of shards (of one dtype), cast to `dtype`, by one collective."""
    mesh = getattr(shards[0], "device_mesh", None)
    if mesh is None or mesh.size() == 1:
        yield from (full_tensor(shard).to(dtype) for shard in shards)
        return
    world = mesh.size()
    rows = [-(-s.shape[0] // world) for s in shards]  # per rank, at most
    sizes = [n * s.shape[1:].numel() for n, s in zip(rows, shards)]
    own = torch.zeros(sum(sizes), dtype=dtype, device=shards[0].device)
    for part, shard in zip(own.split(sizes), shards):
        local = shard.to_local()
        part[: local.numel()] = local.flatten()  # casts
    every = own.new_empty(world, len(own))
    c10d.all_gather(list(every), own, group=mesh.get_group())
    for part, n, s in zip(every.split(sizes, dim=1), rows, shards):
        yield part.reshape(world * n, *s.shape[1:])[: s.shape[0]]


def _merged(weight: Tensor, layer: nn.Module) -> Tensor:
    """Merge a LoRA layer's adapter into its weight (out, in), in float32 (a collective)."""
    (name,) = layer.active_adapters
    a, b = (full_tensor(m[name].weight.detach()).float() for m in (layer.lora_A, layer.lora_B))
    return weight.float() + layer.scaling[name] * (b @ a)  # b (out, r), a (r, in)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Clip the gradients' L2 norm, if finite, to `max_norm`; returns the norm before (a
    collective)."""
    params = [p for _, p in _named_parameters(model) if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in params]))
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)


# ---- whole folders


@contextlib.contextmanager
def _whole_folder(folder: str) -> Iterator[str]:
    """Yield a temporary folder's name; rename it to `folder` if the block succeeds. CheckpointError
    for errors of the disk."""
    temporary, retired = f"{folder}.tmp", f"{folder}.old.tmp"
    try:
        yield temporary
        if os.path.isdir(folder):
            shutil.rmtree(retired, ignore_errors=True)
            os.rename(folder, retired)
        os.rename(temporary, folder)
    except BaseException as e:
        if os.path.isdir(retired) and not os.path.exists(folder):
            os.rename(retired, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, (OSError, SafetensorError)):
            raise CheckpointError(
                f"{folder} could not be written: {_reason(e)}; what stood there and earlier "
                "checkpoints are intact: free some disk space and start again"
            ) from e
        raise
    shutil.rmtree(retired, ignore_errors=True)


def clear_temporaries(run_dir: str) -> None:
    """Remove half-written folders of a killed run; restore a folder that was being replaced."""
    for name in os.listdir(run_dir) if os.path.isdir(run_dir) else []:
        path = os.path.join(run_dir, name)
        if (left := re.fullmatch(r"(\w+)(\.old)?\.tmp", name)) and os.path.isdir(path):
            whole = os.path.join(run_dir, left[1])
            if left[2] and not os.path.exists(whole):
                os.rename(path, whole)
            shutil.rmtree(path, ignore_errors=True)


def _reason(e: BaseException) -> str:
    """The error in one line, without torch's wrapping."""
    if isinstance(e, CheckpointException) and e.failures:
        e = next(iter(e.failures.values()))[0]
    return " ".join(str(e).split())[-300:] or type(e).__name__


def run_bytes(model: nn.Module, keep: int, exports: int, dtype: torch.dtype) -> int:
    """Bytes of `keep` checkpoints (weight and two moments, float32), `exports` (`dtype`; an adapter
    float32), and one more of each being written."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    whole, trained = sum(n for n, _ in sizes), sum(n for n, grad in sizes if grad)
    export = 4 * trained if trained < whole else dtype.itemsize * whole
    return 12 * trained * (keep + 1) + export * (exports + 1)


def check_free_space(folder: str, needed: int) -> None:
    """CheckpointError if a folder cannot grow to `needed` bytes in all."""
    path = Path(folder).absolute()
    held = sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if needed - held > free:
        raise CheckpointError(
            f"{folder} needs up to {needed / 1e9:,.1f} GB, holds {held / 1e9:,.1f}, and its disk "
            f"has {free / 1e9:,.1f} free; free some space, or lower keep_checkpoints"
        )


# ---- checkpoints


def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Trained parameters and AdamW's moments, created if missing, by name."""
    fused = bool(optimizer.param_groups[0].get("fused"))
    trained = {name: p for name, p in _named_parameters(model) if p.requires_grad}
    for p in trained.values():
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return {"model": trained, "optimizer": {n: optimizer.state[p] for n, p in trained.items()}}


def save_checkpoint(
    run_dir: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict,
    keep: int = 2,
) -> str:
    """Write `run_dir/checkpoint_<step>` with `extra` in its state.json, and keep the newest `keep`
    checkpoints; returns the folder (a collective).

    CheckpointError for a full disk or an unwritable folder; earlier checkpoints then stay.
    """
    folder, rank = os.path.join(run_dir, f"checkpoint_{step:06d}"), _rank()
    temporary, rng = f"{folder}.tmp", f"rng_rank{rank:03d}.pt"
    on_rank_0(clear_temporaries, run_dir)
    problem, sums = "", {}
    try:
        os.makedirs(temporary, exist_ok=True)
        dcp.save(_training_state(model, optimizer), checkpoint_id=temporary, process_group=_host)
        state = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        with open(os.path.join(temporary, rng), "wb") as f:
            torch.save(state, f)
            _flush(f)
        own = (rng, f"__{rank}_", ".metadata" if rank == 0 else rng)  # prefixes of its files
        sums = _checksums(temporary, [n for n in os.listdir(temporary) if n.startswith(own)])
    except (Exception, CheckpointException) as e:  # the second is a BaseException
        problem = _reason(e)
        with contextlib.suppress(OSError):  # torch's message is "unexpected pos"
            if shutil.disk_usage(run_dir).free < 1 << 20 and "No space" not in problem:
                problem = f"No space left on device: {problem}"
    found = gather_objects((problem, sums))

    def finish() -> None:
        with _whole_folder(folder):
            if problems := [p for p, _ in found if p]:
                raise OSError(problems[0])
            sums = {name: value for _, part in found for name, value in part.items()}
            state = {"step": step, "world": len(found), **extra, "checksums": sums}
            with open(os.path.join(temporary, "state.json"), "w", encoding="utf-8") as f:
                json.dump(state, f, indent=1)
                _flush(f)
        earlier = [old for n, old in _checkpoints(run_dir).items() if n < step]
        try:
            for old in earlier[::-1][keep - 1 :]:
                os.rename(old, f"{old}.tmp")  # half-removed folders must not look complete
                shutil.rmtree(f"{old}.tmp")
        except OSError as e:
            raise CheckpointError(f"{folder} is written, but an old one stays: {e}") from e

    on_rank_0(finish)
    return folder


def _flush(f) -> None:
    f.flush()
    os.fsync(f.fileno())


def _checksums(folder: str, names: list[str]) -> dict[str, int]:
    """File name → CRC-32."""
    sums = dict.fromkeys(names, 0)
    for name in names:
        with open(os.path.join(folder, name), "rb") as f:
            while block := f.read(1 << 24):
                sums[name] = zlib.crc32(block, sums[name])
    return sums


def _checkpoints(run_dir: str) -> dict[int, str]:
    """Step → folder of a run's checkpoints, in the order of steps."""
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    steps = (int(name[11:]) for name in names if re.fullmatch(r"checkpoint_\d{6,}", name))
    return {step: os.path.join(run_dir, f"checkpoint_{step:06d}") for step in sorted(steps)}


def _state(folder: str) -> Any:
    return json.loads(Path(folder, "state.json").read_text(encoding="utf-8"))


def latest_checkpoint(run_dir: str) -> tuple[str, dict] | None:
    """(folder, state.json) of the newest checkpoint that every rank sees, or None (a collective).

    Damaged ones are skipped with a warning. CheckpointError if there are some but none is usable,
    so that a run never starts over unnoticed.
    """
    folders, readable = _checkpoints(run_dir), {}
    for step, folder in folders.items():
        try:
            state = _state(folder)
            if not isinstance(state, dict) or state.get("step") != step:
                raise ValueError(f"it does not say step {step}")
            readable[step] = (folder, state)
        except (OSError, ValueError) as e:
            print(f"warning: {folder}/state.json is damaged ({e}): left out", file=sys.stderr)
    steps, begun = zip(*gather_objects((set(readable), bool(folders))))
    if common := set.intersection(*steps):
        return readable[max(common)]
    if any(begun):
        raise CheckpointError(
            f"no checkpoint in {run_dir} is whole and seen by every process "
            f"({', '.join(folders.values()) or 'none here'}); move them away to start anew"
        )
    return None


def load_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model, optimizer and random state from a checkpoint of any world size (a collective).

    CheckpointError for another model's checkpoint, and for a changed file before unpickling.
    """
    path, problem = os.path.join(folder, f"rng_rank{_rank():03d}.pt"), ""
    try:
        sums = _state(folder).get("checksums", {})  # earlier versions wrote none
        share = sorted(sums)[_rank() :: c10d.get_world_size()]
        changed = [name for name, v in _checksums(folder, share).items() if v != sums[name]]
        problem = f"{changed[0]} is not what was written" if changed else ""
    except (OSError, ValueError) as e:
        problem = _reason(e)
    try:
        if problems := list(filter(None, gather_objects(problem))):
            raise ValueError(problems[0])
        dcp.load(_training_state(model, optimizer), checkpoint_id=folder, process_group=_host)
        rng = torch.load(path, weights_only=True) if os.path.exists(path) else {}
    except (Exception, CheckpointException) as e:
        raise CheckpointError(
            f"checkpoint {folder} does not load: {_reason(e)}; it is damaged or belongs to another "
            "model: remove it to resume from the one before"
        ) from e
    if rng:
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])


# ---- exports


def export_hf(
    model: nn.Module,
    tokenizer,
    folder: str,
    dtype: torch.dtype = torch.float32,
    notes: dict[str, dict] | None = None,
) -> None:
    """Write a Hugging Face folder atomically (a collective); `notes`: further JSON files by name.

    A LoRA adapter is merged in float32, then cast to `dtype`. CheckpointError for a full disk or an
    unwritable folder.
    """
    config = copy.deepcopy(model.config)
    config.dtype, config.use_cache = dtype, True
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard's prefix
    texts = {name: json.dumps(note) for name, note in (notes or {}).items()}
    if model.generation_config is not None:  # save_pretrained refuses some published ones
        texts["generation_config.json"] = model.generation_config.to_json_string()
    _export(folder, "model", full_parameters(model), dtype, (config, tokenizer), texts)


def export_adapter(
    model: nn.Module, tokenizer, folder: str, notes: dict[str, dict] | None = None
) -> None:
    """Write a LoRA adapter in PEFT's format, in float32, with the tokenizer; as `export_hf`."""
    pairs = [(n, p) for n, p in _named_parameters(model) if ".lora_" in n and p.requires_grad]
    names = ("base_model.model." + clean_name(n).replace(".default.", ".") for n, _ in pairs)
    wholes = (full_tensor(p.detach()) for _, p in pairs)
    settings = copy.copy(model.peft_config["default"])
    settings.inference_mode = True
    texts = {name: json.dumps(note) for name, note in (notes or {}).items()}
    parts = (settings, tokenizer)
    _export(folder, "adapter_model", zip(names, wholes), torch.float32, parts, texts)


def _export(
    folder: str,
    stem: str,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    parts: tuple,
    texts: dict[str, str],
) -> None:
    """Write weights, `parts` (with save_pretrained) and texts (by file name); a collective."""
    state = {n: t.to("cpu", dtype, copy=True).contiguous() for n, t in weights if _rank() == 0}

    def write() -> None:
        from huggingface_hub import save_torch_state_dict

        with _whole_folder(folder) as temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            os.makedirs(temporary)
            save_torch_state_dict(state, temporary, filename_pattern=stem + "{suffix}.safetensors")
            for part in parts:
                part.save_pretrained(temporary)
            for name, text in texts.items():
                Path(temporary, name).write_text(text, encoding="utf-8")

    on_rank_0(write)
