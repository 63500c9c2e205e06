"""What both programs ask the model, and the tokenizer that they write it with."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TASKS = [json.loads(line) for line in (Path(__file__).parents[2] / "one_word" / "tasks.jsonl").open()]


def bundled_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the bundled model, which no hub is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "tokenizer")
        command = (sys.executable, "-m", "mlx_parallm", "tokenizer", "save", saved)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return AutoTokenizer.from_pretrained(saved)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The tokens of a chat that the model is to answer."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
