"""A tokenizer's chat template: text and token ids of messages, and the header that opens a user turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from dspark.data.conversation import Message
from dspark.errors import DataError

if TYPE_CHECKING:
    from dspark.models.tokenizer import Tokenizer

_PLACEHOLDER = "\ue000user\ue000"  # private-use characters: no template treats them specially


class UserHeader(NamedTuple):
    """What stands before and after the words of a user: `text` up to the first word, and how the turn ends.

    The turn ends with the token `stop_token_id`, or, where the template closes it with plain text, with `stop_text`.
    """

    text: str
    stop_token_id: int | None
    stop_text: str | None


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of `tokenizer`; `variables` are passed to it (Qwen3: {"enable_thinking": False})."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any] = field(default_factory=dict)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template, told of the tools that the assistant may call; itself when there are none."""
        return replace(self, variables={**self.variables, "tools": list(tools)}) if tools else self

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages to text. Raises `DataError` when there is no template or the template refuses them."""
        if not self.tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template: use an instruction-tuned target")
        try:
            rendered = self.tokenizer.apply_chat_template(
                [message.as_dict() for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except TemplateError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from None
        return str(rendered)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` followed by the header of the assistant's turn: what a target answers to."""
        return self.encode(self.text(messages, add_generation_prompt=True))

    def prompt_ids_or_plain(self, messages: Sequence[Message]) -> list[int]:
        """`prompt_ids`, or for a tokenizer without a chat template the ids of the messages' text, line by line."""
        if self.tokenizer.chat_template:
            return self.prompt_ids(messages)
        return list(self.tokenizer("\n".join(message.content for message in messages))["input_ids"])

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; it holds its own special tokens, so that none is added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def user_header(self, system: str | None = None) -> UserHeader:
        """Return the text that opens the first user turn (after `system`, or the template's default one) and its end.

        Sampling from the target after this text makes it write what a user would say.
        """
        opening = () if system is None else (Message("system", system),)
        rendered = self.text((*opening, Message("user", _PLACEHOLDER)))
        before, found, after = rendered.partition(_PLACEHOLDER)
        if not found:
            raise DataError("the chat template drops the user's words: prompts cannot be sampled from this target")
        closing = after.strip()
        token = self.special_at_start(closing)
        if token is not None:
            return UserHeader(before, self.special_tokens[token], None)
        return UserHeader(before, None, closing or None)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the control tokens (ends of turn, role markers): those that decoding leaves out."""
        named = self.tokenizer.all_special_tokens
        added = self.tokenizer.added_tokens_decoder.items()
        return {token.content: index for index, token in added if token.special or token.content in named}

    def special_at_start(self, text: str) -> str | None:
        """The control token that `text` begins with, or None."""
        return max((token for token in self.special_tokens if text.startswith(token)), key=len, default=None)

    def special_at_end(self, text: str) -> str | None:
        """The control token that `text` ends with, or None."""
        return max((token for token in self.special_tokens if text.endswith(token)), key=len, default=None)
