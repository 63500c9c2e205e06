"""retrain's engine contract in this process: a Python program gives token ids and gets samples with their logprobs.

The contract is that of `retrain.inference_engine` in retrain 0.3.2, whose class PyTorchEngine this can stand in for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from mlx_parallm.adapters.formats import CONFIG_FILE, PEFT_WEIGHTS
from mlx_parallm.adapters.service import stamp_of
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import EngineKind, configure
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, SequenceOutput, StopParams, WorkClass
from mlx_parallm.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from mlx_parallm.extras.retrain.settings import RetrainFile, read_retrain
from mlx_parallm.rl.rollouts.answers import events_of

T = TypeVar("T")

ADAPTER = "retrain"
"""The name of the adapter whose versions are synced."""

_LARGEST_RANK = 32
"""retrain's own default of `lora_rank`."""
_SEEDS_PER_RUN = 2**32


@dataclass(slots=True)
class SampleResult:
    """One answer, as retrain's class of this name. `token_ids` includes the end-of-sequence token if that ended it.

    `logprobs`: of each token under the model, in nats, before temperature and top_p. `token_entropies`: always None.
    """

    token_ids: list[int]
    logprobs: list[float]
    token_entropies: list[float] | None = None


class RetrainEngine:
    """An inference engine for retrain, or for any loop that is written against its contract.

    The model is loaded at the first call that needs it. Calls block; they may come from any thread, one at a time.

    Args:
        base_model: a model directory or a hub id. None means the bundled model.
        lora_alpha: of the adapters that `sync_from_state_dict` gets. None means twice their rank, as in retrain.
        seed: equal seeds give equal samples in the same order of calls.
        keys: any key of server_config.yaml, with two underscores for the dots of its path.

    Raises:
        ConfigError: one line per problem.
    """

    def __init__(
        self, base_model: str | Path | None = None, lora_alpha: float | None = None, seed: int = 0, **keys: object
    ) -> None:
        keys = {"adapters__max_lora_rank": _LARGEST_RANK, "rl_training__enabled": False, **keys}
        self._config = configure(base_model, None, None, **keys)
        if self._config.rl_training.enabled:
            raise ConfigError("rl_training__enabled: this engine only draws samples; leave it out")
        if self._config.inference.engine.outside:
            raise ConfigError(
                f"inference__engine: {self._config.inference.engine} is a server of its own, and this engine draws in "
                "this process; leave it out"
            )
        self._lora_alpha = lora_alpha
        self._next_seed = seed * _SEEDS_PER_RUN
        self._asked = RetrainFile()
        self._host: _Host | None = None
        self._closed = False
        self._synced: object = None
        """What the live version was made of; None: nothing was synced yet."""

    @classmethod
    def from_toml(cls, file: str | Path) -> RetrainEngine:
        """The engine that a configuration file of retrain asks for, on its model.

        Raises:
            ConfigError: the file cannot be read, or asks for what this engine does not do.
        """
        asked = read_retrain(Path(file))
        rank = {} if asked.lora_rank is None else {"adapters__max_lora_rank": asked.lora_rank}
        made = cls(asked.model, asked.lora_alpha or None, asked.seed, **rank, **asked.keys)
        made._asked = asked
        return made

    # -- the contract ----------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        compute_entropy: bool = False,
    ) -> list[list[SampleResult]]:
        """`num_samples` answers to each prompt, with the weights of the last sync; before one, of the base model.

        Raises:
            InvalidRequestError: an argument cannot be used, or entropies are asked for.
            EngineError: the engine failed.
        """
        if compute_entropy:
            raise InvalidRequestError("compute_entropy: this engine has no entropies; leave it out", "compute_entropy")
        if num_samples < 1 or max_tokens < 1:
            raise InvalidRequestError("num_samples and max_tokens must be at least 1", "num_samples")
        if self._config.inference.engine is EngineKind.NONE:
            raise ConfigError("inference.engine: none samples nothing, and one was asked for; leave it out")
        host = self._started()
        for ids in prompt_ids_list:
            _check_prompt(ids, max_tokens, host.served)
        sampling = SamplingParams(temperature=max(temperature, 0.0), top_p=top_p, top_logprobs=0)
        first, self._next_seed = self._next_seed, self._next_seed + num_samples * len(prompt_ids_list)
        seeds = range(first, self._next_seed, num_samples)
        return host.run(_generate(host.served, prompt_ids_list, seeds, num_samples, max_tokens, sampling))

    def reload_weights(self, adapter_path: str | Path) -> None:
        """Samples with the adapter in a folder from now on, in PEFT's or mlx-lm's format. Does nothing if the files
        are those of the last call.

        Raises:
            AdapterFileError: the files cannot be used.
        """
        folder = Path(adapter_path)
        state = (folder.absolute(), stamp_of(folder))
        if state != self._synced:
            self._publish(folder, state)

    def sync_from_state_dict(self, lora_dict: Mapping[str, Any]) -> None:
        """Samples with these weights from now on. Does nothing if they are those of the last call.

        Args:
            lora_dict: parameters of a PEFT model by name, as PyTorch tensors or NumPy arrays; they are copied. Those
                without `lora_` in their names are left out.

        Raises:
            AdapterFileError: the weights do not fit the model.
        """
        tensors = {name: _array(value) for name, value in lora_dict.items() if "lora_" in name}
        data = save(tensors, {"format": "pt"})
        state = hashlib.sha256(data).digest()
        if state == self._synced:
            return
        with tempfile.TemporaryDirectory(prefix="mlx_parallm-") as folder:
            (Path(folder) / PEFT_WEIGHTS).write_bytes(data)
            (Path(folder) / CONFIG_FILE).write_text(json.dumps(self._lora_config(tensors)))
            self._publish(Path(folder), state)

    def shutdown(self) -> None:
        """Frees the model. The engine cannot be used afterwards; another call does nothing."""
        self._closed = True
        host, self._host = self._host, None
        if host is not None:
            host.stop()

    # -- its parts -------------------------------------------------------------------------------

    def _started(self) -> _Host:
        if self._closed:
            raise EngineDeadError("this engine was shut down; make another one")
        if self._host is None:
            host = _Host(RunningEngine(self._config))
            try:
                self._asked.check(host.served.card.dtype)
            except ConfigError:
                host.stop()
                raise
            self._host = host
        return self._host

    def _publish(self, folder: Path, state: object) -> None:
        host = self._started()
        host.run(host.served.adapters.publish_folder(ADAPTER, folder))
        self._synced = state

    def _lora_config(self, tensors: Mapping[str, NDArray[np.float32]]) -> Mapping[str, object]:
        """PEFT's config of these factors, whose lora_A are [rank, in]."""
        rank = next((int(array.shape[0]) for name, array in tensors.items() if "lora_A" in name), 1)
        return {"peft_type": "LORA", "r": rank, "lora_alpha": self._lora_alpha or 2 * rank}


def _array(value: Any) -> NDArray[np.float32]:
    """A copy in float32. bfloat16, which NumPy does not have, is converted by PyTorch."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.array(value, dtype=np.float32, order="C")


def _check_prompt(ids: Sequence[int], max_tokens: int, served: Served) -> None:
    """Raises InvalidRequestError or ContextLengthError: the model cannot continue this prompt."""
    vocabulary, context = served.card.vocab_size, served.card.context_length
    if not ids or not all(0 <= token < vocabulary for token in ids):
        raise InvalidRequestError(
            f"each prompt needs one token at least, with ids below {vocabulary}", "prompt_ids_list"
        )
    if len(ids) + max_tokens > context:
        raise ContextLengthError(
            f"a prompt of {len(ids)} tokens and {max_tokens} to generate do not fit the context of {context}",
            "max_tokens",
        )


async def _generate(
    served: Served,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    num_samples: int,
    max_tokens: int,
    sampling: SamplingParams,
) -> list[list[SampleResult]]:
    """The groups of all prompts, which are sampled at the same time with one adapter version."""
    live = served.adapters.live(ADAPTER)
    with served.adapters.lease(ADAPTER if live else BASE_ADAPTER.name) as adapter:
        requests = [
            GenerationRequest(
                f"retrain-{seed}",
                (tuple(map(int, ids)),),
                replace(sampling, seed=seed),
                StopParams(max_tokens),
                n=num_samples,
                adapter=adapter,
                work_class=WorkClass.TRAINING,
            )
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        return list(await asyncio.gather(*(_group(served, request) for request in requests)))


async def _group(served: Served, request: GenerationRequest) -> list[SampleResult]:
    results = [SampleResult([], []) for _ in range(request.n)]
    async for event in events_of(served.engine.generate(request)):
        if isinstance(event, SequenceOutput):
            results[event.index].token_ids += event.token_ids
            results[event.index].logprobs += [token.logprob for token in event.logprobs]
    return results


class _Host:
    """A started engine, and the event loop that its asyncio interface runs on, in a thread of its own."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self.served = engine.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="retrain-engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for `work`. If the wait is interrupted, the work is cancelled."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: the work must not go on when nobody waits for it
            future.cancel()
            raise

    def stop(self) -> None:
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
