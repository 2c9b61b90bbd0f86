"""What the sending side of ``publish.backend: nccl`` tells vLLM and the workers, without vLLM and without a GPU."""

from __future__ import annotations

import ast
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors.engine_arguments import nccl_init_info
from actors.weight_sender import NcclBroadcast, _Channel, _Weights
from rlhf_cluster.config_io import load_config


def fields_of_vllm(file: str, name: str) -> set[str]:
    """Annotated fields of a dataclass of vLLM's weight transfer, read from its source."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vllm is not installed")
    path = Path(found.submodule_search_locations[0]) / "distributed" / "weight_transfer" / f"{file}.py"
    cls = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name)
    assert isinstance(cls, ast.ClassDef)
    names = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return names - {"backend"}


def test_the_group_holds_the_sender_and_every_gpu_of_every_engine() -> None:
    config = load_config(
        Path("configs/ppo_7b_single_node.yaml"), ["rollout.workers=3", "rollout.engine.tensor_parallel=2"]
    )
    broadcast = NcclBroadcast.from_config(config)
    assert broadcast == NcclBroadcast(workers=3, tensor_parallel=2)
    whole = broadcast.transport("10.0.0.1", 4000)
    assert (whole["members"], whole["nccl"]["world_size"]) == ([0, 1, 2], 7)


def test_a_group_without_a_dead_worker_is_smaller_and_ranks_its_members_without_a_gap() -> None:
    rebuilt = NcclBroadcast(workers=3, tensor_parallel=2).transport("10.0.0.1", 4001, members=[2, 0])
    assert (rebuilt["members"], rebuilt["nccl"]["world_size"], rebuilt["nccl"]["master_port"]) == ([0, 2], 5, 4001)
    offsets = [nccl_init_info(rebuilt, slot=slot, tensor_parallel=2)["rank_offset"] for slot in rebuilt["members"]]
    # Ranks 1-2 and 3-4 beside the sender's 0: all five, each once.
    assert offsets == [1, 3]
    with pytest.raises(ValueError, match="at least one rollout worker"):
        NcclBroadcast(workers=3, tensor_parallel=2).transport("10.0.0.1", 4001, members=[])


def test_a_run_that_publishes_through_shared_memory_has_no_broadcast() -> None:
    assert NcclBroadcast.from_config(load_config(Path("configs/tiny_test.yaml"), [])) is None


def test_sender_and_workers_get_the_same_fields_and_vllm_knows_them_all() -> None:
    transport = NcclBroadcast(workers=2, tensor_parallel=1).transport("10.0.0.1", 4000)
    told = transport["nccl"]
    assert (told["master_address"], told["master_port"], told["world_size"]) == ("10.0.0.1", 4000, 3)
    assert (told["packed"], told["packed_buffer_size_bytes"], told["packed_num_buffers"]) == (True, 2**28, 2)
    assert set(told) == fields_of_vllm("nccl_engine", "NCCLTrainerInitInfo")
    worker = nccl_init_info(transport, slot=1, tensor_parallel=1)
    assert set(worker) == fields_of_vllm("nccl_common", "NCCLWeightTransferInitInfo") - {"nccl_unique_id_b64"}


def test_a_broadcast_reaches_another_process_whole() -> None:
    assert pickle.loads(pickle.dumps(NcclBroadcast(3, 2))) == NcclBroadcast(workers=3, tensor_parallel=2)


def test_a_channel_sends_each_version_after_the_optimizers_stream_and_leaves_its_group_when_closed() -> None:
    events: list[str] = []
    source = _Weights([], finish_stream=lambda: None)
    engine = SimpleNamespace(
        send_weights=lambda: events.append(f"send {next(source.weights)}"), shutdown=lambda: events.append("leave")
    )
    channel = _Channel(engine, source, before_sending=lambda: events.append("synchronize"))
    channel(iter([("a", 1)]))
    channel(iter([("a", 2)]))
    channel.close()
    assert events == ["synchronize", "send ('a', 1)", "synchronize", "send ('a', 2)", "leave"]


def test_the_packer_gets_finished_copies_in_order_that_outlive_the_learners_tensors() -> None:
    events: list[str] = []
    live = torch.zeros(2)

    def learner():
        for number, name in enumerate(("b", "a")):
            events.append(f"gather {name}")
            live.fill_(number + 1)
            yield name, live

    source = _Weights(["declared"], finish_stream=lambda: events.append("finish"))
    source.weights = learner()
    packed = list(source)
    assert source.metadata() == ["declared"]
    assert [(name, tensor.tolist()) for name, tensor in packed] == [("b", [1.0, 1.0]), ("a", [2.0, 2.0])]
    assert events == ["gather b", "finish", "gather a", "finish"]


def test_importing_the_sender_loads_no_engine() -> None:
    code = "import sys, actors.weight_sender; print([m for m in ('vllm', 'torch', 'ray') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
