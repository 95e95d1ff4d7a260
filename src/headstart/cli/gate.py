"""`headstart gate`: the verdict on a candidate against a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from headstart import render
from headstart.cli.options import JsonTarget, parse_share
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.bench.gate import Judgement
    from headstart.bench.slo import Slo

EXIT_USAGE = 3
_EXITS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}
_LISTS = ("--baseline", "--candidate")


class GateCommand(TyperCommand):
    """Takes several files after one option, and ends wrong usage with 3: 2 is a verdict."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        try:
            return super().parse_args(ctx, spread(args))
        except Exception as error:
            wrong_usage: Any = error
            if getattr(wrong_usage, "exit_code", None) == 2:  # the base of all has no public name
                wrong_usage.exit_code = EXIT_USAGE
            raise


def spread(args: list[str]) -> list[str]:
    """`--baseline a b` as `--baseline a --baseline b`, and so for the candidate."""
    found: list[str] = []
    option, is_named = "", False
    for arg in args:
        if arg.startswith("-") and arg != "-":
            option, is_named = (arg if arg in _LISTS else ""), True
            found.append(arg)
        else:
            found += [arg] if is_named or not option else [option, arg]
            is_named = False
    return found


def gate(
    baseline: Annotated[
        list[Path], typer.Option(help="Runs of the baseline, in order; several files may follow.")
    ],
    candidate: Annotated[
        list[Path], typer.Option(help="Runs of the candidate, each the partner of one of those.")
    ],
    ttft_drop: Annotated[str, typer.Option(help="By how much the median TTFT has to fall.")] = (
        "25%"
    ),
    throughput_gain: Annotated[
        str, typer.Option(help="By how much output tokens/s have to rise; 0: not judged.")
    ] = "29%",
    slo: Annotated[
        str | None,
        typer.Option(help="What requests have to meet in every run, such as ttft=2s,tpot=100ms."),
    ] = None,
    slo_share: Annotated[str, typer.Option(help="Share of the requests that do.")] = "99%",
    token_match: Annotated[
        str, typer.Option(help="Share of the requests that both arms have to answer alike.")
    ] = "98%",
    no_reuse_baseline: Annotated[
        bool, typer.Option(help="The baseline is meant to have no prefix cache at all.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Judge a candidate against a baseline by pairs of runs: PASS, FAIL or INCONCLUSIVE.

    Runs are JSON files of the schema headstart.bench.serve/1, of `vllm bench serve --save-result
    --save-detailed`, of SGLang's bench_serving with --output-details, of GuideLLM or of AIPerf
    (profile_export.jsonl). Interleave them: baseline, candidate, candidate, baseline, with the same
    requests in both of a pair; five pairs are advised. PASS means that a sceptic has to agree: the
    95 % bounds of the ratios, not their means, reach what is asked, and no guard rail speaks
    against it. Throughput is only proved with --slo.

    Exit code 0 PASS, 1 FAIL, 2 INCONCLUSIVE (with the number of pairs that would decide it), 3
    wrong usage or runs that cannot be compared.
    """
    from headstart.bench.gate import Demands, document, judge
    from headstart.bench.imports import read_partners
    from headstart.bench.slo import parse_slo

    try:
        level = parse_slo(slo)
        demands = Demands(
            ttft_drop=parse_share("--ttft-drop", ttft_drop),
            throughput_gain=parse_share("--throughput-gain", throughput_gain, most=100.0),
            slo=level.limits,
            slo_share=parse_share("--slo-share", slo_share),
            token_match=parse_share("--token-match", token_match),
            allow_no_reuse=no_reuse_baseline,
        )
        baselines = [run for path in baseline for run in read_partners(path)]
        candidates = [run for path in candidate for run in read_partners(path)]
        judgement = judge(baselines, candidates, demands)
        render.publish(document(judgement, demands), json, lambda: _show(judgement, level))
    except HeadstartError as error:
        render.print_error(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(_EXITS[judgement.verdict])


def _show(judgement: Judgement, slo: Slo) -> None:
    rows = [("verdict", str(judgement.verdict))]
    rows += [("because", reason) for reason in judgement.reasons]
    rows += [("veto", veto) for veto in judgement.vetoes]
    rows += [("not checked", each) for each in judgement.not_checked]
    if slo.note:
        rows.append(("note", slo.note))
    rows.append(("pairs", str(judgement.num_pairs)))
    if judgement.verdict == "INCONCLUSIVE":
        needed = judgement.pairs_needed
        rows.append(("pairs needed", "more than would help" if needed is None else str(needed)))
    render.print_table([render.Column(title="gate"), render.Column(title="")], rows)
