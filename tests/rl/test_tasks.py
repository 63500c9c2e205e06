"""Tasks of a file: which rows are read, what their rewards get, and how a task is found."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from itertools import islice
from pathlib import Path

import huggingface_hub
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl import task_files
from mlx_parallm.rl.environments import Task, answers_of, environment
from mlx_parallm.rl.environments.files import find_tasks, read_tasks
from mlx_parallm.server.api.conversation import Message

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = 72.\n#### 72"
SUM = {"id": "sum", "prompt": "2 + 2 =", "answer": "4"}
USER = {"role": "user", "content": "2 + 2 ="}
CALL = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2, "b": 2.50}'}}
TOOL_TURNS = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Use sum."}]},
    USER,
    {"role": "assistant", "content": None, "reasoning": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "sum"},
    {"role": "assistant", "content": None, "refusal": "No."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No!"}]},
    {"role": "assistant", "content": "4.", "tool_calls": [
        {"id": "c2", "function": {"name": "f", "arguments": {"of": "é"}}}]},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "ok"}]},
]  # fmt: skip


@pytest.fixture
def write(tmp_path: Path):
    """Writes lines, those that are no text as JSON, and returns the file's path."""

    def write(*lines: object) -> Path:
        file = tmp_path / "tasks.jsonl"
        encoded = [line if isinstance(line, bytes | str) else json.dumps(line) for line in lines]
        file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in encoded))
        return file

    return write


def answer_of(task: Task):
    return task.collection.metadata.get("answer")


def seen(task: Task):
    collection = task.collection
    return collection.prompt_text, answer_of(task), collection.scorer, collection.metadata.get("problem_id")


def test_both_forms_of_a_line_are_read(write) -> None:
    lines = [
        SUM,
        "",
        {"question": "How many clips?", "answer": SOLUTION},
        {"id": 7, "prompt": "Half?", "answer": r"\frac{1}{2}"},
        {"prompt": "x?", "answer": 4.5, "scoring_function": "0.9*exact + 0.1*length", "source": "mine"},
        {"prompt": "one \u2028 line\r", "answer": "1,200"},
    ]
    assert [seen(task) for task in read_tasks(write(*lines)).rows] == [
        ("2 + 2 =", "4", "gsm8k", "sum"),
        ("How many clips?", "72", "gsm8k", None),
        ("Half?", r"\frac{1}{2}", "math", "7"),
        ("x?", "4.5", "0.9*exact + 0.1*length", None),
        ("one \u2028 line\r", "1,200", "gsm8k", None),
    ]


BAD = [
    ("{", "line 2 of"),
    ("[]", "not a JSON object"),
    ("[" * 100_000, "line 2 of"),
    (b'{"prompt": "\xff", "answer": "1"}', "line 2 of"),
    ({"answer": "4"}, r"prompt \(or question, or messages\)"),
    (r'{"prompt": "Say a \ud83d", "answer": "4"}', r"\\ud83d is half of a surrogate pair"),
    (r'{"prompt": "x", "answer": "4", "\uDE00": 1}', r"\\ude00 is half of a surrogate pair"),
    ({"prompt": "", "answer": "4"}, "must be text that is not empty"),
    ({"prompt": 4, "answer": "4"}, r"prompt \(or question, or messages\)"),
    ({"prompt": "x"}, "answer must be"),
    ({"prompt": "x", "answer": None}, "answer must be"),
    ({"prompt": "x", "answer": ["4"]}, "answer must be"),
    ({"prompt": "x", "answer": "so ####  "}, "answer must be"),
    ({"prompt": "x", "answer": "4", "id": 1.5}, "id must be"),
    ({"prompt": "x", "answer": "4", "id": True}, "id must be"),
    ({"prompt": "x", "answer": "4", "scoring_function": 3}, "scoring_function must be"),
    ({"prompt": "x", "answer": "4", "scoring_function": "exact + regex"}, "cannot be read"),
    ({"prompt": "2 + 2 =", "answer": "5"}, "same prompt and another answer"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_line_costs_itself_and_the_log_gives_its_number(write, caplog, line, message) -> None:
    kept = read_tasks(write(SUM, line, {"prompt": "3 + 3 =", "answer": "6"})).rows
    assert [answer_of(task) for task in kept] == ["4", "6"]
    (record,) = caplog.records
    assert record.getMessage().startswith("line 2 of ")
    assert re.search(message, record.getMessage())


def test_one_id_twice_is_an_error_that_names_both_lines(write) -> None:
    with pytest.raises(ConfigError, match=r"line 1 and line 3 of .* same id"):
        read_tasks(write({**SUM, "id": 1}, "{", {"id": "1", "prompt": "3 + 3 =", "answer": "6"}))


def test_a_file_that_gives_no_task_is_refused(write, tmp_path: Path, monkeypatch) -> None:
    for file, message in (
        (write("{}", ""), "has no task; each row needs a prompt .* and an answer"),
        (tmp_path / "gone.jsonl", "cannot be read"),
        (tmp_path, "cannot be read"),
        (tmp_path / "nul\0.jsonl", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_tasks(file)
        assert str(caught.value).startswith("environment: ")
    monkeypatch.setattr(task_files, "MAX_FILE_BYTES", 1024 * 1024)
    assert read_tasks(write(SUM, " " * (1024 * 1024 - len(json.dumps(SUM)) - 1))).rows
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        read_tasks(write(SUM, " " * (1024 * 1024 - len(json.dumps(SUM)))))


def test_a_task_is_found_by_its_id_and_else_by_its_prompt(write) -> None:
    found = read_tasks(write(SUM, {"id": 7, "prompt": "3 + 3 =", "answer": "6"}, {"prompt": "1 + 1 =", "answer": "2"}))
    for problem_id, prompt, answer in (
        ("sum", None, "4"),
        ("7", "anything", "6"),
        (7, "2 + 2 =", "6"),
        ("unknown", "2 + 2 =", "4"),
        (None, "1 + 1 =", "2"),
        ([7], "1 + 1 =", "2"),
        ("None", "1 + 1 = ", None),
        (None, None, None),
        (None, "", None),
        (True, None, None),
    ):
        task = found.find(problem_id, prompt)
        assert (task and answer_of(task)) == answer, (problem_id, prompt)


# ---- environments --------------------------------------------------------------------------------


def test_a_file_is_an_endless_environment_in_an_order_of_the_seed(write) -> None:
    file = str(write(*({"id": n, "prompt": f"{n} + 1 =", "answer": n + 1} for n in range(20))))
    drawn = [task.collection.metadata["problem_id"] for task in islice(environment(file).tasks(3), 40)]
    again = [task.collection.metadata["problem_id"] for task in islice(environment(file).tasks(3), 40)]
    other = [task.collection.metadata["problem_id"] for task in islice(environment(file).tasks(4), 40)]
    assert drawn == again
    assert drawn != other
    assert drawn[:20] != drawn[20:]
    assert sorted(drawn[:20], key=int) == sorted(drawn[20:], key=int) == [str(n) for n in range(20)]


def test_a_server_reads_files_and_loads_no_other_environment(write, monkeypatch) -> None:
    assert answers_of(str(write(SUM))).find("sum", None).collection.metadata["answer"] == "4"
    monkeypatch.setattr("mlx_parallm.rl.scoring.gym.task_names", lambda: pytest.fail("reasoning-gym was loaded"))
    assert answers_of("reasoning_gym:leg_counting").rows == ()


@pytest.mark.parametrize("find", [environment, answers_of])
def test_gsm8k_without_a_file_says_what_to_give(find) -> None:
    with pytest.raises(ConfigError, match=r"environment: 'gsm8k' is unknown: .*FILE\.jsonl \(such as gsm8k's train"):
        find("gsm8k")


# ---- with a reward -------------------------------------------------------------------------------


def test_with_a_reward_every_column_is_passed_on_and_an_answer_is_optional(write) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
    lines = [
        {"id": 1, "prompt": "a", "level": 3, "scoring_function": "exact"},
        {"question": "b", "answer": SOLUTION, "tags": ["x"]},
        {"messages": turns, "ground_truth": [4, 5]},
        {"prompt": turns[1:], "solution": "4", "info": {"deep": None}},
    ]
    found = read_tasks(write(*lines), rewarded=True).rows
    assert {task.collection.scorer for task in found} == {"reward"}
    assert [task.collection.metadata for task in found] == [
        {"problem_id": "1", "level": 3},
        {"question": "b", "answer": "72", "tags": ["x"]},
        {"answer": [4, 5], "ground_truth": [4, 5]},
        {"answer": "4", "solution": "4", "info": {"deep": None}},
    ]
    assert [task.collection.prompt_text or task.messages for task in found] == ["a", "b", tuple(turns), (turns[1],)]
    assert [len(task.messages) for task in found] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "must be text that is not empty, or a list of messages"),
        ({"prompt": ""}, "must be text that is not empty"),
        ({"messages": [{"role": "user"}]}, "a message of the role user needs content"),
        ({"prompt": ["hello"]}, "each message needs a role, one of system, developer, user, assistant, tool"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "reads only text, and .* the type 'image'"),
        ({"prompt": [{"role": "user", "content": {"text": "a"}}]}, "must be text, or a list of text parts"),
        ({"prompt": [{"role": "user", "content": "a", "name": 1}]}, "name of a message must be text"),
        ({"prompt": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "user has tool_calls"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"function": {}}]}, USER]}, "each of tool_calls needs a fun"),
        (
            {"prompt": [USER, {"role": "tool", "content": "4", "tool_call_id": "x"}]},
            "no earlier message has the call 'x', whose result",
        ),
        ({"prompt": [{"role": "assistant", "tool_calls": 5}, USER]}, "tool_calls of a message must be a list"),
        ({"prompt": [{"role": ["user"], "content": "a"}]}, "each message needs a role"),
        ({"messages": '[{"role": "user", "content": "\\ud83d"}]'}, "half of a surrogate pair"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "the last message is",
        ),
        ({"prompt": "a", "long": "x" * 70_000}, "its columns have 700.. bytes as JSON; at most 65536"),
    ],
)
def test_a_row_that_cannot_be_a_task_says_why(write, caplog, line, message) -> None:
    assert len(read_tasks(write(line, {"prompt": "b"}), rewarded=True).rows) == 1
    assert re.search(message, caplog.records[0].getMessage())


@pytest.mark.parametrize("name", ["reasoning_gym:chain_sum", "FILE"])
def test_the_reward_scores_the_tasks_of_any_environment(write, name) -> None:
    file = str(write({"prompt": "a", "answer": "1", "scoring_function": "exact"}))
    (task,) = islice(environment(file if name == "FILE" else name, rewarded=True).tasks(0), 1)
    assert task.collection.scorer == "reward"
    assert task.collection.prompt_text == ("a" if name == "FILE" else "")
    assert ("entry" in task.collection.metadata) == (name != "FILE")


# ---- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_conversation_with_parts_and_tools_is_read_as_chat_reads_it(write, key, as_text) -> None:
    value = json.dumps(TOOL_TURNS) if as_text else TOOL_TURNS
    (task,) = read_tasks(write({key: value}), rewarded=True).rows
    assert list(task.messages) == [Message.model_validate(each).for_template() for each in TOOL_TURNS]


def test_a_text_that_only_looks_like_messages_is_a_text(write) -> None:
    texts = ['[{"a": 1}]', "[1, 2]", "[{", "[]", '{"role": "user", "content": "a"}']
    tasks = read_tasks(write(*({"prompt": text} for text in texts)), rewarded=True).rows
    assert [task.collection.prompt_text for task in tasks] == texts


# ---- parquet -------------------------------------------------------------------------------------


def test_rows_of_parquet_are_tasks_with_their_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": "a", "name": None}],
            "solution": "4",
            "at": datetime(2026, 1, 2),
            "n": 1,
        },
        {"prompt": [{"role": "user", "content": "b", "name": "me"}], "solution": None, "at": None, "n": 2},
        {"prompt": [], "solution": "x", "at": None, "n": 3},
    ]
    file = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    first, second = find_tasks(str(file), rewarded=True).rows
    assert (first.messages, answer_of(first)) == (({"role": "user", "content": "a"},), "4")
    assert first.collection.metadata == {"solution": "4", "at": "2026-01-02 00:00:00", "n": 1, "answer": "4"}
    assert (answer_of(second), second.messages[0]["name"]) == (None, "me")
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"tasks\.parquet cannot be read"):
        find_tasks(str(file))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"tasks\.parquet cannot be read: pyarrow is not installed; .*\[parquet\]"):
        find_tasks(str(tmp_path / "tasks.parquet"))


# ---- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch):
    """A data set with these files."""

    def hub(*names: str) -> None:
        for name in names:
            file = tmp_path / "snapshot" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**SUM, "id": name}))

        def download(name: str, repo_type: str, allow_patterns: str) -> str:
            assert (name, repo_type) == ("someone/sums", "dataset")
            assert allow_patterns in ("*.jsonl", "*train*.parquet")
            return str(tmp_path / "snapshot")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return hub


@pytest.mark.parametrize("files", [("sums.jsonl",), ("data/train.jsonl", "data/test.jsonl")])
def test_a_data_set_of_the_hub_gives_its_file(hub, files) -> None:
    hub(*files)
    (task,) = find_tasks("someone/sums").rows
    assert task.collection.metadata["problem_id"] == files[0]


@pytest.mark.parametrize("files", [(), ("a.jsonl", "b.jsonl")])
def test_a_data_set_with_no_file_or_several_says_what_to_do(hub, files) -> None:
    hub(*files)
    with pytest.raises(
        ConfigError, match=r"has . JSONL (or parquet )?files to choose from.*; download the file and give its path"
    ):
        find_tasks("someone/sums")


def test_a_data_set_that_cannot_be_had_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no file, and no data set 'someone/sums' .*download the file"):
        find_tasks("someone/sums")


def test_the_level_of_a_row_is_that_of_its_task(write) -> None:
    levels = ["easy", " two digits ", 3, 0.5, None, True, ["a"], "", "x" * 99]
    rows = [{"prompt": f"{n}?", "answer": n, "level": level} for n, level in enumerate(levels)]
    tasks = read_tasks(write(*rows)).rows
    assert [task.level for task in tasks] == ["easy", "two digits", "3", "0.5", None, None, None, None, "x" * 64]
    given = {task.messages[0]["content"]: task.level for task in islice(environment(str(write(*rows))).tasks(0), 9)}
    assert given == {f"{n}?": task.level for n, task in enumerate(tasks)}
