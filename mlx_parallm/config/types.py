"""Building blocks of the configuration: the base class of every section, flags, the field types, and byte sizes.

Each field type reads a yaml value as well as the text of a flag or an environment variable.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SecretStr

Program = Literal["mlx_parallm_serve", "mlx_parallm_train"]
"""The programs that read the configuration."""
SERVE: Final = "mlx_parallm_serve"
TRAIN: Final = "mlx_parallm_train"

AUTO = "auto"
_DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES_PER_UNIT = _DECIMAL_UNITS | _BINARY_UNITS
_LONGEST_UNITS = ("TiB", "TB", "GiB", "GB", "MiB", "MB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_PLAIN_NAME = r"(?!\.)[A-Za-z0-9._-]{1,64}"
_RESERVED_NAME = re.compile(r"base|base-model|latest|best|route|rollback|checkpoint-[0-9]+")


class Section(BaseModel):
    """Base class of the configuration's sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def fields_of(section: Section) -> dict[str, Any]:
    """The values of a section by key; those of inner sections are sections."""
    return {name: getattr(section, name) for name in type(section).model_fields}


@dataclass(frozen=True, slots=True)
class Flag:
    """What an annotation says of a setting's flag. Every setting has a flag by its key; the one of
    `port: Annotated[int, Flag("--port", "PORT")]` in the section `server` is --server.port, or --port for short.

    Attributes:
        name: the short name. The help shows it, and not the one by the key.
        metavar: the name of the value in the help. A bool without one is a switch: it takes no value, and has a --no-
            form.
        alias: one more short name.
        several: the flag takes several values, and may be given several times, as in vLLM.
        common: `--help` shows it; `--help-all` shows every setting.
        only: the program that obeys the setting, or all settings of a section; None: both do. The other one refuses
            the flags.
        short_in: the program that has the short names, if both obey the setting; None: both have them.
    """

    name: str = ""
    metavar: str = ""
    alias: str = ""
    several: bool = False
    common: bool = False
    only: Program | None = None
    short_in: Program | None = None


# -- byte sizes ----------------------------------------------------------------------------------


def parse_bytes(value: object) -> int:
    """Bytes from a whole number, or from text such as `4GB` (4 · 10^9) or `1.5 GiB` (1.5 · 2^30), in any case.

    Raises:
        ValueError: the value is not a size, or is less than one byte.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = _BYTES_PER_UNIT.get(match[2].upper() or "B") if match else None
    if match is None or unit is None:
        raise ValueError("must be a size in bytes such as 4GB, 512MiB or 1048576")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise ValueError("must be at least one byte")
    return size


def exact_bytes(size: int) -> int | str:
    """The shortest text (or number) that `parse_bytes` reads back as exactly `size`."""
    units = ((name, _BYTES_PER_UNIT[name.upper()]) for name in _LONGEST_UNITS)
    return next((f"{size // unit}{name}" for name, unit in units if size and size % unit == 0), size)


def human_bytes(size: int) -> str:
    """The size rounded for people: `257.0 MiB`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{size} B"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _parse_auto_bytes(value: object) -> int | None:
    return None if value is None or value == AUTO else parse_bytes(value)


def _parse_guard_bytes(value: object) -> int | None:
    """`off`, which yaml reads as false, is 0."""
    return 0 if value in (0, "off") else _parse_auto_bytes(value)


# -- network addresses ---------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def machine_names() -> tuple[str, ...]:
    """The names by which other machines of a local network may call this one: the host name, with and without its
    domain, and the name in the domain .local (Bonjour)."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return (name, short, f"{short}.local") if short else ()


def _check_host(host: str) -> str:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("must be a host name or an address, without http:// and port") from None
    return host


def _check_proxies(proxy: str) -> str:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        raise ValueError("must be an address such as 127.0.0.1, or a network such as 10.0.0.0/8") from None
    return proxy


def _check_origin(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin):
        raise ValueError("must be '*' or an origin such as https://example.org:8080, without a path")
    return origin


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("must begin with http:// or https://, such as http://127.0.0.1:4318")
    return url


def _check_api_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or any(not "!" <= character <= "~" for character in text):
        raise ValueError("must be visible ASCII characters without spaces, or be left out")
    if set(text) == {"*"}:
        raise ValueError("is the mask that --print-config shows; put the key itself there")
    return key


# -- names, paths and plain values ---------------------------------------------------------------


def _parse_kv_bits(value: object) -> int | None:
    bits = str(value)
    if value is None or bits in ("8", "4"):
        return None if value is None else int(bits)
    raise ValueError("must be 8 or 4, the bits for which keys and values can be quantized; null quantizes nothing")


def _json_text(value: object) -> object:
    """A mapping of a yaml file as JSON text, other values unchanged."""
    return json.dumps(value, default=str) if isinstance(value, dict) else value


def _check_variables(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        raise ValueError("""must be a JSON object of variables, such as '{"enable_thinking": false}'""")
    return text


def lower(value: object) -> object:
    """Text in lower case, other values unchanged. A BeforeValidator for words that may be written in any case."""
    return value.lower() if isinstance(value, str) else value


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def optional_names(value: object) -> object:
    """Splits text at its commas; null is no name. A BeforeValidator."""
    return _split_commas(value or ())


def _parse_path(value: object, kind: str) -> Path:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"must be the path of a {kind}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("starts with ~, and that home folder is not known; write the path out") from None


def _check_adapter_name(name: str) -> str:
    if not re.fullmatch(_PLAIN_NAME, name):
        raise ValueError("must be 1 to 64 of the characters A-Z a-z 0-9 . _ - and not start with a dot")
    if _RESERVED_NAME.fullmatch(name):
        raise ValueError("is reserved, like base, latest, best and checkpoint-<step>; choose another name")
    return name


def _check_selector(selector: str) -> str:
    if not re.fullmatch(rf"{_PLAIN_NAME}(@[0-9]{{1,9}})?", selector):
        raise ValueError("must be a name, name@version, checkpoint-<step>, latest or a checkpoint's tag")
    return selector


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Host = Annotated[Text, AfterValidator(_check_host)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_split_commas)]
OptionalNames = Annotated[tuple[Text, ...], BeforeValidator(optional_names)]
"""Names; null means none."""
Hosts = Annotated[tuple[Host, ...], BeforeValidator(_split_commas)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], BeforeValidator(_split_commas)]
Proxies = Annotated[tuple[Annotated[str, AfterValidator(_check_proxies)], ...], BeforeValidator(_split_commas)]
Folder = Annotated[Path, BeforeValidator(partial(_parse_path, kind="folder"))]
File = Annotated[Path, BeforeValidator(partial(_parse_path, kind="file"))]
Folders = Annotated[tuple[Folder, ...], BeforeValidator(_split_commas)]
AdapterName = Annotated[str, AfterValidator(_check_adapter_name)]
Selector = Annotated[str, AfterValidator(_check_selector)]
Url = Annotated[str, AfterValidator(_check_url)]
ApiKey = Annotated[SecretStr, AfterValidator(_check_api_key)]
ByteSize = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(exact_bytes)]
JsonVariables = Annotated[str, BeforeValidator(_json_text), AfterValidator(_check_variables)]
KVBits = Annotated[int | None, BeforeValidator(_parse_kv_bits)]
AutoByteSize = Annotated[
    int | None,
    BeforeValidator(_parse_auto_bytes),
    PlainSerializer(lambda size: AUTO if size is None else exact_bytes(size)),
]
GuardSize = Annotated[
    int | None,
    BeforeValidator(_parse_guard_bytes),
    PlainSerializer(lambda size: AUTO if size is None else exact_bytes(size) if size else "off"),
]
