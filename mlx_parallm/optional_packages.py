"""Optional packages: which feature needs each, and how to install one that is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extra:
    """A package that a plain install leaves out.

    `module` is what Python imports, `package` what pip calls it, and `name` the extra in pyproject.toml.
    """

    module: str
    package: str
    name: str

    @property
    def installed(self) -> bool:
        """Whether the module can be found. It is not imported."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a module inside a package: the package is missing
            return False

    @property
    def missing(self) -> str:
        """The error text for a feature that needs the package."""
        return (
            f"{self.package} is not installed; install it with `pip install 'mlx-parallm[{self.name}]'`, "
            f"or in a clone with `uv sync --inexact --extra {self.name}`"
        )


CLUSTER = Extra("nats", "NATS", "cluster")
DATASETS = Extra("datasets", "datasets", "datasets")
GGUF = Extra("gguf", "gguf", "gguf")
MATH = Extra("math_verify", "math-verify", "math")
OTEL = Extra("opentelemetry.exporter.otlp.proto.http", "opentelemetry", "otel")
PARQUET = Extra("pyarrow", "pyarrow", "parquet")
PLOTS = Extra("matplotlib", "matplotlib", "plots")
REASONING_GYM = Extra("reasoning_gym", "reasoning-gym", "reasoning-gym")
TENSORBOARD = Extra("tensorboardX", "tensorboardX", "tensorboard")
TINKER = Extra("tinker", "tinker", "tinker")
TRACKIO = Extra("trackio", "trackio", "trackio")
VERIFIERS = Extra("verifiers", "verifiers", "verifiers")
WANDB = Extra("wandb", "wandb", "wandb")
