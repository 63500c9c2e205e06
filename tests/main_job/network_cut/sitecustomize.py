"""With this folder on PYTHONPATH, a Python process and its children reach this machine only.

What tries to reach another one is refused, and writes its stack to the file that REACHED_OUT names. A connection of
compiled code is not seen: `unshare -n` before pytest shows those on Linux.
"""

import os
import sys
import traceback

_HOST_OF = {
    "socket.connect": lambda arguments: arguments[1],
    "socket.sendto": lambda arguments: arguments[1],
    "socket.sendmsg": lambda arguments: arguments[1],
    "socket.getaddrinfo": lambda arguments: arguments[0],
    "socket.gethostbyname": lambda arguments: arguments[0],
    "socket.gethostbyaddr": lambda arguments: arguments[0],
}


def _refuse(event: str, arguments: tuple) -> None:
    if event not in _HOST_OF:
        return
    address = _HOST_OF[event](arguments)
    host = address[0] if isinstance(address, tuple) else address  # a text with "/": the path of a Unix socket
    if host is None or str(host).startswith(("127.", "/", "b'/", "b'\\x00")) or host in ("localhost", "::1", ""):
        return
    with open(os.environ["REACHED_OUT"], "a") as file:
        file.write(f"{event} {address}\n{''.join(traceback.format_stack())}\n")
    raise OSError(f"the network is cut: {event} {address}")


sys.addaudithook(_refuse)
