"""Field types of the configuration: each reads yaml values and the texts of flags and environment alike."""

from __future__ import annotations

import ipaddress
import re
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr

from mlx_parallm.config.sizes import exact_bytes, parse_bytes

AUTO = "auto"
_PLAIN = r"(?!\.)[A-Za-z0-9._-]{1,64}"
_RESERVED = re.compile(r"base|latest|best|route|rollback|checkpoint-[0-9]+")


def is_loopback(host: str) -> bool:
    """True when only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def lower(value: object) -> object:
    """For BeforeValidator: words in any case."""
    return value.lower() if isinstance(value, str) else value


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def _parse_auto_bytes(value: object) -> int | None:
    return None if value is None or value == AUTO else parse_bytes(value)


def _check_host(host: str) -> str:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("must be a host name or an address, without http:// and port") from None
    return host


def _check_origin(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin):
        raise ValueError("must be '*' or an origin such as https://example.org:8080, without a path")
    return origin


def _parse_path(value: object, kind: str) -> Path:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"must be the path of a {kind}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("starts with ~, and that home folder is not known; write the path out") from None


def _check_adapter_name(name: str) -> str:
    if not re.fullmatch(_PLAIN, name):
        raise ValueError("must be 1 to 64 of the characters A-Z a-z 0-9 . _ - and not start with a dot")
    if _RESERVED.fullmatch(name):
        raise ValueError("has a meaning of its own, as base, latest, best and checkpoint-<step> have; take another")
    return name


def _check_selector(selector: str) -> str:
    if not re.fullmatch(rf"{_PLAIN}(@[0-9]{{1,9}})?", selector):
        raise ValueError("must be a name, name@version, checkpoint-<step>, latest or a checkpoint's tag")
    return selector


def _check_api_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or any(not "!" <= character <= "~" for character in text):
        raise ValueError("must be visible ASCII characters without spaces, or be left out")
    if set(text) == {"*"}:
        raise ValueError("is the mask that --print-config shows; put the key itself there")
    return key


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Host = Annotated[Text, AfterValidator(_check_host)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_split_commas)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(_split_commas)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_check_origin)], ...], BeforeValidator(_split_commas)]
Folder = Annotated[Path, BeforeValidator(partial(_parse_path, kind="folder"))]
File = Annotated[Path, BeforeValidator(partial(_parse_path, kind="file"))]
Folders = Annotated[tuple[Folder, ...], BeforeValidator(_split_commas)]
AdapterName = Annotated[str, AfterValidator(_check_adapter_name)]
Selector = Annotated[str, AfterValidator(_check_selector)]
ApiKey = Annotated[SecretStr, AfterValidator(_check_api_key)]
ByteSize = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(exact_bytes)]
AutoByteSize = Annotated[
    int | None,
    BeforeValidator(_parse_auto_bytes),
    PlainSerializer(lambda size: AUTO if size is None else exact_bytes(size)),
]
