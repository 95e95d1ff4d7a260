"""Options of loads: traces that they are read from, and how they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.bench.drive import Pace
    from headstart.bench.load import Ask, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is taken of a trace."""

    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For the workloads trace and agentic: Mooncake, WEKA, token ids, MLCommons.",
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Sessions of the trace, or requests: its first ones.")
    ] = None
    scale_tokens: Annotated[
        float, typer.Option(help="Makes the trace's prompts and answers shorter, such as 0.1.")
    ] = 1.0
    time_scale: Annotated[
        float, typer.Option(help="Makes the trace's times and pauses longer, or shorter.")
    ] = 1.0
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="A session of the trace ends before a prompt that is longer."),
    ] = None
    trace_block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a hash id stands for, if not 512 (Mooncake only)."),
    ] = None

    def asks(self, workload: str, shape: Shape) -> list[Ask]:
        """The load: of the trace, or made. Raises ConfigError."""
        from headstart.bench.load import TRACED, make_load
        from headstart.bench.traces import Cut, load_trace

        if workload not in TRACED:
            if self.trace is not None:
                raise ConfigError(
                    f"--trace is for the workloads {' and '.join(TRACED)}, not for {workload}"
                )
            return make_load(workload, shape)
        if self.trace is None:
            raise ConfigError(f"--workload {workload} needs a file: --trace FILE")
        cut = Cut(
            limit=self.limit,
            scale_tokens=self.scale_tokens,
            time_scale=self.time_scale,
            max_prompt_tokens=self.max_prompt_tokens,
            block_size=self.trace_block_size,
        )
        return load_trace(workload, self.trace, cut, shape)

    def told(self) -> dict[str, float | None]:
        """What a run says of how its trace was sent."""
        return {} if self.trace is None else {"time_scale": self.time_scale}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """What is asked, but for how many sessions."""

    workload: Annotated[
        str,
        typer.Option(
            help="shared-prefix, multi-turn, rag, unique (nothing to hit), or with --trace: trace, "
            "agentic (sessions with pauses)."
        ),
    ] = "multi-turn"
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session of multi-turn.")] = 4
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that sessions share: system prompt, documents.")
    ] = 1024
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = 256
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32
    documents: Annotated[int, typer.Option(min=1, help="Documents of rag.")] = 8
    think: Annotated[float, typer.Option(min=0.0, help="Seconds between turns.")] = 0.0
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0
    vocabulary: Annotated[int, typer.Option(min=30, help="Token ids are smaller than this.")] = (
        30_000
    )
    block_size: Annotated[
        int, typer.Option(min=1, help="The server's block, for the hit rate that is possible.")
    ] = 16

    def shape(self, sessions: int) -> Shape:
        """Of a load of so many sessions."""
        from headstart.bench.load import Shape

        return Shape(
            sessions=sessions,
            turns=self.turns,
            shared_tokens=self.shared_tokens,
            own_tokens=self.own_tokens,
            output_tokens=self.output_tokens,
            documents=self.documents,
            think_s=self.think,
            seed=self.seed,
            vocabulary=self.vocabulary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """Who sends a load, and when."""

    trace_time: Annotated[
        bool, typer.Option("--trace-time", help="Open loop: each request at its trace's time.")
    ] = False
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Client processes that share the sessions.")
    ] = 1

    def pace(self, asks: list[Ask], rate: float | None, concurrency: int | None, seed: int) -> Pace:
        """One session at once where nothing is said. Raises ConfigError, before work is done."""
        from headstart.bench.drive import Pace
        from headstart.bench.processes import split

        if rate is None and concurrency is None and not self.trace_time:
            concurrency = 1
        pace = Pace(
            rate=rate,
            concurrency=concurrency,
            is_timed=self.trace_time,
            processes=self.processes,
            seed=seed,
        )
        split(asks, pace)
        return pace
