"""What the library clients are asked to ask."""

from __future__ import annotations

from main_job.serving import SERVED

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London", "Rome"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ASKED = {
    "model": SERVED,
    "question": "What is the capital of France?",
    "prompt": "The capital of France is",
    "max_tokens": 24,
    "tool": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER},
}
