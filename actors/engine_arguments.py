"""What a vLLM engine is asked for, as plain values: arguments, environment, sampling, infos of a weight transfer.

Pure functions of configuration and model folder; nothing here imports vLLM, so all of it is tested without an engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.parent_death import EndsWithParent
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.diagnosis import logprob_probe

RECEIVER_EXTENSION = "actors.weight_receiver.WeightReceiverExtension"


def engine_arguments(
    *,
    model: str,
    dtype: str,
    engine: EngineConfig,
    max_model_len: int,
    seed: int,
    device: str,
    publish: PublishConfig,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Keyword arguments of ``AsyncEngineArgs`` for training rollouts.

    ``processed_logprobs`` puts the temperature into the reported log-probs, and ``generation_config="vllm"`` keeps the
    model's own sampling defaults (top_p, repetition penalty) out, so that what is reported is what was sampled from.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        # Room for the log-prob probe beside a full engine, and priority for it: nobody waits for its verdict for long.
        "max_num_seqs": engine.max_num_seqs + logprob_probe.SEQUENCES,
        "scheduling_policy": "priority",
        "tensor_parallel_size": engine.tensor_parallel,
        "distributed_executor_backend": "uni" if engine.tensor_parallel == 1 else "mp",
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": publish.backend},
        "worker_extension_cls": RECEIVER_EXTENSION,
        "additional_config": {"ends_with_parent": EndsWithParent()},
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if device == "cpu":
        # A prefill cut in two kills the engine when the request has a seed of its own: vLLM 0.32 then winds its
        # generator back, which a CPU generator cannot do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(2048, max_model_len)
        # An explicit size also makes vLLM skip the warm-up forward that would otherwise measure memory.
        arguments["kv_cache_memory_bytes"] = int(engine.cpu_kv_cache_gib * 2**30)
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return arguments


def engine_environment(engine: EngineConfig, device: str) -> dict[str, str]:
    """Environment of the worker's process; vLLM's engine process inherits it. Holds no secrets."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # An engine is never spread over nodes, so its own rendezvous stays on loopback.
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if device == "cpu":
        environment |= {
            # Otherwise vLLM replaces the "uni" executor and runs the model in a third process with a third import.
            # AsyncLLM still runs its engine in a process of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(engine.cpu_threads),
            # Engine, scorers and learner share cores: a thread that spins at a barrier takes one from the others.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return environment


def neutral_sampling(stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The part of ``SamplingParams`` that training fixes: nothing bends the policy's own distribution."""
    return {
        "n": 1,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": False,
    }


def stop_token_ids(model_folder: Path, tokenizer_eos: int | None) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS and those of config.json and generation_config.json.

    ``generation_config="vllm"`` makes the engine ignore the last of these, and chat models keep their end-of-turn
    id there.
    """
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("config.json", "generation_config.json"):
        file = model_folder / name
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        ids.update([found] if isinstance(found, int) else found or [])
    return sorted(ids)


def checkpoint_weight_shapes(model_folder: Path) -> dict[str, tuple[int, ...]]:
    """Names an update must bring, with their shapes: those of the folder's safetensors files, a tied head left out.

    Raises:
        ValueError: when the folder holds no safetensors.
    """
    from safetensors import safe_open

    files = sorted(model_folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"model folder {model_folder} holds no *.safetensors; save the model with save_pretrained (safetensors is "
            "its default format)"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(str(file), framework="numpy") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    if config.get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    # Checkpoints of old transformers versions carry this derived buffer; no model has it as a weight.
    return {name: shape for name, shape in sorted(shapes.items()) if not name.endswith("rotary_emb.inv_freq")}


def nccl_init_info(transport: Mapping[str, Any], *, slot: int, tensor_parallel: int) -> dict[str, Any]:
    """Init info of vLLM's nccl backend for worker ``slot``.

    The learner's sending rank is NCCL rank 0; the GPUs of the group's members (``transport["members"]``) follow in slot
    order. ``transport["nccl"]`` holds what the learner chose: master_address, master_port, world_size, and packed with
    its buffer sizes.

    Raises:
        ValueError: the worker is no member of the group.
    """
    members = list(transport["members"])
    if slot not in members:
        raise ValueError(f"rollout worker {slot} is no member of the transfer group of workers {members}")
    return {**transport["nccl"], "rank_offset": 1 + members.index(slot) * tensor_parallel}


def nccl_update_info(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Update info of vLLM's nccl backend: tensors in the manifest's order, which is the order of the broadcasts."""
    tensors = manifest["tensors"]
    return {
        "names": list(tensors),
        "dtype_names": [entry["dtype"] for entry in tensors.values()],
        "shapes": [list(entry["shape"]) for entry in tensors.values()],
    }
