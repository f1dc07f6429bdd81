"""Process group, FSDP2 sharding, collectives and checkpoints: the same path for one process and for many.

Needs torch alone (and huggingface_hub, which comes with transformers, to write the exported weights).

A checkpoint is a folder `checkpoint_000120/`: sharded weights and optimizer state (torch.distributed.checkpoint, so
another number of processes can load it), the RNG state of every rank, and `state.json`.  It is written under a
temporary name and renamed: a folder with the right name is whole.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import glob
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FSDPModule, fully_shard,
                                    MixedPrecisionPolicy, OffloadPolicy,
                                    register_fsdp_forward_method)
from torch.distributed.tensor import DTensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: the message names the folder and the way out."""

    exit_status = 2


@dataclass(frozen=True)
class Dist:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device


# ---------------------------------------------------------------------------------------------- process group

def setup() -> Dist:
    """Join the process group that torchrun describes, or make one of a single process; gloo on CPU, NCCL on GPUs."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Dist(dist.get_rank(), dist.get_world_size(), device)


def use_device(where: Dist, threads: int) -> None:
    """Make this rank's card the calling thread's, with so many CPU threads for torch.

    CUDA keeps the choice for each thread and begins with card 0; a new thread starts with as many CPU threads as another
    one has just then (one, inside model.one_thread).
    """
    torch.set_num_threads(threads)
    if where.device.type == "cuda":
        torch.cuda.set_device(where.device)


def cleanup() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads are joined once nothing holds the group, and sharded models, full of cycles, do.  A thread that
        # drops the last collective's tensors while the interpreter goes down aborts the process (2 of 22 runs).
        atexit.register(gc.collect)


def print0(*words: Any) -> None:
    """Print to stdout from rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*words, flush=True)


def all_reduce_sum(values: list[float]) -> list[float]:
    """Element-wise float64 sum over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Within the block SIGTERM and Ctrl-C are noted in a list and the step is finished; a later one stops at once.

    What comes within two seconds is the same one: a scheduler signals workers and torchrun, which passes it on to them.
    """
    noted: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        noted.append(number)
        if time.monotonic() - first > 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of_any(noted: list[int]) -> int:
    """A signal that any rank has noted, 0 if none has (a collective, so that all ranks stop after the same step)."""
    return max(gather_objects(noted[0] if noted else 0))


# ---------------------------------------------------------------------------------------------- sharding

def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The module list that holds most of the parameters: the decoder layers, in any family."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def shard_model(model: nn.Module, where: Dist, bf16: bool = False, gather_once: bool = False,
                cpu_offload: bool = False) -> nn.Module:
    """FSDP2 over all ranks, a unit per decoder layer and one for the rest (tied embeddings stay one parameter).

    Parameters stay shards of the dtype they have (float32 where they are trained; the frozen base of a LoRA adapter may
    be bfloat16); with `bf16` they are cast for compute and gradients are reduced in float32.
    Gradients are averaged over ranks: multiply the loss by the world size where a sum is meant.
    `gather_once`: a layer's weights, once cast and gathered for a forward pass, stay until a backward pass for which
    `set_reshard_after_backward(True)` holds, or `reshard`: 2 bytes a parameter, and no traffic between micro-batches.
    `cpu_offload`: shards, their gradients and the optimizer's moments rest in (pinned) host memory.
    """
    mesh = init_device_mesh(where.device.type, (where.world,))
    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    policy = MixedPrecisionPolicy(**types)
    offload = CPUOffloadPolicy(pin_memory=where.device.type == "cuda") if cpu_offload else OffloadPolicy()
    model.compute_place = where.device, torch.bfloat16 if bf16 else next(model.parameters()).dtype
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=not gather_once)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if hasattr(model, "logprobs_forward"):
        register_fsdp_forward_method(model, "logprobs_forward")
    return model


_WRAPPERS = re.compile(r"^((module|base_model\.model|_orig_mod|_fsdp_wrapped_module)\.)+"
                       r"|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")


def clean_name(name: str) -> str:
    """A parameter's Hugging Face name, without what wrappers (compile, DDP, FSDP, checkpointing, PEFT) put into it."""
    return _WRAPPERS.sub("", name)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective: every rank calls it), or the tensor itself."""
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh.size() == 1:  # a tenth of a millisecond each: a model has hundreds, and an engine waits
        return value.to_local()
    return value.full_tensor()


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters`, sharded where the model is: the parameters that the optimizer knows.

    After a forward pass without a backward pass FSDP keeps the root's parameters whole, under the same names.
    """
    reshard(model)
    yield from model.named_parameters()


def reshard(model: nn.Module) -> None:
    """Free weights that were gathered for a pass: each rank has its shards alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


GATHER_BYTES = 2 ** 28  # of weights in one collective: hundreds of small ones are a matter of starting them


def full_parameters(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, tied ones once; some are whole at a time.  A collective.

    Behind them come the buffers that a checkpoint has (a router's bias), as they are.

    With `dtype` they are cast to it, the shards before they are gathered.

    Of a layer with a LoRA adapter W + scaling · B·A, in float32, each time from the frozen W as it was loaded: nothing
    is added to it and taken off again, so it never drifts.
    """
    adapted = {f"{name}.base_layer.weight": module for name, module in model.named_modules()
               if hasattr(module, "lora_A")}
    named = [(name, p.detach()) for name, p in _named_parameters(model) if ".lora_" not in name]
    parts = [(p.dtype, name in adapted, total // GATHER_BYTES)
             for (name, p), total in zip(named, itertools.accumulate(p.nbytes for _, p in named))]
    for (_, merged, _), run in itertools.groupby(zip(named, parts), lambda x: x[1]):
        names, shards = zip(*(pair for pair, _ in run))
        values = gather(shards, dtype) if not merged else (
            _merged(p, adapted[name]).to(dtype or torch.float32) for name, p in zip(names, shards))
        yield from zip(map(clean_name, names), values)
    kept = model.state_dict().keys()
    yield from ((clean_name(name), full_tensor(b)) for name, b in model.named_buffers() if name in kept)


def gather(shards: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The whole of every tensor (all of one dtype), cast: sharded ones through one collective."""
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
        part[:local.numel()] = local.flatten()  # cast
    every = own.new_empty(world, len(own))
    dist.all_gather(list(every), own, group=first.device_mesh.get_group())
    for part, n, s in zip(every.split(sizes, dim=1), rows, shards):
        yield part.reshape(world * n, *s.shape[1:])[:s.shape[0]]


def _merged(weight: Tensor, layer: nn.Module) -> Tensor:
    """The weight (out, in) of a LoRA layer with its active adapter added, float32 (a collective)."""
    (name,) = layer.active_adapters
    a, b = (full_tensor(m[name].weight.detach()).float() for m in (layer.lora_A, layer.lora_B))  # (r, in), (out, r)
    return full_tensor(weight).float() + layer.scaling[name] * (b @ a)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`; returns the norm before (nan or inf: not scaled)."""
    params = [p for _, p in _named_parameters(model) if p.grad is not None]
    if not params:
        return 0.0
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in params]))  # whole, before clipping adds its 1e-6
    if torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)


# ---------------------------------------------------------------------------------------------- checkpoints

def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Trained parameters by name and, by the same names, the optimizer's moments (made here if no step was taken yet).

    What is frozen, the base of a LoRA adapter, comes from where it was loaded.
    """
    state: dict = {"model": {}, "optimizer": {}}
    for name, p in _named_parameters(model):
        if p.requires_grad:
            state["model"][name] = p
            moments = optimizer.state[p]
            if not moments:
                device = p.device if _fused(optimizer) else "cpu"
                moments.update(step=torch.zeros((), dtype=torch.float32, device=device),
                               exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["optimizer"][name] = moments
    return state


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


def _rng_state() -> dict:
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def save_checkpoint(run_dir: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict,
                    keep: int = 2) -> str:
    """Write `run_dir/checkpoint_<step>` (a collective) and remove all but the newest `keep`; returns the folder.

    `extra` is JSON-able and comes back from `load_checkpoint`.  CheckpointError on a full disk or an unwritable folder:
    nothing half-written is left, earlier checkpoints are untouched.
    """
    folder = os.path.join(run_dir, f"checkpoint_{step:06d}")
    temporary = folder + ".tmp"
    rank, problem = dist.get_rank(), ""
    if rank == 0:
        for left in glob.glob(os.path.join(glob.escape(run_dir), "checkpoint_*.tmp")):  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    try:
        os.makedirs(temporary, exist_ok=True)
        dcp.save(_training_state(model, optimizer), checkpoint_id=temporary)
        with open(os.path.join(temporary, f"rng_rank{rank:03d}.pt"), "wb") as f:
            torch.save(_rng_state(), f)
            f.flush()
            os.fsync(f.fileno())
        if rank == 0:
            with open(os.path.join(temporary, "state.json"), "w", encoding="utf-8") as f:
                json.dump({"step": step, "world": dist.get_world_size(), **extra}, f, indent=1)
                f.flush()
                os.fsync(f.fileno())
    except (Exception, CheckpointException) as e:  # dcp puts an OSError of any rank into its own, a BaseException
        problem = _reason(e)
        with contextlib.suppress(OSError):  # torch reports a full disk as "unexpected pos"
            if shutil.disk_usage(run_dir).free < 1 << 20 and "No space" not in problem:
                problem = f"No space left on device: {problem}"
    if problems := [p for p in gather_objects(problem) if p]:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()  # nobody leaves, and has torchrun end the others, before it is removed
        raise CheckpointError(f"checkpoint {folder} could not be written: {problems[0]}; earlier checkpoints are "
                              "intact: free some disk space and start again, the run resumes from the newest")
    if rank == 0:
        _replace(temporary, folder)
        earlier = [f for f in _checkpoint_folders(run_dir) if _step(f) < step]  # a damaged later one takes no place
        for old in earlier[:max(0, len(earlier) + 1 - keep)]:
            os.rename(old, f"{old}.tmp")  # first the name: a kill in the middle leaves nothing that looks whole
            shutil.rmtree(f"{old}.tmp")
    dist.barrier()
    return folder


def _reason(e: BaseException) -> str:
    """In one line what went wrong: the first error of any rank, out of torch.distributed.checkpoint's wrapping."""
    if isinstance(e, CheckpointException) and e.failures:
        e = next(iter(e.failures.values()))[0]
    return " ".join(str(e).split())[-300:] or type(e).__name__


def _replace(temporary: str, folder: str) -> None:
    """Give a finished folder its name, in place of an older one: what bears the name is whole at any moment."""
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


def _step(folder: str) -> int:
    return int(folder.rpartition("_")[2])


def _checkpoint_folders(run_dir: str) -> list[str]:
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    return sorted((os.path.join(run_dir, n) for n in names if re.fullmatch(r"checkpoint_\d{6,}", n)), key=_step)


def latest_checkpoint(run_dir: str) -> tuple[str, dict] | None:
    """(folder, its state.json) of the newest checkpoint that is whole and seen by every rank; None if there is none.

    A folder with an unreadable state.json is passed over with a warning; if no other is left, CheckpointError: a run
    never starts again at step 0 over the remains of an earlier one.
    """
    whole: dict[int, tuple[str, dict]] = {}
    folders = _checkpoint_folders(run_dir)
    for folder in folders:
        try:
            with open(os.path.join(folder, "state.json"), encoding="utf-8") as f:
                state = json.load(f)
            if not isinstance(state, dict) or state.get("step") != _step(folder):
                raise ValueError(f"it does not say step {_step(folder)}")
            whole[_step(folder)] = (folder, state)
        except (OSError, ValueError) as e:
            print(f"warning: {folder}/state.json is damaged ({e}); trying the checkpoint before it", file=sys.stderr)
    common = set.intersection(*map(set, gather_objects(sorted(whole))))
    if not common and any(gather_objects(folders)):
        raise CheckpointError(f"no checkpoint in {run_dir} is whole and seen by every process "
                              f"({', '.join(folders) or 'none here'}); move them away to start anew")
    return whole[max(common)] if common else None


def load_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer from a checkpoint that any number of ranks wrote; RNG too where this rank has one."""
    try:
        dcp.load(_training_state(model, optimizer), checkpoint_id=folder)
    except (Exception, CheckpointException) as e:
        raise CheckpointError(f"checkpoint {folder} does not load: {_reason(e)}; it is damaged or belongs to another "
                              "model: remove it to resume from the one before") from e
    path = os.path.join(folder, f"rng_rank{dist.get_rank():03d}.pt")
    if os.path.exists(path):
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as e:
            raise CheckpointError(f"checkpoint {folder} does not load: {path}: {_reason(e)}; it is damaged: remove the "
                                  "folder to resume from the one before") from e
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def export_hf(model: nn.Module, tokenizer, folder: str, dtype: torch.dtype = torch.float32,
              notes: dict[str, dict] | None = None) -> None:
    """Write a Hugging Face folder that stock transformers and vLLM load, whole or not at all (a collective).

    A LoRA adapter is merged in float32, then rounded to `dtype` once.
    CheckpointError on a full disk or an unwritable folder: what stood in `folder` before stays.
    """
    from huggingface_hub import save_torch_state_dict

    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {}
    for name, value in full_parameters(model):
        if rank == 0:
            state[name] = value.to("cpu", dtype, copy=True)

    def write(temporary: str) -> None:
        save_torch_state_dict(state, temporary)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype, config.use_cache = dtype, True
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
        config.save_pretrained(temporary)
        if model.generation_config is not None:  # as JSON: save_pretrained refuses what some published models set
            model.generation_config.to_json_file(os.path.join(temporary, "generation_config.json"))
        tokenizer.save_pretrained(temporary)

    _write_folder(folder, write, notes)


def export_adapter(model: nn.Module, tokenizer, folder: str, notes: dict[str, dict] | None = None) -> None:
    """Write a LoRA adapter in PEFT's format, float32, with the tokenizer, whole or not at all (a collective).

    `model.peft_config["default"]` holds its settings, the model it belongs to among them.  CheckpointError as above.
    """
    from safetensors.torch import save_file

    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {}
    for name, p in _named_parameters(model):
        if ".lora_" in name and p.requires_grad:
            value = full_tensor(p.detach())
            if rank == 0:
                key = "base_model.model." + clean_name(name).replace(".default.", ".")
                state[key] = value.to("cpu", torch.float32, copy=True).contiguous()

    def write(temporary: str) -> None:
        save_file(state, os.path.join(temporary, "adapter_model.safetensors"), metadata={"format": "pt"})
        settings = copy.copy(model.peft_config["default"])
        settings.inference_mode = True
        settings.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    _write_folder(folder, write, notes)


def _write_folder(folder: str, write: Callable[[str], None], notes: dict[str, dict] | None) -> None:
    """Let rank 0 write a folder, with `notes` as JSON files, under a temporary name; the others wait."""
    from safetensors import SafetensorError

    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        temporary = f"{folder}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
        try:
            write(temporary)
            for name, note in (notes or {}).items():
                with open(os.path.join(temporary, name), "w", encoding="utf-8") as f:
                    json.dump(note, f)
            _replace(temporary, folder)
        except BaseException as e:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(e, (OSError, SafetensorError)):
                raise CheckpointError(f"{folder} could not be written: {' '.join(str(e).split())[-300:]}; "
                                      "an earlier export there is intact: free some disk space and start again") from e
            raise
    if dist.is_initialized():
        dist.barrier()
