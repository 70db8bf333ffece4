"""Tells requests of a server's own pages from those that pages of other sites make in a browser."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit


def own_names(host: str) -> tuple[str, ...]:
    """Returns the names of this machine, for a server that listens on `host`."""
    return "localhost", socket.gethostname().lower(), host


def is_address(name: str) -> bool:
    """Returns whether a name is an IP address, which another site cannot point here (DNS rebinding)."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def named_host(headers: Mapping[str, str]) -> str | None:
    """Returns the name in `Host`, without its port.

    None if a page of another site sent the request, by `Origin` or `Sec-Fetch-Site`, or `Host` is not valid.
    The servers use plain HTTP, so a page that came over HTTPS is another site's.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None
    is_own = headers.get("origin") in (None, f"http://{host}") and headers.get("sec-fetch-site", "none") in (
        "none",
        "same-origin",
    )
    return name if is_own else None
