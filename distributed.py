"""Process group, FSDP2 sharding, collectives, checkpoints: one path for one process or many.

A leaf: needs torch alone, and what comes with transformers (huggingface_hub, safetensors) to
export.

A checkpoint is a folder `checkpoint_000120/`: sharded weights and optimizer state, which another
number of processes can load, the RNG state of every rank, and `state.json` with a checksum of each
file. It is written under a temporary name and renamed: a folder with the right name is whole. torch
unpickles a part of it, so a checkpoint is code: load those of your own runs alone.
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
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

DEVICE_WAIT = timedelta(minutes=15)  # for collectives of the model: all ranks come to them together
HOST_WAIT = timedelta(hours=12)  # for the functions of this file: a rank may infer much longer


class CheckpointError(ValueError):
    """A checkpoint or an export that cannot be written or read."""

    exit_status = 2


@dataclass(frozen=True)
class Dist:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device


# ---------------------------------------------------------------------------- process group

_host: c10d.ProcessGroup | None = None  # of all ranks, gloo, with HOST_WAIT; None: the default one


def setup() -> Dist:
    """Join the process group that torchrun describes, or make one of this process alone."""
    global _host
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    if not c10d.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=c10d.HashStore(), rank=0, world_size=1)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        c10d.init_process_group(backend, timeout=DEVICE_WAIT, **alone)
        _host = c10d.new_group(backend="gloo", timeout=HOST_WAIT)
    return Dist(c10d.get_rank(), c10d.get_world_size(), device)


def cleanup() -> None:
    """Leave the process group."""
    global _host
    if c10d.is_initialized():
        c10d.destroy_process_group()
        _host = None
        # sharded models, full of cycles, hold gloo's threads: alive at exit, these may abort it
        atexit.register(gc.collect)


def print0(*words: Any) -> None:
    """Print to stdout from rank 0 alone."""
    if _rank() == 0:
        print(*words, flush=True)


def _rank() -> int:
    return c10d.get_rank() if c10d.is_initialized() else 0


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    c10d.all_reduce(total, group=_host)
    return total.tolist()


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    out: list[Any] = [None] * c10d.get_world_size()
    c10d.all_gather_object(out, value, group=_host)
    return out


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    c10d.broadcast_object_list(box, src=0, group=_host)
    return box[0]


def on_rank_0(function: Callable, *args: Any) -> Any:
    """What `function` returns on rank 0, or raises there, on every rank (a collective)."""
    if not c10d.is_initialized():
        return function(*args)
    result, error = None, None
    if _rank() == 0:
        try:
            result = function(*args)
        except Exception as e:  # raised below: the others must not be left waiting
            error = e
    result, theirs = broadcast_object((result, error))
    if theirs is not None:
        raise error or theirs
    return result


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Within the block the processes of a host work one after the other (a collective): of a model
    that is loaded and sharded in it the host holds one whole copy at a time."""
    turn, turns = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for _ in range(turn):
        c10d.barrier(group=_host)
    try:
        yield
    finally:
        for _ in range(turns - turn):
            c10d.barrier(group=_host)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Within the block signals are noted in a list and the step is finished; a later one ends it.

    These are SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and, unless nohup has it ignored, SIGHUP. What comes
    within two seconds is the same one: a scheduler signals workers and torchrun, which passes it
    on.
    """
    noted: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        noted.append(number)
        if time.monotonic() - first > 2:
            raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of_any(noted: list[int]) -> int:
    """A signal that any rank has noted, 0 if none has (a collective)."""
    return max(gather_objects(noted[0] if noted else 0))


# ---------------------------------------------------------------------------- sharding


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The module list that holds most of the parameters: the decoder layers, in any family."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def shard_model(
    model: nn.Module,
    dist: Dist,
    bf16: bool = False,
    gather_once: bool = False,
    cpu_offload: bool = False,
) -> nn.Module:
    """FSDP2 over all ranks, a unit per decoder layer and one for the rest (with tied embeddings).

    A model on the CPU goes to the device a unit at a time: the card never holds the whole of it.
    Parameters stay shards of the dtype they have; with `bf16` they are cast for compute and
    gradients are reduced in float32. Gradients are averaged over ranks: multiply the loss by the
    world size where a sum is meant.
    `gather_once`: a layer's weights, once gathered for a forward pass, stay until a backward pass
    with `set_reshard_after_backward(True)` or `reshard`: 2 bytes a parameter, and less traffic.
    `cpu_offload`: shards, their gradients and the optimizer's moments rest in pinned host memory.
    """
    mesh = init_device_mesh(dist.device.type, (dist.world,))
    types = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else {}
    pinned = fsdp.CPUOffloadPolicy(pin_memory=dist.device.type == "cuda")
    rest = pinned if cpu_offload else fsdp.OffloadPolicy()
    settings = dict(mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**types), offload_policy=rest)
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
    """A parameter's Hugging Face name, without what compile, DDP, FSDP and PEFT put into it."""
    return _WRAPPERS.sub("", name)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective: every rank calls it), or the tensor itself."""
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh.size() == 1:  # 0.1 ms each: a model has hundreds, and an engine waits
        return value.to_local()
    return value.full_tensor()


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters`, sharded: those that the optimizer knows. After a forward pass without a
    backward pass FSDP keeps the root's whole, under the same names."""
    reshard(model)
    yield from model.named_parameters()


def reshard(model: nn.Module) -> None:
    """Free weights that were gathered for a pass: each rank has its shards alone."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


GATHER_BYTES = 2**28  # of weights in one collective: hundreds of small ones mean waiting for starts


def full_parameters(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, tied ones once; some are whole at a
    time.

    A collective. Behind them come the buffers that a checkpoint has (a router's bias), as they are.
    With `dtype` parameters are cast to it, the shards before they are gathered. Of a layer with a
    LoRA adapter W + scaling · B·A, in float32, each time from the frozen W: it never drifts.
    """
    layers = [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]
    adapted = {f"{name}.base_layer.weight": layer for name, layer in layers}
    pairs = [(n, p.detach()) for n, p in _named_parameters(model) if ".lora_" not in n]
    ends = itertools.accumulate(p.nbytes for _, p in pairs)
    keys = [(p.dtype, n in adapted, end // GATHER_BYTES) for (n, p), end in zip(pairs, ends)]
    for (_, merged, _), part in itertools.groupby(zip(pairs, keys), lambda x: x[1]):
        names, shards = zip(*(pair for pair, _ in part))
        if merged:
            whole = (_merged(p, adapted[n]) for n, p in zip(names, shards))
            values = (w if dtype is None else w.to(dtype) for w in whole)
        else:
            values = gather(shards, dtype)
        yield from zip(map(clean_name, names), values)
    kept = model.state_dict().keys()
    yield from ((clean_name(n), full_tensor(b)) for n, b in model.named_buffers() if n in kept)


def gather(shards: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The whole of every tensor (any shapes, one dtype), cast: sharded ones in one collective."""
    first = shards[0]
    dtype = dtype or first.dtype
    if not isinstance(first, DTensor) or first.device_mesh.size() == 1:
        yield from (full_tensor(shard).to(dtype) for shard in shards)
        return
    world = first.device_mesh.size()
    rows = [-(-s.shape[0] // world) for s in shards]  # of a rank; the last may have fewer, or none
    sizes = [n * s.shape[1:].numel() for n, s in zip(rows, shards)]
    own = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
    for part, shard in zip(own.split(sizes), shards):
        local = shard.to_local()
        part[: local.numel()] = local.flatten()  # cast
    every = own.new_empty(world, len(own))
    c10d.all_gather(list(every), own, group=first.device_mesh.get_group())
    for part, n, s in zip(every.split(sizes, dim=1), rows, shards):
        yield part.reshape(world * n, *s.shape[1:])[: s.shape[0]]


def _merged(weight: Tensor, layer: nn.Module) -> Tensor:
    """A LoRA layer's weight (out, in) with its active adapter added, float32 (a collective)."""
    (name,) = layer.active_adapters
    a, b = (full_tensor(m[name].weight.detach()).float() for m in (layer.lora_A, layer.lora_B))
    return full_tensor(weight).float() + layer.scaling[name] * (b @ a)  # b (out, r), a (r, in)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to an L2 norm of at most `max_norm`, if it is finite; returns what it was."""
    params = [p for _, p in _named_parameters(model) if p.grad is not None]
    if not params:
        return 0.0
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in params]))
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)


# ---------------------------------------------------------------------------- checkpoints


def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Trained parameters and, by the same names, the optimizer's moments (made here before step 1).

    What is frozen, the base of a LoRA adapter, comes from where it was loaded.
    """
    fused = bool(optimizer.param_groups[0].get("fused"))
    state: dict = {"model": {}, "optimizer": {}}
    for name, p in _named_parameters(model):
        if p.requires_grad:
            state["model"][name] = p
            moments = optimizer.state[p]
            if not moments:
                moments.update(
                    step=torch.zeros((), device=p.device if fused else "cpu"),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
            state["optimizer"][name] = moments
    return state


def save_checkpoint(
    run_dir: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict,
    keep: int = 2,
) -> str:
    """Write `run_dir/checkpoint_<step>` and remove all but the newest `keep`; returns the folder.

    A collective. `extra` is JSON-able and stands in `state.json`. CheckpointError on a full disk or
    an unwritable folder: nothing half-written is left, earlier checkpoints are untouched.
    """
    folder = os.path.join(run_dir, f"checkpoint_{step:06d}")
    temporary, rank = f"{folder}.tmp", _rank()
    on_rank_0(clear_temporaries, run_dir)
    problem, sums = "", {}
    try:
        os.makedirs(temporary, exist_ok=True)
        dcp.save(_training_state(model, optimizer), checkpoint_id=temporary, process_group=_host)
        rng = f"rng_rank{rank:03d}.pt"
        state = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        with open(os.path.join(temporary, rng), "wb") as f:
            torch.save(state, f)
            _flush(f)
        for name in os.listdir(temporary):
            if name == rng or name.startswith(f"__{rank}_") or name == ".metadata" and rank == 0:
                sums[name] = _checksum(os.path.join(temporary, name))
    except (Exception, CheckpointException) as e:  # the second is a BaseException
        problem = _reason(e)
        with contextlib.suppress(OSError):  # torch reports a full disk as "unexpected pos"
            if shutil.disk_usage(run_dir).free < 1 << 20 and "No space" not in problem:
                problem = f"No space left on device: {problem}"
    found = gather_objects((problem, sums))

    on_rank_0(_finish_checkpoint, folder, step, found, extra, keep)
    return folder


def _finish_checkpoint(folder: str, step: int, found: list, extra: dict, keep: int) -> None:
    """Add state.json, name the folder, remove old ones; `found`: (problem, sums) of each rank."""
    run_dir, temporary = os.path.dirname(folder), f"{folder}.tmp"
    try:
        if problems := [p for p, _ in found if p]:
            raise OSError(problems[0])
        sums = {name: value for _, part in found for name, value in part.items()}
        with open(os.path.join(temporary, "state.json"), "w", encoding="utf-8") as f:
            json.dump({"step": step, "world": len(found), **extra, "checksums": sums}, f, indent=1)
            _flush(f)
        _replace(temporary, folder)
        earlier = [f for f in _checkpoint_folders(run_dir) if _step(f) < step]
        for old in earlier[: max(0, len(earlier) + 1 - keep)]:
            os.rename(old, f"{old}.tmp")  # a kill in the middle leaves nothing that looks whole
            shutil.rmtree(f"{old}.tmp")
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written: {_reason(e)}; earlier checkpoints are "
            "intact: free some disk space and start again, the run resumes from the newest"
        ) from e


def _flush(f) -> None:
    f.flush()
    os.fsync(f.fileno())


def _checksum(path: str) -> int:
    """CRC-32 of a file: it finds damage, not forgery."""
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _reason(e: BaseException) -> str:
    """In one line what went wrong: the first error of any rank, without torch's wrapping."""
    if isinstance(e, CheckpointException) and e.failures:
        e = next(iter(e.failures.values()))[0]
    return " ".join(str(e).split())[-300:] or type(e).__name__


def _replace(temporary: str, folder: str) -> None:
    """Give a finished folder its name, in place of an older one, which comes back if that fails."""
    retired = f"{folder}.old.tmp"
    shutil.rmtree(retired, ignore_errors=True)
    if os.path.isdir(folder):
        os.rename(folder, retired)
    try:
        os.rename(temporary, folder)
    except OSError:
        if os.path.isdir(retired):
            os.rename(retired, folder)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def clear_temporaries(run_dir: str) -> None:
    """Remove what a killed run left half-written; what it was replacing gets its name back."""
    for name in os.listdir(run_dir) if os.path.isdir(run_dir) else []:
        path = os.path.join(run_dir, name)
        if (left := re.fullmatch(r"(\w+)(\.old)?\.tmp", name)) and os.path.isdir(path):
            whole = os.path.join(run_dir, left[1])
            if left[2] and not os.path.exists(whole):
                os.rename(path, whole)
            shutil.rmtree(path, ignore_errors=True)


def run_bytes(model: nn.Module, keep: int, exports: int, dtype: torch.dtype) -> int:
    """Bytes that a run's folder grows to: `keep` checkpoints (a weight and two moments, float32),
    exports (the model in `dtype`, or its adapter in float32), and one of each being written."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    whole, trained = sum(n for n, _ in sizes), sum(n for n, grad in sizes if grad)
    export = 4 * trained if trained < whole else dtype.itemsize * whole
    return 12 * trained * (keep + 1) + export * (exports + 1)


def check_free_space(folder: str, needed: int) -> None:
    """Raise CheckpointError where a folder cannot grow to `needed` bytes; what it holds counts."""
    walk = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    held = sum(os.lstat(path).st_size for path in walk)
    path = Path(folder).absolute()
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if needed - held > free:
        raise CheckpointError(
            f"{folder} needs up to {needed / 1e9:,.1f} GB, holds {held / 1e9:,.1f}, and its disk "
            f"has {free / 1e9:,.1f} free; free some space, or lower keep_checkpoints"
        )


def _step(folder: str) -> int:
    return int(folder.rpartition("_")[2])


def _checkpoint_folders(run_dir: str) -> list[str]:
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    found = (os.path.join(run_dir, n) for n in names if re.fullmatch(r"checkpoint_\d{6,}", n))
    return sorted(found, key=_step)


def latest_checkpoint(run_dir: str) -> tuple[str, dict] | None:
    """(folder, its state.json) of the newest checkpoint that every rank sees; None if there is
    none.

    A collective. A folder with an unreadable state.json is passed over with a warning; if no other
    is left, CheckpointError: a run never starts at step 0 over the remains of an earlier one.
    """
    readable: dict[int, tuple[str, dict]] = {}
    folders = _checkpoint_folders(run_dir)
    for folder in folders:
        try:
            with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
                state = json.load(f)
            if not isinstance(state, dict) or state.get("step") != _step(folder):
                raise ValueError(f"it does not say step {_step(folder)}")
            readable[_step(folder)] = (folder, state)
        except (OSError, ValueError) as e:
            print(f"warning: {folder}/state.json is damaged ({e}): left out", file=sys.stderr)
    common = set.intersection(*map(set, gather_objects(sorted(readable))))
    if not common and any(gather_objects(folders)):
        raise CheckpointError(
            f"no checkpoint in {run_dir} is whole and seen by every process "
            f"({', '.join(folders) or 'none here'}); move them away to start anew"
        )
    return readable[max(common)] if common else None


def load_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model, optimizer and, where this rank has one, RNG from a checkpoint of any world size.

    A collective. CheckpointError for a file that is not as it was written (found before anything of
    it is unpickled), and for a checkpoint of another model.
    """
    path = os.path.join(folder, f"rng_rank{_rank():03d}.pt")
    problem = ""
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
            sums = json.load(f).get("checksums", {})  # none in those of earlier versions
        for name in sorted(sums)[_rank() :: c10d.get_world_size()]:
            if _checksum(os.path.join(folder, name)) != sums[name]:
                raise ValueError(f"{name} is not what was written")
    except (OSError, ValueError) as e:
        problem = _reason(e)
    try:
        if problems := [p for p in gather_objects(problem) if p]:
            raise ValueError(problems[0])
        dcp.load(_training_state(model, optimizer), checkpoint_id=folder, process_group=_host)
        rng = torch.load(path, weights_only=True) if os.path.exists(path) else None
    except (Exception, CheckpointException) as e:
        raise CheckpointError(
            f"checkpoint {folder} does not load: {_reason(e)}; it is damaged or belongs to another "
            "model: remove it to resume from the one before"
        ) from e
    if rng is not None:
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
        if "cuda" in rng and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng["cuda"])


# ---------------------------------------------------------------------------- exports


def export_hf(
    model: nn.Module,
    tokenizer,
    folder: str,
    dtype: torch.dtype = torch.float32,
    notes: dict[str, dict] | None = None,
) -> None:
    """Write a Hugging Face folder that stock transformers and vLLM load, whole or not at all.

    A collective. A LoRA adapter is merged in float32, then rounded to `dtype` once. `notes`:
    further JSON files by name. CheckpointError on a full disk or an unwritable folder: what stood
    in `folder` before stays.
    """
    from huggingface_hub import save_torch_state_dict

    state = _host_copies(full_parameters(model), dtype)

    def write(temporary: str) -> None:
        save_torch_state_dict(state, temporary)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype, config.use_cache = dtype, True
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard's prefix
        config.save_pretrained(temporary)
        if model.generation_config is not None:
            # as JSON: save_pretrained refuses what some published models set
            model.generation_config.to_json_file(os.path.join(temporary, "generation_config.json"))
        tokenizer.save_pretrained(temporary)

    on_rank_0(_write_folder, folder, write, notes)


def export_adapter(
    model: nn.Module, tokenizer, folder: str, notes: dict[str, dict] | None = None
) -> None:
    """Write a LoRA adapter in PEFT's format, float32, with the tokenizer; otherwise as `export_hf`.

    `model.peft_config["default"]` holds its settings, the model it belongs to among them.
    """
    from safetensors.torch import save_file

    pairs = [(n, p) for n, p in _named_parameters(model) if ".lora_" in n and p.requires_grad]
    keys = ("base_model.model." + clean_name(n).replace(".default.", ".") for n, _ in pairs)
    wholes = (full_tensor(p.detach()) for _, p in pairs)
    state = _host_copies(zip(keys, wholes), torch.float32)

    def write(temporary: str) -> None:
        save_file(state, f"{temporary}/adapter_model.safetensors", metadata={"format": "pt"})
        settings = copy.copy(model.peft_config["default"])
        settings.inference_mode = True
        settings.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    on_rank_0(_write_folder, folder, write, notes)


def _host_copies(pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Rank 0's copies of full tensors; the other ranks have none."""
    return {n: t.to("cpu", dtype, copy=True).contiguous() for n, t in pairs if _rank() == 0}


def _write_folder(folder: str, write: Callable[[str], None], notes: dict[str, dict] | None) -> None:
    """Let `write` fill a folder under a temporary name; add `notes`, and give it its name."""
    from safetensors import SafetensorError

    temporary = f"{folder}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        os.makedirs(temporary)
        write(temporary)
        for name, note in (notes or {}).items():
            with open(os.path.join(temporary, name), "w", encoding="utf-8") as f:
                json.dump(note, f)
        _replace(temporary, folder)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, (OSError, SafetensorError)):
            raise CheckpointError(
                f"{folder} could not be written: {_reason(e)}; an earlier export there is intact: "
                "free some disk space and start again"
            ) from e
        raise
