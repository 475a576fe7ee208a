"""URLs that carry credentials, which would be copied into manifests, logs and messages."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from rlhf_core.errors import DataError
from rlhf_core.redaction import SECRET_NAME

SECRET_PARAMETER = re.compile(rf"{SECRET_NAME}=", re.IGNORECASE)
WEB = ("http", "https", "ftp", "ftps")


def require_no_credentials(url: str) -> None:
    """Raise ``DataError``, which does not repeat them, for a URL that :func:`carries_credentials`."""
    if carries_credentials(url):
        scheme = url.split(":")[0]
        raise DataError(
            f"the URL {without_credentials(url)} carries credentials, which would be written into the manifest and the "
            f"logs; leave them out and give them to fsspec (environment variable FSSPEC_{scheme.upper()}), or copy the "
            "file here"
        )


def carries_credentials(url: str) -> bool:
    """Return whether a URL has a password, a user of a web server (a token, as a rule), or a parameter named as one.

    Other stores write names there that are no secret: ``abfs://container@account``, ``github://owner:repository@ref``.
    """
    parts = _split(url)
    if parts is None:
        return False
    has_password = bool(parts.password) and parts.scheme != "github"
    has_user = bool(parts.username) and parts.scheme in WEB
    return has_password or has_user or SECRET_PARAMETER.search(parts.query) is not None


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment, as messages may show it."""
    parts = _split(url)
    if parts is None:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        return None
