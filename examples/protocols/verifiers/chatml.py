"""A renderer for the ChatML template of the bundled model, which continues the tokens of the turn before.

The default renderer of `renderers` knows no template, so it renders the whole conversation again and again.
"""

from renderers.base import Message, RenderedTokens, ToolSpec, trim_to_turn_close
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer


class ChatMLRenderer(DefaultRenderer):
    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = trim_to_turn_close(previous_prompt_ids, previous_completion_ids, {end}, synthesize_close=end)
        owners = [-1] * len(ids)
        for number, message in enumerate(new_messages):
            text = f"\n<|im_start|>{message['role']}\n{message['content']}<|im_end|>"
            added = self._tokenizer.encode(text, add_special_tokens=False)
            ids, owners = ids + added, owners + [number] * len(added)
        opening = self._tokenizer.encode("\n<|im_start|>assistant\n", add_special_tokens=False)
        return RenderedTokens(
            token_ids=ids + opening,
            message_indices=owners + [-1] * len(opening),
            message_roles=[message["role"] for message in new_messages],
        )
