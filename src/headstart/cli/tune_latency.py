"""Options and output of `headstart tune` that say when first tokens come, and at what price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.options import parse_share
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.tuner.case import Site
    from headstart.tuner.recorded import Recorded
    from headstart.tuner.timed import Times
    from headstart.tuner.tune import Tuned

EXIT_INTERRUPTED = 130
_MOST_TOKEN_KV = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """What is served, on what, and what is searched."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="A config.json, its folder, or a model of `plan presets`: simulates times, too.",
        ),
    ] = None
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hardware file (TOML), with prices; see docs/plan.md."),
    ] = None
    prefill: Annotated[
        str | None,
        typer.Option(help="Measured prefills instead of MFU: 1024=0.21,8192=1.9 (tokens=s)."),
    ] = None
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="FILE#ARM/PHASE",
            help="Prefills as requests of `bench serve --concurrency 1` had them, without tiers.",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Closed loop, as a load generator has it: requests at once, not times."
        ),
    ] = None
    kv_dtype: Annotated[
        str, typer.Option(help="Of the KV: float32, bfloat16, float16, fp8, fp4.")
    ] = ""
    engine_kv: Annotated[
        str,
        typer.Option(metavar="SIZE", help="KV that an engine's own prefix cache holds."),
    ] = "0"
    memory_sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Memory tiers to try, such as 64GiB,256GiB."),
    ] = None
    file_sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="File tiers to try, such as 0,1000GiB; 0: none."),
    ] = None
    block_sizes: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,...", help="Block sizes to try, such as 16,64,256."),
    ] = None
    all_combinations: Annotated[
        bool,
        typer.Option("--all-combinations", help="Try each with each, which takes long."),
    ] = False
    time_gain: Annotated[
        str, typer.Option(help="Share by which doubling the price has to make times shorter.")
    ] = "10%"
    slo: Annotated[
        str | None, typer.Option(help="Such as ttft=2s, or a preset of `bench serve`: the goodput.")
    ] = None
    tpot: Annotated[str, typer.Option(help="Time of a later token, for --slo.")] = "30ms"

    def site(self) -> Site | None:
        """The model on the hardware; None: only hits are asked for. Raises ConfigError."""
        if self.model is None:
            self._check_unused()
            return None
        from headstart.bench.slo import parse_slo
        from headstart.cli.plan import parse_prefills
        from headstart.sizing.configfile import read_model
        from headstart.sizing.hardware import Hardware, look_up, read_hardware
        from headstart.tuner.case import make_site
        from headstart.tuner.latency import Level
        from headstart.units import parse_nbytes, parse_seconds

        if self.prefill is not None and self.measured is not None:
            raise ConfigError("--prefill and --measured tell the same: leave one of them out")
        hardware = read_hardware(self.hardware) if self.hardware else Hardware()
        site = make_site(
            read_model(self.model),
            look_up(hardware),
            measured=parse_prefills(self.prefill),
            kv_dtype=self.kv_dtype,
            level=Level(slo=parse_slo(self.slo), tpot_s=parse_seconds(self.tpot)),
            engine_kv_nbytes=parse_nbytes(self.engine_kv),
        )
        self._sizes(), self._time_gain()  # before work that takes long
        return site if self.measured is None else self._learnt(site, Path(self.measured))

    def _learnt(self, site: Site, path: Path) -> Site:
        from headstart.bench.imports import read_runs
        from headstart.tuner.measured import learnt_costs

        return replace(site, costs=learnt_costs(read_runs(path), site.costs))

    def check_times(self, context: typer.Context, recorded: Recorded) -> None:
        """Raises ConfigError where a rate is missing, or does nothing."""
        source = context.get_parameter_source("rate")
        is_given = source is not None and source.name != "DEFAULT"
        is_given = is_given or self.concurrency is not None
        if source is not None and source.name != "DEFAULT" and recorded.has_times:
            raise ConfigError(
                "the trace tells its times, which --rate does not change: it is for traces without"
            )
        if self.model is not None and not recorded.has_times and not is_given:
            raise ConfigError(
                "the trace tells no times, and how long a first token takes depends on how much "
                "comes at once: give --rate, the sessions that start a second, or --concurrency"
            )

    def times(self, site: Site | None, tuned: Tuned, policies: Sequence[str]) -> Times | None:
        """What was tried until the end, or until Ctrl-C; None: not asked for."""
        if site is None:
            return None
        from headstart.tuner.case import Case
        from headstart.tuner.search import default_space, search
        from headstart.tuner.timed import Times

        memory, file, block_sizes = self._sizes()
        case = Case(tuned.recorded, site, concurrency=self.concurrency)
        space = default_space(
            case,
            tuned,
            memory=memory or (),
            file=file,
            block_sizes=block_sizes,
            policies=policies,
            all_combinations=self.all_combinations,
        )
        tried, is_interrupted, time_gain = [], False, self._time_gain()
        try:
            with render.progress("timing") as advance:
                for timed in search(case, space, time_gain=time_gain, advance=advance):
                    tried.append(timed)  # noqa: PERF402 - what is done stays after Ctrl-C
        except KeyboardInterrupt:
            if not tried:
                raise
            is_interrupted = True
        return Times(
            case=case, tried=tuple(tried), time_gain=time_gain, is_interrupted=is_interrupted
        )

    def _time_gain(self) -> float:
        return parse_share("--time-gain", self.time_gain, most=0.99)

    def _sizes(self) -> tuple[list[int] | None, list[int] | None, list[int]]:
        """Bytes of memory and file tiers, tokens of blocks, as given."""
        memory = _nbytes("--memory-sizes", self.memory_sizes)
        if memory is not None and 0 in memory:
            raise ConfigError(
                "--memory-sizes: 0 is no memory tier; no cache at all is tried in any case"
            )
        block_sizes = []
        for part in self.block_sizes.split(",") if self.block_sizes else ():
            if not part.strip().isdecimal() or not int(part):
                raise ConfigError(
                    f"--block-sizes {self.block_sizes!r} are no numbers of tokens; write 16,64,256"
                )
            block_sizes.append(int(part))
        return memory, _nbytes("--file-sizes", self.file_sizes), block_sizes

    def _check_unused(self) -> None:
        """Raises ConfigError for an option that does nothing without a model."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} is for times, which need --model: a config.json, or a name of "
                    "`headstart plan presets`"
                )


def _nbytes(option: str, text: str | None) -> list[int] | None:
    from headstart.units import parse_nbytes

    if text is None:
        return None
    try:
        return [parse_nbytes(part) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error


def token_kv_nbytes(text: str | None, site: Site | None) -> int | None:
    """KV of one token, as given or as the model has it; None: not known. Raises ConfigError."""
    from headstart.units import parse_nbytes

    if text is not None:
        nbytes = parse_nbytes(text)
        if not 0 < nbytes <= _MOST_TOKEN_KV:
            raise ConfigError(f"--token-kv {text!r} is not the KV of a token; write 128KiB")
        return nbytes
    return None if site is None else site.block_nbytes(1)


def times_document(times: Times | None) -> dict[str, Any]:
    """What the JSON has more, or instead."""
    from headstart.tuner.timed import timed_document

    return {} if times is None else timed_document(times)


def times_html(times: Times | None) -> list[str]:
    """What the page has more."""
    if times is None:
        return []
    from headstart.tuner.timed_page import parts

    return parts(times)


def show_times(times: Times | None) -> None:
    """Print what was timed, and the settings to use."""
    if times is None:
        return
    from headstart.tuner.recipe import engine_flags, settings_toml
    from headstart.tuner.timed import overview, point_rows

    titles, rows = point_rows(times, times.front)
    columns = [
        render.Column(title=title, numeric=title not in _TEXTS and bool(title)) for title in titles
    ]
    print()
    render.print_table(
        columns, rows, title="What nothing beats, by price; times of the last half of the requests"
    )
    print()
    found = overview(times)
    render.print_table([render.Column(title="time and money"), render.Column(title="")], found)
    if times.best is None:
        return
    print("\nheadstart.toml\n")
    print(settings_toml(times.case.site, times.best))
    for engine, flags in engine_flags(times.case.site, times.best).items():
        print(f"{engine}: {flags}")


_TEXTS = ("policy", "load", "by")


def end_interrupted(is_interrupted: bool) -> None:
    """Say so, and exit as one does after Ctrl-C, if that was so."""
    if is_interrupted:
        render.print_error("interrupted: the result has what was done until then")
        raise typer.Exit(EXIT_INTERRUPTED)
