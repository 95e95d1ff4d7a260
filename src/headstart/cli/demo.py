"""`headstart demo`: the main job, on a real model, in a few minutes."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headstart import render
from headstart.cli.options import JsonTarget
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.demo.results import DemoResult

EXIT_FINDING = 1
EXIT_TERMINATED = 143
_NEEDED = ("torch", "transformers", "gguf", "accelerate", "matplotlib")


def demo(
    root: Annotated[
        Path,
        typer.Option(help="Folder on the disk to show; what is written there is removed again."),
    ] = Path("build/demo"),
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Number format of weights and KV.")
    ] = "float32",
    block_size: Annotated[
        int, typer.Option(min=16, max=256, help="Tokens in a block: 16, 32, 64, 128 or 256.")
    ] = 32,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="vllm: two questions, with a node and `vllm serve`; needs vLLM."),
    ] = "transformers",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with plots to FILE.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one picture (PNG) to FILE.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Answer questions on a long document four times: recomputed, stored, from memory, from disk.

    The last time in a new process, which reads the document's KV from the disk instead of computing
    it. Runs SmolLM2-135M on the CPU. Exit code 1 when any answer differs from the recomputed one.
    """
    _check_installed(engine, html is not None or plot is not None)
    from headstart.config import cache_dir, forbid_downloads
    from headstart.demo.scenario import DemoOptions, run_demo
    from headstart.demo.vllm import BLOCK_SIZE, run_vllm_demo
    from headstart.engines.smollm2 import prepare_model

    forbid_downloads()
    # Ended from outside, it still ends what it started and removes what it wrote.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    with render.progress("converting the model") as advance:
        model_dir = prepare_model(
            cache_dir(), dtype, lambda done, total, message: advance(message, done, total)
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--root {root}: {error.strerror}") from error
    size = BLOCK_SIZE if engine == "vllm" else block_size
    options = DemoOptions(model_dir=model_dir, root=root, block_size=size)
    with render.progress("demo") as advance:
        result = (run_vllm_demo if engine == "vllm" else run_demo)(
            options,
            lambda phase, done, total, message: advance(f"{phase}: {message}", done, total),
        )
    render.publish(result.to_json(), json, lambda: _show(result))
    _write_report(result, html, plot)
    if not result.identical:
        print("headstart: an answer differs from the recomputed one", file=sys.stderr)
        raise typer.Exit(EXIT_FINDING)


def _check_installed(engine: str, has_plots: bool) -> None:
    """Raises ConfigError with what is missing."""
    needed: tuple[str, ...] = _NEEDED
    if engine == "vllm":
        needed = ("vllm", "transformers", "gguf") + (("matplotlib",) if has_plots else ())
    missing = [name for name in needed if find_spec(name) is None]
    if missing and engine == "vllm":
        raise ConfigError(
            f"the demo needs {', '.join(missing)} in this environment; `make venv-vllm` makes one "
            "with vLLM for CPUs, whose command is .venv-vllm/bin/headstart"
        )
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}; install them with: pip install 'headstart[demo]'"
        )


def _write_report(result: DemoResult, html: Path | None, plot: Path | None) -> None:
    from headstart.demo.plots import write_plot
    from headstart.demo.report import report_html

    try:
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(report_html(result), encoding="utf-8")
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            write_plot(result, plot)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from error


def _show(result: DemoResult) -> None:
    columns = [
        render.Column(title="phase"),
        *(
            render.Column(title=title, numeric=True)
            for title in ("TTFT s", "prompt", "loaded", "computed", "MB loaded", "load GB/s")
        ),
        render.Column(title="identical"),
    ]
    rows = []
    for phase in result.phases:
        first, rate = phase.first, phase.load_bytes_per_s
        rows.append(
            [
                phase.name,
                f"{first.ttft_s:.3f}",
                str(first.prompt_tokens),
                str(first.hit_tokens),
                str(first.prompt_tokens - first.hit_tokens),
                f"{first.loaded_nbytes / 1e6:.1f}",
                "-" if rate is None else f"{rate / 1e9:.2f}",
                "yes" if phase.identical else "NO",
            ]
        )
    render.print_table(columns, rows, title="Question 1, by where its KV came from")
    whence = "from the device" if result.device_verified else "not proved to be from the device"
    print(
        f"in a new process the first token came {result.speedup_restart:.1f} x sooner than "
        f"recomputed; its blocks came {whence}"
    )
