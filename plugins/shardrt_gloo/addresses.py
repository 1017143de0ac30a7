"""Where peers can reach this rank: the addresses that Gloo itself would take.

Gloo listens on the device that ``GLOO_SOCKET_IFNAME`` names, else where the host's name leads to. A rank that has found
the store can also be reached on the way it went there, which is right where a host's name leads nowhere.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

_DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ASK_ADDRESS = 0x8915  # SIOCGIFADDR
_NAME_BYTES = 15


def addresses_of_this_rank() -> list[str]:
    """The likeliest first; at least one.

    Example:
        >>> from shardrt_gloo.addresses import addresses_of_this_rank
        >>> len(addresses_of_this_rank()) > 0
        True
    """
    named = os.environ.get(_DEVICE_VARIABLE, "")
    devices = [name for name in named.split(",") if name]
    found = [_of_device(name) for name in devices] if devices else [_towards_the_store(), _of_host_name()]
    return list(dict.fromkeys(address for address in found if address)) or ["127.0.0.1"]


def _of_device(name: str) -> str:
    """The address of a network device, or nothing.

    Example:
        >>> from shardrt_gloo.addresses import _of_device
        >>> _of_device("lo"), _of_device("no-such")
        ('127.0.0.1', '')
    """
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking, _ASK_ADDRESS, struct.pack("256s", name.encode()[:_NAME_BYTES]))
    except (ImportError, OSError):
        return ""
    return socket.inet_ntoa(answer[20:24])


def _towards_the_store() -> str:
    """The address that packets to the store's host would come from; none are sent."""
    host = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with suppress(OSError), socket.socket(family, kind) as asking:
                asking.connect(address)
                return str(asking.getsockname()[0])
    return ""


def _of_host_name() -> str:
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trying:
                trying.bind(address)
                return str(address[0])
    return ""
