"""The dashboard's page and its files, as the server sends them."""

import gzip
import re
import runpy
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def files_of(page):
    """The addresses of the page's own files."""
    return re.findall(r'(?:src|href)="(/[^"]+)"', page.text)


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard/"])
async def test_a_browser_gets_the_page_and_its_files(client, path):
    page = await client.get(path, headers=HTML)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["cache-control"] == "no-cache"
    loaded = [each for each in files_of(page) if each.startswith("/dashboard/")]
    assert {each.rpartition(".")[2] for each in loaded} == {"js", "css", "txt"}
    for each in loaded:
        file = await client.get(each)
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
        assert file.headers["x-content-type-options"] == "nosniff"


async def test_the_page_may_load_nothing_from_elsewhere(client):
    page = await client.get("/dashboard", headers=HTML)
    policy = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text)
    assert "<script>" not in page.text
    assert "style=" not in page.text


def test_no_text_of_a_prompt_becomes_part_of_the_page():
    """The source uses nothing that reads a text as HTML or as a program."""
    source = ROOT / "dashboard" / "src"
    files = [path for path in source.rglob("*.ts*") if path.is_file()]
    assert len(files) > 50
    reads = r"(inner|outer|adjacent)HTML|dangerously|document\.write|srcdoc|\beval\(|new Function|javascript:"
    assert [path.name for path in files if re.search(reads, path.read_text("utf-8"), re.IGNORECASE)] == []


def test_the_types_of_the_page_belong_to_the_document():
    lock = (ROOT / "requirements.lock").read_text()
    if not all(f"\n{name}=={metadata.version(name)} " in lock for name in ("fastapi", "pydantic")):
        pytest.skip("they write the document a little differently in each version")
    page = runpy.run_path(str(ROOT / "scripts" / "page_schemas.py"))["page_schemas"]()
    schema = (ROOT / "dashboard" / "src" / "api" / "schema.ts").read_text("utf-8")
    assert page["description"] in schema, "run scripts/dashboard, which needs Node, and commit what it makes"


async def test_files_are_compressed_for_those_who_accept_it(client):
    page = await client.get("/dashboard")
    (script,) = (each for each in files_of(page) if each.endswith(".js"))
    plain = await client.get(script, headers={"accept-encoding": "identity"})
    async with client.stream("GET", script, headers={"accept-encoding": "gzip"}) as sent:
        raw = b"".join([piece async for piece in sent.aiter_raw()])
    assert (sent.headers["content-encoding"], sent.headers["vary"]) == ("gzip", "accept, accept-encoding")
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(raw) == plain.content
    assert len(raw) < 100_000


async def test_the_licences_of_what_is_bundled_are_served(client):
    page = await client.get("/dashboard")
    (address,) = (each for each in files_of(page) if each.endswith(".txt"))
    licences = (await client.get(address)).text
    for package in ("preact", "@preact/signals", "uplot"):
        assert re.search(rf"^{package} [\d.]+ \(MIT\)$", licences, re.MULTILINE), package


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "..%2f..%2fapp.py", "%2e%2e", "..\\app.py"])
async def test_only_the_files_of_the_page_are_served(client, name):
    assert (await client.get(f"/dashboard/assets/{name}")).status_code == 404


async def test_it_can_be_turned_off(make_client):
    client = make_client(dashboard=False)
    for path in ("/dashboard", "/dashboard/assets/index.html"):
        assert (await client.get(path, headers=HTML)).status_code == 404
    root = await client.get("/", headers=HTML)
    assert (root.status_code, root.headers["location"]) == (307, "/docs")
    assert (await client.get("/v1/stats")).status_code == 200
