"""What other projects' trainers ask of the inference server: adapters at the root, facts, pauses, and refusals."""

from server.asking import fault, refusal
from server.fakes import CARD, ByteTokenizer

from mlx_parallm.adapters.cards import AdapterStats

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
BODY = {"lora_name": "outside", "lora_path": "/runs/step"}


async def test_the_root_route_replaces_the_name_at_every_step(client):
    for version in (1, 2):
        response = await client.post(LOAD, json=BODY)
        assert (response.status_code, response.json()["lora_adapter"]) == (200, f"outside@{version}")
    response = await client.post(LOAD, json={**BODY, "load_inplace": True, "is_3d_lora_weight": False})
    assert response.json()["lora_adapter"] == "outside@3"
    response = await client.post(LOAD, json={**BODY, "load_inplace": False})
    assert (response.status_code, fault(response)["param"]) == (400, "load_inplace")
    response = await client.post(UNLOAD, json={"lora_name": "outside"})
    assert response.json() == {"status": "success", "unloaded": ["outside@1", "outside@2", "outside@3"]}
    assert (await client.post(UNLOAD, json={"lora_name": "outside"})).status_code == 404


async def test_server_info_has_what_trl_looks_for(client, adapters):
    adapters.state = AdapterStats(slots=6, max_rank=32)
    config = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert config == {
        "model_config": {"dtype": f"torch.{CARD.dtype}"},
        "lora_config": {"max_lora_rank": 32, "max_loras": 6},
        "parallel_config": {"data_parallel_size": 1},
        "weight_transfer_config": None,
    }


async def test_one_process_holds_the_model(client):
    assert (await client.get("/get_world_size")).json() == {"world_size": 1}


async def test_liveness_needs_no_key_and_does_not_ask_the_engine(make_client, engine):
    client = make_client(api_key="secret")
    engine.state["alive"] = False
    response = await client.get("/liveness")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert (await client.get("/get_world_size")).status_code == 401


async def test_an_update_of_the_whole_model_is_refused_with_what_to_use_instead(client):
    """With a 404, prime-rl would go on with the old weights."""
    for content in (b"", b'{"weight_dir": "/runs/step_3"}'):
        error = await refusal(client.post("/update_weights", content=content), 400)
        assert "/v1/load_lora_adapter" in error["message"]


async def test_a_chat_may_name_the_template_that_it_gets_anyway(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    same = await client.post("/v1/chat/completions", json={**body, "chat_template": ByteTokenizer.chat_template})
    assert same.status_code == 200
    loop = "{% for x in range(9) %}{% endfor %}"
    other = await client.post("/v1/chat/completions", json={**body, "chat_template": loop})
    assert (other.status_code, fault(other)["param"]) == (400, "chat_template")
    assert "A template is a program" in fault(other)["message"]
