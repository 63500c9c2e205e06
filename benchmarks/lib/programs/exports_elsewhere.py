# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "transformers>=5", "peft", "gguf", "sentencepiece", "llama-cpp-python"]
#
# [tool.uv]
# no-binary-package = ["llama-cpp-python"]
# ///
"""The programs that `studies/exports.py` exports for: PEFT, and llama.cpp by its Python binding.

    python exports_elsewhere.py make LLAMA_CPP FOLDER …       bases: Transformers makes them, llama.cpp converts them
    python exports_elsewhere.py compute LLAMA_CPP FOLDER …    log-probabilities, with the adapter and without

A FOLDER has a model in `model/`, or `config.json` of a tiny one and gets that; and then `base.gguf`, in float32.
`compute` reads `tokens.json`, `peft/`, `gguf/` and `fused/`, and writes `elsewhere.npz`. LLAMA_CPP: the sources of
llama.cpp, which have its converter.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

F32 = 0
"""ggml's number of the type."""


def make(folders: list[Path]) -> None:
    for folder in folders:
        model = folder / "model"
        if (folder / "config.json").exists():
            torch.manual_seed(0)
            keys = json.loads((folder / "config.json").read_text())
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32).save_pretrained(model)
            saved = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(keys | saved))  # with version 4's names, which mlx-lm reads
        convert(model, folder / "base.gguf")


def convert(model: Path, file: Path) -> None:
    """Has llama.cpp's converter write a model's weights in float32."""
    from conversion import ModelBase, get_model_architecture, get_model_class
    from conversion.base import ModelType
    from gguf import LlamaFileType

    of = get_model_class(get_model_architecture(ModelBase.load_hparams(model, False), ModelType.TEXT))
    known = type("WithoutVocabulary", (of,), {"model_arch": of.model_arch, "set_vocab": _set_no_vocabulary})
    with torch.inference_mode():
        known(model, LlamaFileType.ALL_F32, file, model_name=model.parent.name).write()


def _set_no_vocabulary(self) -> None:
    self.gguf_writer.add_tokenizer_model("none")
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])


def compute(folders: list[Path]) -> None:
    from peft import PeftModel

    for folder in folders:
        tokens = json.loads((folder / "tokens.json").read_text())
        found = {}
        if (folder / "peft").exists():
            base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
            found["peft, base"] = by_torch(base, tokens)
            found["peft"] = by_torch(PeftModel.from_pretrained(base, folder / "peft").eval(), tokens)
        for name, file in (("gguf", folder / "base.gguf"), ("gguf packed", folder / "packed.gguf")):
            if file.exists():
                found[f"{name}, base"] = by_llama_cpp(file, None, tokens)
                found[name] = by_llama_cpp(file, folder / "gguf" / "adapter.gguf", tokens)
        try:
            convert(folder / "fused", folder / "fused.gguf")
            found["fused gguf"] = by_llama_cpp(folder / "fused.gguf", None, tokens)
        except Exception as error:  # noqa: BLE001  whatever its converter raises
            print(f"{folder.name}: llama.cpp does not convert the fused model: {error!r}")
        np.savez(folder / "elsewhere.npz", **found)


def by_torch(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return log_softmax(model(torch.tensor([tokens])).logits[0].numpy())


def by_llama_cpp(file: Path, adapter: Path | None, tokens: list[int]) -> np.ndarray:
    from llama_cpp import Llama

    options = {"n_ctx": 256, "n_threads": 1, "logits_all": True, "type_k": F32, "type_v": F32, "verbose": False}
    model = Llama(str(file), lora_path=adapter and str(adapter), **options)
    model.eval(tokens)
    return log_softmax(np.array(model.scores[: len(tokens)]))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return above - np.log(np.exp(above).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    llama_cpp = Path(sys.argv[2])
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    {"make": make, "compute": compute}[sys.argv[1]]([Path(folder) for folder in sys.argv[3:]])
