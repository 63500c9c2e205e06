"""What schemathesis may not ask for: long answers, and many of them. Everything else it makes is sent as it is."""

import schemathesis

MAX_TOKENS, MAX_SAMPLES, MAX_PROMPTS = 8, 2, 2
NO_LIMIT = -1
GENERATING = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
}


@schemathesis.hook
def before_call(context, case, kwargs):
    """In every phase: whole numbers above a bound are lowered to it, and a length that is left out is given."""
    lengths = GENERATING.get(case.operation.path)
    if lengths is not None and isinstance(case.body, dict):
        case.body = capped(case.body, lengths)


def capped(body, lengths):
    asked = {**body}
    for name, most in (*((name, MAX_TOKENS) for name in lengths), ("n", MAX_SAMPLES)):
        if type(asked.get(name)) is int and (asked[name] > most or asked[name] == NO_LIMIT):
            asked[name] = most
    if all(asked.get(name) is None for name in lengths):
        asked[lengths[0]] = MAX_TOKENS
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
        asked["prompt"] = prompt[:MAX_PROMPTS]
    return asked
