"""The report: one HTML file with numbers, settings and plots as inline SVG, without scripts or external files."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from forebay.errors import UsageError
from forebay.workload.answers import TIERS
from forebay.workload.bench.compare import MEASURES, Comparison, verdict
from forebay.workload.bench.result import Result
from forebay.workload.bench.stats import Estimate

__all__ = ["comparison_report", "report"]

_COLOURS = {"computed": "#b9c2cc", "device": "#2a6f97", "host": "#e09f3e", "disk": "#9e2a2b", "cached": "#2a6f97"}
_A, _B = "#2a6f97", "#e09f3e"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{{font:15px/1.5 system-ui,sans-serif;color:#1c2430;max-width:62rem;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.4rem;margin:0}} h2{{font-size:1.05rem;margin:2rem 0 .5rem}} .sub{{color:#5b6673;margin:.2rem 0 1.2rem}}
table{{border-collapse:collapse}} td,th{{padding:.2rem 1rem .2rem 0;text-align:left;vertical-align:top}}
td.n{{font-variant-numeric:tabular-nums}} .ci{{color:#5b6673;font-size:.85em}} svg{{max-width:100%;height:auto}}
.note{{border-left:4px solid #e09f3e;padding:.3rem .8rem;background:#fdf6ea;margin:.4rem 0}}
pre{{background:#f4f6f8;padding:.8rem;overflow:auto}}
</style></head><body><h1>{title}</h1><p class="sub">{sub}</p>{body}</body></html>
"""


def report(result: Result) -> str:
    """The page of one run.

    Raises:
        UsageError: matplotlib is not installed.
    """
    body = [
        *(f'<p class="note">{html.escape(note)}</p>' for note in result.notes),
        _numbers([("", result)]),
        _section("Throughput over time", _time_plot([("", result)])),
        _section(
            "Latency: share of requests (left) and of tokens (right) that took at most this long",
            _latency_plot([("", result)]),
        ),
        _section("Where prompt tokens came from, over time", _tier_plot(result)),
        "<h2>Settings</h2><pre>" + html.escape(json.dumps(result.workload, indent=1, default=str)) + "</pre>",
    ]
    return _PAGE.format(title=f"Bench of {html.escape(result.target)}", sub=_subtitle(result), body="\n".join(body))


def comparison_report(comparison: Comparison) -> str:
    """The page of a comparison: the ratios, every round, and the latencies of the last round.

    Raises:
        UsageError: matplotlib is not installed.
    """
    rows = "".join(
        f"<tr><th>{title}</th><td>{html.escape(verdict(comparison.ratios[name], better))}</td></tr>"
        for name, (title, _, better) in MEASURES.items()
    )
    starts = "".join(
        f"<tr><th>start of {side}</th><td>{', '.join(f'{s:.1f} s' for s in seconds)}</td></tr>"
        for side, seconds in comparison.start_s.items()
    )
    last = [("A", comparison.rounds_a[-1]), ("B", comparison.rounds_b[-1])]
    body = [
        f"<table>{rows}{starts}</table>",
        _section("Every round", _rounds_plot(comparison)),
        _section("Latency in the last round", _latency_plot(last)),
        "<h2>The last round of each side</h2>" + _numbers(last),
        "<h2>Settings</h2><pre>" + html.escape(json.dumps(last[0][1].workload, indent=1, default=str)) + "</pre>",
    ]
    title = f"A {html.escape(comparison.a)} against B {html.escape(comparison.b)}"
    return _PAGE.format(
        title=title, sub=f"{len(comparison.rounds_a)} interleaved rounds per side; 99 % intervals", body="\n".join(body)
    )


def _subtitle(result: Result) -> str:
    cache = f"cache {result.cache.state} ({'seen' if result.cache.seen else 'not seen'}: {result.cache.evidence})"
    return html.escape(f"{result.model} · {result.server} · {result.workload['workload']} · {cache}")


def _section(title: str, svg: str) -> str:
    return f"<h2>{title}</h2>{svg}"


def _numbers(sides: Sequence[tuple[str, Result]]) -> str:
    def row(name: str, cells: Sequence[str]) -> str:
        return f"<tr><th>{name}</th>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"

    results = [result for _, result in sides]
    rows = [row("", [label for label, _ in sides])] if len(sides) > 1 else []
    rows.append(row("requests", [f"{r.requests:,} in {r.seconds:.1f} s" for r in results]))
    rows.append(
        row("errors", [html.escape(", ".join(f"{k} {v}" for k, v in r.errors.items()) or "none") for r in results])
    )
    rows.append(row("output, tok/s", [_cell(r.output_per_s, 1, 1) for r in results]))
    rows.append(row("input, tok/s", [_cell(r.input_per_s, 1, 1) for r in results]))
    for name, field in (
        ("first token", "first_token_s"),
        ("between tokens", "between_tokens_s"),
        ("whole request", "request_s"),
    ):
        for share in (50, 90, 99):
            cells = [getattr(r, field).get(share) for r in results]
            rows.append(row(f"{name} p{share}, ms", ["–" if c is None else _cell(c, 1000, 2) for c in cells]))
    rows.append(row("cached tokens, usage", [_tiers(r.by_tier_usage, r.cached_tokens) for r in results]))
    rows.append(row("cached tokens, metrics", [_tiers(r.by_tier_metrics, None) for r in results]))
    return f"<table>{''.join(rows)}</table>"


def _cell(estimate: Estimate, scale: float, digits: int) -> str:
    low, high = scale * estimate.low, scale * estimate.high
    return f'{scale * estimate.value:,.{digits}f} <span class="ci">{low:,.{digits}f} – {high:,.{digits}f}</span>'


def _tiers(by_tier: dict[str, int] | None, total: int | None) -> str:
    if by_tier:
        return ", ".join(f"{tier} {count:,}" for tier, count in by_tier.items())
    return "not reported" if total is None else f"{total:,} (tiers not reported)"


def _figure(columns: int, height: float = 2.6) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "the HTML report needs matplotlib", fix="pip install 'forebay[data]', or leave --html out"
        ) from error
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.tick_params(labelsize=8)
    return figure, list(axes)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _time_plot(sides: Sequence[tuple[str, Result]]) -> str:
    figure, (axis,) = _figure(1)
    for (label, result), colour in zip(sides, (_A, _B)):
        axis.plot(result.timeline["at_s"], result.timeline["output"], color=colour, label=label or "output tokens")
    axis.set(xlabel="seconds", ylabel="output tok/s", ylim=(0, None))
    return _svg(figure)


def _latency_plot(sides: Sequence[tuple[str, Result]]) -> str:
    figure, axes = _figure(2)
    from matplotlib.ticker import FuncFormatter, LogFormatter  # _figure has said what is missing, if it is

    for axis, field, title in (
        (axes[0], "first_curve", "time to first token, ms"),
        (axes[1], "gap_curve", "time between tokens, ms"),
    ):
        for (label, result), colour in zip(sides, (_A, _B)):
            curve = [1000 * max(value, 1e-5) for value in getattr(result, field)]
            if curve:
                axis.plot(curve, [n / (len(curve) - 1) for n in range(len(curve))], color=colour, label=label)
        for share in (0.5, 0.9, 0.99):
            axis.axhline(share, color="#5b6673", linewidth=0.5, linestyle=":")
        axis.set(xscale="log", xlabel=title, ylim=(0, 1.01))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # not 1e-01
        axis.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
        axis.tick_params(axis="x", which="both", labelsize=8)
    if len(sides) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    return _svg(figure)


def _tier_plot(result: Result) -> str:
    figure, (axis,) = _figure(1)
    shown = [name for name in (*TIERS, "cached", "computed") if name in result.timeline]
    layers = [result.timeline[name] for name in shown]
    axis.stackplot(
        result.timeline["at_s"], layers, labels=shown, colors=[_COLOURS[name] for name in shown], linewidth=0
    )
    axis.set(xlabel="seconds", ylabel="prompt tok/s", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, loc="upper right", ncols=len(shown))
    return _svg(figure)


def _rounds_plot(comparison: Comparison) -> str:
    figure, axes = _figure(len(MEASURES))
    for axis, (name, (title, value, _)) in zip(axes, MEASURES.items()):
        scale = 1 if name == "output" else 1000
        for rounds, colour, label in ((comparison.rounds_a, _A, "A"), (comparison.rounds_b, _B, "B")):
            places = [number + 1 for number in range(len(rounds))]
            axis.plot(
                places, [scale * value(r) for r in rounds], "o-", color=colour, label=label, markersize=4, linewidth=1
            )
        axis.set_title(title + ("" if scale == 1 else ", ms"), fontsize=9)
        axis.set(xlabel="round", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    return _svg(figure)
