"""Fitting the reward head: the optimum, the split by prompt, and the folder that is saved."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.frozen_model import FrozenModel, pad_right
from actors.reward_scorer import last_token_scores
from learner.reward_model import _folds, _Pairs, choose_l2, fit_bradley_terry, fit_reward_head
from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.preferences import PreferencePair
from tests.tiny_models import build_tiny_policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_policy(tmp_path_factory.mktemp("base"))


def pairs_by_completeness(n_prompts, per_prompt=2):
    """Pairs in which the answer that ended by itself is preferred; the words are noise."""
    rng = random.Random(0)

    def words():
        return " ".join("".join(rng.choices("abcdefgh", k=4)) for _ in range(rng.randint(1, 5)))

    return [
        PreferencePair(f"{p}/{k}", ({"role": "user", "content": f"q{p}"},), words(), words(), True, False)
        for p in range(n_prompts)
        for k in range(per_prompt)
    ]


def test_the_head_is_the_bradley_terry_optimum_orthogonal_to_the_mean():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 6, generator=generator, dtype=torch.float64) + 3.0
    pairs = _Pairs(torch.arange(0, 20), torch.arange(20, 40), torch.arange(20))
    head = fit_bradley_terry(features, pairs, l2=0.1)
    mean, std = features.mean(dim=0), features.std(dim=0, correction=0)
    assert abs(float(head @ mean)) < 1e-9

    # At the optimum no direction orthogonal to the mean goes downhill: the gradient is a multiple of the mean.
    free = head.clone().requires_grad_()
    difference = features[:20] - features[20:]
    unconstrained = torch.nn.functional.softplus(-(difference @ free)).mean()
    unconstrained.backward()
    data_gradient = free.grad
    direction = mean / mean.norm()
    # The penalty sees the head before it is projected: head = (1 - d d') (scaled / std). Solve for `scaled` in that
    # family by stationarity: std-scaled, projected data gradient = -l2 * scaled.
    projected = data_gradient - (data_gradient @ direction) * direction
    scaled = -(projected / std) / 0.1
    again = scaled / std
    again = again - (again @ direction) * direction
    torch.testing.assert_close(again, head, atol=1e-4, rtol=1e-3)


def test_folds_hold_every_prompt_out_once_and_need_one_each():
    folds = _folds([3, 3, 1, 0, 2, 4, 4, 5, 6], 3, seed=0)
    assert sorted(group for fold in folds for group in fold) == [0, 1, 2, 3, 4, 5, 6]
    assert sorted(map(len, folds)) == [2, 2, 3]
    with pytest.raises(ValueError, match="at least 3 prompts, one a fold; got 2"):
        _folds([0, 1, 1], 3, seed=0)


def test_the_penalty_grows_with_the_noise_of_the_labels():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(240, 30, generator=generator, dtype=torch.float64)
    first, second, groups = torch.arange(0, 120), torch.arange(120, 240), torch.arange(120)
    better = features[first, 0] > features[second, 0]
    clear = _Pairs(torch.where(better, first, second), torch.where(better, second, first), groups)
    flip = torch.rand(120, generator=generator) < 0.5
    noise = _Pairs(torch.where(flip, first, second), torch.where(flip, second, first), groups)
    assert choose_l2(features, clear, 5, seed=0) <= 0.03
    assert choose_l2(features, noise, 5, seed=0) >= 10


def test_a_learnable_rule_is_learned_and_the_folder_scores_as_reported(base, tmp_path):
    stages = []
    pairs = pairs_by_completeness(30)
    fit = fit_reward_head(
        base, pairs, tmp_path / "rm", dtype="float32", batch_tokens=300, progress=lambda *event: stages.append(event)
    )
    assert fit.held_out_accuracy > 0.9 and fit.train_accuracy > 0.9
    assert fit.pairs == 60

    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert saved.config.num_labels == 1 and saved.config.pad_token_id == 0
    backbone = load_file(base / "model.safetensors")
    assert torch.equal(saved.model.embed_tokens.weight, backbone["model.embed_tokens.weight"])
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tmp_path / "rm"))
    frozen = FrozenModel(str(tmp_path / "rm"), "score", dtype="float32", attention="eager")

    def scores(which):
        rows = [
            renderer.conversation_ids(p.messages, getattr(p, which), getattr(p, f"{which}_complete")) for p in pairs
        ]
        return torch.tensor(last_token_scores(frozen, pad_right(rows)), dtype=torch.float64)

    chosen, rejected = scores("chosen"), scores("rejected")
    right = (chosen > rejected).sum()
    assert int(right) == round(fit.train_accuracy * 60)
    everything = torch.cat([chosen, rejected])
    assert abs(float(everything.mean())) < 0.02 and abs(float(everything.std()) - 1) < 0.02
    assert stages[-1][1] == stages[-1][2] and any(stage == "reading answers (tokens)" for stage, _, _ in stages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rm"]


def test_pure_noise_gives_no_held_out_accuracy(base, tmp_path):
    """Labels without a rule must not look learned: held-out prompts never reach the fit."""
    rng = random.Random(1)
    pairs = []
    for pair in pairs_by_completeness(60, per_prompt=3):
        chosen, rejected = (pair.chosen, pair.rejected) if rng.random() < 0.5 else (pair.rejected, pair.chosen)
        pairs.append(PreferencePair(pair.pair_id, pair.messages, chosen, rejected))
    fit = fit_reward_head(base, pairs, tmp_path / "rm", dtype="float32")
    assert fit.pairs == 180
    assert abs(fit.held_out_accuracy - 0.5) < 0.15  # 4 standard errors of 180 coin flips


def test_bad_input_is_refused_with_its_fix(base, tmp_path):
    with pytest.raises(ValueError, match="at least 5 prompts"):
        fit_reward_head(base, pairs_by_completeness(4), tmp_path / "rm")
    with pytest.raises(ValueError, match=r"pair '0/0' has \d+ tokens .* limit is 10"):
        fit_reward_head(base, pairs_by_completeness(6), tmp_path / "rm", max_tokens=10)
    (tmp_path / "rm").mkdir()
    with pytest.raises(ValueError, match="exists"):
        fit_reward_head(base, pairs_by_completeness(6), tmp_path / "rm")


def test_answers_that_look_alike_to_the_model_are_an_error_and_leave_no_folder(base, tmp_path):
    same = [PreferencePair(str(p), ({"role": "user", "content": f"q{p}"},), "yes", "yes") for p in range(6)]
    with pytest.raises(ValueError, match="do not tell the chosen answers from the rejected"):
        fit_reward_head(base, same, tmp_path / "rm", dtype="float32")
    assert list(tmp_path.iterdir()) == []
