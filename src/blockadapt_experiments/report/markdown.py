"""Write the report as a Markdown page, to be kept with the PNG files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from blockadapt_experiments.files.atomic import atomic_text
from blockadapt_experiments.report.content import Content
from blockadapt_experiments.report.table import Line, Table
from blockadapt_experiments.results.formats import number


def write_markdown(content: Content, path: Path) -> None:
    """Write the page."""
    with atomic_text(path) as file:
        file.write("\n".join(_lines(content)) + "\n")


def _lines(content: Content) -> Iterator[str]:
    summary = content.summary
    yield f"# {inline(content.heading)}"
    yield "\n" + " ".join(filter(None, (inline(content.source), content.facts)))
    if not summary.complete:
        yield "\n**Not finished**: numbers and verdicts are of the runs that have come to their end."
    for trouble in content.troubles:
        yield f"\n**{inline(trouble)}**"
    whose, says = ("The paper's claims", "The paper") if summary.experiment.in_paper else ("Claims", "The claim")
    yield f"\n## {whose}\n"
    rows = [(inline(claim.paper), inline(claim.verdict.words), f"**{claim.word}**") for claim in content.judged]
    yield from grid((says, "Measured here", "Verdict"), rows) if rows else ["This experiment tests no claim."]
    if content.figures or content.pictures:
        yield "\n## Curves and pictures"
    for picture in (*content.figures, *content.pictures):
        yield f"\n![{picture.stem.replace('_', ' ').replace('-', ' ')}]({picture.name})"
    yield "\n## Results\n"
    yield from _results(content)
    yield from _compared(content)
    if content.others.columns:
        yield "\n## Other numbers\n"
        yield from _table(content, content.others, range(len(content.others.columns)))
    yield from _provenance(content)
    yield from _tuned(content)
    yield from _against_paper(content)


def _results(content: Content) -> Iterator[str]:
    """Write a table for each metric, then one of what is not about a metric.

    Yields:
        A line.
    """
    columns = content.table.columns
    for metric in content.summary.metrics:
        yield f"### {inline(metric.label[:1].upper() + metric.label[1:])}\n"
        yield from _table(content, content.table, [i for i, c in enumerate(columns) if c.metric == metric.key])
        yield ""
    yield "### Time and memory\n"
    yield from _table(content, content.table, [i for i, c in enumerate(columns) if not c.metric], facts=True)
    equal = f" Equal time: when the fastest had finished, {inline(content.equal_times)}." if content.equal_times else ""
    target = f" Target: {inline(content.target)}." if content.target else ""
    yield (
        "\nMean ± half width of the 95% interval over finished seeds (Student's t). Bold: the best, where the interval"
        f" of its lead over every other, paired by seed, is above zero.{equal} Oscillation: standard deviation over the"
        f" last 20% of the points of a run. Diverged: seeds with a value that is not finite.{target}"
    )


def _table(content: Content, table: Table, shown: Sequence[int], facts: bool = False) -> Iterator[str]:
    """Write the columns at these places; with `facts` also the learning rate and the seeds.

    Yields:
        A line.
    """
    sweep, rates = content.summary.variants != [""], facts and table.has_lr

    def cells(line: Line) -> Iterator[str]:
        yield inline(line.label)
        if sweep:
            yield inline(line.variant)
        if rates:
            yield f"{number(line.lr)} {line.lr_source}" if line.lr == line.lr else number(line.lr)
        for place in shown:
            estimate = line.estimates[place]
            text = f"{estimate.text} ({estimate.part})" if estimate.part else estimate.text
            yield f"**{text}**" if line.best[place] else text
        if facts:
            yield from (line.seeds, str(line.diverged))

    heads = ["Optimizer", *(["Variant"] if sweep else []), *(["lr"] if rates else [])]
    heads += [table.columns[place].heading for place in shown] + (["Seeds", "Diverged"] if facts else [])
    yield from grid(heads, map(tuple, map(cells, table.lines)), numbers=len(heads) - 1 - sweep)


def _compared(content: Content) -> Iterator[str]:
    """Write what arms and variants differ by from their reference.

    Yields:
        A line.
    """
    if not content.compared:
        return
    sweep = content.summary.variants != [""]
    yield "\n## Differences, paired by seed"
    for comparison in content.compared:
        yield f"\nMinus {inline(comparison.reference)}:\n"
        heads = ["Optimizer", *["Variant"] * sweep, *(inline(moment.heading) for moment in comparison.moments), "Pairs"]
        rows = [
            (
                inline(line.label),
                *[inline(line.variant)] * sweep,
                *(f"**{estimate.text}**" if clear else estimate.text for estimate, clear in line.marked),
                str(line.pairs),
            )
            for line in comparison.lines
        ]
        yield from grid(heads, rows, numbers=len(heads) - 1 - sweep)
    for picture in content.apart:
        yield f"\n![Differences, paired by seed]({picture.name})"
    yield (
        "\nMean ± half width of the 95% interval of the difference between runs of the same seed (Student's t). Bold:"
        " the interval leaves zero out. At equal time: when the faster of the two runs was done. A dash:"
        " a run diverged, or had measured nothing by then."
    )


def _provenance(content: Content) -> Iterator[str]:
    """Write how to repeat it.

    Yields:
        A line.
    """
    yield f"\n## Repeat it\n\n```sh\n{content.summary.command}\n```"
    yield f"\nSeeds: {', '.join(map(str, content.summary.seeds))}.\n"
    yield from (f"- {inline(key)}: {inline(value)}" for key, value in content.environment.items())
    if content.elsewhere:
        other = ", ".join(f"{inline(key)} {inline(value)}" for key, value in content.elsewhere.items())
        yield f"\nDifferent for some of the runs: {other}."
    if content.notes:
        yield "\nOn the way:\n"
        yield from (f"- {inline(note)}" for note in content.notes)


def _tuned(content: Content) -> Iterator[str]:
    """Write which learning rates were tried, and what came of each.

    Yields:
        A line.
    """
    if not content.tuned:
        return
    yield "\n## Learning rates tried\n"
    yield f"{inline(content.budget)} The seeds are not those of the results, and no test data was used.\n"
    for picture in content.sensitivity:
        yield f"![Objective against learning rate]({picture.name})\n"
        yield "Rings: the learning rates chosen. Crosses: those with which a run diverged.\n"
    sweep = content.summary.variants != [""]
    rows = [
        (
            inline(line.label),
            *[inline(line.variant)] * sweep,
            inline(line.lr),
            line.value,
            line.trials,
            "; ".join(f"{inline(lr)}: {value}" for lr, value in line.tried) + f". {inline(line.warning)}".rstrip(". "),
        )
        for line in content.tuned
    ]
    heads = ("Optimizer", *["Variant"] * sweep, "lr", "Objective there", "Trials", "All trials, lr: objective")
    yield from grid(heads, rows)


def _against_paper(content: Content) -> Iterator[str]:
    """Write in which settings it differs from the paper's scale.

    Yields:
        A line.
    """
    yield "\n## Against the paper's scale\n"
    if content.differences is None:
        yield "The settings of the paper's scale are not known."
    elif not content.differences:
        yield "Nothing differs: these are the settings of the paper's scale."
    else:
        rows = [tuple(map(inline, difference)) for difference in content.differences]
        yield from grid(("Setting", "Here", "At the paper's scale"), rows)
        yield "\nA reduced run tests the direction of a claim, not the paper's numbers."


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> Iterator[str]:
    """Write a Markdown table whose last `numbers` columns are numbers, set to the right.

    Yields:
        A line.
    """
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * (len(heads) - numbers) + "---:|" * numbers
    for row in rows:
        yield f"| {' | '.join(row)} |"


def inline(text: str) -> str:
    """Escape all that Markdown or HTML would take for more than text."""
    text = " ".join(text.split()).replace("\\", "\\\\")
    for mark in "`*[]<>|$":
        text = text.replace(mark, "\\" + mark)
    return text
