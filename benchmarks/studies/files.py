"""Compares runs on files with those of mlx-lm (SFT) and TRL 1.16 (DPO, KTO) on a CPU: the same model, adapter, rows,
batches, masks, order and AdamW, each side in a process of its own with one thread.

    python benchmarks/studies/files.py [--only sft dpo kto] [--updates 12] [--repeats 2] [--quick] [--work DIR]
        [--out FILE]

SFT learns from conversations of one to three sums, of which the assistant's messages are trained; the others from pairs
that a rule makes, as in `beside_trl.py`. Loss: largest and last difference between the sides, step by step. Time and
processor time: of an update, without the first; time only of runs that had a processor to themselves. TRL's side needs
an environment of its own, which uv makes. Kinds that are not run keep their results in the record.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, ratios, reported
from benchmarks.lib.training.beside_cells import LIMIT_S, ROOT, TRAINED, TRL, Bench, CellError, environment
from benchmarks.lib.training.beside_tasks import END, RESULT, ROWS, Order, Setting, Sums, preferences
from mlx_parallm.extras.files.data import FileSettings, TrainingData
from mlx_parallm.extras.files.encoding import Encoded, Encoder
from mlx_parallm.extras.files.forms import FileKind, read_example
from mlx_parallm.model.tokenizer import Tokenizer

OURS, MLX_LM = "ours", "mlx-lm"
OTHER = {FileKind.SFT: MLX_LM, FileKind.DPO: TRL, FileKind.KTO: TRL}
PROGRAMS = {OURS: "file_side", MLX_LM: "mlx_lm_side"}
APART = 1.0
"""Percent by which two losses may differ."""
MOST_UPDATES = 16
"""Of preferences there are no more questions."""
SETTING = replace(Setting(), max_grad_norm=1e30)
"""mlx-lm does not limit gradients."""
RATE = {FileKind.SFT: 3e-4, FileKind.DPO: 1e-4, FileKind.KTO: 1e-4}
ALONE = 1.2
"""A run whose time is at most so many times its processor time had a processor to itself."""
Row = Result = Mapping[str, Any]


class Study:
    """Runs both sides on the rows of each kind."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._bench = Bench(arguments.work, SETTING)
        self._tokenizer = Tokenizer(TokenizerWrapper(self._bench.tokenizer))
        self._encoder = Encoder(self._tokenizer, 2048, cuts=False)

    def compare(self, kind: FileKind) -> Iterator[dict[str, Any]]:
        """The results of all repeats of both sides, which take turns."""
        orders = self._orders(kind)
        for repeat in range(self._arguments.repeats):
            for side, order in orders.items():
                result = self._run(side, order)
                print(f"{kind}, {side}: {result['updates'][-1]}, {result['peak_mb']:.0f} MB", flush=True)
                yield {"kind": kind.value, "side": side, "repeat": repeat, **result}

    def _run(self, side: str, order: Order) -> dict[str, Any]:
        if side == TRL:
            return self._bench.run(TRL, order)[0]
        folder = Path(order.folder + f"-{side}")
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        folder.mkdir(parents=True)
        replace(order, folder=str(folder)).write(folder / "order.json")
        command = [sys.executable, "-m", f"benchmarks.lib.programs.{PROGRAMS[side]}", str(folder / "order.json")]
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(order.hyper.threads), stdout=log, stderr=log, timeout=LIMIT_S
            )
        if done.returncode:
            raise CellError(f"{side} ended with {done.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
        result: dict[str, Any] = json.loads((folder / RESULT).read_text())
        return result

    # -- what both sides get ---------------------------------------------------------------------

    def _orders(self, kind: FileKind) -> dict[str, Order]:
        setting = asdict(replace(self._bench.setting, learning_rate=RATE[kind]))
        size = setting[ROWS[kind]]
        updates = min(self._arguments.updates, MOST_UPDATES)
        flat = self._rows(kind, size * updates, size)
        ours, theirs = self._bench.folder / f"rows-{kind}.jsonl", self._bench.folder / f"rows-{kind}-{OTHER[kind]}.json"
        self._write(ours, kind, flat, size)
        batches = [flat[first : first + size] for first in range(0, len(flat), size)]
        theirs.write_text(json.dumps([[self._encoded(kind, row) for row in rows] for rows in batches]))
        order = Order(
            kind.value,
            str(self._bench.model_folder),
            str(self._bench.adapter(0)),
            str(self._bench.folder / f"file-{kind}"),
            updates=updates,
            data=str(ours),
            setting=setting,
        )
        return {OURS: order, OTHER[kind]: replace(order, data=str(theirs))}

    def _write(self, file: Path, kind: FileKind, flat: Sequence[Row], size: int) -> None:
        """Writes the rows so that our batches have them in this order."""

        def write(rows: Sequence[Row]) -> TrainingData:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return TrainingData(FileSettings(kind, str(file), 0.0, size))

        data, placed = write(flat), [*flat]
        numbers = [number for step in range(1, data.steps + 1) for number in data.batch(step).rows]
        for number, row in zip(numbers, flat, strict=True):
            placed[number] = row
        write(placed)

    def _rows(self, kind: FileKind, count: int, size: int) -> list[Row]:
        if kind is FileKind.SFT:
            return list(islice(_conversations(), count))
        pairs = preferences(TRAINED, 0, count)
        rows = [
            {"prompt": _question(pair.prompt), "chosen": _plain(pair.chosen), "rejected": _plain(pair.rejected)}
            for pair in pairs
        ]
        if kind is FileKind.DPO:
            return rows
        # falling, so that TRL's mismatched answers, those of the next row, are ours; see `beside_cells.preference_data`
        batches = [sorted(rows[at : at + size], key=self._prompt_ids, reverse=True) for at in range(0, count, size)]
        return [
            {"prompt": row["prompt"], "completion": row["rejected" if at % 2 else "chosen"], "label": at % 2 == 0}
            for batch in batches
            for at, row in enumerate(batch)
        ]

    def _prompt_ids(self, row: Row) -> tuple[int, ...]:
        return self._turns(FileKind.DPO, row)[0][0].prompt_ids

    def _turns(self, kind: FileKind, row: Row) -> list[list[Encoded]]:
        return self._encoder.encode(read_example(row, kind))

    def _encoded(self, kind: FileKind, row: Row) -> Row:
        """A row for the other side: tokens with their mask, or texts that TRL makes the same tokens of."""
        answers = self._turns(kind, row)
        first = answers[0][0]
        if kind is FileKind.SFT:
            last = answers[0][-1]
            tokens = [*last.prompt_ids, *last.completion_ids]
            spans = [(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)) for turn in answers[0]]
            return {"tokens": tokens, "trained": [int(any(a <= at < b for a, b in spans)) for at in range(len(tokens))]}
        decode = self._tokenizer.decode
        prompt, texts = decode(list(first.prompt_ids)), [decode(list(turns[0].completion_ids)) for turns in answers]
        if kind is FileKind.DPO:
            return {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}
        return {"prompt": prompt, "completion": texts[0], "label": row["label"]}


def _conversations() -> Iterator[Row]:
    examples, dice = Sums().examples(seed=7), random.Random(7)
    while True:
        turns = []
        for text, answer in islice(examples, dice.choice((1, 2, 3))):
            turns += [{"role": "user", "content": _question(text)}, {"role": "assistant", "content": answer}]
        yield {"messages": turns}


def _question(prompt: str) -> str:
    """The user's message of a prompt in ChatML."""
    return prompt.removeprefix("<|im_start|>user\n").partition(END)[0]


def _plain(answer: str) -> str:
    return answer.removesuffix(END)


def figures(results: Sequence[Result]) -> Iterator[Figure]:
    for kind, other in OTHER.items():
        sides = [(kind, side) for side in (OURS, other)]
        mine, theirs = ([one for one in results if (one["kind"], one["side"]) == side] for side in sides)
        if not mine or not theirs:
            continue
        pairs = [list(zip(_losses(one), _losses(two), strict=True)) for one, two in zip(mine, theirs, strict=True)]
        apart = [[100 * abs(a - b) / b for a, b in each] for each in pairs]
        name = f"{kind}, beside {other}"
        yield _figure(f"{name}: loss apart, largest of a step", "%", [max(each) for each in apart], APART)
        yield _figure(f"{name}: loss apart, last step", "%", [each[-1] for each in apart], APART)
        yield from _compared(f"{kind}", other, "processor time of an update", "s", _processor, mine, theirs)
        yield from _compared(f"{kind}", other, "peak memory", "MB", lambda one: one["peak_mb"], mine, theirs)
        alone = [pair for pair in zip(mine, theirs, strict=True) if all(map(_was_alone, pair))]
        if alone:
            first, second = zip(*alone, strict=True)
            yield from _compared(f"{kind}", other, "time of an update", "s", _seconds, first, second)


def _compared(
    kind: str,
    other: str,
    what: str,
    unit: str,
    of: Callable[[Result], float],
    mine: Sequence[Result],
    theirs: Sequence[Result],
) -> Iterator[Figure]:
    for side, results in ((OURS, mine), (other, theirs)):
        yield _figure(f"{kind}, {side}: {what}", unit, [*map(of, results)])
    ratio = ratios([*map(of, mine)], [*map(of, theirs)])
    yield Figure(f"{kind}, {what}, of {other}'s", "x", ratio, ratio.median)


def _was_alone(result: Result) -> bool:
    """Whether other programs hardly took time of its processor."""
    return _seconds(result) <= ALONE * _processor(result)


def _seconds(result: Result) -> float:
    return _per_update(result, "seconds")


def _processor(result: Result) -> float:
    return _per_update(result, "processor")


def _losses(result: Result) -> list[float]:
    return [update["loss"] for update in result["updates"]]


def _per_update(result: Result, what: str) -> float:
    ends = [update[what] for update in result["updates"]]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def _figure(name: str, unit: str, values: list[float], limit: float | None = None) -> Figure:
    return Figure(name, unit, *reported(values), limit=limit)


def main() -> int:
    """Returns the exit code: 0 if the losses agree, 1 if some do not."""
    arguments = _arguments()
    study = Study(arguments)
    known = json.loads(arguments.out.read_text())["results"] if arguments.out.exists() else []
    results: list[dict[str, Any]] = [one for one in known if one["kind"] not in arguments.only]
    for kind in map(FileKind, arguments.only):
        results += study.compare(kind)
        setting = asdict(SETTING) | {"learning_rate": {kind.value: rate for kind, rate in RATE.items()}}
        record = {"machine": machine.describe(), "setting": setting, "results": results}
        report.write(arguments.out, record, list(figures(results)))
    found = list(figures(results))
    report.show(found)
    return int(any(figure.met is False for figure in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*map(str, OTHER)], default=[*map(str, OTHER)])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 updates, once")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "beside_trl", help="working folder")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "files.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.updates, arguments.repeats = 2, 1
    return arguments


if __name__ == "__main__":
    sys.exit(main())
