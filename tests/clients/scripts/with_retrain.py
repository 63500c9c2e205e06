# /// script
# requires-python = ">=3.12"
# dependencies = ["retrain==0.3.2", "torch", "transformers>=5", "peft"]
# ///
"""retrain's engine `openai`, unmodified: it samples before and after each time that an adapter is saved in one folder.

    with_retrain.py SERVER_URL MODEL_DIR ADAPTER_DIR

Prints, for each step, the largest difference between the logprobs that it got and those of PyTorch with the same
weights.
"""

import json
import sys

import torch
from peft import LoraConfig, get_peft_model
from retrain.inference_engine import create_engine
from transformers import AutoModelForCausalLM

STEPS, SAMPLES, TOKENS = 3, 3, 6
TARGETS = ["q_proj", "v_proj", "down_proj"]


def main(url: str, path: str, folder: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")).eval()
    engine = create_engine("openai", path, "cpu", None, torch.float32, url)
    prompt = engine.tokenizer.encode("Hello there", add_special_tokens=False)
    apart = [difference(model, engine, prompt)]
    for _ in range(STEPS):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
        engine.reload_weights(folder)
        apart.append(difference(model, engine, prompt))
    engine.shutdown()
    print(json.dumps(apart))


@torch.no_grad()
def difference(model, engine, prompt: list[int]) -> float:
    (group,) = engine.generate([prompt], SAMPLES, TOKENS, 1.0, 1.0)
    assert [len(sample.token_ids) > 0 for sample in group] == [True] * SAMPLES
    worst = 0.0
    for sample in group:
        logits = model(torch.tensor([prompt + sample.token_ids])).logits[0].float()
        own = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        for row, token, logprob in zip(own, sample.token_ids, sample.logprobs, strict=True):
            worst = max(worst, abs(row[token].item() - logprob))
    return worst


if __name__ == "__main__":
    main(*sys.argv[1:])
