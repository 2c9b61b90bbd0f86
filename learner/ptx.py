"""The language-model loss of PPO-ptx: which text this rank adds to an optimizer step of the policy."""

from __future__ import annotations

import functools

from transformers import AutoTokenizer

from learner.engine import TrainEngine
from learner.models import collate
from learner.objectives import Contribution, text_objective
from learner.ranks import Ranks
from learner.spec import LearnerSpec
from learner.trainer import Extra
from rlhf_cluster.config import PtxConfig
from rlhf_cluster.data.text_blocks import TextBlocks, read_blocks
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Ids


class TextTraining:
    """Blocks are dealt to the ranks in turn; a rank without one adds a filler of weight 0, so that all take part.

    Args:
        micro_batch_tokens: most tokens of text in one forward and backward.
    """

    def __init__(
        self, blocks: TextBlocks, config: PtxConfig, ranks: Ranks, *, packed: bool, micro_batch_tokens: int
    ) -> None:
        self._blocks = blocks
        self._config = config
        self._ranks = ranks
        self._packed = packed
        self._rows = max(1, micro_batch_tokens // config.block_tokens)

    @classmethod
    def from_spec(cls, spec: LearnerSpec, config: PtxConfig, ranks: Ranks, *, packed: bool) -> TextTraining:
        """Raises DataError when the file cannot be read or is shorter than a block."""
        tokenizer = AutoTokenizer.from_pretrained(spec.model.policy, trust_remote_code=spec.model.trust_remote_code)
        blocks = TextBlocks(
            read_blocks(config.file, tokenizer, config.block_tokens), seed=derive_seed(spec.seed, "ptx", 0)
        )
        return cls(blocks, config, ranks, packed=packed, micro_batch_tokens=spec.learner.micro_batch_tokens)

    def of_step(self, step: int) -> list[Extra]:
        """This rank's micro-batches of text for the policy's optimizer step ``step``, equally many on every rank."""
        count, world = self._config.blocks_per_step, self._ranks.world_size
        mine = self._blocks.of_step(step, count)[self._ranks.rank :: world]
        most = -(-count // world)
        parts = [mine[start : start + self._rows] for start in range(0, most, self._rows)]
        n_tokens = count * (self._config.block_tokens - 1)
        return [functools.partial(self._contribution, part, n_tokens) for part in parts]

    def _contribution(self, blocks: list[Ids], n_tokens: int, engine: TrainEngine) -> Contribution:
        # The first token of a block is predicted by nothing.
        rows = [(block[:1], block[1:]) for block in blocks]
        inputs = collate(rows, self._ranks.device, packed=self._packed)
        return text_objective(engine, inputs, filler=not rows, coef=self._config.coef, n_tokens=n_tokens)
