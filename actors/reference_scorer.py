"""Log-probabilities of sampled tokens under the frozen reference policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.frozen_model import FrozenModel, pad_right
from actors.micro_batcher import MicroBatcher
from rlhf_cluster.algorithms.losses import token_logprobs
from rlhf_cluster.config import ModelConfig, ScorerConfig
from rlhf_cluster.types import Floats, Rollout

# Positions whose logits are held at once: 512 rows of a 150k vocabulary are 300 MB in float32.
_LOGIT_ROWS = 512


class ReferenceScorer:
    """log pi_ref of every response token, at the temperature its rollout was sampled with.

    Args:
        model: names the reference folder, dtype and attention.
        scorers: batch window and token budget.
    """

    def __init__(self, model: ModelConfig, scorers: ScorerConfig, *, device: str = "cpu") -> None:
        self._model = FrozenModel(
            model.reference_path,
            "lm_head",
            dtype=model.dtype,
            attention=model.attention,
            device=device,
            trust_remote_code=model.trust_remote_code,
        )
        self._batcher: MicroBatcher[Rollout, Floats] = MicroBatcher(
            lambda rollouts: response_logprobs(self._model, rollouts),
            length=lambda rollout: len(_inputs(rollout)),
            batch_tokens=scorers.batch_tokens,
            window_s=scorers.batch_window_ms / 1000,
        )

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """One (T,) array of nats per rollout, same order; empty for a rollout without tokens.

        Raises:
            ValueError: a rollout with an empty prompt, whose first token nothing predicts.
        """
        for rollout in rollouts:
            if len(rollout.prompt_token_ids) == 0:
                raise ValueError(f"rollout {rollout.rollout_id} has an empty prompt; nothing predicts its first token")
        with_tokens = [rollout for rollout in rollouts if rollout.n_tokens]
        scored = iter(await self._batcher.submit(with_tokens))
        return [next(scored) if rollout.n_tokens else np.zeros(0, np.float32) for rollout in rollouts]


def response_logprobs(model: FrozenModel, rollouts: Sequence[Rollout]) -> list[Floats]:
    """(T,) log-probs in nats of each rollout's response, by the learner's definition (``token_logprobs``).

    The head runs on positions that predict a response token and on no other, some rows at a time.
    """
    hidden = model.hidden_states(pad_right([_inputs(rollout) for rollout in rollouts]))
    logprobs = []
    for row, rollout in enumerate(rollouts):
        # Position t predicts token t+1, so the prompt's last position predicts the first response token.
        first = len(rollout.prompt_token_ids) - 1
        states = hidden[row, first : first + rollout.n_tokens]
        ids = torch.as_tensor(rollout.token_ids, dtype=torch.long, device=states.device)
        parts = [
            token_logprobs(
                model.apply_head(states[start : start + _LOGIT_ROWS]),
                ids[start : start + _LOGIT_ROWS],
                rollout.sampling.temperature,
            )
            for start in range(0, rollout.n_tokens, _LOGIT_ROWS)
        ]
        logprobs.append(torch.cat(parts).cpu().numpy().astype(np.float32))
    return logprobs


def _inputs(rollout: Rollout) -> NDArray[np.int32]:
    """Everything but the last token, which predicts nothing that is asked for."""
    return np.concatenate([rollout.prompt_token_ids, rollout.token_ids[:-1]])
