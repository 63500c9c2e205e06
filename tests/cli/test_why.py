"""`mlx_parallm why`: in words, from answers of the server's own types."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from mlx_parallm.cli.main import main
from mlx_parallm.core.requests import Signal
from mlx_parallm.extras.why.cards import KeyPart, UpdatePush, WhyAnswer, WhyPush, WhySample, WhyUpdate, WhyVersion

KEYS = (KeyPart("ann", 3, 0.75), KeyPart("", 1, 0.2), KeyPart(None, 1, 0.05))
SAMPLE = WhySample(
    *("traj-a-0", "ann", True, "Where?", "Here.", 1.0, 0.5, 0.75, "", "exact"),
    versions=("tone@1",),
    sampled_at=1_800_000_000.0,
)
HIDDEN = WhySample(None, None, False, "", "", 0.0, None, 0.0, "zero_variance", "exact", (), None)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")


def update(number: int, **fields: object) -> WhyUpdate:
    known = {"at": 1_800_000_000.0, "step": number, "version": f"tone@{number - 1}", "status": "published"}
    known |= {"signal": Signal.REWARDS, "learning_rate": 1e-3, "reward_mean": 0.5, "trajectories": 4, "left_out": 0}
    known |= {
        "forgotten": 0,
        "keys": KEYS,
        "scoring_functions": ("exact",),
        "changed_settings": {},
        "problem": "",
        "samples": (),
    }
    return WhyUpdate(number, **{**known, **fields})  # type: ignore[arg-type]


def version(*updates: WhyUpdate, **fields: object) -> WhyVersion:
    known = {"base_model": "0123abcd", "start": "", "missing": (), "checkpoints": ("checkpoint-3",)}
    known |= {"updates_total": len(updates), "trajectories": 8, "keys": KEYS, "settings": {}, "updates": updates}
    return WhyVersion("tone@3", **{**known, **fields})  # type: ignore[arg-type]


def said(server, capsys, card: object, *args: str, path: str = "/v1/training/why") -> str:
    server.answers[path] = TypeAdapter(type(card)).dump_json(card, by_alias=True)
    assert main(["why", *args, "--url", server.url]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_version_is_told_in_a_table(server, capsys) -> None:
    newest = update(4, changed_settings={"optimizer.learning_rate": 0.002})
    old = update(3, trajectories=None, keys=(), problem="removed")
    shown = said(server, capsys, version(newest, old), "tone@3", path="/v1/training/why?version=tone%403")
    for text in (
        "starting from the base model, as it is",
        "ann 75%, the server's own tasks 20%, unnamed 5%",
        "tone@3 rewards 4 0.50 - 0.001",
        "optimizer.learning_rate 0.002",
        "removed",
        "checkpoint-3",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"start": "tone@9"}, "starting from tone@9, which was not trained here"),
        ({"missing": (1, 7)}, "not known: its changes 1 to 7 are not in the journal any more"),
    ],
)
def test_what_is_not_known_of_a_version_is_said(server, capsys, fields: dict[str, object], text: str) -> None:
    assert text in said(server, capsys, version(**fields))


def test_an_update_is_told_by_its_answers(server, capsys) -> None:
    card = version(update(4, samples=(SAMPLE, HIDDEN)))
    path = "/v1/training/why?version=tone&update=4"
    shown = said(server, capsys, card, "tone", "--update", "4", path=path)
    assert "75.0% 1.00 0.50 ann traj-a-0 Where? → Here." in shown
    assert "0.0% 0.00 zero_variance - - of another key" in shown


def test_an_answer_is_told_by_what_pushed_it(server, capsys) -> None:
    push = WhyPush(**{name: getattr(SAMPLE, name) for name in SAMPLE.__slots__}, update=4, score=1.5, cosine=0.25)
    card = WhyAnswer(
        "tone@3", "tone@3", True, "cosine", -3.0, 9, 1, 8, ("gone",), (push,), (), (UpdatePush(4, 1.5, 8),)
    )
    shown = said(server, capsys, card, "traj-b-0", "--samples", "8")
    assert server.posted[0][2] == {"trajectory_id": "traj-b-0", "samples": 8}
    assert "8 of 9 answers" in shown
    assert "1 of them is of other keys" in shown
    assert "+1.5 +0.25 4 1.00 75.0% ann traj-a-0 Where? → Here." in shown
    assert "Nothing pushed away from it." in shown
    assert "Not known: gone." in shown


@pytest.mark.parametrize("args", [["traj-b-0", "--update", "4"], ["tone", "--samples", "8"]])
def test_flags_of_the_other_question_are_refused(server, capsys, args: list[str]) -> None:
    assert main(["why", *args, "--url", server.url]) == 2
    assert args[1] in capsys.readouterr().err
