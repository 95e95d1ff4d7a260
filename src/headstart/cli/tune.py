"""`headstart tune`: how much capacity, which policy and block size a load is worth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.options import JsonTarget, grouped, parse_share
from headstart.cli.sample_options import SampleOptions, sample_document, show_errors
from headstart.cli.trace import ReadOptions, TraceFile, broken_document, show_broken
from headstart.cli.tune_latency import (
    LatencyOptions,
    end_interrupted,
    show_times,
    times_document,
    times_html,
    token_kv_nbytes,
)
from headstart.cli.tune_tiers import TierOptions, show_tiers, tiers_document
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.tuner.case import Site
    from headstart.tuner.tier_report import TierPoint
    from headstart.tuner.timed import Times
    from headstart.tuner.tune import Tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveOptions:
    """What is computed of hits."""

    capacities: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,...", help="Capacities, such as 1024000,5120000."),
    ] = None
    policies: Annotated[
        str,
        typer.Option(help="As in settings; only simulated: lfu, sieve, optimal (the bound)."),
    ] = "lru"
    gain: Annotated[
        str, typer.Option(help="Share of the tokens that doubling a capacity has to add.")
    ] = "2%"
    token_kv: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV of one token, such as 128KiB: shows bytes, too."),
    ] = None

    @property
    def names(self) -> list[str]:
        """Of policies, each once."""
        return list(dict.fromkeys(self.policies.split(",")))

    @property
    def least_gain(self) -> float:
        """As a share. Raises ConfigError."""
        return parse_share("--gain", self.gain)

    @property
    def tokens(self) -> list[int]:
        """Capacities, the smallest first. Raises ConfigError."""
        if self.capacities is None:
            return []
        try:
            found = [int(part.replace("_", "")) for part in self.capacities.split(",")]
        except ValueError:
            found = []
        if min(found, default=0) < 1:
            raise ConfigError(
                f"--capacities {self.capacities!r} are no numbers of tokens; write such as "
                "1024000,5120000"
            )
        return sorted(set(found))


@grouped
def tune(
    context: typer.Context,
    read: ReadOptions,
    curve: CurveOptions,
    tiers: TierOptions,
    sample: SampleOptions,
    latency: LatencyOptions,
    trace: TraceFile,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the curves here.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Say how much of a trace a cache of each capacity hits, and where more stops to pay.

    The curve of lru is exact for every capacity and takes about a second; each point of another
    policy is a simulation with the store's own policy. Nothing has to run, nothing is changed.
    Capacities are tokens of KV cache: times the KV bytes a token of the model, they are bytes.

    With --model, times of first tokens are simulated, too: capacities of memory and drives, block
    sizes and policies are searched for what is worth its price. Ctrl-C ends that with what is done.
    """
    from headstart.tuner.report import tune_html
    from headstart.tuner.tune import document
    from headstart.tuner.tune import tune as tuned_by

    _check_targets(json, html)
    wanted, least_gain, site = curve.tokens, curve.least_gain, latency.site()
    token_nbytes = token_kv_nbytes(curve.token_kv, site)
    tiers.check(token_nbytes, sample.share)
    if site is not None and sample.share < 1.0:
        raise ConfigError("--model needs all of a trace: a sample asks less of it; no --sample")
    recorded, broken = read.read(trace, sample.share)
    latency.check_times(context, recorded)
    with render.progress("simulating") as advance:
        tuned = tuned_by(
            recorded,
            policies=curve.names,
            capacities_tokens=wanted,
            least_gain=least_gain,
            token_nbytes=token_nbytes,
            advance=advance,
        )
        errors = sample.errors(tuned, read.seed, advance)
    replayed, times, is_interrupted = _more(tuned, tiers, latency, site, curve.names)
    found = {
        **document(tuned),
        **sample_document(tuned, errors),
        **tiers_document(replayed),
        **times_document(times),
        "broken": broken_document(broken),
        "interrupted": is_interrupted,
    }
    if html is not None:
        page = tune_html(tuned, trace.name, broken, times_html(times))
        render.write_text(html, page, option="--html")
    render.publish(found, json, lambda: _show(tuned, replayed, times))
    if json != "-":
        show_errors(tuned, errors)
        show_broken(found["broken"])
    end_interrupted(is_interrupted)


def _check_targets(json: str | None, html: Path | None) -> None:
    """Raises ConfigError for what cannot be written, before a trace is read."""
    from headstart import figure

    render.check_target(json)
    if html is not None:
        figure.check_installed()
        render.check_target(f"{html}", option="--html")
        if json not in (None, "-") and Path(f"{json}").resolve() == html.resolve():
            raise ConfigError(f"--html and --json are both {html}: write them to two files")


def _more(
    tuned: Tuned,
    tiers: TierOptions,
    latency: LatencyOptions,
    site: Site | None,
    policies: list[str],
) -> tuple[list[TierPoint], Times | None, bool]:
    """What two tiers and times are, as far as they are asked for; and whether Ctrl-C came."""
    if tuned.is_interrupted:
        return [], None, True
    replayed, is_interrupted = tiers.replayed(tuned.recorded, tuned.token_nbytes)
    if is_interrupted:
        return replayed, None, True
    try:
        times = latency.times(site, tuned, policies)
    except KeyboardInterrupt:  # before anything was timed
        return replayed, None, True
    return replayed, times, times is not None and times.is_interrupted


def _show(tuned: Tuned, replayed: list[TierPoint], times: Times | None) -> None:
    from headstart.tuner.report import overview, point_rows

    titles, rows = point_rows(tuned)
    columns = [render.Column(title=each, numeric=index > 0) for index, each in enumerate(titles)]
    render.print_table(columns, rows, title="Hits; a cold start, and the last half of the requests")
    print()
    found = overview(tuned, with_advice=times is None)
    render.print_table([render.Column(title="tune"), render.Column(title="")], found)
    show_tiers(replayed)
    show_times(times)
