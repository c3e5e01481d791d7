"""Addresses of TCP sockets as people write them: HOST:PORT, with brackets around an IPv6 literal."""
import ipaddress
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class HostPort:
    """A host's name or literal (without brackets) and a port."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "HostPort":
        """`node0:5000`, `10.0.0.1:5000`, `[fd00::1]:5000`. Raises ValueError saying what is wrong."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit():
            raise ValueError("must be HOST:PORT")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError("an IPv6 address needs brackets: [ADDRESS]:PORT")
        if not host:
            raise ValueError("must be HOST:PORT")
        if not 1 <= int(port) <= 65535:
            raise ValueError("the port must be between 1 and 65535")
        return HostPort(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def at(self, offset: int) -> "HostPort":
        """The same host, `offset` ports further."""
        return HostPort(self.host, self.port + offset)

    def resolve(self) -> "HostPort":
        """With a numeric host: names may mean other addresses elsewhere. Raises OSError for an unknown name."""
        return HostPort(str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]), self.port)

    def listen(self, backlog: int = 128) -> socket.socket:
        """A socket that listens here and nowhere else. Raises OSError when the host is another machine's or the port is taken."""
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        return listener


def is_wildcard(host: str) -> bool:
    """0.0.0.0 and ::, where one can listen but nobody can connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def is_loopback(host: str) -> bool:
    """host: numeric."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def interface_of(host: str) -> str:
    """Name of the network interface that has the numeric address `host`; empty if none is found."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.address == host or (is_loopback(host) and found.family in (socket.AF_INET, socket.AF_INET6) and is_loopback(found.address)):
                return name
    return ""
