"""Named keys: their file, which ones are accepted, and what is kept apart."""

import base64
import os
import stat

import pytest
from server.asking import fault
from server.keys import key_file

from mlx_parallm.errors import ConfigError
from mlx_parallm.server.access import MAX_KEYS, KeyRing, Role, new_key, read_keys, write_keys

BODY = {"prompt": "x"}


def test_the_file_has_hashes_and_is_its_owners_alone(tmp_path):
    file, sent = key_file(tmp_path, laptop="inference")
    secret = sent["laptop"]["authorization"].removeprefix("Bearer ")
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert secret not in file.read_text()
    assert len(base64.urlsafe_b64decode(secret.removeprefix("sk-") + "=")) == 32, "256 bits"
    (key,) = read_keys(file)
    assert (key.name, key.role) == ("laptop", Role.INFERENCE)
    assert key.sha256 not in repr(key)
    assert os.listdir(tmp_path) == ["keys.json"], "nothing is left beside it"


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file, _ = key_file(tmp_path, laptop="inference")
    before = file.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        write_keys(file, [])
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "not a file of keys"),
        ("[]", "not a file of keys"),
        ('{"keys": ' + "[" * 50_000, "not a file of keys"),
        ('{"keys": 3}', "not a file of keys"),
        ('{"keys": [{"name": "a"}]}', "role"),
        ('{"keys": [{"name": "a", "role": "root", "sha256": "' + "0" * 64 + '"}]}', "role"),
        ('{"keys": [{"name": "a b", "role": "admin", "sha256": "' + "0" * 64 + '"}]}', "name"),
        ('{"keys": [{"name": "a", "role": "admin", "sha256": "secret"}]}', "sha256"),
        ('{"keys": [{"name": "api-key", "role": "admin", "sha256": "' + "0" * 64 + '"}]}', "reserved"),
        ("x" * (2**20 + 1), "longer than"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, named):
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=named) as raised:
        read_keys(file)
    assert "secret" not in str(raised.value)


def test_the_number_of_keys_is_bounded_and_names_are_unique(tmp_path):
    keys = [new_key(f"key-{number}", Role.INFERENCE)[0] for number in range(MAX_KEYS + 1)]
    with pytest.raises(ConfigError, match="at most"):
        write_keys(tmp_path / "keys.json", keys)
    with pytest.raises(ConfigError, match="same name"):
        write_keys(tmp_path / "keys.json", [keys[0], keys[0]])


def test_a_change_of_the_file_counts_from_the_next_request_on(tmp_path, caplog):
    file, sent = key_file(tmp_path, one="inference", two="train")
    secrets = {name: headers["authorization"].removeprefix("Bearer ").encode() for name, headers in sent.items()}
    ring = KeyRing(file=file)
    assert ring.find(secrets["one"]).name == "one"
    write_keys(file, [key for key in read_keys(file) if key.name != "one"])
    assert ring.find(secrets["one"]) is None
    file.write_text("{")
    assert ring.find(secrets["two"]).role is Role.TRAIN, "a broken file changes nothing"
    assert ring.find(secrets["two"]) is not None
    assert [record.message for record in caplog.records if "stay as they were" in record.message], "and is logged"
    assert len(caplog.records) == 1, "once"
    file.unlink()
    assert ring.find(secrets["two"]) is not None


@pytest.mark.parametrize("scheme", ["bearer", "x-api-key", "basic"])
async def test_every_way_of_sending_a_key(make_client, tmp_path, scheme):
    file, sent = key_file(tmp_path, laptop="inference")
    secret = sent["laptop"]["authorization"].removeprefix("Bearer ")
    headers = {
        "bearer": {"authorization": f"bearer {secret}"},
        "x-api-key": {"x-api-key": secret},
        "basic": {"authorization": "Basic " + base64.b64encode(f"any:{secret}".encode()).decode()},
    }[scheme]
    client = make_client(keys_file=file)
    assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert (await client.post("/v1/completions", json=BODY)).status_code == 401


async def test_a_key_may_be_sent_in_two_headers_but_not_two_keys(make_client, tmp_path):
    file, sent = key_file(tmp_path, laptop="inference", desk="inference")
    client = make_client(keys_file=file)
    one, other = (sent[name]["authorization"].removeprefix("Bearer ") for name in ("laptop", "desk"))
    for second, status in ((one, 200), (other, 401), ("", 401)):
        headers = {"authorization": f"Bearer {one}", "x-api-key": second}
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == status
        assert status == 200 or "different API keys" in fault(answer)["message"]


async def test_the_one_key_is_an_admin_beside_named_ones(make_client, tmp_path, engine):
    file, sent = key_file(tmp_path, laptop="inference")
    client = make_client(keys_file=file, api_key="secret")
    assert (await client.post("/pause", headers={"authorization": "Bearer secret"})).status_code == 200
    assert (await client.post("/v1/completions", json=BODY, headers=sent["laptop"])).status_code == 200
    assert engine.requests[0].key == "laptop"


async def test_the_prefix_cache_of_a_key_is_apart_where_asked(make_client, tmp_path, engine):
    own = ("inference", {"own_prefix_cache": True})
    file, sent = key_file(tmp_path, shared="inference", one=own, two=own)
    client = make_client(keys_file=file)
    for name in ("shared", "one", "two"):
        for salt in ({}, {"cache_salt": "s"}):
            await client.post("/v1/completions", json=BODY | salt, headers=sent[name])
    salts = [request.cache_salt for request in engine.requests]
    assert salts[:2] == ["", "s"]
    assert len(set(salts)) == 6
    await client.post("/v1/completions", json=BODY | {"cache_salt": salts[2]}, headers=sent["shared"])
    await client.post("/v1/completions", json=BODY | {"cache_salt": salts[2]}, headers=sent["two"])
    assert engine.requests[-1].cache_salt not in salts, "another key cannot ask for it"
