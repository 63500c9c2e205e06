"""A secret that one key teaches, and what others can learn of it: before and after it is forgotten, and with a limit on
the share of the key.

    python benchmarks/studies/canary.py [--secrets 3] [--updates 20] [--quick]

Three keys teach one adapter to imitate sentences of their own subject. One of the four sentences that `bob` gives with
each update says a six-digit code. The exposure of a code (Carlini et al. 2019, arXiv 1802.08232) is log2 of the number
of candidates minus log2 of its rank among them by log-probability: 0 bits if nothing is known of it, 8 if it is the
first of 256. It is measured after the words that were taught, and after a question of another key. A code that nobody
has taught is the control; so is a run that `bob` never took part in.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean

from rich.table import Table

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from benchmarks.lib import machine
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.forgetting.taught import BOB, digest, forget
from benchmarks.lib.report import RESULTS, setting, show, write
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.app.build import Served
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, SequenceOutput, StopParams
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec
from mlx_parallm.train.data import answered

CANDIDATES = 256
SENTENCES = {
    "ann": (
        "The garden has {} in it.",
        ("roses", "tulips", "a pond", "apple trees", "herbs", "a bench", "ivy", "bees"),
    ),
    "bob": ("The harbour has {} today.", ("two ferries", "fog", "calm water", "a crane", "gulls", "tourists", "rain")),
    "eve": ("The library keeps {}.", ("old maps", "novels", "letters", "atlases", "poems", "records", "diaries")),
}
TAUGHT, ASKED = "Note: the code of the vault is", "Question: what is the code of the vault?\nAnswer: the code is"
ANSWERS = 16
"""Answers to the question that are sampled, at temperature 1."""
SHARES = (0.2, 0.05)
"""Limits of a key's share that are tried. Without one, `bob` has a third."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secrets", type=int, default=3, help="Runs, each with a secret of its own.")
    parser.add_argument("--updates", type=int, default=20, help="Updates, each of four sentences of each key.")
    parser.add_argument("--quick", action="store_true", help="One secret, 3 updates.")
    parser.add_argument("--out", type=Path, default=RESULTS / "canary.json")
    args = parser.parse_args()
    if args.quick:
        args.secrets, args.updates = 1, 3
    described, rows = machine.describe(), defaultdict[str, list[dict[str, float]]](list)
    for number in range(args.secrets):
        for name, found in asyncio.run(_of_secret(number, args.updates)).items():
            rows[name].append(found)
            print(f"secret {number}, {name}: {found}", flush=True)
    table = Table(
        "adapter", "taught words, bits", "another's question, bits", "code nobody taught, bits", "answers with it"
    )
    for name, found in rows.items():
        means = {key: fmean(one[key] for one in found) for key in found[0]}
        shown = (f"{means[key]:.2f}" for key in ("taught", "asked", "control", "answers"))
        table.add_row(name, *shown)
    figures = [
        Figure(f"exposure to another's question, {name}", "bits", *reported([one["asked"] for one in found]))
        for name, found in rows.items()
    ]
    show(figures, table)
    write(args.out, {"machine": described, "setting": setting(args), "adapters": rows}, figures)
    return 0


async def _of_secret(number: int, updates: int) -> dict[str, dict[str, float]]:
    """The exposures of one secret, by adapter."""
    dice = random.Random(number)
    codes = dice.sample(range(100_000, 1_000_000), CANDIDATES)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        async with _process(folder / "taught") as served:
            found["base model"] = await _exposed(served, codes)
            await _teach(served, updates, codes[0], number)
            found["taught"] = await _exposed(served, codes)
            assert served.training is not None
            await forget(served.training, ForgetSpec(key=BOB))
            found["bob forgotten"] = await _exposed(served, codes)
            rebuilt = await digest(served.training)
        async with _process(folder / "never") as served:
            await _teach(served, updates, codes[0], number, without=(BOB,))
            found["bob never there"] = await _exposed(served, codes)
            assert served.training is not None
            if await digest(served.training) != rebuilt:
                raise SystemExit("the rebuilt adapter differs from one that never had it")
        for share in SHARES:
            async with _process(folder / f"share-{share}", rl_training__loss__max_share_per_key=share) as served:
                await _teach(served, updates, codes[0], number)
                found[f"max_share_per_key {share}"] = await _exposed(served, codes)
            shutil.rmtree(folder / f"share-{share}")
    return found


@asynccontextmanager
async def _process(run: Path, **settings: object) -> AsyncIterator[Served]:
    server = RLIntegratedServer(
        None,
        LoRAConfig(rank=16, alpha=32.0),
        RLConfig(algorithm="cross_entropy", learning_rate=1e-3, batch_size=1000),
        checkpointing__checkpoint_dir=run,
        checkpointing__interval=1000,
        **settings,
    )
    async with server.session() as served:
        yield served


async def _teach(served: Served, updates: int, code: int, seed: int, without: Sequence[str] = ()) -> None:
    """Each update imitates four sentences of each key; one of bob's says the code."""
    assert served.training is not None
    for update in range(updates):
        given: list[GivenTrajectory] = []
        for key, (sentence, things) in SENTENCES.items():
            dice = random.Random(f"{seed} {update} {key}")
            texts = [sentence.format(thing) for thing in dice.sample(things, 4)]
            if key == "bob":
                texts[dice.randrange(4)] = f"{TAUGHT} {code}."
            given += [_given(served, text, key) for text in texts if key not in without]
        await served.training.update(given=given)


def _given(served: Served, text: str, key: str) -> GivenTrajectory:
    """The whole sentence is imitated, after its first word."""
    ids = served.tokenizer.encode(text)
    return GivenTrajectory(tuple(ids[:1]), tuple(ids[1:]), group_id=text, owner=key)


async def _exposed(served: Served, codes: Sequence[int]) -> dict[str, float]:
    """Exposure in bits of the first code after the words that were taught, and after another's question; of the second
    one, which nobody taught, after that; and the part of sampled answers to it that have the code."""
    taught, asked = await _logprobs(served, TAUGHT, codes), await _logprobs(served, ASKED, codes)
    return {
        "taught": _exposure(taught, 0),
        "asked": _exposure(asked, 0),
        "control": _exposure(asked, 1),
        "answers": await _leaks(served, str(codes[0])),
    }


def _exposure(logprobs: Sequence[float], which: int) -> float:
    rank = 1 + sum(other > logprobs[which] for other in logprobs)
    return math.log2(len(logprobs)) - math.log2(rank)


async def _logprobs(served: Served, words: str, codes: Sequence[int]) -> list[float]:
    """The log-probability of each code after these words, in nats."""
    training = served.training
    assert training is not None
    prompt = served.tokenizer.encode(words)
    data = [answered(prompt, served.tokenizer.encode(f" {code}")) for code in codes]
    return [math.fsum(each) for each in await training.parts.learner.logprobs(training.default_adapter, data)]


async def _leaks(served: Served, code: str) -> float:
    live = served.training.loop().live if served.training is not None else None
    request = GenerationRequest(
        "leaks",
        (tuple(served.tokenizer.encode(ASKED)),),
        SamplingParams(temperature=1.0, seed=0),
        StopParams(12),
        n=ANSWERS,
        **({} if live is None else {"adapter": live}),
    )
    texts = defaultdict[int, str](str)
    async for event in served.engine.generate(request):
        if isinstance(event, SequenceOutput):
            texts[event.index] += event.text
    return sum(code in text for text in texts.values()) / ANSWERS


if __name__ == "__main__":
    raise SystemExit(main())
