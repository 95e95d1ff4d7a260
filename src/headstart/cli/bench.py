"""`headstart bench`: measurements of this machine and of servers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.bench_rate import rate
from headstart.cli.bench_report import report
from headstart.cli.bench_serve import serve
from headstart.cli.bench_workload import workload
from headstart.cli.options import JsonTarget
from headstart.units import format_nbytes, format_seconds, parse_nbytes

if TYPE_CHECKING:
    from headstart.bench.bookkeeping import LookupResult, ReopenResult
    from headstart.bench.storage import BlockSizeResult

EXIT_FINDING = 1
STORAGE_SCHEMA = "headstart.bench.storage/1"

app = typer.Typer(
    help="Measure this machine, or a server.", no_args_is_help=True, rich_markup_mode=None
)
app.command(name="serve")(serve)
app.command(name="rate")(rate)
app.command(name="report")(report)
app.command(name="workload")(workload)


@app.command()
def storage(
    root: Annotated[
        Path,
        typer.Option(help="Folder on the disk to measure; what is written there is removed again."),
    ] = Path("build/bench"),
    total: Annotated[
        str, typer.Option(help="Payload read in each round, such as 256MiB.")
    ] = "256MiB",
    rounds: Annotated[int, typer.Option(min=6, help="Rounds for each block size.")] = 15,
    blocks: Annotated[
        int, typer.Option(min=8192, help="Blocks in the index for reopening and look-up.")
    ] = 1_000_000,
    block_size: Annotated[
        list[str] | None,
        typer.Option(help="Block size to measure, such as 1MiB; may be given several times."),
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Measure the file tier against raw direct reads of the same blocks, and what its index costs.

    A share of 1.00 is the device's own speed. "raw/raw" compares the raw reads with themselves: as
    far as it is from 1.00, the machine was noisy. Needs about 8 GiB of disk for the index part.
    Exit code 1 when a block came back wrong.
    """
    from headstart.bench.bookkeeping import bench_bookkeeping
    from headstart.bench.environment import describe
    from headstart.bench.storage import BLOCK_SIZES, bench_block_sizes

    sizes = [parse_nbytes(size) for size in block_size] if block_size else list(BLOCK_SIZES)
    with render.progress("storage") as progress:
        results = bench_block_sizes(
            root,
            block_sizes=sizes,
            total_nbytes=parse_nbytes(total),
            num_rounds=rounds,
            progress=progress,
        )
        reopen, lookup = bench_bookkeeping(root, num_blocks=blocks, progress=progress)
    document = {
        "schema": STORAGE_SCHEMA,
        "environment": describe(),
        "settings": {"total_nbytes": parse_nbytes(total), "rounds": rounds},
        "results": [asdict(result) for result in results],
        "reopen": asdict(reopen),
        "lookup": asdict(lookup),
    }
    render.publish(document, json, lambda: _show(results, reopen, lookup))
    if not all(result.verified for result in results):
        print("headstart: a block came back with wrong bytes", file=sys.stderr)
        raise typer.Exit(EXIT_FINDING)


def _show(results: list[BlockSizeResult], reopen: ReopenResult, lookup: LookupResult) -> None:
    columns = [
        render.Column(title=title, numeric=True)
        for title in (
            "block",
            "write GB/s",
            "read GB/s",
            "raw GB/s",
            "share of raw",
            "95 % interval",
            "raw/raw",
            "CPU s/GB",
            "raw CPU s/GB",
        )
    ]
    rows = [
        [
            format_nbytes(result.block_nbytes),
            f"{result.write_bytes_per_s / 1e9:.2f}",
            f"{result.read_bytes_per_s / 1e9:.2f}",
            f"{result.raw_read_bytes_per_s / 1e9:.2f}",
            f"{result.share_of_raw:.3f}",
            f"{result.share_low:.3f}-{result.share_high:.3f}",
            f"{result.raw_vs_raw:.3f}",
            f"{result.cpu_s_per_gb:.3f}",
            f"{result.raw_cpu_s_per_gb:.3f}",
        ]
        for result in results
    ]
    render.print_table(columns, rows, title="File tier against raw reads of the same blocks, cold")
    print(
        f"reopening {reopen.num_blocks:,} blocks: {format_seconds(reopen.seconds)}, "
        f"{reopen.index_bytes_per_block:.0f} bytes of index a block"
    )
    print(
        f"look-up of {lookup.num_keys:,} keys among {lookup.num_indexed:,}: "
        f"p50 {format_seconds(lookup.p50_s)}, p99 {format_seconds(lookup.p99_s)}, "
        f"p99 while four threads store and evict {format_seconds(lookup.p99_busy_s)}"
    )
