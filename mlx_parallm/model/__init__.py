"""The base model. Importing this package imports mlx-lm, which sets the limit of open files of the process: it lowers a
higher hard limit, and fails where it may not raise a lower one. So it is kept from that here."""

import resource

_setrlimit = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    import mlx_lm  # noqa: F401
finally:
    resource.setrlimit = _setrlimit
