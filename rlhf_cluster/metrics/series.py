"""Series keys: one time series is ``name`` or ``name{label="value",...}``, in rows, files and on /metrics alike."""

from __future__ import annotations

import re
from collections.abc import Mapping

_KEY = re.compile(r'^([a-z_][a-z0-9_]*)(?:\{(\w+="[^"\\\n]*"(?:,\w+="[^"\\\n]*")*)\})?$')
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_UNSAFE_VALUE = re.compile(r'["\\\n]')


def series_key(name: str, labels: Mapping[str, object] | None = None) -> str:
    """``rlhf_worker_up`` and ``{"worker": 0}`` -> ``rlhf_worker_up{worker="0"}``, labels in the order given.

    Raises:
        ValueError: a label value holds a quote, a backslash or a line break.
    """
    if not labels:
        return name
    parts = []
    for label, value in labels.items():
        text = str(value)
        if _UNSAFE_VALUE.search(text):
            raise ValueError(f"metric {name}: label {label} may hold no quote, backslash or line break, got {text!r}")
        parts.append(f'{label}="{text}"')
    return f"{name}{{{','.join(parts)}}}"


def parse_series_key(key: str) -> tuple[str, dict[str, str]]:
    """The inverse of ``series_key``. Raises ValueError when ``key`` is not one."""
    match = _KEY.match(key)
    if match is None:
        raise ValueError(f'{key!r} is not a series key; write name or name{{label="value"}}')
    return match[1], dict(_LABEL.findall(match[2] or ""))
