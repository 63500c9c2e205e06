"""Tinker's protobuf, with the SDK's own writer and reader. Needs the extra `tinker`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from protocols.test_tinker import ADAM, NAME, Client, client, sampling  # noqa: F401 - a fixture

from mlx_parallm.core.summed import SummedLoss, TargetedTokens, TokenLoss

types = pytest.importorskip("tinker.types")
request_conv = pytest.importorskip("tinker.proto.request_conv")
response_conv = pytest.importorskip("tinker.proto.response_conv")
zstandard = pytest.importorskip("zstandard")

HEADERS = {"content-type": "application/x-protobuf"}
READS = {"accept": "application/x-protobuf"}


def written(model: str, number: int, loss: str = "ppo", config: Any = None, forward_only: bool = False) -> bytes:
    """A request as the SDK writes it."""
    inputs = {
        "target_tokens": types.TensorData(data=[0, 3, 4], dtype="int64", shape=[3]),
        "logprobs": types.TensorData(data=[0.0, -1.0, -2.0], dtype="float32", shape=[3]),
        "advantages": types.TensorData(data=[0.0, 0.5, 0.5], dtype="float32", shape=[3]),
    }
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), types.EncodedTextChunk(tokens=[2, 3])])
    given = types.ForwardBackwardInput(
        data=[types.Datum(model_input=prompt, loss_fn_inputs=inputs)] * 2, loss_fn=loss, loss_fn_config=config
    )
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=number)
    message = request_conv.forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    raw: bytes = message.SerializeToString()
    return raw


async def asked(client: Client, raw: bytes, status: int = 200, **headers: str) -> dict[str, Any]:  # noqa: F811
    response = await client.http.post("/api/v1/forward_backward", content=raw, headers=HEADERS | headers)
    assert response.status_code == status, response.text
    return response.json()


async def read(client: Client, request_id: str) -> bytes:  # noqa: F811
    response = await client.http.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=READS)
    assert response.headers["content-type"] == "application/x-protobuf", response.text
    return response.content


@pytest.mark.parametrize("packed", [False, True])
async def test_the_sdks_request_and_what_it_reads_of_the_result(client: Client, packed: bool) -> None:  # noqa: F811
    await client.start()
    raw = written(client.model, 1, config={"clip_high_threshold": 1.5})
    headers = {"content-encoding": "zstd"} if packed else {}
    raw = zstandard.ZstdCompressor().compress(raw) if packed else raw
    first = await asked(client, raw, **headers)
    assert await asked(client, raw, **headers) == first, "a repeated request"
    output = response_conv.deserialize_forward_backward_output(await read(client, first["request_id"]))
    assert [each["logprobs"].data for each in output.loss_fn_outputs] == [[-0.5, -0.5, -0.5]] * 2
    assert output.metrics == {"loss:sum": 1.5}
    assert client.policies.kinds == ["create", "forward_backward"]
    _, _, sequences, loss = client.policies.calls[-1]
    assert loss == SummedLoss(TokenLoss.PPO, 0.8, 1.5)
    assert sequences == [TargetedTokens((1, 2, 3), (0, 3, 4), (0.0, 0.5, 0.5), (0.0, -1.0, -2.0))] * 2


async def test_forward_alone(client: Client) -> None:  # noqa: F811
    await client.start()
    await read(client, (await asked(client, written(client.model, 1, forward_only=True)))["request_id"])
    assert client.policies.kinds[-1] == "forward"


async def test_samples(client: Client) -> None:  # noqa: F811
    await client.start()
    made = {"session_id": client.session, "sampling_session_seq_id": 4, "base_model": NAME}
    sampler = (await client.post("create_sampling_session", made))["sampling_session_id"]
    body = sampling(sampler, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1)
    raw = await read(client, (await client.post("asample", body))["request_id"])
    answer = response_conv.deserialize_sample_response(raw)
    assert [(each.stop_reason, each.tokens) for each in answer.sequences] == [("stop", list(b"Hi \xc3\xa4!"))] * 2
    assert answer.sequences[0].logprobs == [-0.5] * 6
    assert answer.sequences[0].topk_logprobs_np.token_ids.tolist() == [[token] for token in b"Hi \xc3\xa4!"]
    assert answer.prompt_logprobs == [None, -0.5]
    np.testing.assert_allclose(answer.topk_prompt_logprobs_np.token_ids, [[0, 0], [6, 7]])


async def test_mistakes(client: Client) -> None:  # noqa: F811
    await client.start()
    await asked(client, b"\xff\xff\xff", 400)
    await asked(client, b"", 400)
    await asked(client, written(client.model, 1), 415, **{"content-encoding": "br"})
    await asked(client, written(client.model, 1), 400, **{"content-encoding": "zstd"})
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    await asked(client, bomb, 413, **{"content-encoding": "zstd"})
    failed = await client.result((await asked(client, written(client.model, 1, "dro")))["request_id"])
    assert "cross_entropy, importance_sampling, ppo, cispo" in failed["error"]
    assert (await client.ask("optim_step", seq_id=2, adam_params=ADAM))["metrics"]["update"] == 1
