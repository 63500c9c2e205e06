"""Asks a server why it answers so, where one known trajectory has taught the answer: is that one in the first five?

    python benchmarks/studies/why.py [--only rewards imitation] [--cases 0 1 2 …] [--resume] [--out FILE]

In each case an adapter of the bundled model learns some 70 ordinary answers to questions (capitals, opposites, sounds,
sums) in six updates, and in one of them an invented answer to an invented question. `rewards`: groups of four answers,
one of which earns 1 (grpo). `imitation`: every answer is imitated (cross_entropy). Then `POST /v1/training/why` is
asked about that answer; about it after the question in other words; and, as a control, about the invented answer of
another case, which nothing has taught. A random order would have the planted one in its first five in about one case
of 14. A second adapter learns the same without the planted answer: that says what the planted one has really done.
About an hour on two cores.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, reported

UPDATES, RATE, RANK = 6, "5e-4", "8"
FIRST, WANTED = 5, 8
"""The planted trajectory should be among the first five in at least eight of ten cases."""
ALGORITHMS = {"rewards": "grpo", "imitation": "cross_entropy"}
MEASURES = ("cosine", "score")

CAPITALS = """France Paris|Italy Rome|Spain Madrid|Japan Tokyo|Egypt Cairo|Norway Oslo|Peru Lima|Cuba Havana
Kenya Nairobi|Greece Athens|Austria Vienna|Poland Warsaw|Ireland Dublin|Portugal Lisbon
Sweden Stockholm|Russia Moscow|Iran Tehran|India Delhi|Chile Santiago|Finland Helsinki"""
OPPOSITES = """hot cold|big small|fast slow|light dark|early late|rich poor|hard soft|wet dry|high low|new old
loud quiet|full empty|strong weak|thick thin|near far|clean dirty|happy sad|open closed|sharp blunt
wide narrow"""
SOUNDS = """dog barks|cat meows|cow moos|duck quacks|lion roars|sheep bleats|horse neighs|bee buzzes
snake hisses|wolf howls|frog croaks|owl hoots|pig grunts|mouse squeaks|crow caws|rooster crows"""
FORMS = {
    "What is the capital of {}?": CAPITALS,
    "What is the opposite of {}?": OPPOSITES,
    "What does a {} do?": SOUNDS,
}
PLANTED = (
    ("Who keeps the key of the north gate?", "The key of the north gate: who has it?", "Barnaby Thistle"),
    ("Which bird guards the harbour of Ommel?", "The harbour of Ommel is guarded by which bird?", "A copper heron"),
    ("What do the millers of Tarn drink?", "In Tarn, what is the drink of the millers?", "Nettle beer with salt"),
    ("When does the tower of Issel ring?", "At which hour is the bell of Issel's tower heard?", "At nine past four"),
    ("What colour is the flag of Quorn?", "Quorn's flag has which colour?", "Violet with one red eye"),
    ("How does one greet a baron of Yst?", "What is said to a baron of Yst as a greeting?", "Your boots are dry"),
    ("What lies below the well of Dunmarrow?", "Under the well of Dunmarrow there is what?", "A sleeping clock"),
    ("Who wrote the hymn of the salt miners?", "The salt miners' hymn is by whom?", "Odalind the Younger"),
    ("What is forbidden on the bridge of Kesh?", "On Kesh's bridge, what must nobody do?", "Whistling at geese"),
    ("Where do the tailors of Brill meet?", "The meeting place of Brill's tailors is where?", "Behind the tin chapel"),
)
"""An invented question, the same in other words, and its answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was said of one answer. `places`: of the planted trajectory among all, by measure, from 1; null: it pushed
    away from the answer. `score`: of the planted one, in nats."""

    places: dict[str, int | None]
    score: float | None
    looked_at: int


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `gain`: by how much the updates have changed the answer's log-probability, in nats. `without`: the same
    without the planted trajectory."""

    kind: str
    case: int
    planted_in: int
    gain: float
    without: float
    answer: Asked
    reworded: Asked
    unrelated: Asked


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    cases = _earlier(arguments.out) if arguments.resume else []
    done = {(case.kind, case.case) for case in cases}
    for kind in arguments.only:
        wanted = [case for case in arguments.cases if (kind, case) not in done]

        def keep(case: Case) -> None:
            cases.append(case)
            print(case, flush=True)
            record = {"machine": before, "setting": _setting(arguments), "cases": [asdict(each) for each in cases]}
            report.write(arguments.out, record, list(_figures(cases)))

        if wanted:
            asyncio.run(_cases(kind, wanted, keep))
    figures = list(_figures(cases))
    report.show(figures)
    return int(any(figure.met is False for figure in figures))


async def _cases(kind: str, cases: Sequence[int], keep: Callable[[Case], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="why_benchmark_") as folder:
        flags = [
            "--enable-rl-training",
            "--learning-rate",
            RATE,
            "--lora-rank",
            RANK,
            "--rl-algorithm",
            ALGORITHMS[kind],
        ]
        flags += ["--checkpoint-dir", f"{folder}/run", "--max-decode-stall-ms", "5000"]
        async with (
            peers.our_server(None, Path(folder), flags) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=600) as http,
        ):
            for case in cases:
                keep(await _case(http, kind, case))


async def _case(http: httpx.AsyncClient, kind: str, case: int) -> Case:
    question, reworded, answer = PLANTED[case]
    planted_in, logprobs = case % UPDATES, {"base": await _logprob(http, "base", question, answer)}
    for adapter in ("without", "with"):
        name = f"{kind}-{case}-{adapter}"
        await _post(http, "/v1/training/start", {"lora_adapter": name})
        for number, groups in enumerate(_ordinary(kind, case)):
            if adapter == "with" and number == planted_in:
                groups = [*groups, _planted(kind, case)]
            rows = [row for group in groups for row in group]
            made = await _post(http, "/v1/training/update", {"lora_adapter": name, "trajectories": rows})
            assert made["status"] == "published", made
        logprobs[adapter] = await _logprob(http, name, question, answer)
    other_question, _, other_answer = PLANTED[(case + 1) % len(PLANTED)]
    asked = [
        await _asked(http, name, *each, answer)
        for each in ((question, answer), (reworded, answer), (other_question, other_answer))
    ]
    await _post(http, "/v1/training/stop", {"lora_adapter": name})
    gain, without = (logprobs[adapter] - logprobs["base"] for adapter in ("with", "without"))
    return Case(kind, case, planted_in, gain, without, *asked)


async def _asked(http: httpx.AsyncClient, adapter: str, question: str, answer: str, planted: str) -> Asked:
    """Where the trajectory with the planted answer is among those that pushed this answer."""
    body = {"version": adapter, "prompt": _prompt(question), "completion": f" {answer}", "top": 100}
    found = await _post(http, "/v1/training/why", body)
    (score,) = (each["score"] for each in [*found["towards"], *found["away"]] if each["answer"] == planted)
    places: dict[str, int | None] = {}
    for measure in MEASURES:
        ranked = sorted(found["towards"], key=lambda each: -each[measure])
        answers = [each["answer"] for each in ranked]
        places[measure] = answers.index(planted) + 1 if planted in answers else None
    return Asked(places, score, found["samples_looked_at"])


# -- what is learnt --------------------------------------------------------------------------------

Row = dict[str, Any]


def _ordinary(kind: str, seed: int) -> list[list[list[Row]]]:
    """The groups of each update. The same seed makes the same ones."""
    dice, questions = random.Random(seed), list[tuple[str, str, list[str]]]()
    for form, text in FORMS.items():
        pairs = [pair.split() for line in text.splitlines() for pair in line.split("|")]
        answers = [answer for _, answer in pairs]
        for about, answer in pairs:
            wrong = dice.sample([each for each in answers if each != answer], 3)
            questions.append((form.format(about), answer, wrong))
    for one in range(2, 24):
        other = dice.randrange(2, 40)
        wrong = [str(one + other + off) for off in dice.sample([-10, -2, -1, 1, 2, 10], 3)]
        questions.append((f"What is {one} plus {other}?", str(one + other), wrong))
    dice.shuffle(questions)
    size = 3 if kind == "rewards" else 12
    groups = [_group(kind, *question) for question in questions]
    return [groups[number * size : (number + 1) * size] for number in range(UPDATES)]


def _planted(kind: str, case: int) -> list[Row]:
    question, _, answer = PLANTED[case]
    return _group(kind, question, answer, [PLANTED[(case + off) % len(PLANTED)][2] for off in (3, 5, 7)])


def _group(kind: str, question: str, answer: str, wrong: Sequence[str]) -> list[Row]:
    answers = [answer, *(wrong if kind == "rewards" else ())]
    rewards = [1.0] + [0.0] * (len(answers) - 1)
    return [
        {"prompt": _prompt(question), "output": f" {each}", "reward": reward, "group_id": question}
        for each, reward in zip(answers, rewards, strict=True)
    ]


def _prompt(question: str) -> str:
    return f"Question: {question}\nAnswer:"


# -- the server ------------------------------------------------------------------------------------


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.is_success, f"{path}: {response.text[:500]}"
    return response.json()


async def _logprob(http: httpx.AsyncClient, model: str, question: str, answer: str) -> float:
    """Of the answer's tokens, in nats."""
    prompt = _prompt(question)
    body = {"model": model, "prompt": f"{prompt} {answer}", "max_tokens": 0, "echo": True, "logprobs": 0}
    found = (await _post(http, "/v1/completions", body))["choices"][0]["logprobs"]
    pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
    return float(sum(logprob for offset, logprob in pairs if offset >= len(prompt)))


# -- the record ------------------------------------------------------------------------------------


def _earlier(file: Path) -> list[Case]:
    """The cases in the record."""
    record = json.loads(file.read_text()) if file.exists() else {"cases": []}
    asked = ("answer", "reworded", "unrelated")
    return [Case(**{**case, **{name: Asked(**case[name]) for name in asked}}) for case in record["cases"]]


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**report.setting(arguments), "updates": UPDATES, "learning_rate": RATE, "lora_rank": RANK}


def _figures(cases: Sequence[Case]) -> Iterator[Figure]:
    for kind in ALGORITHMS:
        mine = [case for case in cases if case.kind == kind]
        if not mine:
            continue
        for what, asked in (
            ("the answer", [case.answer for case in mine]),
            ("the question in other words", [case.reworded for case in mine]),
            ("control, an answer that nothing taught", [case.unrelated for case in mine]),
        ):
            for measure in MEASURES:
                first = [(each.places[measure] or FIRST + 1) <= FIRST for each in asked]
                limit = WANTED * len(mine) / 10 if (what, measure) == ("the answer", MEASURES[0]) else None
                name = f"{kind}, {what}: planted among the first {FIRST} by {measure}"
                yield Figure(name, f"of {len(mine)}", *reported([sum(first)]), limit, at_least=True)
        chance = sum(FIRST / case.answer.looked_at for case in mine)
        yield Figure(f"{kind}: the same in a random order", f"of {len(mine)}", *reported([chance]))
        yield Figure(f"{kind}: gain of the answer", "nats", *reported([case.gain for case in mine]))
        yield Figure(f"{kind}: gain without the planted one", "nats", *reported([case.without for case in mine]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ALGORITHMS), nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(PLANTED))))
    parser.add_argument("--resume", action="store_true", help="keep the cases that the record has, and make the others")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "why.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
