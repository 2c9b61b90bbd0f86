"""What is told of an actor's death."""

from __future__ import annotations

from rlhf_cluster.causes import death_cause, first_line

RAY_SAYS = """The actor died unexpectedly before finishing this task.
        class_name: RankActor
        pid: 1917
The actor is dead because its worker process has died. Worker exit detail: End of file. Some common causes include: (1)
the process was killed by the OOM killer
"""


def test_a_death_is_one_line_with_the_process_and_what_ray_knows_of_the_reason() -> None:
    assert death_cause(RuntimeError(RAY_SAYS)) == (
        "RuntimeError (pid: 1917): The actor is dead because its worker process has died. "
        "Worker exit detail: End of file."
    )


def test_a_constructor_that_raised_is_told_by_its_own_error() -> None:
    error = RuntimeError(
        "The actor died because of an error in its creation task, ray::A\n  File x\nValueError: no GPU"
    )
    assert death_cause(error) == "ValueError: no GPU"


def test_an_error_without_a_message_is_told_by_its_type() -> None:
    assert first_line(ValueError(" \n ")) == "ValueError"
    assert first_line(ValueError("\n first \n second")) == "first"
