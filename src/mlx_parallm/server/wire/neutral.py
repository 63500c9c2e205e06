"""Fields that other servers know and this one does not serve, with the values of them that ask for nothing.

`null`, `""`, `[]` and `{}` ask for nothing in each of them. Any other value is refused by name: an answer that ignores
it would not be the answer that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

EMPTY: tuple[Any, ...] = ("", [], {})

GENERATION: Neutral = {
    "allowed_token_ids": (),
    "bad_words": (),
    "early_stopping": (False,),
    "grammar": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "response_format": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": (),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETIONS: Neutral = {**GENERATION, "prompt_embeds": (), "suffix": ()}
CHAT: Neutral = {
    **GENERATION,
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": (),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}
RESPONSES: Neutral = {
    **GENERATION,
    "access_programs": (),
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "frequency_penalty": (0.0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image": (),
    "logit_bias": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "moderation": (),
    "n": (1,),
    "presence_penalty": (0.0,),
    "prompt_logprobs": (),
    "prompt": (),
    "prompt_cache_options": (),
    "repetition_penalty": (1.0,),
    "stop": (),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}
MESSAGE: Neutral = {"annotations": (), "audio": (), "function_call": (), "images": (), "refusal": ()}
CALL: Neutral = {"custom": ()}
RESPONSE_FORMAT: Neutral = {"schema": ()}
STRUCTURED_OUTPUTS: Neutral = {
    "disable_additional_properties": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
RESPONSES_TOOL: Neutral = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}
RESPONSES_CALL: Neutral = {"async": (False,), "namespace": ()}
RESPONSES_CALL_OUTPUT: Neutral = {"namespace": ()}
REASONING: Neutral = {"generate_summary": ("auto",), "mode": ("standard",), "summary": ("auto",)}
