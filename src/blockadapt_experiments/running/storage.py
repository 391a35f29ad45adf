"""URLs of databases: what may be said of them, and which driver opens them."""

from __future__ import annotations

import re

HIDDEN = "***"


def without_password(url: str) -> str:
    """The URL with its password hidden, wherever it has one.

    >>> without_password("postgresql://me:a:b@c@host/db?sslpassword=d&x=1")
    'postgresql://me:***@host/db?sslpassword=***&x=1'
    """
    url = re.sub(r"(//[^/:@]*):.*@", rf"\1:{HIDDEN}@", url)
    return re.sub(r"([?&]\w*password=)[^&]*", rf"\1{HIDDEN}", url)


def is_postgres(url: str) -> bool:
    """Whether PostgreSQL is asked for, by whichever driver."""
    return re.match(r"postgres(ql)?(\+\w+)?://", url) is not None


def with_driver(url: str) -> str:
    """The URL with the driver that the `postgres` extra installs, where it names none."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
