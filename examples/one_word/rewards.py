"""Rewards for tasks.jsonl: a sentiment in one word.

mlx_parallm_train --environment tasks.jsonl --reward "0.9*rewards.py:share + 0.1*rewards.py:ended" --steps 15 \\
    --max-tokens 12 --learning-rate 1e-3
"""

import re


def share(completion, answer):
    """The right word's share of the answer: 1 if it is the only word, a third among three, 0 beside the opposite."""
    words = re.findall("[a-z]+", completion.lower())
    wrong = {"positive": "negative", "negative": "positive"}[answer]
    return 0.0 if wrong in words else words.count(answer) / max(len(words), 1)


def ended(sample):
    """1 if the model ended its answer, and was not cut off."""
    return float(sample.finish_reason == "stop")
