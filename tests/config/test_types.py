import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import is_loopback, parse_bytes
from mlx_parallm.config.types import exact_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        (" 1.5 gib ", 3 * 2**29),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("1TB", 10**12),
        ("7", 7),
        ("7B", 7),
        (7, 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("bad", ["", "GB", "4G", "-1", "0", "1e9", "4 G B", "٤GB", "0.1B", True, 1.5, None, -3, [4]])
def test_not_a_size(bad):
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(bad)


@given(st.integers(1, 2**50))
def test_exact_form_reads_back(size):
    assert parse_bytes(exact_bytes(size)) == size


@pytest.mark.parametrize(
    ("loopback", "hosts"),
    [
        (True, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "Localhost")),
        (False, ("0.0.0.0", "::", "192.168.1.2", "box.local", "localhost.example.org", "")),
    ],
)
def test_loopback(loopback, hosts):
    assert [is_loopback(host) for host in hosts] == [loopback] * len(hosts)
