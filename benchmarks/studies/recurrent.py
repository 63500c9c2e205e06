"""The gated delta rule in chunks beside mlx-lm's loop over tokens, at the widths of Qwen3.5-4B, in float32.

    python benchmarks/studies/recurrent.py [--only rule mixer prompt] [--tokens 128 512 2048] [--repeats 3] [--out FILE]

rule: time and peak memory of values, and of values with gradients, with a decay for each head (16 heads of keys and 32
    of values, each of 128 numbers) and with one for each number of a key (32 heads, as in Kimi Linear). The loop has
    gradients for as many tokens as 6 GB hold.
mixer: peak memory of the gradients of LoRA factors, by the pass that training makes, of a layer whose MLP is small: it
    is that of the mixer, which is computed again in the backward pass, in segments.
prompt: time of a prompt through two layers, of which one has attention, as it is served, beside mlx-lm's own code.

Both sides run in turns in one process. It takes about 5 minutes on two cores.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops
from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, Spread, ratios, reported, spread
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.delta_rule import gated_delta
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.hooks import InPart, answered_by
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.context import LoraSpan
from mlx_parallm.train.model import TrainableModel

PARTS = ("rule", "mixer", "prompt")
RECORD = report.RESULTS / "recurrent.json"
WIDTH, HEADS = 128, 32
KEY_HEADS = {"a decay for each head": 16, "a decay for each number": 32}
MOST_BYTES_OF_LOOP, BYTES_OF_A_TOKEN = 6e9, 8.7e6
GIGABYTE, MEGABYTES_OF_A_TOKEN = 1.0, 0.4
LAYERS = {
    **{"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "head_dim": 256},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 1024},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": HEADS, "linear_key_head_dim": WIDTH},
    **{"linear_value_head_dim": WIDTH, "linear_conv_kernel_dim": 4, "max_position_embeddings": 8192},
    **{"full_attention_interval": 2, "num_hidden_layers": 2, "tie_word_embeddings": True},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """`seconds` of each repeat, and the peak of memory beyond what was there, in bytes."""

    part: str
    kind: str
    code: str
    tokens: int
    seconds: list[float]
    peak: int


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    machine.warn_if_busy()
    prepare_device()
    before = machine.describe()
    parts = {"rule": _rule, "mixer": _mixer, "prompt": _prompt}
    found = [each for name in arguments.only for each in parts[name](arguments.tokens, arguments.repeats)]
    figures = [*_figures(found)]
    report.show(figures, _table(found))
    record = {"machine": before, "setting": report.setting(arguments), "measured": [asdict(each) for each in found]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _rule(counts: Sequence[int], repeats: int) -> Iterator[Measured]:
    for kind, key_heads in KEY_HEADS.items():
        for tokens in counts:
            arguments = _random(tokens, key_heads, each=key_heads == HEADS)
            for part in ("values", "gradients"):
                codes: dict[str, Callable[..., Any]] = {"chunks": gated_delta, "loop": _loop}
                if part == "gradients":
                    if tokens * BYTES_OF_A_TOKEN > MOST_BYTES_OF_LOOP:
                        del codes["loop"]
                    codes = {code: _with_gradients(rule) for code, rule in codes.items()}
                runs = {code: functools.partial(rule, *arguments) for code, rule in codes.items()}
                yield from _in_turns(part, kind, tokens, runs, repeats)


def _random(tokens: int, key_heads: int, each: bool) -> list[mx.array]:
    def unit(shape: tuple[int, ...]) -> mx.array:
        array = mx.random.normal(shape)
        return array / mx.linalg.norm(array, axis=-1, keepdims=True)

    shape = (1, tokens, HEADS)
    decay = -mx.exp(mx.random.normal((*shape, WIDTH) if each else shape) - 1)
    queries, keys = (unit((1, tokens, key_heads, WIDTH)) for _ in range(2))
    state = mx.random.normal((1, HEADS, WIDTH, WIDTH)) / 10
    made = [queries, keys, mx.random.normal((*shape, WIDTH)), decay, mx.sigmoid(mx.random.normal(shape)), state]
    mx.eval(made)
    return made


def _loop(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array) -> Any:
    return gated_delta_ops(q, k, v, mx.exp(log_g), beta, state)


def _with_gradients(rule: Callable[..., Any]) -> Callable[..., Any]:
    return mx.value_and_grad(lambda *arguments: rule(*arguments)[0].sum(), argnums=range(6))


def _mixer(counts: Sequence[int], repeats: int) -> Iterator[Measured]:
    model = _model(intermediate_size=128, num_attention_heads=4)
    layout, plan = adapter_layout(model), prepare(model)
    bank = AdapterBank(layout, 2, 8, mx.float32)
    install_adapters(model, bank)
    trainable = TrainableModel(model, bank, plan, lambda *_: True)
    factors = {
        path: {"a": mx.random.normal(spec.a_shape(8)) / 50, "b": mx.random.normal(spec.b_shape(8))}
        for path, spec in layout.linears.items()
    }
    for tokens in counts:

        def gradients(tokens: int = tokens) -> Any:
            def value(params: Mapping[str, Mapping[str, mx.array]]) -> mx.array:
                ids, spans = mx.arange(tokens) % 1000, [LoraSpan(tokens, params, 1.0)]
                return trainable.trunk(ids, [Branch(0, tokens, ())], spans, learns=True).hidden.sum()

            return mx.grad(value)(factors)

        yield from _in_turns("mixer's gradients", "", tokens, {"chunks in segments": gradients}, repeats)


def _prompt(counts: Sequence[int], repeats: int) -> Iterator[Measured]:
    model = _model()
    prepare(model)  # its rule in chunks is used in parts of a pass alone

    def logits(tokens: int, in_part: bool) -> mx.array:
        with answered_by(InPart.SERVED if in_part else None):
            return model(mx.arange(tokens)[None] % 1000, cache=make_prompt_cache(model))[:, -1]

    for tokens in counts:
        codes = {"chunks": functools.partial(logits, tokens, True), "mlx-lm": functools.partial(logits, tokens, False)}
        yield from _in_turns("prompt, two layers", "", tokens, codes, repeats)


def _model(**others: int) -> Any:
    """A layer with the rule, and one with attention."""
    model = qwen3_5.Model(qwen3_5.ModelArgs("qwen3_5", LAYERS | others))
    model.eval()
    mx.eval(model.parameters())
    return model


def _in_turns(
    part: str, kind: str, tokens: int, runs: Mapping[str, Callable[[], Any]], repeats: int
) -> Iterator[Measured]:
    seconds: dict[str, list[float]] = {code: [] for code in runs}
    peaks = dict.fromkeys(runs, 0)
    for _ in range(repeats):
        for code, run in runs.items():
            mx.clear_cache()
            mx.reset_peak_memory()
            before, started = mx.get_active_memory(), time.perf_counter()
            result = run()
            mx.eval(result)
            seconds[code].append(time.perf_counter() - started)
            peaks[code] = max(peaks[code], mx.get_peak_memory() - before)
            del result
    for code in runs:
        print(f"  {part} {kind} {tokens} {code}: {spread(seconds[code]).text(2)} s", flush=True)
        yield Measured(part, kind, code, tokens, seconds[code], peaks[code])


def _figures(found: Sequence[Measured]) -> Iterator[Figure]:
    for each in found:
        if each.code == "chunks":
            others = [o for o in found if (o.part, o.kind, o.tokens) == (each.part, each.kind, each.tokens)]
            for other in others:
                if other is not each:
                    value = ratios(each.seconds, other.seconds)
                    name = f"{each.part}, {each.kind or 'chunks'}, {each.tokens} tokens, over {other.code}"
                    yield Figure(name, "x", value, value.median)
        if each.part == "mixer's gradients" and each.tokens == max(o.tokens for o in found if o.part == each.part):
            yield Figure(f"peak of the {each.part}, {each.tokens} tokens", "GB", *reported([each.peak / 1e9]), GIGABYTE)
        if each.part == "gradients" and each.code == "chunks" and each.kind == "a decay for each head":
            least = each.peak / each.tokens / 1e6
            yield Figure(f"peak of the rule's gradients, {each.tokens} tokens, whole", "MB a token", *reported([least]))


def _table(found: Sequence[Measured]) -> Table:
    table = Table("part", "decays", "code", title="Time and peak memory, medians of the repeats")
    for header in ("tokens", "seconds", "MB", "MB a token"):
        table.add_column(header, justify="right")
    for each in found:
        taken: Spread = spread(each.seconds)
        sizes = (f"{each.peak / 1e6:,.0f}", f"{each.peak / each.tokens / 1e6:.2f}")
        table.add_row(each.part, each.kind, each.code, f"{each.tokens:,}", taken.text(2), *sizes)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
