"""Writes a checkpoint of the bundled model's size whose prediction head is right for a given share of tokens.

    python benchmarks/lib/programs/head.py DIR

No released checkpoint with a head fits here, and the bundled model has none. So the file has the format of GLM-4.5, and
its layers add nothing to their input: each token is followed by another one, whatever came before, in an order without
repetition. The head's projection is the identity with noise, as much as leaves the wanted share of its drafts right.
All products are as large as the bundled model's.
"""

import json
import sys
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten

from mlx_parallm.model.bundled import load_bundled

SHARE = 0.7
"""Of drafts that are right. Published figures for one token are 0.6 to 0.85."""

_SAMPLE = 400
"""Tokens with which the noise is chosen."""
_GLM = {
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 0,
    "num_experts_per_tok": 0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "partial_rotary_factor": 1.0,
    "rope_scaling": None,
    "use_qk_norm": False,
    "attention_bias": False,
}


def write_checkpoint(folder: Path) -> None:
    """Writes the model directory."""
    model, tokenizer, config = load_bundled(dequantize=True)
    layers, dims = config["num_hidden_layers"], config["hidden_size"]
    weights = dict(tree_flatten(model.parameters()))
    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(array)
    last, head = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {head + name.removeprefix(last): array for name, array in weights.items() if name.startswith(last)}
    embedded = _normed(weights["model.embed_tokens.weight"])
    weights["model.norm.weight"] = weights[f"{head}shared_head.norm.weight"] = mx.ones((dims,))
    order = mx.random.permutation(len(embedded), key=mx.random.key(0))
    weights["lm_head.weight"] = embedded[mx.roll(order, 1)][mx.argsort(order)]  # each token follows the one before it
    weights |= {f"{head}{name}.weight": mx.ones((dims,)) for name in ("enorm", "hnorm")}
    weights[f"{head}eh_proj.weight"] = mx.concatenate([_projection(embedded), mx.zeros((dims, dims))], axis=1)
    kept = {key: value for key, value in config.items() if key not in ("quantization", "architectures")}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps({**kept, **_GLM, "head_dim": dims // config["num_attention_heads"]}))
    tokenizer.save_pretrained(folder)


def _normed(rows: mx.array) -> mx.array:
    return rows / mx.sqrt((rows * rows).mean(axis=-1, keepdims=True))


def _projection(embedded: mx.array) -> mx.array:
    """The identity with noise. The least and the most noise that is tried differ less in each round."""
    dims = embedded.shape[-1]
    noise = mx.random.normal((dims, dims), key=mx.random.key(1))
    sample = mx.random.randint(0, len(embedded), (_SAMPLE,), key=mx.random.key(2))
    least, most = 0.0, 1.0
    for _ in range(10):
        middle = (least + most) / 2
        outputs = embedded[sample] @ (mx.eye(dims) + middle * noise).T
        right = ((outputs @ embedded.T).argmax(axis=-1) == sample).mean().item()
        least, most = (middle, most) if right > SHARE else (least, middle)
    print(f"the head is right for {right:.0%} of tokens", flush=True)
    return mx.eye(dims) + least * noise


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
