# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor>=1.17,<2"]
# ///
"""instructor: `with_instructor.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
SAID = {
    "model": ASKED["model"],
    "messages": [{"role": "user", "content": ASKED["question"]}],
    "max_tokens": 128,
    "temperature": 0,
    "max_retries": 0,
}


class Capital(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    certain: bool


def ask(mode):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(response_model=Capital, **SAID).model_dump()


def parsed():
    return ask(instructor.Mode.JSON_SCHEMA)


def parsed_by_tool():
    return ask(instructor.Mode.TOOLS)


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
