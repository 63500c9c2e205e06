# /// script
# requires-python = ">=3.11"
# dependencies = ["requests>=2.34,<3"]
# ///
"""TRL's own client of vLLM, unmodified: `with_trl.py TRL_FOLDER URL ADAPTER_FOLDER` prints one JSON object.

TRL_FOLDER has the package trl without its dependencies. torch, transformers, accelerate and vLLM are replaced by empty
modules: TRL imports them at the top of the file, and its HTTP requests do not use them. Both clients are asked for
everything that does not send weights over NCCL, and one such route is asked for its error.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

TRL, URL, ADAPTER = Path(sys.argv[1]) / "trl", sys.argv[2], sys.argv[3]


class Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *arguments, **named):
        return self

    def __or__(self, other):
        return self


def loaded(name, path):
    """The module of a file of TRL, without the packages around it."""
    spec = importlib.util.spec_from_file_location(name, TRL / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


for absent in ("torch", "transformers", "transformers.utils", "accelerate", "accelerate.logging", "trl",
               "trl.generation", "trl.experimental", "trl.experimental.async_grpo"):  # fmt: skip
    sys.modules[absent] = Anything(absent)
there = types.ModuleType("trl.import_utils")
there.is_requests_available = lambda: True
there.is_vllm_available = lambda min_version=None: min_version is None or min_version == "0.26.0"
sys.modules["trl.import_utils"] = there
for used in ("vllm", "vllm.utils", "vllm.utils.network_utils", "vllm.distributed", "vllm.distributed.weight_transfer",
             "vllm.distributed.weight_transfer.nccl_engine"):  # fmt: skip
    sys.modules[used] = Anything(used)

grpo = loaded("trl.generation.vllm_client", "generation/vllm_client.py").VLLMClient(URL)
asynchronous = loaded("trl.experimental.async_grpo.vllm_client", "experimental/async_grpo/vllm_client.py").VLLMClient(
    URL
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
answers = {}
prompts = [[504, 3575, 282], [504, 3575]]
answers["generate"] = grpo.generate(prompts, n=2, max_tokens=5, generation_kwargs={"seed": 1})
answers["texts"] = grpo.generate(["The capital of France is"], max_tokens=2, temperature=0.0)
answers["regex"] = grpo.generate(prompts[:1], max_tokens=4, structured_outputs_regex="[0-9]+")
answers["chat"] = grpo.chat([QUESTION], n=2, max_tokens=4)
sequence = prompts[0] + answers["generate"]["completion_ids"][0]
answers["scored"] = grpo.get_sequence_logprobs([sequence], [len(prompts[0])], top_logprobs=int(sys.argv[4]))
grpo.reset_prefix_cache()
answers["world"] = [grpo.get_world_size(), asynchronous.get_world_size()]
asynchronous.wait_for_server_ready()
answers["max_model_len"], answers["dtype"] = asynchronous.get_max_model_len(), asynchronous.get_dtype()
answers["info"] = asynchronous.get_server_info()
for step in range(3):
    asynchronous.load_lora_adapter(f"trl-policy-v{step}", ADAPTER)
asynchronous.unload_lora_adapter("trl-policy-v0")
asynchronous.unload_lora_adapter("trl-policy-v0")
grpo.model = "trl-policy-v2"
answers["adapter"] = grpo.generate(prompts[:1], max_tokens=2)
asynchronous.pause()
asynchronous.resume()
try:
    asynchronous.update_weights({"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]})
except Exception as refused:  # noqa: BLE001 - TRL raises no narrower one
    answers["refused"] = str(refused)
try:
    grpo.init_communicator()
except RuntimeError as refused:
    answers["no_transfer"] = str(refused)
print(json.dumps(answers))
