# /// script
# requires-python = ">=3.11"
# dependencies = ["outlines>=1.3.3,<2", "openai>=3.52,<4"]
# ///
"""outlines' models of a vLLM and of an SGLang server: `with_outlines.py BASE_URL ASKED PART…` prints one JSON object,
an answer of each for each part."""

import json
import sys
from typing import Literal

import outlines
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
SERVER = OpenAI(base_url=URL, api_key="none", max_retries=0)
MODELS = [outlines.from_vllm(SERVER, ASKED["model"]), outlines.from_sglang(SERVER, ASKED["model"])]
CITIES = Literal["Paris", "London", "Rome"]


class Capital(BaseModel):
    city: CITIES
    certain: bool


def answers(form):
    return [model(ASKED["question"], form, temperature=0, max_tokens=64) for model in MODELS]


def parsed():
    return [Capital.model_validate_json(text).model_dump() for text in answers(Capital)]


def pattern():
    return answers(Regex("[a-c]{3}"))


def grammar():
    return answers(CFG('start: "Paris" | "Rome"'))


def choice():
    return ["".join(model.stream(ASKED["question"], CITIES, temperature=0)) for model in MODELS]


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
