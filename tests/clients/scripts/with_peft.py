# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "transformers>=5", "peft"]
# ///
"""PEFT, unmodified: reads a reward model that was written here, and writes one; or reads an exported adapter.

    with_peft.py rewards MODEL_DIR REWARD_MODEL_DIR NEW_DIR ROWS
    with_peft.py logits MODEL_DIR ADAPTER_DIR ROWS

ROWS is JSON, lists of token ids. Prints the rewards of the rows, those of the reward model and those of the new one; or
the logits after each row.
"""

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

TARGETS = ["q_proj", "down_proj"]


def rewards(model: str, folder: str, new: str, rows: list[list[int]]) -> None:
    read = PeftModel.from_pretrained(base(model), folder).eval()
    made = get_peft_model(
        base(model), LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=TARGETS)
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                weight.copy_(0.2 * torch.randn_like(weight))
    made.save_pretrained(new)
    print(json.dumps([[each(torch.tensor([row])).logits.item() for row in rows] for each in (read, made)]))


def logits(model: str, folder: str, rows: list[list[int]]) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    read = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        print(json.dumps([read(torch.tensor([row])).logits[0, -1].tolist() for row in rows]))


def base(path: str) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)


if __name__ == "__main__":
    {"rewards": rewards, "logits": logits}[sys.argv[1]](*sys.argv[2:-1], json.loads(sys.argv[-1]))
