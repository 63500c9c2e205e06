"""At home on a local network: names of this machine, flags in refusals, HTTPS, the audit log."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading

import httpx
import pytest
from server.asking import fault, refusal
from server.keys import key_file

from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.address import check_certificate


async def test_the_machines_own_names_count_where_it_can_be_reached(make_client, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Studio.home.arpa")
    for bound, expected in (("0.0.0.0", 200), ("192.168.1.7", 200), ("127.0.0.1", 403)):
        client = make_client(host=bound)
        for name in ("studio.local:8000", "STUDIO.local", "studio", "studio.home.arpa"):
            assert (await client.get("/health", headers={"host": name})).status_code == expected, (bound, name)
        assert (await client.get("/health", headers={"host": "other.local"})).status_code == 403


@pytest.mark.parametrize(
    ("headers", "flag"),
    [
        ({"host": "mac.lan:8000"}, "--allowed-hosts mac.lan."),
        ({"host": "x$(reboot).lan"}, "--allowed-hosts NAME."),
        ({"host": "a" * 300}, "--allowed-hosts NAME."),
        ({"host": ""}, "--allowed-hosts NAME."),
        ({"origin": "https://ui.example:3000"}, "--cors-origins https://ui.example:3000."),
        ({"origin": "app://obsidian.md"}, "--cors-origins app://obsidian.md."),
        ({"origin": "null"}, "--cors-origins ORIGIN."),
        ({"origin": "https://ui.example/`reboot`"}, "--cors-origins ORIGIN."),
        ({"origin": "https://" + "a" * 300}, "--cors-origins ORIGIN."),
    ],
)
async def test_a_refusal_names_the_flag(client, headers, flag):
    answer = await client.get("/health", headers=headers)
    assert answer.status_code == 403
    assert fault(answer)["message"].endswith(flag)


# ---- pages of other sites, and proxies -----------------------------------------------------------


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_changes_and_reads_nothing_without_an_origin(client, site):
    """Browsers send no Origin for an image or a link. Another port of this machine is the same site."""
    for path in ("/health", "/v1/models", "/metrics", "/reset_data"):
        await refusal(client.get(path, headers={"sec-fetch-site": site}), 403, code="forbidden_origin")
    for path in ("/", "/dashboard", "/docs", "/login"):
        assert (await client.get(path, headers={"sec-fetch-site": site})).status_code != 403
    for own in ("none", "same-origin"):
        assert (await client.get("/health", headers={"sec-fetch-site": own})).status_code == 200


@pytest.mark.parametrize(
    "origin", ["ftp://localhost:8000", "https://localhost:8000", "localhost:8000", "http://localhost"]
)
async def test_an_origin_of_another_scheme_or_port_is_another_site(client, origin):
    await refusal(
        client.post("/v1/completions", json={"prompt": "x"}, headers={"origin": origin}), 403, code="forbidden_origin"
    )


@pytest.mark.parametrize(("trusted", "refused"), [((), 429), (("127.0.0.0/8",), 401), (("10.0.0.0/8",), 429)])
async def test_only_a_trusted_proxy_says_who_the_client_is(serving, tmp_path, trusted, refused):
    file, _ = key_file(tmp_path, someone="admin")
    async with serving(keys_file=file, trusted_proxies=trusted) as server, httpx.AsyncClient() as client:
        for number in range(12):
            forwarded = {"origin": server.url, "x-forwarded-for": f"10.0.0.{number}", "x-forwarded-proto": "http"}
            answer = await client.post(f"{server.url}/login", data={"key": f"wrong {number}"}, headers=forwarded)
        assert answer.status_code == refused


# ---- HTTPS ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A folder with a certificate for localhost, and its key, which has the password `hidden`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2")
    kind = ("-x509", "-newkey", "rsa:2048", "-passout", "pass:hidden")
    subprocess.run(["openssl", "req", *kind, *files, *subject], check=True, capture_output=True)
    return folder


async def test_https(serving, certificate):
    files = {"ssl_certfile": certificate / "cert.pem", "ssl_keyfile": certificate / "key.pem"}
    async with serving(**files, ssl_keyfile_password="hidden", api_key="secret") as server:
        context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        async with httpx.AsyncClient(verify=context, base_url=f"https://localhost:{server.port}") as client:
            headers = {"authorization": "Bearer secret"}
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 200
            origin = {"origin": f"https://localhost:{server.port}"}
            logged_in = await client.post("/login", data={"key": "secret"}, headers=origin)
            assert "secure" in logged_in.headers["set-cookie"].lower().split("; ")
            assert (await client.get("/docs")).status_code == 200


def test_a_password_that_is_wrong_or_missing(certificate):
    files = {"ssl_certfile": certificate / "cert.pem", "ssl_keyfile": certificate / "key.pem"}
    check_certificate(ServerConfig(**files, ssl_keyfile_password="hidden"))
    for password in ({}, {"ssl_keyfile_password": "wrong"}):
        with pytest.raises(ConfigError, match="ssl_keyfile_password"):
            check_certificate(ServerConfig(**files, **password))


def test_certificates_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="ssl_keyfile: set ssl_certfile too"):
        check_certificate(ServerConfig(ssl_keyfile=tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        check_certificate(ServerConfig(ssl_certfile=tmp_path / "cert.pem"))
    (tmp_path / "cert.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_certificate(ServerConfig(ssl_certfile=tmp_path / "cert.pem"))


# ---- the audit log -------------------------------------------------------------------------------


async def test_control_actions_are_audited_and_prompts_are_not(make_client, tmp_path):
    file, sent = key_file(tmp_path, app="inference", boss="admin")
    log = tmp_path / "logs" / "audit.jsonl"
    client = make_client(keys_file=file, audit_log=log)
    await client.post("/v1/completions", json={"prompt": "a secret prompt"}, headers=sent["boss"])
    await client.get("/debug/state", headers=sent["boss"])
    assert (await client.post("/pause?mode=keep", headers=sent["app"])).status_code == 403
    assert (await client.post("/pause?mode=keep", headers=sent["boss"])).status_code == 200
    assert (await client.post("/sleep")).status_code == 401
    body = {"lora_name": "private name", "lora_path": "x"}
    await client.post("/v1/load_lora_adapter", json=body, headers=sent["boss"])
    text = log.read_text()
    assert not [word for word in ("secret prompt", "private name") if word in text]
    refused, paused, *rest = [json.loads(line) for line in text.splitlines()]
    assert (refused["key"], refused["path"], refused["status"], refused["error"]) == (
        *("app", "/pause", 403),
        "insufficient_role",
    )
    assert (paused["key"], paused["method"], paused["query"]) == ("boss", "POST", "mode=keep")
    assert paused["time"].endswith("+00:00")
    assert [(line["key"], line["path"]) for line in rest] == [(None, "/sleep"), ("boss", "/v1/load_lora_adapter")]
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600


async def test_a_line_that_a_full_disk_refuses_is_in_the_log_and_the_action_is_done(
    make_client, tmp_path, monkeypatch, caplog
):
    log, real = tmp_path / "audit.jsonl", os.write
    client = make_client(audit_log=log)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: real(descriptor, data[: len(data) // 2]))
        assert (await client.post("/pause?mode=keep")).status_code == 200
    assert (await client.post("/resume")).status_code == 200
    assert [json.loads(line)["path"] for line in log.read_text().splitlines()] == ["/resume"]
    (message,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert message.startswith("the audit log cannot be written (No space left on device): {")
    assert '"path":"/pause"' in message


async def test_a_slow_disk_under_the_audit_log_holds_up_nobody_else(make_client, tmp_path, monkeypatch):
    client, slow, real = make_client(audit_log=tmp_path / "audit.jsonl"), threading.Event(), os.write

    def write(descriptor, data):
        assert slow.wait(10), "the event loop waits for the disk"
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    pausing = asyncio.create_task(client.post("/pause?mode=keep"))
    await asyncio.sleep(0.05)
    assert (await client.get("/health")).status_code == 200
    assert not pausing.done(), "its line is not written yet"
    slow.set()
    assert (await pausing).status_code == 200


async def test_an_audit_log_that_was_moved_away_is_made_again_for_its_owner_alone(make_client, tmp_path):
    log, rotated = tmp_path / "audit.jsonl", tmp_path / "audit.1.jsonl"
    client = make_client(audit_log=log)
    assert (await client.post("/pause?mode=keep")).status_code == 200
    log.rename(rotated)
    assert (await client.post("/resume")).status_code == 200
    for file, path in ((rotated, "/pause"), (log, "/resume")):
        (line,) = file.read_text().splitlines()
        assert json.loads(line)["path"] == path
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_an_audit_log_that_cannot_be_written_stops_the_start(make_client, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"audit_log: .* cannot be written"):
        make_client(audit_log=tmp_path / "file" / "audit.jsonl")
