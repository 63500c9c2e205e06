# /// script
# requires-python = ">=3.11"
# dependencies = ["guidance>=0.3.1,<0.4", "openai>=3.52,<4"]
# ///
"""guidance's model of a vLLM server: `with_guidance.py BASE_URL ASKED PART…` prints one JSON object, an answer for each
part. Each of its requests has one grammar, written for old and new vLLM."""

import json
import sys

from guidance import assistant, gen, select, user
from guidance import json as json_of
from guidance.models.experimental import VLLMModel

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
MODEL = VLLMModel(ASKED["model"], base_url=URL, api_key="none", echo=False)
CITIES = ["Paris", "London", "Rome"]


def answered(grammar):
    with user():
        model = MODEL + ASKED["question"]
    with assistant():
        return model + grammar


def captures():
    """Literals around a choice and a regular expression, each with a name."""
    sentence = "The capital is " + select(CITIES, name="city") + ", since " + gen("year", regex="1[0-9]{3}") + "."
    model = answered(sentence)
    return {"text": str(model).rpartition("assistant\n")[2], "city": model["city"], "year": model["year"]}


def parsed():
    schema = {"type": "object", "properties": {"city": {"enum": CITIES}, "certain": {"type": "boolean"}}}
    schema |= {"required": ["city", "certain"], "additionalProperties": False}
    return json.loads(answered(json_of("capital", schema=schema, max_tokens=64))["capital"])


print(json.dumps({part: globals()[part]() for part in sys.argv[3:]}))
