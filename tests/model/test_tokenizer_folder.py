"""`mlx_parallm tokenizer save`: what it writes is the tokenizer that the server has."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from mlx_parallm.cli.main import main
from mlx_parallm.model.bundled import bundled_tokenizer

pytestmark = pytest.mark.ci

MESSAGES = [{"role": "user", "content": "Hello, naïve 123"}]
READ = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer.apply_chat_template(json.loads(sys.argv[2]), add_generation_prompt=True, return_dict=False)
print(json.dumps([ids, tokenizer.eos_token_id]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "tokenizer"
    assert main(["tokenizer", "save", str(folder)]) == 0
    return folder


def test_transformers_reads_it_without_a_network(folder):
    expected = bundled_tokenizer()
    ids = expected.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    command = [sys.executable, "-c", READ, str(folder), json.dumps(MESSAGES)]
    offline = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(folder)}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [ids, expected.eos_token_id]


def test_the_tokenizer_of_a_model_directory(folder, tmp_path, capsys):
    source, saved = tmp_path / "model", tmp_path / "saved"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert main(["tokenizer", "save", str(saved), "--model-path", str(source)]) == 0
    assert str(saved) in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(saved).encode("a b") == bundled_tokenizer().encode("a b")


def test_nothing_is_overwritten_and_a_wrong_model_is_an_error(tmp_path, capsys):
    assert main(["tokenizer", "save", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["tokenizer", "save", str(tmp_path / "x"), "--model-path", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
