"""What a rollout worker asks of vLLM, without vLLM: engine arguments, environment, sampling, transfer handshakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.engine_arguments import (
    checkpoint_weight_shapes,
    engine_arguments,
    engine_environment,
    nccl_init_info,
    nccl_update_info,
    neutral_sampling,
    stop_token_ids,
)
from actors.parent_death import EndsWithParent
from actors.rollout_worker import RolloutWorker, version_spans
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.protocols import RolloutRequest
from rlhf_cluster.types import Prompt, Sampling


def arguments(engine: EngineConfig | None = None, *, device: str = "cpu", publish: PublishConfig | None = None) -> Any:
    return engine_arguments(
        model="folder",
        dtype="bfloat16",
        engine=engine or EngineConfig(),
        max_model_len=640,
        seed=5,
        device=device,
        publish=publish or PublishConfig(),
        trust_remote_code=False,
    )


def test_log_probs_are_processed_and_the_models_sampling_defaults_ignored() -> None:
    asked = arguments()
    assert asked["logprobs_mode"] == "processed_logprobs"
    assert asked["generation_config"] == "vllm"
    assert asked["trust_remote_code"] is False


def test_every_engine_is_handed_what_ends_it_with_its_worker() -> None:
    assert any(isinstance(value, EndsWithParent) for value in arguments()["additional_config"].values())


def test_on_cpu_the_engine_runs_in_one_process_with_its_own_cache_size_and_threads() -> None:
    engine = EngineConfig(cpu_kv_cache_gib=3, cpu_threads=2, max_num_seqs=48)
    asked = arguments(engine)
    assert asked["distributed_executor_backend"] == "uni"
    assert asked["kv_cache_memory_bytes"] == 3 * 2**30
    # Two more than may be generated at once: the log-prob probe finds room in a full engine.
    assert (asked["max_num_seqs"], asked["max_model_len"], asked["seed"]) == (50, 640, 5)
    assert "gpu_memory_utilization" not in asked

    environment = engine_environment(engine, "cpu")
    # With multiprocessing on, vLLM would replace the uni executor by a third process.
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_on_gpus_an_engine_spreads_over_its_tensor_parallel_processes() -> None:
    engine = EngineConfig(tensor_parallel=4, gpu_memory_utilization=0.7)
    asked = arguments(engine, device="cuda", publish=PublishConfig(backend="nccl"))
    assert asked["tensor_parallel_size"] == 4
    assert asked["distributed_executor_backend"] == "mp"
    assert asked["gpu_memory_utilization"] == 0.7
    assert asked["weight_transfer_config"] == {"backend": "nccl"}
    assert "kv_cache_memory_bytes" not in asked
    assert "OMP_NUM_THREADS" not in engine_environment(engine, "cuda")


def test_the_environment_keeps_engines_offline_silent_and_on_loopback() -> None:
    for device in ("cpu", "cuda"):
        environment = engine_environment(EngineConfig(), device)
        assert (environment["HF_HUB_OFFLINE"], environment["VLLM_NO_USAGE_STATS"]) == ("1", "1")
        assert environment["VLLM_HOST_IP"] == "127.0.0.1"


def test_sampling_is_neutral_in_every_field_that_could_bend_it() -> None:
    neutral = neutral_sampling([2, 7])
    assert (neutral["top_p"], neutral["top_k"], neutral["min_p"], neutral["min_tokens"]) == (1.0, 0, 0.0, 0)
    assert neutral["repetition_penalty"] == 1.0
    assert neutral["presence_penalty"] == neutral["frequency_penalty"] == 0.0
    assert neutral["stop_token_ids"] == [2, 7]
    assert neutral["ignore_eos"] is False


def test_end_ids_come_from_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert stop_token_ids(tmp_path, 2) == [2, 4, 9]


def test_end_ids_without_any_file_are_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(tmp_path, 2) == [2]
    assert stop_token_ids(tmp_path, None) == []


@pytest.mark.parametrize(("tied", "expected"), [(True, {"a": (2, 1)}), (False, {"a": (2, 1), "lm_head.weight": (1,)})])
def test_expected_names_span_all_files_and_leave_out_a_tied_head(
    tmp_path: Path, tied: bool, expected: dict[str, tuple[int, ...]]
) -> None:
    one, two = np.zeros(1, np.float32), np.zeros((2, 1), np.float32)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    save_file({"lm_head.weight": one}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": two, "layer.rotary_emb.inv_freq": one}, tmp_path / "model-00002-of-00002.safetensors")
    assert checkpoint_weight_shapes(tmp_path) == expected


def test_a_folder_without_safetensors_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors; save the model with save_pretrained"):
        checkpoint_weight_shapes(tmp_path)


def test_nccl_ranks_follow_the_learners_rank_in_slot_order() -> None:
    nccl = {"master_address": "10.0.0.1", "master_port": 4000, "world_size": 9, "packed": True}
    transport = {"nccl": nccl, "members": [0, 1]}
    # Rank 0 is the learner; slots 0 and 1 of four GPUs hold ranks 1-4 and 5-8.
    assert nccl_init_info(transport, slot=0, tensor_parallel=4)["rank_offset"] == 1
    second = nccl_init_info(transport, slot=1, tensor_parallel=4)
    assert second == nccl | {"rank_offset": 5}


def test_nccl_ranks_close_up_when_a_worker_is_missing() -> None:
    transport = {"nccl": {"world_size": 5}, "members": [0, 2]}
    assert nccl_init_info(transport, slot=2, tensor_parallel=2) == {"world_size": 5, "rank_offset": 3}
    with pytest.raises(ValueError, match=r"rollout worker 1 is no member of the transfer group of workers \[0, 2\]"):
        nccl_init_info(transport, slot=1, tensor_parallel=2)


def test_nccl_update_info_keeps_the_manifests_order() -> None:
    manifest = {
        "tensors": {
            "z": {"dtype": "bfloat16", "shape": [2, 3], "crc32": 1},
            "a": {"dtype": "float32", "shape": [4], "crc32": 2},
        }
    }
    assert nccl_update_info(manifest) == {
        "names": ["z", "a"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
    }


def test_spans_are_the_engines_labels_and_an_empty_answer_keeps_its_start_version() -> None:
    reported = [SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4", start=2, end=5)]
    assert version_spans(reported, 5, 3) == ((3, 0, 2), (4, 2, 5))
    assert version_spans([], 0, 7) == ((7, 0, 0),)


def test_a_worker_that_has_not_started_refuses_by_name() -> None:
    import asyncio

    worker = RolloutWorker(2, "folder", "float32", EngineConfig(), 64, 0, "cpu", PublishConfig())
    request = RolloutRequest("g", 1, Prompt("p", (1,), "x"), (Sampling(1.0, 4, 0),))
    with pytest.raises(RuntimeError, match="rollout worker 2 does not generate: it has not started"):
        asyncio.run(worker.generate(request))


def test_importing_the_worker_loads_no_engine() -> None:
    code = "import sys, actors.rollout_worker; print([m for m in ('vllm', 'torch', 'ray') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
