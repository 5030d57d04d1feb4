"""Opens addresses of servers: on loopback without a proxy, and no redirects. Knows nothing of what servers say."""

from __future__ import annotations

import ipaddress
import urllib.request
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from kvtuner.errors import EndpointError

if TYPE_CHECKING:
    from http.client import HTTPMessage
    from typing import IO


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """The opener of a server's paths, which takes the environment's proxy except for servers on this machine.

    Opening raises EndpointError where the server redirects.

    Args:
        url: The URL of the server.

    Raises:
        EndpointError: the URL is no address.
    """
    proxies = urllib.request.ProxyHandler({} if is_loopback(url) else None)
    return urllib.request.build_opener(proxies, _NoRedirects())


def proxy_of(url: str) -> str | None:
    """The host and port of the proxy that `opener_of` goes by, without its password; None without one."""
    server = urlsplit(url)
    proxy = urllib.request.getproxies().get(server.scheme)
    if not proxy or is_loopback(url) or urllib.request.proxy_bypass(server.netloc):
        return None
    return urlsplit(proxy if "://" in proxy else f"//{proxy}").netloc.rpartition("@")[2]


def is_loopback(url: str) -> bool:
    """Whether a server is on this machine, as far as its name says.

    Raises:
        EndpointError: the URL is no address.
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError as error:
        raise EndpointError(f"{url} is no address ({error}); an endpoint is http://HOST:PORT") from error
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take prompts, and the key, to a server that nobody named."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> NoReturn:
        """Refuse a redirect; urllib calls this."""
        fp.close()
        raise EndpointError(
            f"{req.full_url} redirects to {newurl.partition('?')[0]}, and no key or prompt is sent on; give the address"
            " of the server itself, if it is to be asked"
        )
