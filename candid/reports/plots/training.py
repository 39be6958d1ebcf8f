"""The course of a training run."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from candid.reports.plots.style import BLUE, GREY, STYLE, VERMILION


@rc_context(STYLE)
def curves(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Draw cross-entropy, accuracy, bits/dim and the learning rate of each epoch."""
    panels = {
        "cross_entropy": "cross-entropy (nats)",
        "accuracy": "accuracy",
        "bits_per_dim": "bits/dim",
        "learning_rate": "learning rate",
    }
    shown = {key: label for key, label in panels.items() if key in rows[0] or f"val_{key}" in rows[0]}
    figure = Figure(figsize=(3.4 * len(shown), 2.8), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axes, (key, label) in zip(
        figure.subplots(1, len(shown), squeeze=False).flat, shown.items(), strict=True
    ):
        for prefix, name, colour in (
            ("train_", "training", BLUE),
            ("val_", "validation", VERMILION),
            ("", "", GREY),
        ):
            if prefix + key in rows[0]:
                values = [row[prefix + key] for row in rows]
                axes.plot(epochs, values, color=colour, label=name, marker="." if len(rows) < 40 else "")
        axes.set_xlabel("epoch")
        axes.set_title(label)
        axes.grid()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(axes.lines) > 1:
            axes.legend()
    return figure
