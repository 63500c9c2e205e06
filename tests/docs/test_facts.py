"""What pages say of the program is read from the program: lists, defaults, numbers, and the cells about it in the
comparison with others."""

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, get_args

import pytest
from docs.pages import PAGES, ROOT, lines_of, prose_of, spans_of, table_of
from tool_families import ASKED, TEXTS, TOOLS

from mlx_parallm import blas
from mlx_parallm.cli.flags import FLAGS
from mlx_parallm.cli.main import main_parser
from mlx_parallm.config import (
    API_KEY_VARIABLE,
    CLUSTER_TOKEN_VARIABLE,
    KEYS,
    Action,
    Algorithm,
    DivergenceConfig,
    EngineKind,
    Speculation,
    TrackerName,
)
from mlx_parallm.core.device import MODE_SHARES, PauseMode
from mlx_parallm.core.models import ModelState
from mlx_parallm.core.summed import TokenLoss
from mlx_parallm.core.text import RepairedCalls, ToolCall
from mlx_parallm.extras.cluster.connection import LEASE_S, TRAINER_LEASE_S
from mlx_parallm.extras.competition.comparison import ComparisonVerdict
from mlx_parallm.extras.lessons.route import MAX_PROMPTS
from mlx_parallm.extras.ranks.tensor_parallel import SPLIT_FAMILIES
from mlx_parallm.model.families import TESTED
from mlx_parallm.model.tools.formats import FAMILIES, HERMES, OTHER_NAMES
from mlx_parallm.model.tools.thinking import REASONINGS
from mlx_parallm.rl.events import MAX_EVENTS
from mlx_parallm.rl.groups import MAX_PEOPLE
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.server.access import LIFETIME_S, Role
from mlx_parallm.server.api.bodies import (
    MAX_CHOICES,
    MAX_INPUTS,
    MAX_REGEX,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_STOPS,
)
from mlx_parallm.server.api.histories import MAX_TOKENS
from mlx_parallm.server.api.trajectories import MAX_SAMPLES
from mlx_parallm.server.app import all_routes, dashboard, openapi_document
from mlx_parallm.server.errors import RULES

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIVERGENCE = "| signal | beyond its limit | default | then |"
ERRORS = "| status | `code` | meaning |"
FORMS = "| `--tool-parser` | also | models | thinking |"
LISTS: tuple[tuple[str, str, Collection[str]], ...] = (
    ("docs/people.md", "| verdict | when | live then |", {*get_args(ComparisonVerdict)} - {"running"}),
    ("docs/dashboard.md", "| role | on the dashboard |", Role),
    ("docs/operating.md", "| reason | meaning |", DropReason),
    ("docs/learning.md", "| action | what it does |", Action),
    ("docs/learning.md", DIVERGENCE, DivergenceConfig.model_fields.keys() - {"webhook"}),
    (
        "docs/trainers.md",
        "| `--inference-engine` | server | how it takes the adapter |",
        EngineKind,
    ),
    ("docs/keys.md", "| role | may |", Role),
    ("docs/learning.md", "| name | reward | reads |", BUILTINS),
    ("docs/learning.md", "| name | the policy ratio is clipped | tokens are averaged |", Algorithm),
    ("docs/learning.md", "| tracker | where its figures go |", TrackerName),
    ("docs/serving.md", "| `--speculation` | drafts come from |", Speculation),
    ("docs/models.md", "| state | meaning |", ModelState),
    ("docs/operating.md", "| mode | requests under way |", PauseMode),
    ("docs/tools.md", FORMS, FAMILIES),
    ("docs/trainers.md", "| loss | sum over tokens, with r = π / q | settings, with defaults |", TokenLoss),
)
"""Page, first line of a table, and the names that its first column has."""
SERVERS, LEARNERS = "### Servers", "### Learning on a Mac"
CLAIMS = {
    SERVERS: {
        "one batch for several requests": "server.max_batch_size",
        "one batch for several LoRA adapters": "adapters.max_loras",
        "adapter chosen by each request": "lora_adapter",
        "trains while it serves": "rl_training.training_time_share",
        "prefix cache across requests": "server.prefix_cache",
        "speculative decoding": "server.speculation",
        "JSON schemas are enforced": "response_format",
        "images": "image_url",
        "embeddings": "/v1/embeddings",
        "several models in one server": "model.other_base_models",
    },
    LEARNERS: {
        "answers requests while it trains": "rl_training.training_time_share",
        "GRPO and its relatives": "grpo",
        "preferences": "kto",
        "imitates examples": "cross_entropy",
        "several turns and tools": "episode_id",
        "full fine-tuning": "model.full_fine_tuning",
        "updates survive a crash": "journal",
    },
}
"""What the program has if it does what a row of the comparison says: a setting, route, field, loss, family or file."""
SENTENCES = (
    ("README.md", f"Training gets {MODE_SHARES['inference_and_training']:.0%} of".replace("%", " %")),
    ("docs/operating.md", f"gets {MODE_SHARES['inference_and_training']:.0%} of the device's".replace("%", " %")),
    ("docs/cluster.md", f"renews a lease of {LEASE_S:g} s"),
    ("docs/cluster.md", f"A trainer holds a lease of {TRAINER_LEASE_S:g} s"),
    ("docs/dashboard.md", f"more than {MAX_SAMPLES} answers"),
    ("docs/other-apis.md", f"a list of up to {MAX_INPUTS:,} of either"),
    ("docs/other-apis.md", f"for each of up to {MAX_INPUTS:,} in `text_2`"),
    ("docs/other-apis.md", f"orders up to {MAX_INPUTS:,} `documents`"),
    ("docs/tutorial-teach.md", f"1 to {MAX_PROMPTS}, each a text or a list of messages"),
    ("docs/environments.md", f"It keeps {MAX_TOKENS // 10**6} million tokens"),
    ("docs/keys.md", f"It ends after {LIFETIME_S // 3600} hours"),
    ("docs/learning.md", f"up to {MAX_EVENTS:,} of each adapter"),
    ("docs/people.md", f"Up to {MAX_PEOPLE:,} people may judge one answer"),
    ("docs/requests.md", f"Up to {MAX_STOPS} stop strings"),
    ("docs/requests.md", f"A schema has at most {MAX_SCHEMA_BYTES >> 10} KiB and {MAX_SCHEMA_DEPTH} levels"),
    ("docs/requests.md", f"a regular expression {MAX_REGEX >> 10} KiB"),
    ("docs/requests.md", f"a list {MAX_CHOICES:,} choices"),
)
"""Numbers that are constants of the program."""
APIS = {"OpenAI": "/v1/chat/completions", "Anthropic": "/v1/messages", "Ollama": "/api/chat"}

_NAMES = re.compile(r"`(\w[\w ,-]*)`")
_DEFAULT = re.compile(r"`(--[a-z-]+|[a-z_]+(?:\.[a-z_]+)+)`[\w\s]{0,20}\((\d[\d.,]*(?: [A-Z]i?B)?)\)")
_EXTRA = re.compile(r"--extra ([a-z-]+)|mlx-parallm\[([a-z-]+)\]|\bextra `([a-z-]+)`")


@pytest.mark.parametrize(("page", "header", "known"), LISTS, ids=[f"{page}: {header}" for page, header, _ in LISTS])
def test_tables_have_all_names_and_no_others(page: str, header: str, known: Collection[str]) -> None:
    named = [name for first, *_ in table_of(page, header) for name in _NAMES.findall(first)]
    assert sorted(named) == sorted(known)


def test_limits_of_divergence() -> None:
    for signal, _, default, action in table_of("docs/learning.md", DIVERGENCE):
        configured = getattr(DivergenceConfig(), signal.strip("`"))
        limit = getattr(configured, "limit", None)
        assert (default, action) == ("" if limit is None else f"{limit:g}", f"`{configured.action}`"), signal


def test_errors() -> None:
    """Each code is in the row of its status."""
    named = {
        (code, int(status))
        for statuses, codes, _ in table_of("docs/requests.md", ERRORS)
        for code in _NAMES.findall(codes)
        for status in statuses.split(",")
    }
    declared = {(rule.code, rule.status) for rule in RULES.values() if rule.code}
    assert declared <= named
    assert {code for code, _ in named} == {code for code, _ in declared}


def test_commands() -> None:
    rows = table_of("docs/command-line.md", "| command | what it does |")
    named = {name.split()[0] for first, *_ in rows for name in _NAMES.findall(first)}
    subcommands = (action for action in main_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert named == set(next(subcommands).choices)


def test_defaults() -> None:
    """Of a setting or a flag with a number in brackets behind it."""
    wrong, checked = [], 0
    for page in PAGES:
        for name, value in _DEFAULT.findall("\n".join(line for _, line in prose_of(page))):
            default = (FLAGS.get(name) or KEYS[name]).default_text
            checked += 1
            if _plain(value) != _plain(default):
                wrong.append(f"{page}: {name} ({value}) is {default}")
    assert checked > 5
    assert not wrong


def _plain(value: str) -> str:
    return value.replace(",", "").replace(" ", "").removesuffix(".0")


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_numbers(page: str, sentence: str) -> None:
    assert sentence in _text(page)


def test_fields_exist() -> None:
    """Those of the first column of each table of fields."""
    known = {*_properties(openapi_document())}
    headers = {(page, line) for page in PAGES for line in lines_of(page) if re.match(r"\| (field|both) \|", line)}
    named = {
        (page, name)
        for page, line in headers
        for first, *_ in table_of(page, line)
        for name in re.findall(r"`(\w+)[`.]", first)
    }
    assert len(named) > 10
    assert sorted(where for where in named if where[1] not in known) == []


def test_variables_exist() -> None:
    known = {*(key.env_name for key in KEYS.values()), API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, blas.ENV_VAR}
    named = {
        (page, name)
        for page in PAGES
        for line in lines_of(page)
        for name in re.findall(r"MLX_PARALLM_[A-Z][A-Z_]*\b", line)
    }
    assert sorted(where for where in named if where[1] not in known) == []


def test_extras_exist() -> None:
    known = PYPROJECT["project"]["optional-dependencies"]
    named = {
        (page, name)
        for page in PAGES
        for line in lines_of(page)
        for found in _EXTRA.findall(line)
        for name in found
        if name
    }
    assert sorted(page_and_name for page_and_name in named if page_and_name[1] not in known) == []


def test_families() -> None:
    """Those of the tests, and those that can be split."""
    models = _text("docs/models.md")
    tested = models[models.index("**Tested families.**") : models.index("**Other models that")]
    assert [name for name in TESTED if not re.search(rf"\b{name.removesuffix('_text')}\b", tested)] == []
    (split,) = (cells[1] for cells in table_of("docs/cluster.md", "| | |") if cells[0] == "architectures")
    assert tuple(_NAMES.findall(split)) == SPLIT_FAMILIES


def test_forms_of_calls_and_thinking() -> None:
    """Other names, marks of thinking, which values can be enforced, and whether a call is read in the answer of a model
    of another family."""
    called = ToolCall(ASKED[0], json.dumps(ASKED[1], ensure_ascii=False))
    rows = {_NAMES.findall(cells[0])[0]: cells[1:] for cells in table_of("docs/tools.md", FORMS)}
    others = {other: name for name, (also, *_) in rows.items() for other in _NAMES.findall(also)}
    assert others == OTHER_NAMES
    assert {each for *_, thinking in rows.values() for each in _NAMES.findall(thinking)} == REASONINGS.keys()
    syntaxes = {name: family.syntax for name, family in FAMILIES.items() if family.syntax}
    page = _text("docs/tools.md")
    assert syntaxes.keys() == FAMILIES.keys()
    assert f"one call an answer in {_listed(name for name, each in syntaxes.items() if each.single)}" in page
    assert f"without lists and objects in {_listed(name for name, each in syntaxes.items() if each.scalars)}" in page
    read = {name: HERMES.repaired(TEXTS[name], TOOLS) for name in FAMILIES}
    assert f"(but not in {_listed(name for name, calls in read.items() if calls is None)})" in page
    assert {calls for calls in read.values() if calls} == {RepairedCalls("form", (called,))}


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def test_rooms() -> None:
    """The order of imports is that of the contract, and each room is in the table."""
    contract = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    order = " › ".join(re.sub(r"mlx_parallm\.(\w+)", r"`\1`", layer).replace(" | ", ", ") for layer in contract[:-2])
    assert f"only from rooms below it: {order} › errors" in _text("docs/architecture.md")
    folders = {first for first, *_ in table_of("docs/architecture.md", "| folder | what it owns | main names |")}
    rooms = {f"`mlx_parallm/{path.parent.name}/`" for path in (ROOT / "mlx_parallm").glob("*/__init__.py")}
    assert rooms <= folders


def test_every_benchmark_is_named() -> None:
    page = "\n".join(lines_of("docs/benchmarks.md"))
    commands = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/studies").glob("*.py")]
    assert [path.name for path in commands if path.name not in page] == []


def test_methods_of_routes() -> None:
    """Of each span such as `POST /v1/score`."""
    modules = (*all_routes(), dashboard)
    routes = (route for module in modules for route in module.router.routes)
    known = {f"{method} {route.path_format}" for route in routes for method in route.methods}
    named = {
        (place, text.partition("?")[0])
        for page in PAGES
        for place, text in spans_of(page)
        if re.match(r"(GET|POST|PUT|DELETE) /", text)
    }
    assert sorted(f"{place}: {text}" for place, text in named if text not in known) == []


@pytest.mark.parametrize("section", [SERVERS, LEARNERS])
def test_cells_of_the_comparison_about_this_project(section: str) -> None:
    cells = _cells_about_us(section)
    claims, known = CLAIMS[section], {*_names_of_the_program()}
    assert set(claims) == set(cells) - {"runs on", "APIs besides its own", "measured on a Mac"}
    for row, evidence in claims.items():
        answer = re.match(r"yes|no|partly", cells[row])
        assert answer, row
        assert (answer[0] != "no") == (evidence in known), f"{row}: {cells[row]}"


def test_apis_of_the_comparison() -> None:
    known = {*_names_of_the_program()}
    assert _cells_about_us(SERVERS)["APIs besides its own"].split(", ") == [
        name for name, route in APIS.items() if route in known
    ]


def _cells_about_us(section: str) -> dict[str, str]:
    """The second column by the first."""
    lines = lines_of("docs/limits.md")
    header = next(line for line in lines[lines.index(section) :] if line.startswith("| |"))
    return {cells[0]: cells[1] for cells in table_of("docs/limits.md", header)}


def _names_of_the_program() -> Iterator[str]:
    document = openapi_document()
    yield from (*KEYS, *document["paths"], *Algorithm, *TESTED, *_properties(document))
    yield from (path.stem for path in (ROOT / "mlx_parallm/rl/runs").glob("*.py"))


def _properties(part: Any) -> Iterator[str]:
    """Names of the fields of all bodies and answers."""
    if isinstance(part, dict):
        yield from part.get("properties", {})
        part = [*part.values()]
    if isinstance(part, list):
        for each in part:
            yield from _properties(each)


def _text(page: str) -> str:
    """The prose of a page, in one line."""
    return " ".join(line.strip() for _, line in prose_of(page))
