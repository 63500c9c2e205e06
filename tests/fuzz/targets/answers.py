"""Requests for answers in every dialect: OpenAI's chat, completions, responses, embeddings and scores, Anthropic's,
Ollama's, vLLM's, SGLang's and TRL's."""

from fuzz.wire import Wire, asked

WIRE = Wire()
BEGIN = (
    "/v1/completions", "/v1/chat", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank",
    "/tokenize", "/detokenize", "/inference", "/generate", "/api/",
)  # fmt: skip
EXAMPLES = list(WIRE.examples(*BEGIN))
LINES = sorted({example.partition(b"\n")[0].decode() for example in EXAMPLES})
mutated = WIRE.mutate(LINES)


def run(data):
    method, path, body = asked(data)
    if f"{method} {path}" in LINES:
        WIRE.reset()
        WIRE.ask(method, path, body)
        WIRE.check_idle()
