"""HOST:PORT as people write it."""
import errno
import socket

import pytest

from sglane.utils.addresses import HostPort, interface_of, is_loopback, is_wildcard


@pytest.mark.parametrize(("text", "host", "port", "zmq"), [
    ("node0:5000", "node0", 5000, "node0:5000"),
    ("192.0.2.1:65535", "192.0.2.1", 65535, "192.0.2.1:65535"),
    ("[::1]:1", "::1", 1, "[::1]:1"),
    ("[2001:db8::7]:5000", "2001:db8::7", 5000, "[2001:db8::7]:5000"),
])
def test_parse_and_print(text, host, port, zmq):
    address = HostPort.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, zmq)


@pytest.mark.parametrize(("text", "reason"), [
    ("", "HOST:PORT"), ("node0", "HOST:PORT"), (":5000", "HOST:PORT"), ("node0:", "HOST:PORT"), ("node0:5x", "HOST:PORT"), ("node0:٣", "HOST:PORT"),
    ("::1:5000", "brackets"), ("node0:0", "between 1 and 65535"), ("node0:65536", "between 1 and 65535"), ("[]:5000", "HOST:PORT"),
])
def test_refusals(text, reason):
    with pytest.raises(ValueError, match=reason):
        HostPort.parse(text)


def test_where_it_listens():
    listener = HostPort("127.0.0.3", 0).listen()
    with listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.3"
        with socket.create_connection((host, port), 5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        with pytest.raises(OSError) as busy:
            HostPort(host, port).listen()
        assert busy.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError) as foreign:
        HostPort("192.0.2.77", 0).listen()
    assert foreign.value.errno == errno.EADDRNOTAVAIL


def test_kinds_of_hosts():
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "node0")] == [True, True, False, False]
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "192.0.2.1", "fe80::1%eth0")] == [True, True, False, False]
    assert interface_of("127.0.0.2") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.77") == ""
