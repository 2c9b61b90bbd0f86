"""Errors of a cluster in one line each: what a log, a metric's reader and an operator see of a death."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of its message that says something, else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def death_cause(error: BaseException) -> str:
    """How an actor died, from Ray's error about it. A constructor that raised is told by its own error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if "creation task" in lines[0]:
        return lines[-1]
    # Ray's first line says only that it died; what it knows of the reason follows, before a list of guesses.
    why = next((line for line in lines if line.startswith("The actor is dead because")), lines[0])
    process = next((f" ({line})" for line in lines if line.startswith("pid:")), "")
    return f"{type(error).__name__}{process}: {why.partition(' Some common causes')[0]}"
