"""Chat rendering: messages -> the token ids a model was trained to read, through its tokenizer's own template.

Imports neither torch nor transformers: the tokenizer is passed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from jinja2 import TemplateError

from rlhf_cluster.data.jsonl import RowError
from rlhf_cluster.types import Prompt

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant")

_PROBE = "probe-answer"
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Tokenizer(Protocol):
    """What rendering needs of a Hugging Face tokenizer."""

    chat_template: Any
    bos_token_id: int | None
    unk_token_id: int | None

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...

    def get_chat_template(self, chat_template: str | None = None) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, chat_template: str, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class ChatTemplateError(ValueError):
    """The tokenizer's chat template is missing or unusable; the message names the fix."""


def as_messages(value: Any, what: str) -> list[dict[str, str]]:
    """A row's field as chat messages: a string is one user message, a list ends with a user message.

    Raises:
        RowError: naming ``what`` and the rule that is broken.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RowError(f"{what} is a JSON {type(value).__name__}, not a string or a list of messages")
    if not value:
        raise RowError(f"{what} is empty")
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RowError(f"{what} holds a message whose role is not one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise RowError(f"{what} holds a message whose content is not a string")
        if not content.strip():
            raise RowError(f"{what} is empty" if len(value) == 1 else f"{what} holds an empty message")
        messages.append({"role": message["role"], "content": content})
    if messages[-1]["role"] != "user":
        raise RowError(f"the last message of {what} is not the user's")
    return messages


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """The conversation a prompt was rendered from, for rendering it again with another model's template."""
    messages = prompt.metadata.get("messages")
    return list(messages) if messages else [{"role": "user", "content": prompt.text}]


class ChatRenderer:
    """Renders conversations with one tokenizer and its chat template.

    Special-token strings inside messages and answers are encoded as plain text, so nobody can forge a turn. For all
    other text ``prompt_ids(m)`` equals ``tokenizer.apply_chat_template(m, add_generation_prompt=True)``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja source used in place of the tokenizer's own template.

    Raises:
        ChatTemplateError: when there is no template, it doubles or loses the BOS token, or it cannot open an answer.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        if template is None and not tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; use an instruct model, or name a template (Jinja source)"
            )
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template(template)
        control = self._control_tokens()
        self._control_ids = frozenset(control.values())
        # Longest first: "<eos>" must not hide behind a shorter token it begins with.
        self._control_pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        self._check_bos()
        self._check_generation_prompt()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the conversation and the generation prompt, BOS included where the template has one.

        Raises:
            RowError: when the template refuses the conversation, or its text would become special tokens.
        """
        return tuple(self._encode(messages))

    def conversation_ids(self, messages: Sequence[Message], answer_text: str, complete: bool) -> tuple[int, ...]:
        """Token ids of the conversation with an answer, as a reward model reads it.

        A ``complete`` answer is closed by the end-of-turn token, which is then the last id; a truncated one is left
        open, so that it looks truncated.

        Raises:
            RowError: as ``prompt_ids``. ChatTemplateError: when the template never closes an answer.
        """
        closing = self.end_of_turn_ids if complete else ()
        return (*self._encode(messages, self._answer_opening, answer_text), *closing)

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """What the template writes after an answer, up to and including its first special token (mostly one id).

        Raises:
            ChatTemplateError: when it writes nothing there.
        """
        suffix = self._probe_turn[1]
        ids = self._tokenizer.encode(suffix, add_special_tokens=False)
        for position, token_id in enumerate(ids):
            if token_id in self._control_ids:
                return tuple(ids[: position + 1])
        if not suffix.strip():
            raise ChatTemplateError(
                "the chat template writes nothing after an answer, so a complete answer cannot be told from a "
                "truncated one; use a template that closes the assistant's turn"
            )
        return tuple(self._tokenizer.encode(suffix.rstrip(), add_special_tokens=False))

    def _control_tokens(self) -> dict[str, int]:
        """Tokens user text must not become: special ones, and added ones that the template uses as markers."""
        specials = list(self._tokenizer.all_special_tokens)
        control = dict(zip(specials, self._tokenizer.convert_tokens_to_ids(specials), strict=True))
        for token_id, token in self._tokenizer.added_tokens_decoder.items():
            # Some vocabularies add runs of spaces as tokens; they mark nothing.
            if token.special or (token.content.strip() and token.content in self._template):
                control[token.content] = token_id
        return control

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except TemplateError as error:
            raise RowError(f"the chat template refuses the conversation ({error})") from None
        return rendered

    def _encode(self, messages: Sequence[Message], opening: str = "", answer: str = "") -> list[int]:
        """Ids of the rendered prompt, the template's ``opening`` and the answer."""
        everything = "".join(message["content"] for message in messages) + answer
        if not self._control_pattern.search(everything):
            text = self._render(messages, generation_prompt=True) + opening + answer
            return self._tokenizer.encode(text, add_special_tokens=False)
        # Special tokens are matched in the text handed to `encode`, so a string cut in pieces is plain text.
        cut = next(mark for mark in _NONCHARACTERS if mark not in everything)
        shielded = [{**message, "content": self._shield(message["content"], cut)} for message in messages]
        text = self._render(shielded, generation_prompt=True) + opening + self._shield(answer, cut)
        return [i for piece in text.split(cut) for i in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _shield(self, text: str, cut: str) -> str:
        shielded = self._control_pattern.sub(lambda match: cut + cut.join(match[0]) + cut, text)
        forged = self._control_ids - {self._tokenizer.unk_token_id}
        for piece in filter(None, shielded.split(cut)):
            if forged.intersection(self._tokenizer.encode(piece, add_special_tokens=False)):
                raise RowError("its text would be encoded as special tokens")
        return shielded

    @cached_property
    def _probe_turn(self) -> tuple[str, str]:
        """What the template writes around an answer that follows the generation prompt: ``(before, after)``."""
        question = [{"role": "user", "content": "probe-question"}]
        prompt = self._render(question, generation_prompt=True)
        whole = self._render([*question, {"role": "assistant", "content": _PROBE}], generation_prompt=False)
        start = whole.rfind(_PROBE)
        if start < 0:
            raise ChatTemplateError("the chat template leaves out the assistant's answer; name a template that has it")
        before = whole[len(prompt) : start] if whole.startswith(prompt) else ""
        return before, whole[start + len(_PROBE) :]

    @property
    def _answer_opening(self) -> str:
        return self._probe_turn[0]

    def _check_bos(self) -> None:
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return
        ids = self.prompt_ids([{"role": "user", "content": "probe-question"}])
        if ids[:2] == (bos, bos):
            raise ChatTemplateError("the chat template begins with two BOS tokens; take one `bos_token` out of it")
        adds_bos = self._tokenizer.encode("a")[:1] == [bos]
        if adds_bos and ids[:1] != (bos,):
            raise ChatTemplateError(
                "the tokenizer begins plain text with a BOS token but its chat template does not, so the model would "
                "read chats without the BOS it was trained with; begin the template with `{{ bos_token }}`"
            )

    def _check_generation_prompt(self) -> None:
        question = [{"role": "user", "content": "probe-question"}]
        has_one = self._render(question, generation_prompt=True) != self._render(question, generation_prompt=False)
        if not has_one and self._answer_opening.strip():
            raise ChatTemplateError(
                "the chat template ignores `add_generation_prompt`, so an answer would begin without its header; "
                "use a template that writes the assistant's header when `add_generation_prompt` is set"
            )
