"""Writes docs/config.md from the config models: `python -m docs.generate_config_reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_cluster.config import Config
from rlhf_cluster.presets import load_preset, preset_names

_HEAD = """# Config reference

Generated from `rlhf_cluster/config.py` and its sections by `python -m docs.generate_config_reference`; a test keeps
them equal.

A config is one YAML file of these sections; `section.key=value` on the command line overrides a key. Unknown keys,
options that would do nothing and impossible combinations are refused before Ray starts. Paths are relative to the
current folder. `rlhf train CONFIG --dry-run` prints how the config is composed and what it comes to. What each key of
`reward`, `algorithm` and `learner` computes: [numerics.md](numerics.md).
"""

_PRESETS = """
## Presets

A preset is a recipe laid over a base config: `rlhf train CONFIG --preset ppo_max [KEY=VALUE ...]`, and the same for
`eval` and `submit`; `--preset` may be given again. Order: base file, presets as given, overrides. The `algorithm`
section of a preset replaces the one so far, since it says wholly what the algorithm is (the file of `algorithm.ptx`
is then given as an override); its other sections are merged key by key. Paths, workers and whatever else a preset
cannot know stay in the base. A preset of your own is given by its path, ending in `.yaml`. Beside sections of the
config a preset may hold

- `parent: NAME`: another preset that it is merged over;
- `drop: [learner.critic_lr, ...]`: keys of the base that mean nothing with it, taken out first;
- `key: ${section.key}` as a whole value: that key's value in the composed config (`critic: ${model.policy}`).

Each file in `configs/presets` says where its values come from and what to compare it with. `rlhf presets` prints:

| preset | what it is |
|---|---|
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
    return "\n".join(lines) + "\n" + _PRESETS + "\n".join(_preset_rows()) + "\n"


def _preset_rows() -> list[str]:
    return [f"| `{name}` | {load_preset(name).files[-1].about} |" for name in preset_names()]


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
    values = _literals(annotation)
    return f" One of: {', '.join(map(str, values))}." if len(values) > 1 else ""


def _literals(annotation: Any) -> list[Any]:
    """Values of a Literal, also of one that may be null."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in _literals(argument)]


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(_model, get_args(annotation)) if model is not None), None)


if __name__ == "__main__":
    Path("docs/config.md").write_text(reference(), encoding="utf-8")
