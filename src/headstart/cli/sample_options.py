"""`--sample` of `headstart tune`: a part of a trace that is too large for memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.options import parse_share

if TYPE_CHECKING:
    from headstart.tuner.sampled import Errors
    from headstart.tuner.tune import Tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Whether a sample is read, and how far off it is."""

    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Read this share of the sessions, such as 10%, and say how far off that may be.",
        ),
    ] = None

    @property
    def share(self) -> float:
        """Of the sessions. Raises ConfigError."""
        return 1.0 if self.sample is None else parse_share("--sample", self.sample)

    def errors(self, tuned: Tuned, seed: int, advance: render.Advance) -> Errors | None:
        """Of what was tuned; None: all of the trace was read. Raises ConfigError."""
        from headstart.tuner.sampled import errors

        return None if tuned.recorded.share == 1.0 else errors(tuned, seed, advance)


def sample_document(tuned: Tuned, errors: Errors | None) -> dict[str, Any]:
    """What JSON has of it."""
    from headstart.tuner import sampled

    return {} if errors is None else {"sample": sampled.sample_document(tuned, errors)}


def show_errors(tuned: Tuned, errors: Errors | None) -> None:
    """Print the errors, if it is a sample."""
    if errors is None:
        return
    from headstart.tuner.sampled import NUM_PARTS, error_rows

    titles, rows = error_rows(tuned, errors)
    print()
    render.print_table(
        [render.Column(title=each, numeric=index > 0) for index, each in enumerate(titles)],
        rows,
        title=f"A sample: {errors.num_sessions:,} sessions, {tuned.recorded.share:.2%} of the "
        f"prompt tokens. What all of them hit, within points (95 %, by {NUM_PARTS} disjoint parts)",
    )
