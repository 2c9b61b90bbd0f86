"""Which prompt comes next, and which are done: a shuffled cursor whose saved state counts consumed, not issued.

A *place* numbers every issue of a run: ``epoch * n_prompts + position``, position counting in that epoch's shuffled
order. The state is the frontier (every place below it is consumed) and the few consumed places above it, so it stays
as small as the outstanding work. Example: 8 prompts, places 0-3 issued, 0, 1 and 3 consumed -> frontier 2, ahead [3];
a resumed cursor issues 2, 4, 5, 6, 7 and then the next epoch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_cluster.types import Prompt


@dataclass(frozen=True, slots=True)
class Issue:
    """One prompt in one epoch; ``position`` counts in that epoch's shuffled order."""

    epoch: int
    position: int
    prompt: Prompt
    group_id: str


class PromptCursor:
    """Issues every prompt once an epoch, in an order that depends on ``(seed, epoch)`` only.

    Args:
        prompts: prompts with distinct ids; fewer than a batch is fine, epochs follow one another without a gap.
        seed: run seed.
        epochs: how often each prompt is issued; None repeats for ever.

    Raises:
        ValueError: without prompts, with equal prompt ids, or with ``epochs`` below 1.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, epochs: int | None = None) -> None:
        self._prompts = tuple(prompts)
        self._index = {prompt.prompt_id: index for index, prompt in enumerate(self._prompts)}
        if not self._prompts:
            raise ValueError("prompts: the cursor needs at least one prompt, got 0")
        if len(self._index) != len(self._prompts):
            raise ValueError("prompts: ids must differ, got the same prompt_id twice; give every row its own `id`")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs: must be at least 1, or None to repeat for ever; got {epochs}")
        self._seed = seed
        self._epochs = epochs
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}  # by epoch: the position of every prompt
        self._frontier = 0
        self._ahead: set[int] = set()
        self._next = 0
        self._outstanding: dict[str, int] = {}
        # Places from ``_next`` on that were issued before a resume; only these can stand in the way of the next issue.
        self._issued_before: set[int] = set()

    def next(self) -> Issue | None:
        """The next issue, or None when every epoch is issued."""
        while self._next in self._issued_before:
            self._issued_before.remove(self._next)
            self._next += 1
        epoch, position = divmod(self._next, len(self._prompts))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        prompt = self._prompts[self._order(epoch)[position]]
        issue = Issue(epoch, position, prompt, f"{epoch}:{prompt.prompt_id}")
        self._outstanding[issue.group_id] = self._next
        self._next += 1
        return issue

    def issue(self, group_id: str) -> Issue:
        """The issue behind an outstanding group id, for issuing the same prompt again.

        Raises:
            ValueError: when ``group_id`` is not outstanding here.
        """
        if group_id not in self._outstanding:
            raise ValueError(f"group {group_id!r} is not outstanding: it was never issued, or is consumed already")
        epoch, position = divmod(self._outstanding[group_id], len(self._prompts))
        return Issue(epoch, position, self._prompts[self._order(epoch)[position]], group_id)

    def consumed(self, group_id: str) -> None:
        """Marks an issue as done: trained, or retired for good. Re-issuing an attempt is not consuming.

        Raises:
            ValueError: when ``group_id`` is not outstanding here.
        """
        if group_id not in self._outstanding:
            raise ValueError(f"group {group_id!r} is not outstanding: it was never issued, or is consumed already")
        self._ahead.add(self._outstanding.pop(group_id))
        while self._frontier in self._ahead:
            self._ahead.remove(self._frontier)
            self._frontier += 1
        # After a resume the frontier may run over places that were consumed before the save and are not yet passed.
        self._next = max(self._next, self._frontier)
        frontier_epoch = self._frontier // len(self._prompts)
        for by_epoch in (self._orders, self._positions):
            for epoch in [epoch for epoch in by_epoch if epoch < frontier_epoch]:
                del by_epoch[epoch]

    @property
    def frontier(self) -> int:
        """The first place that is not consumed."""
        return self._frontier

    def passed(self, group_id: str, frontier: int) -> bool:
        """Whether ``group_id`` lies below ``frontier``: a cursor that resumes there never issues it again.

        False for what is no issue of these prompts.
        """
        epoch, _, prompt_id = group_id.partition(":")
        if not epoch.isdecimal() or prompt_id not in self._index:
            return False
        whole_epochs, rest = divmod(frontier, len(self._prompts))
        if int(epoch) != whole_epochs:
            return int(epoch) < whole_epochs
        return self._position(whole_epochs, prompt_id) < rest

    @property
    def done(self) -> bool:
        """True when every epoch is consumed."""
        return self._epochs is not None and self._frontier >= self._epochs * len(self._prompts)

    def state_dict(self) -> dict[str, Any]:
        """A JSON-able copy: what is consumed, and a digest of the prompts and their order."""
        return {
            "frontier": self._frontier,
            "consumed_ahead": sorted(self._ahead),
            "seed": self._seed,
            "n_prompts": len(self._prompts),
            "digest": self._digest,
            "fields": self._fields,
        }

    def load_state_dict(self, state: Mapping[str, Any], outstanding: Iterable[str] = ()) -> None:
        """Resumes: exactly the prompts that are not consumed are issued, each once an epoch.

        Args:
            state: what ``state_dict`` returned.
            outstanding: group ids that live on elsewhere (a restored queue): not issued again, still to be consumed.

        Raises:
            ValueError: when the seed or the prompts are not those of the saved run, or an outstanding group is unknown
                or consumed. The cursor is then unchanged.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"run.seed: the saved run has seed {state['seed']}, got {self._seed}; use the saved one")
        # States of before the other fields were held do not say them.
        same = state["digest"] == self._digest and state.get("fields", self._fields) == self._fields
        if state["n_prompts"] != len(self._prompts) or not same:
            raise ValueError(
                f"data.prompts: the saved run had {state['n_prompts']} prompts and these {len(self._prompts)} are not "
                "the same (text, order, other fields, template or max_prompt_tokens changed); restore the old file or "
                "start a new run"
            )
        frontier, ahead = int(state["frontier"]), {int(place) for place in state["consumed_ahead"]}
        places = {group_id: self._place(group_id) for group_id in outstanding}
        for group_id, place in places.items():
            if place < frontier or place in ahead:
                raise ValueError(f"group {group_id!r} is outstanding in the queue but consumed in the cursor's state")
        self._frontier = self._next = frontier
        self._ahead, self._outstanding = ahead, places
        self._issued_before = ahead | set(places.values())

    def _place(self, group_id: str) -> int:
        epoch, _, prompt_id = group_id.partition(":")
        if not epoch.isdecimal() or prompt_id not in self._index:
            raise ValueError(f"group {group_id!r} is not an issue of these prompts (`epoch:prompt_id`)")
        return int(epoch) * len(self._prompts) + self._position(int(epoch), prompt_id)

    def _position(self, epoch: int, prompt_id: str) -> int:
        if epoch not in self._positions:
            self._positions[epoch] = np.argsort(self._order(epoch))
        return int(self._positions[epoch][self._index[prompt_id]])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return self._orders[epoch]

    @functools.cached_property
    def _digest(self) -> str:
        """Over ids and tokens in the first epoch's order, so that a changed shuffle is seen as well."""
        digest = hashlib.sha256()
        for index in np.random.default_rng([self._seed, 0]).permutation(len(self._prompts)):
            prompt = self._prompts[index]
            head = f"{len(prompt.prompt_id)}:{prompt.prompt_id}:{len(prompt.token_ids)}:"
            digest.update(head.encode(errors="surrogatepass"))
            digest.update(np.asarray(prompt.token_ids, dtype="<i4").tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _fields(self) -> str:
        """Over everything else that a row said of its prompt."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(json.dumps(prompt.metadata, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()
