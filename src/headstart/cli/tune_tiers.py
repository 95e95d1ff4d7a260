"""Options of `headstart tune` for memory above a file tier, and what it shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.errors import ConfigError
from headstart.units import parse_seconds

if TYPE_CHECKING:
    from headstart.tuner.recorded import Recorded
    from headstart.tuner.tier_report import TierPoint
    from headstart.tuner.tiers import TierSetup

_MAX_SETUPS = 64
_MAX_TOKENS = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Two tiers, how the lower one is written, and what its SSD endures."""

    memory_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...", help="Replays two tiers: capacities of each engine's memory."
        ),
    ] = None
    file_tokens: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,...", help="Capacities of the file tier below it."),
    ] = None
    tier_policy: Annotated[str, typer.Option(help="Of both tiers: any of the store's.")] = "lru"
    write: Annotated[
        str,
        typer.Option(
            help="When files are written: of through (at once, as the store does), on-evict (what "
            "memory evicts), second-touch (what is used again)."
        ),
    ] = "through"
    exclusive: Annotated[
        bool,
        typer.Option("--exclusive", help="What is read leaves the file tier (on-evict only)."),
    ] = False
    engines: Annotated[
        int, typer.Option(help="Engines with a memory each over one file tier; by session.")
    ] = 1
    ttl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="What is unused for so long goes, such as 10min."),
    ] = None
    endurance: Annotated[
        str | None,
        typer.Option(
            metavar="RATING", help="The SSD's: 1dwpd, 1dwpd:7.68TB or 600TBW:5y. With --token-kv."
        ),
    ] = None

    def check(self, token_nbytes: int | None, share: float) -> None:
        """Raises ConfigError for what is wrong, before a trace is read."""
        from headstart.tuner.endurance import parse_endurance

        if (self.memory_tokens is None) != (self.file_tokens is None):
            raise ConfigError("two tiers need both --memory-tokens and --file-tokens; 0 is none")
        if self.memory_tokens is None:
            if self != TierOptions():
                raise ConfigError(
                    "options of tiers do nothing without --memory-tokens and --file-tokens"
                )
            return
        if share < 1.0:
            raise ConfigError("two tiers are not replayed from a sample; leave out --sample")
        self._setups(block_size=1)
        if self.endurance is not None:
            parse_endurance(self.endurance)
            if token_nbytes is None:
                raise ConfigError("--endurance is about bytes: it needs --token-kv, such as 128KiB")

    def replayed(
        self, recorded: Recorded, token_nbytes: int | None
    ) -> tuple[list[TierPoint], bool]:
        """Every setup that is asked for, and whether Ctrl-C came before the last one.

        None where no tiers are asked for. Raises ConfigError.
        """
        from headstart.tuner.endurance import parse_endurance
        from headstart.tuner.tier_report import tier_points

        if self.memory_tokens is None:
            return [], False
        with render.progress("replaying") as advance:
            return tier_points(
                recorded,
                self._setups(recorded.block_size),
                token_nbytes=token_nbytes,
                endurance=None if self.endurance is None else parse_endurance(self.endurance),
                advance=advance,
            )

    def _setups(self, block_size: int) -> list[TierSetup]:
        from headstart.tuner.tiers import TierSetup

        memories = _blocks("--memory-tokens", self.memory_tokens or "", block_size)
        files = _blocks("--file-tokens", self.file_tokens or "", block_size)
        writes = list(dict.fromkeys(self.write.split(",")))
        found = [
            TierSetup(
                memory_blocks=memory,
                file_blocks=file,
                policy=self.tier_policy,
                write=write,
                inclusive=not self.exclusive,
                ttl_s=None if self.ttl is None else parse_seconds(self.ttl),
                engines=self.engines,
            )
            for memory, file, write in product(memories, files, writes)
        ]
        if len(found) > _MAX_SETUPS:
            raise ConfigError(
                f"{len(found)} setups of tiers would be replayed; at most {_MAX_SETUPS} are"
            )
        return found


def _blocks(option: str, text: str, block_size: int) -> list[int]:
    """Capacities in blocks. Raises ConfigError."""
    try:
        tokens = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        tokens = [-1]
    if not 0 <= min(tokens) <= max(tokens) <= _MAX_TOKENS:
        raise ConfigError(
            f"{option} {text!r} are no numbers of tokens; write such as 1024000,5120000, or 0"
        )
    if any(0 < each < block_size for each in tokens):
        raise ConfigError(
            f"{option} {text}: less than one block of {block_size:,} tokens; 0 is no tier"
        )
    return sorted({each // block_size for each in tokens})


def tiers_document(points: Sequence[TierPoint]) -> dict[str, Any]:
    """As a section of the JSON; nothing where there are none."""
    from headstart.tuner.tier_report import point_document

    return {"tiers": [point_document(point) for point in points]} if points else {}


def show_tiers(points: Sequence[TierPoint]) -> None:
    """As a table; nothing where there are none."""
    from headstart.tuner.tier_report import tier_rows

    if not points:
        return
    titles, rows = tier_rows(points)
    columns = [
        render.Column(title=each, numeric=each not in ("write", "why", "read")) for each in titles
    ]
    print()
    render.print_table(columns, rows, title="Tiers; shares of the prompt tokens from a cold start")
