"""retrain trains with PyTorch and samples from this project's server: its `mlx` or `openai` engine, unmodified.

    uv run python examples/protocols/retrain/run.py [--engine openai] [--steps 10] [--python PYTHON]

Writes the bundled model as a folder that PyTorch loads, serves that folder, and runs `loop.py` in an environment with
retrain, which uv makes; --python names the interpreter of another one.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.merge import merge

LOOP = Path(__file__).with_name("loop.py")
UV = ("uv", "run", "--no-project", "--python", "3.12", "--with", "retrain==0.3.2", "--with", "torch", "python")
SERVE = "import sys; from mlx_parallm.cli.main import serve; sys.exit(serve())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("mlx", "openai"), default="mlx")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--python", help="an interpreter of an environment with retrain and torch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, adapters = Path(folder) / "SmolLM2-135M-Instruct", Path(folder) / "adapters"
        write_model(model)
        adapters.mkdir()
        with serving(model, adapters) as url:
            python = (options.python,) if options.python else UV
            command = [*python, str(LOOP), url, str(model), str(adapters), str(options.steps), options.engine]
            return subprocess.run(command).returncode


def write_model(folder: Path) -> None:
    """The bundled model in float32, with its tokenizer: the model with an adapter merged that changes nothing."""
    layout = adapter_layout(load_bundled(dequantize=False)[0])
    path, spec = next(iter(layout.linears.items()))
    nothing = LoRAPair(np.zeros(spec.a_shape(1), np.float32), np.zeros(spec.b_shape(1), np.float32), 1.0)
    with tempfile.TemporaryDirectory() as adapter:
        write_mlx_lm(Path(adapter), AdapterWeights({path: nothing}), layout)
        merge(None, Path(adapter), folder, dequantize=True)


@contextmanager
def serving(model: Path, adapters: Path) -> Iterator[str]:
    """`mlx_parallm_serve` on a free port, which may load adapters from one folder; its address."""
    flags = ["--model-path", str(model), "--port", "0", "--allowed-adapter-roots", str(adapters)]
    # The engine `openai` asks for the model alone. The engine `mlx` names this folder in each request.
    flags += ["--serve-adapter-folder", str(adapters / "_live_adapter")]
    # retrain asks for the model by the path that it loads itself.
    flags += ["--served-model-name", str(model), "--max-lora-rank", "8", "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-c", SERVE, *flags], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        yield next(
            found[1] for line in server.stderr if (found := re.search(r"base URL\W+(http://\S+?)(?:/v1)?\s", line))
        )
    finally:
        server.terminate()
        server.stderr.read()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
