"""Writes docs/config.md from the config models: `python -m docs.generate_config_reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_cluster.config import Config

_HEAD = """# Config reference

Generated from `rlhf_cluster/config.py` by `python -m docs.generate_config_reference`; a test keeps them equal.

A config is one YAML file of these sections; `section.key=value` on the command line overrides a key. Unknown keys,
options that would do nothing and impossible combinations are refused before Ray starts. Paths are relative to the
current folder. `rlhf train CONFIG --dry-run` prints the resolved config and what it comes to.
"""


def reference() -> str:
    """The page as Markdown."""
    lines = [_HEAD]
    for name, info in Config.model_fields.items():
        section = _model(info.annotation)
        assert section is not None
        optional = "" if info.is_required() or info.default is not None else " (optional)"
        lines += [f"\n## {name}{optional}\n", "| key | default | meaning |", "|---|---|---|"]
        lines += _rows(section, f"{name}.")
    return "\n".join(lines) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, info in section.model_fields.items():
        nested = _model(info.annotation)
        if info.description:
            rows.append(
                f"| `{prefix}{name}` | {_default(info.default)} | {info.description}{_choices(info.annotation)} |"
            )
        else:
            rows.append(f"| `{prefix}{name}` | | section |")
        if nested is not None:
            rows += _rows(nested, f"{prefix}{name}.")
    return rows


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "on"
    return f"{str(value).lower() if isinstance(value, bool) else value}"


def _choices(annotation: Any) -> str:
    values = [value for value in get_args(annotation) if isinstance(value, str | int)]
    return f" One of: {', '.join(map(str, values))}." if len(values) > 1 else ""


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(_model, get_args(annotation)) if model is not None), None)


if __name__ == "__main__":
    Path("docs/config.md").write_text(reference(), encoding="utf-8")
