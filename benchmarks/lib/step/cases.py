"""The decode steps whose launches and bytes are counted, and the record that they are compared with."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.report import RESULTS
from benchmarks.lib.step.compared import batches
from benchmarks.lib.step.compared import counted as compared_counts
from benchmarks.lib.step.counting import Counts, count, trace
from benchmarks.lib.step.decode import Decoder, Rows
from benchmarks.lib.step.graph import Kind, Operation
from benchmarks.lib.step.metal import Cost, costs
from benchmarks.lib.step.models import BUNDLED, HYBRID_4B, LLAMA_8B, TINY, Architecture, ShapedModel, build, runner_of
from benchmarks.lib.step.stand_ins import gpu_graphs, new_arrays_without_memory
from benchmarks.lib.step.training import counted as training_counts

RECORD = RESULTS / "step_counts.json"
ALLOWED = 0.02
"""Share by which launches or bytes may be above the record."""

_UNEVEN = tuple(range(64, 1064, 64))


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step of one model."""

    model: Architecture
    rows: Rows

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.rows.text}"


def cases() -> Iterator[Case]:
    """The cases of the record."""
    yield Case(TINY, Rows.of([512]))
    yield Case(TINY, Rows.of(_UNEVEN, sampled=True, adapters=8))
    for rows in (1, 8, 16, 32):
        yield Case(BUNDLED, Rows.of([512] * rows))
    yield Case(BUNDLED, Rows.of(_UNEVEN))
    yield Case(BUNDLED, Rows.of([512] * 16, sampled=True))
    for adapters in (1, 8):
        yield Case(BUNDLED, Rows.of([512] * 16, adapters=adapters))
    for rows in (1, 16, 64):
        yield Case(LLAMA_8B, Rows.of([512] * rows))


def counted(wanted: Iterable[Case]) -> dict[Case, Counts]:
    """The counts of each case. It takes about a third of a second for each of a large model."""
    models: dict[Architecture, ShapedModel] = {}
    found = {}
    with gpu_graphs() as recorder:
        for case in wanted:
            if case.model not in models:
                models[case.model] = build(case.model)
            found[case] = count(_prepared(models[case.model], case.rows), recorder)
    return found


def by_operation(case: Case) -> dict[str, Cost]:
    """The cost of the operations of each name and shape, most bytes first. Repeated launches are left out."""
    with gpu_graphs() as recorder:
        operations = trace(_prepared(build(case.model), case.rows), recorder)
    found: dict[str, Cost] = {}
    for operation, cost in zip(operations, costs(operations), strict=True):
        if cost.launches:
            found.setdefault(_text(operation), Cost()).add(cost)
    return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def _text(operation: Operation) -> str:
    inputs = " ".join(str(list(array.shape)) for array in operation.inputs[:2])
    return f"{operation.name} {inputs} → {list(operation.outputs[0].shape)}"


def _prepared(shaped: ShapedModel, rows: Rows) -> Callable[[], Callable[[], list[mx.array]]]:
    def prepare() -> Callable[[], list[mx.array]]:
        with new_arrays_without_memory(Kind.KEYS_AND_VALUES):
            return Decoder(runner_of(shaped), rows).step

    return prepare


# ---- the record --------------------------------------------------------------------------------


def as_record(found: Mapping[Case, Counts]) -> dict[str, dict[str, int]]:
    """Launches and bytes of each case, by its name."""
    return {case.name: {"launches": counts.launches, "bytes": counts.nbytes} for case, counts in found.items()}


def whole_steps() -> dict[str, dict[str, int]]:
    """The counts of whole steps of the engine that the record has, by name."""
    return {
        f"engine: {model.name}, {batch.text}": asdict(compared.ours)
        for model in (BUNDLED, HYBRID_4B)
        for batch, compared in compared_counts(model, batches(quick=True)).items()
    }


def micro_steps() -> dict[str, dict[str, int]]:
    """The counts of training micro-steps, by name."""
    return {f"training: {name}": asdict(counts) for name, counts in training_counts().items()}


def write_record(found: Mapping[str, Mapping[str, int]]) -> None:
    machine = {"processor": "no machine: counted from the graph", "mlx": mx.__version__}
    RECORD.write_text(json.dumps({"machine": machine, "cases": found}, indent=2) + "\n")


def read_record(kind: str) -> dict[str, dict[str, int]]:
    """The cases of one kind: `engine`, `training`, or those of a runner's step, which have no such prefix."""
    record: dict[str, dict[str, int]] = json.loads(RECORD.read_text())["cases"]
    return {name: figures for name, figures in record.items() if name.rpartition(": ")[0] == kind}


def excess(found: Mapping[str, Mapping[str, int]], record: Mapping[str, Mapping[str, int]]) -> list[str]:
    """One line for each figure that is more than 2 % above the record, and for each case that only one of them has."""
    lines = [f"{name}: not in the record" for name in found.keys() - record.keys()]
    lines += [f"{name}: only in the record" for name in record.keys() - found.keys()]
    for name in found.keys() & record.keys():
        for figure, before in record[name].items():
            now = found[name][figure]
            if now > before * (1 + ALLOWED):
                lines.append(f"{name}: {figure} {before:,} → {now:,} ({(now - before) / max(before, 1):+.1%})")
    return sorted(lines)
