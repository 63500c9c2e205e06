"""Model folders whose model recites a script in a family's own forms: `save_scripted`.

The templates write what the families' own write in a loop of tools: special tokens, thinking of the turns since the
last question, calls and results.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mlx_parallm.model.bundled import bundled_tokenizer

CONTEXT = 1_048_576
_LONG = " ".join(["The file has one line, and I put the one after it in its place."] * 8)
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How a family's answers begin and end, and what it writes.

    begins:  tokens of which the last one of a prompt begins an answer
    special: other special tokens of the vocabulary; `words` are added tokens that decoding keeps
    stops:   tokens that end an answer
    call:    (thought, tool, arguments) → what the model writes after the prompt, up to the token that ends it
    said:    (thought, text) → the same without a call
    """

    template: str
    begins: tuple[str, ...]
    special: tuple[str, ...]
    words: tuple[str, ...]
    stops: tuple[str, ...]
    call: Callable[[str, str, Arguments], str]
    said: Callable[[str, str], str]


def _lines(form: str, arguments: Arguments) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "".join(form.format(key, text) for key, text in texts.items())


_HARMONY = """\
<|start|>system<|message|>You are ChatGPT.
# Valid channels: analysis, commentary, final.<|end|>
{%- set system = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
<|start|>developer<|message|># Instructions

{{ system }}
{%- if tools %}

# Tools

## functions

namespace functions {
{% for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor %}
} // namespace functions
{%- endif %}<|end|>
{%- set ns = namespace(name='', last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls -%}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
{%- set call = m.tool_calls[0].function -%}
{%- set ns.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
_QWEN = """\
{%- if tools %}<|im_start|>system
# Tools

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

If you call a function, reply in this format:

<tool_call>
<function=example>
<parameter=name>
value
</parameter>
</function>
</tool_call>
{%- if messages[0].role == 'system' %}

{{ messages[0].content }}{% endif %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content.strip() }}
</think>

{% endif %}{{ m.content.strip() if m.content else '' }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}
{% endif -%}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
_GLM = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>...</tool_call>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'system' %}<|system|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>{% else %}</think>{% endif %}
{%- if m.content and m.content.strip() %}{{ m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
_MISTRAL = """\
<s>
{%- if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] -%}
{%- if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in m.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>
{%- endif %}
{%- endfor %}"""
_QWEN_ARGUMENT = "<parameter={}>\n{}\n</parameter>\n"
_GLM_ARGUMENT = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"

FAMILIES = {
    "openai": Family(
        _HARMONY,
        begins=("<|start|>",),
        special=("<|message|>", "<|channel|>", "<|constrain|>", "<|end|>"),
        words=(),
        stops=("<|call|>", "<|return|>"),
        call=lambda thought, tool, arguments: (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.{tool} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        ),
        said=lambda thought, text: (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}"
            "<|return|>"
        ),
    ),
    "qwen3_coder": Family(
        _QWEN,
        begins=("<think>",),
        special=("<|im_start|>",),
        words=("</think>", "<tool_call>", "</tool_call>"),
        stops=("<|im_end|>",),
        call=lambda thought, tool, arguments: (
            f"{thought}\n</think>\n\n<tool_call>\n<function={tool}>\n"
            f"{_lines(_QWEN_ARGUMENT, arguments)}</function>\n</tool_call><|im_end|>"
        ),
        said=lambda thought, text: f"{thought}\n</think>\n\n{text}<|im_end|>",
    ),
    "glm47": Family(
        _GLM,
        begins=("<|assistant|>",),
        special=("[gMASK]", "<sop>", "<|system|>"),
        words=(
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        stops=("<|observation|>", "<|user|>"),
        call=lambda thought, tool, arguments: (
            f"{thought}</think><tool_call>{tool}{_lines(_GLM_ARGUMENT, arguments)}</tool_call><|observation|>"
        ),
        said=lambda thought, text: f"{thought}</think>{text}<|user|>",
    ),
    "mistral": Family(
        _MISTRAL,
        begins=("[/INST]", "[/TOOL_RESULTS]"),
        special=(
            *("<s>", "[INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        ),
        words=(),
        stops=("</s>",),
        call=lambda thought, tool, arguments: (
            f"[THINK]{thought}[/THINK][TOOL_CALLS]{tool}[ARGS]{json.dumps(arguments)}</s>"
        ),
        said=lambda thought, text: f"[THINK]{thought}[/THINK]{text}</s>",
    ),
}


def line(number: int) -> str:
    """What the file says after this many edits: one token."""
    return f"line-{number:02}"


def _thought(number: int) -> str:
    """Two tokens that set a state. They are so far apart that the second part of an answer, whose positions are counted
    from its own beginning, has no state and position in common with the first part."""
    return f"{_marks(number)[0]}. {_LONG} {_marks(number)[1]}"


def _marks(number: int) -> tuple[str, str]:
    return f"plan-{number:02}", f"next-{number:02}"


def save_scripted(folder: Path, family: Family, calls: Sequence[tuple[str, Arguments]]) -> None:
    """Writes a model that answers a prompt whose last `line` is number n by the n-th of these calls, which must write
    line n + 1 in the end. After the last one it says that it is done."""
    numbers = range(len(calls) + 1)
    states = [state for number in numbers for state in (line(number), *_marks(number))]
    tokenizer = _tokenizer(family, states)
    ids = dict(zip(states, map(tokenizer.convert_tokens_to_ids, states), strict=True))
    thoughts = [_thought(number) for number in numbers]
    answers = [family.call(thought, *call) for thought, call in zip(thoughts, calls, strict=False)]
    answers.append(family.said(thoughts[-1], "Done."))
    begins = [tokenizer.convert_tokens_to_ids(token) for token in family.begins]
    number_of = {ids[state]: place for place, state in enumerate(states, start=1)}
    script: dict[tuple[int, int], int] = {}
    for number, answer in enumerate(answers):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": line(number)}], add_generation_prompt=True, tokenize=False
        )
        before = tokenizer.encode(prompt, add_special_tokens=False)
        state, offset = 0, 0
        for place, token in enumerate([*before, *tokenizer.encode(answer, add_special_tokens=False)]):
            if place >= len(before) and script.setdefault((state, offset), token) != token:
                raise ValueError(f"the answer {answer!r} needs another token than {token} where another answer has it")
            state = number_of.get(token, state)
            offset = 0 if token in begins else offset + 1
    _save(folder, family, tokenizer, script, begins, number_of)


def _tokenizer(family: Family, states: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = bundled_tokenizer()
    tokenizer.add_special_tokens({"eos_token": family.stops[0]})
    special = (*family.begins, *family.special, *family.stops)
    words = [AddedToken(word, normalized=False) for word in (*family.words, *states)]
    hidden = [token for token in special if token != "<think>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in hidden], special_tokens=True)
    tokenizer.add_tokens([*words, AddedToken("<think>", normalized=False)])
    tokenizer.chat_template = family.template
    return tokenizer


def _save(
    folder: Path,
    family: Family,
    tokenizer: PreTrainedTokenizerFast,
    script: Mapping[tuple[int, int], int],
    begins: Sequence[int],
    number_of: Mapping[int, int],
) -> None:
    folder.mkdir(parents=True)
    size, offsets = len(tokenizer), max(offset for _, offset in script) + 2
    table = mx.zeros((len(number_of) + 1, offsets))
    for (state, offset), token in script.items():
        table[state, offset] = token
    weights = {"script": table, "begins": mx.zeros(size), "sets": mx.zeros(size)}
    for token in begins:
        weights["begins"][token] = 1
    for token, number in number_of.items():
        weights["sets"][token] = number
    stops = [tokenizer.convert_tokens_to_ids(token) for token in family.stops]
    config = {
        "model_type": "scripted",
        "model_file": "model.py",
        "vocab_size": size,
        "states": len(number_of),
        "offsets": offsets,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": stops,
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    shutil.copy(Path(__file__).parent / "model.py", folder)
