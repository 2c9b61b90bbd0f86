"""The memory ledger: every process of a run and what its memory goes to, before anything is started.

    config + model shapes --> processes x parts --> totals by device --> advice

On a CPU every process shares the host's memory and the ledger's total is compared with it. On GPUs each process has a
device of its own and is compared alone. Figures are peaks: what is resident when a batch of the longest samples is
trained and a new version arrives at the engines.

Constants named after a measurement are of the versions in requirements/cpu.lock; docs/planning.md has the commands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_cluster.config import Config
from rlhf_cluster.planner.activations import (
    MIB,
    Pass,
    forward_pass,
    scoring_head,
    training_head,
    training_pass,
)
from rlhf_cluster.planner.learner_memory import EngineMemory, engine_memory
from rlhf_cluster.planner.model_shapes import ModelShape, read_shape

GIB = 2**30

Column = Literal["process", "weights", "gradients", "optimizer", "activations", "KV cache", "buffers"]
COLUMNS: tuple[Column, ...] = ("process", "weights", "gradients", "optimizer", "activations", "KV cache", "buffers")
Device = Literal["host", "gpu"]

# Resident MiB of each process before it holds a model: Python, its imports, its Ray worker.
PROCESS_MIB = {
    "driver": 500,
    "Ray": 725,
    "rollout worker": 635,
    "engine": 705,
    "reward scorer": 490,
    "reference scorer": 490,
    "learner rank": 560,
}
# Of that, pages of libraries that the processes of one host share.
_SHARED_MIB = {"driver": 80, "Ray": 220}
_SHARED_TORCH_MIB = 170
# A loaded tokenizer takes this many bytes for each of its tokenizer.json.
_TOKENIZER_FACTOR = 12
# Heap of a scorer's thread after batches of many shapes, over the largest batch's needs.
_SCORER_HEAP = 2.3
# CUDA context, kernels and communication buffers of one process on its GPU: assumed, not measured here.
_CUDA_GIB = 1.5
# Weight files in shared memory: the two newest versions and the one being written (learner.weight_publisher).
_SNAPSHOTS = 3
_ENGINE_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """``count`` processes of one role, each with ``parts`` bytes on its ``device``."""

    role: str
    count: int
    device: Device
    parts: Mapping[Column, float]
    shared: float = 0.0
    """Bytes of one process that the others of its host share."""

    @property
    def total(self) -> float:
        """Bytes of one process."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Room of one engine: ``tokens`` in its KV cache, which hold ``sequences`` of the longest length."""

    tokens: float
    sequences: float
    wanted: int
    """Sequences that may run at once (rollout.engine.max_num_seqs)."""
    bytes_a_sequence: float
    """Of the longest length, on one device."""


@dataclass(frozen=True, slots=True)
class Ledger:
    processes: tuple[ProcessMemory, ...]
    kv: KVRoom

    def process(self, role: str) -> ProcessMemory:
        return next(process for process in self.processes if process.role == role)

    @property
    def host_bytes(self) -> float:
        """Of all processes on the host together, shared pages once."""
        on_host = [process for process in self.processes if process.device == "host"]
        apart = sum(process.count * (process.total - process.shared) for process in on_host)
        return apart + max((process.shared for process in on_host), default=0.0)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The models of a run; ``critic`` and ``reward`` are None where there is none."""

    policy: ModelShape
    reference: ModelShape
    reward: ModelShape | None
    critic: ModelShape | None


def read_shapes(config: Config) -> Shapes:
    """Raises ConfigError when a model folder cannot be read here."""
    model = config.model
    policy = read_shape(model.policy, "model.policy")
    reference = policy if model.reference is None else read_shape(model.reference, "model.reference")
    reward = None if model.reward is None else read_shape(model.reward, "model.reward").classifier()
    critic = None
    if config.algorithm.uses_critic:
        critic = reward if model.critic is None else read_shape(model.critic, "model.critic").classifier()
    has_reward = any(component.kind == "model" for component in config.reward.components)
    return Shapes(policy, reference, reward if has_reward else None, critic)


def plan_memory(config: Config, shapes: Shapes, *, gpu_bytes: float = 0.0) -> Ledger:
    """The ledger of ``config``; ``gpu_bytes`` is the memory of one GPU (with ``cluster.device: cuda``)."""
    plan = _Plan(config, shapes, gpu_bytes)
    processes = [*plan.scorers(), *plan.learner(), *plan.host()]
    engines, kv = plan.engines()
    return Ledger((*engines, *processes), kv)


class _Plan:
    def __init__(self, config: Config, shapes: Shapes, gpu_bytes: float) -> None:
        self._config = config
        self._shapes = shapes
        self._gpu_bytes = gpu_bytes
        self._on_gpu = config.cluster.device == "cuda"
        self._element = 2 if config.model.dtype == "bfloat16" else 4
        self._eager = config.model.attention == "eager"
        self._longest = config.max_model_len
        self._samples = config.queue.groups_per_batch * config.rollout.samples_per_prompt

    def engines(self) -> tuple[list[ProcessMemory], KVRoom]:
        """Rollout workers and the engine process of each."""
        config, policy, e = self._config, self._shapes.policy, self._element
        engine = config.rollout.engine
        a_token = policy.kv_bytes_per_token(e)
        batch_tokens = max(_ENGINE_BATCH_TOKENS, self._longest)
        # Paged attention reads the cache in place and keeps no scores.
        work = forward_pass(policy, Pass(batch_tokens, self._longest, e, eager=False))
        work += scoring_head(policy, engine.max_num_seqs, e)
        worker = self._process(
            "rollout worker", config.rollout.workers, {"buffers": 2 * self._tokenizer(config.model.policy)}, host=True
        )
        if self._on_gpu:
            # A GPU holds its share of the weights; what the limit leaves is KV cache.
            split = engine.tensor_parallel
            parts: dict[Column, float] = {"weights": e * policy.total / split, "activations": work / split}
            fixed = _CUDA_GIB * GIB + sum(parts.values())
            room = max(0.0, engine.gpu_memory_utilization * self._gpu_bytes - fixed)
            count = config.rollout.workers * split
            return [
                self._process("engine", count, {**parts, "KV cache": room}),
                worker,
            ], self._room(room, a_token / split)
        # vLLM packs each weight for its own kernels; a tied head is packed beside the embedding it shares.
        packed = e * (policy.total + (policy.vocabulary * policy.hidden if policy.tied else 0))
        room = engine.cpu_kv_cache_gib * GIB
        # While an update is applied: the mapped file and the weights packed anew.
        update = e * policy.total + packed
        memory: dict[Column, float] = {"weights": packed, "KV cache": room, "activations": work, "buffers": update}
        return [self._process("engine", config.rollout.workers, memory), worker], self._room(room, a_token)

    def scorers(self) -> list[ProcessMemory]:
        config, scorers = self._config, self._config.scorers
        outstanding = (config.queue.max_staleness + 1) * self._samples
        slots = min(max(scorers.batch_tokens, self._longest), outstanding * self._longest)
        run = Pass(slots, self._longest, self._element, self._eager)
        heap = 1.0 if self._on_gpu else _SCORER_HEAP
        reward, reference = self._shapes.reward, self._shapes.reference
        tokenizer = self._tokenizer(config.model.policy)
        parts: dict[Column, float] = {"buffers": tokenizer}
        if reward is not None and config.model.reward is not None:
            parts = {
                "weights": self._element * reward.total,
                "activations": heap * forward_pass(reward, run),
                "buffers": tokenizer + self._tokenizer(config.model.reward),
            }
        work = forward_pass(reference, run) + scoring_head(reference, config.rollout.max_new_tokens, self._element)
        return [
            self._process("reward scorer", scorers.reward_replicas, parts),
            self._process(
                "reference scorer",
                scorers.reference_replicas,
                {"weights": self._element * reference.total, "activations": heap * work},
            ),
        ]

    def learner(self) -> list[ProcessMemory]:
        """The ranks. Policy and critic step in turn, so gradients and activations are those of the larger."""
        config, shapes, learner = self._config, self._shapes, self._config.learner
        engines = [(self._policy_engine(), self._policy_pass())]
        if shapes.critic is not None:
            critic, layers = shapes.critic, learner.critic_layers
            trained = critic.total if layers is None else critic.top_layers(layers)
            engines.append((self._engine(critic.total, trained), self._training(critic, layers or critic.layers)))
        weights = sum(memory.weights for memory, _ in engines)
        if config.algorithm.needs_reference_model:
            weights += self._element * shapes.reference.total
        gradients = max(memory.gradients for memory, _ in engines)
        step = max(memory.step for memory, _ in engines)
        activations = max(work for _, work in engines)
        if self._on_gpu:
            # Activations are gone when the optimizer steps, and the allocator gives their memory to it.
            step = max(0.0, step - activations)
        parts: dict[Column, float] = {
            "weights": weights,
            "gradients": gradients,
            "optimizer": sum(memory.optimizer for memory, _ in engines),
            "activations": activations,
            "buffers": step,
        }
        return [self._process("learner rank", learner.ranks, parts)]

    def host(self) -> list[ProcessMemory]:
        """What lies in the host's memory whatever the device: the driver, Ray, and weights on their way."""
        config, policy = self._config, self._shapes.policy
        size = self._element * policy.total
        rows = [
            self._process("driver", 1, {"buffers": self._tokenizer(config.model.policy)}, host=True),
            self._process("Ray", 1, {}, host=True),
        ]
        if config.publish.backend == "shared_memory":
            rows.append(ProcessMemory("weight files", 1, "host", {"buffers": _SNAPSHOTS * size}))
        if self._on_gpu:
            rows.append(ProcessMemory("checkpoint copy", 1, "host", {"buffers": size}))
        return rows

    def _policy_pass(self) -> float:
        policy, run = self._shapes.policy, self._training_run()
        responses = min(run.slots, math.ceil(run.slots / self._longest) * self._config.rollout.max_new_tokens)
        if self._config.algorithm.ptx is not None:
            responses = run.slots
        full_kl = self._config.algorithm.needs_reference_model
        head = training_head(policy, responses, self._element, reference=full_kl)
        return self._training(policy, policy.layers) + head

    def _training(self, model: ModelShape, layers: int) -> float:
        checkpointing = self._config.learner.gradient_checkpointing
        return training_pass(
            model, self._training_run(), checkpointing=checkpointing, trained_layers=min(layers, model.layers)
        )

    def _training_run(self) -> Pass:
        learner = self._config.learner
        samples = math.ceil(self._samples / learner.minibatches / learner.ranks)
        # A sample longer than the budget goes alone.
        slots = min(max(learner.micro_batch_tokens, self._longest), samples * self._longest)
        return Pass(slots, self._longest, self._element, self._eager)

    def _policy_engine(self) -> EngineMemory:
        policy, lora = self._shapes.policy, self._config.learner.lora
        if lora is None:
            return self._engine(policy.total, policy.total)
        adapters = policy.adapters(lora.rank, lora.target_modules)
        return self._engine(policy.total + adapters, adapters)

    def _engine(self, parameters: int, trained: int) -> EngineMemory:
        learner = self._config.learner
        return engine_memory(
            parameters,
            trained,
            ranks=learner.ranks,
            stage=learner.zero_stage,
            element=self._element,
            on_gpu=self._on_gpu,
        )

    def _process(self, role: str, count: int, parts: Mapping[Column, float], *, host: bool = False) -> ProcessMemory:
        if self._on_gpu and not host:
            return ProcessMemory(role, count, "gpu", {"process": _CUDA_GIB * GIB, **parts})
        shared = _SHARED_MIB.get(role, _SHARED_TORCH_MIB) * MIB
        return ProcessMemory(role, count, "host", {"process": PROCESS_MIB[role] * MIB, **parts}, shared)

    def _room(self, size: float, a_token: float) -> KVRoom:
        """``size`` bytes of cache on one device, ``a_token`` of them a token."""
        a_sequence = a_token * self._longest
        wanted = self._config.rollout.engine.max_num_seqs
        return KVRoom(size / a_token, size / a_sequence, wanted, a_sequence)

    def _tokenizer(self, folder: str) -> float:
        path = Path(folder) / "tokenizer.json"
        return _TOKENIZER_FACTOR * path.stat().st_size if path.is_file() else 0.0
