"""What every section of the configuration is built from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: frozen, extras forbidden, defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def changed(section: Section, *names: str) -> str:
    """Those of the fields that differ from their default, as `a, b`; a default says nothing and may stay."""
    fields = type(section).model_fields
    return ", ".join(name for name in names if getattr(section, name) != fields[name].default)
