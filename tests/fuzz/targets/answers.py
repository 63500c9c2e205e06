"""Requests for answers in every dialect: OpenAI's chat, completions, responses, embeddings and scores, Anthropic's,
Ollama's, vLLM's, SGLang's and TRL's."""

from fuzz.wire import Wire, asked

BEGIN = (
    "/v1/completions", "/v1/chat", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank",
    "/tokenize", "/detokenize", "/inference", "/generate", "/api/",
)  # fmt: skip
WIRE = Wire(*BEGIN)
mutated = WIRE.mutated


def run(data):
    method, path, body = asked(data)
    if path.startswith(BEGIN):
        WIRE.reset()
        WIRE.ask(method, path, body)
        WIRE.check_idle()
