"""`/v1/training/trajectories`: the list of groups, and one group in full, over a real buffer."""

from dataclasses import replace

import pytest
from rl.fakes import set_scores, trajectories
from server.asking import refusal

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup
from mlx_parallm.server.api.trajectories import MAX_TOKENS

LIST = "/v1/training/trajectories"
EOS = 257


@pytest.fixture
def put(training):
    """`put(name, *rewards, **changes)` → a group in the buffer; `changes` are fields of its trajectories."""

    def put(name, *rewards, **changes):
        drawn = [replace(each, **changes) for each in trajectories(name, AdapterRef("policy", 3), len(rewards) or 2)]
        group = TrajectoryGroup("policy", drawn)
        training.buffer.add(group)
        if rewards:
            set_scores(group, rewards)
        return group

    return put


async def listed(client, **query):
    response = await client.get(LIST, params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def test_rows_of_the_list(client, put, training):
    chat = ({"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "What  is\n2 + 2? " + 200 * "x"})
    put("chat", 1.0, 0.0, collection=CollectionSpec("exact", messages=chat))
    training.buffer.drop(put("text", 0.5, 0.5, collection=CollectionSpec(prompt_text="Say")), DropReason.ZERO_VARIANCE)
    put("ids", prompt_ids=tuple(b"hello"), created=1_800_000_000.5)
    got = await listed(client)
    ids, text, chat = got["data"]
    assert (got["object"], got["has_more"]) == ("list", False)
    assert ids == {
        **{"number": 3, "group_id": "ids", "prompt": "hello", "samples": 2, "reward": None, "lora_adapter": "policy"},
        **{"lora_versions": ["policy@3"], "fate": "waiting", "reason": "", "signal": "rewards"},
        "created": "2027-01-15T08:00:00.500Z",
    }
    assert (text["prompt"], text["fate"], text["reason"]) == ("Say", "dropped", "zero_variance")
    assert chat["prompt"].startswith("What is 2 + 2? xxx")
    assert len(chat["prompt"]) == 160


async def test_pages_and_filters(client, put):
    for number in range(5):
        put(f"g{number}", number, number)
    page = await listed(client, limit=2)
    assert ([row["group_id"] for row in page["data"]], page["has_more"]) == (["g4", "g3"], True)
    page = await listed(client, limit=3, after=page["data"][-1]["number"])
    assert ([row["group_id"] for row in page["data"]], page["has_more"]) == (["g2", "g1", "g0"], False)
    query = {"lora_adapter": "policy", "lora_version": "policy@3", "fate": "scored", "min_reward": 1, "max_reward": 2}
    assert [row["group_id"] for row in (await listed(client, **query))["data"]] == ["g2", "g1"]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=501", "after=-1", "fate=lost", "min_reward=nan", "max_reward=x", "lora_adapter=" + "x" * 999],
)
async def test_a_bad_query_is_refused_by_name(client, query):
    await refusal(client.get(f"{LIST}?{query}"), 400, param=query.partition("=")[0])


async def test_one_group_with_its_tokens(client, put):
    group = put("g", 1.0, 0.0, prompt_ids=tuple(b"2+2?"), completion_ids=(*"4é".encode(), EOS))
    group.members[0].advantage, group.members[1].advantage = 1.0, -1.0
    for member in group.members:
        member.turns[0] = replace(member.turns[0], sampling_logprobs=(-0.5, -0.25, -0.125, float("-inf")))
    got = (await client.get(f"{LIST}/g")).json()
    assert (got["full_prompt"], got["prompt_tokens"], got["scoring_function"]) == ("2+2?", 4, "exact")
    first = got["members"][0]
    turn = first["turns"][0]
    assert (first["reward"], first["advantage"], first["fate"], first["thumbs"]) == (1.0, None, "scored", "count")
    assert [token["text"] for token in turn["tokens"]] == ["4", "", "é", "<eos>"]
    assert [token["logprob"] for token in turn["tokens"]] == [-0.5, -0.25, -0.125, None]
    assert (turn["context"], turn["tokens_left_out"], turn["thumbs_up"], turn["edits"]) == ("", 0, 0, [])
    assert (await client.get(f"{LIST}/g-1")).json() == got, "by the id of a trajectory"


async def test_turns_show_what_came_between_them(client, training):
    first, second = trajectories("g", AdapterRef("policy", 3), 2)
    episode = CollectionSpec(group_id="g", group_size=2, episode_id="e")
    turns = [
        replace(
            first, collection=episode, sampling_logprobs=(), prompt_ids=tuple(b"ask"), completion_ids=tuple(b"say")
        ),
        replace(
            second,
            collection=episode,
            sampling_logprobs=(),
            prompt_ids=tuple(b"asksay and?"),
            completion_ids=tuple(b"more"),
        ),
    ]
    training.buffer.add(TrajectoryGroup("policy", turns))
    (member,) = (await client.get(f"{LIST}/g")).json()["members"]
    assert [(turn["context"], turn["trajectory_id"]) for turn in member["turns"]] == [("", "g-0"), (" and?", "g-1")]


async def test_long_groups_are_cut(client, put):
    put(
        "g",
        *range(70),
        prompt_ids=tuple(b"p" * 5000),
        completion_ids=tuple(b"x" * 900),
        sampling_logprobs=(-0.5,) * 900,
    )
    got = (await client.get(f"{LIST}/g")).json()
    assert (got["samples"], len(got["members"]), len(got["full_prompt"]), got["prompt_tokens"]) == (70, 64, 4096, 5000)
    (turn,) = got["members"][0]["turns"]
    assert (len(turn["tokens"]), turn["tokens_left_out"]) == (MAX_TOKENS // 64, 900 - MAX_TOKENS // 64)
    assert turn["text"] == "x" * (MAX_TOKENS // 64)
