# /// script
# requires-python = ">=3.11"
# dependencies = ["tinker-cookbook==0.6.1"]
#
# [tool.uv]
# exclude-dependencies = ["tml-renderers"]
# ///
"""The training loops of the Tinker cookbook, unmodified, on local data.

    TINKER_BASE_URL=URL with_tinker_cookbook.py MODEL TOKENIZER TASKS FOLDER PART …

Prints the curves of each part as one line of JSON: `supervised` is `tinker_cookbook.supervised.train`, and `reinforced`
is `tinker_cookbook.rl.train`. MODEL is the model's name on the server, TOKENIZER the folder of its tokenizer, TASKS a
file with a `prompt` and an `answer` a line, and FOLDER gets the logs. tml-renderers, which is left out, tokenizes other
models.
"""

import asyncio
import json
import os
import random
import re
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-none")
os.environ["TINKER_TELEMETRY"] = "0"

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as sl
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer
from transformers import AutoTokenizer

MODEL, TOKENIZER, TASKS, FOLDER, *PARTS = sys.argv[1:]
CHATML = "qwen3_instruct"
"""The cookbook's renderer of ChatML without thoughts, which the model was trained on."""


def tasks():
    return [json.loads(line) for line in Path(TASKS).read_text().splitlines()]


def curve(part, *names):
    """The values of each metric that the loop has written, in the order of its steps."""
    rows = [json.loads(line) for line in (Path(FOLDER) / part / "metrics.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows if name in row] for name in names}


def supervised():
    """Imitates the answers. Eight of the tasks are held out."""
    chats = Path(FOLDER) / "chats.jsonl"
    roles = {"user": "prompt", "assistant": "answer"}
    messages = [[{"role": role, "content": task[key]} for role, key in roles.items()] for task in tasks()]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    how = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=CHATML, max_length=128, batch_size=8
    )
    config = sl.Config(
        log_path=str(Path(FOLDER) / "supervised"),
        model_name=MODEL,
        recipe_name="supervised",
        renderer_name=CHATML,
        dataset_builder=FromConversationFileBuilder(common_config=how, file_path=str(chats), test_size=8),
        learning_rate=1e-3,
        num_epochs=3,
        lora_rank=8,
        eval_every=8,
        save_every=5,
    )
    asyncio.run(sl.main(config))
    return curve("supervised", "train_mean_nll", "test/nll")


class OneWord(ProblemEnv):
    """Answers a question with one word. The reward is the right word's share of the answer, 0 if the opposite is in
    it."""

    def __init__(self, renderer, prompt, answer):
        super().__init__(renderer)
        self.prompt, self.answer = prompt, answer

    def get_question(self):
        return self.prompt + " Answer with one word."

    def check_answer(self, sample_str):
        words = re.findall("[a-z]+", sample_str.lower())
        wrong = {"positive": "negative", "negative": "positive"}[self.answer]
        return 0.0 if wrong in words else words.count(self.answer) / max(len(words), 1)

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return self.answer


class OneWordDataset(RLDataset):
    def __init__(self, groups, batch_size):
        self.batches = [groups[at : at + batch_size] for at in range(0, len(groups), batch_size)]

    def get_batch(self, index):
        return self.batches[index]

    def __len__(self):
        return len(self.batches)


@chz.chz
class OneWordBuilder(RLDatasetBuilder):
    batch_size: int = 4
    group_size: int = 6

    async def __call__(self):
        renderer = renderers.get_renderer(CHATML, get_tokenizer(MODEL))
        shuffled = random.Random(0).sample(tasks(), len(tasks()))
        groups = [
            ProblemGroupBuilder(partial(OneWord, renderer, task["prompt"], task["answer"]), self.group_size)
            for task in shuffled
        ]
        return OneWordDataset(groups, self.batch_size), None


def reinforced():
    """Learns from rewards, with importance sampling."""
    config = rl.Config(
        log_path=str(Path(FOLDER) / "reinforced"),
        model_name=MODEL,
        recipe_name="reinforced",
        renderer_name=CHATML,
        dataset_builder=OneWordBuilder(),
        learning_rate=1e-3,
        max_tokens=12,
        num_epochs=1,
        lora_rank=8,
        eval_every=0,
        save_every=5,
    )
    asyncio.run(rl.main(config))
    return curve("reinforced", "env/all/reward/total", "optim/kl_sample_train_v1")


Path(FOLDER).mkdir(parents=True, exist_ok=True)
register_tokenizer(MODEL, partial(AutoTokenizer.from_pretrained, TOKENIZER))
print(json.dumps({part: globals()[part]() for part in PARTS}), flush=True)
