"""The socket. It is taken before anything else is done that takes long: a port in use is an error at once, and clients
that come early wait."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

from otaro.errors import OtaroError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens already."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OtaroError(f"there is no address {host} to listen on: choose one of this machine's") from error
    listening = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would take the port away from another program
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise OtaroError(f"port {port} is in use on {host}: choose another with --port") from error
        raise OtaroError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    listening.setblocking(False)
    return listening


def is_local(listening: socket.socket) -> bool:
    """Whether nothing but this machine can reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
