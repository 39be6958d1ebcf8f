"""What verdicts accept, next to a plain threshold: for the page and the cards of the bundled models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.cells import Results, Table, between, title


def accepted(results: Results) -> Table:
    """Return coverage and accuracy of accepted images, and of a plain threshold at the same coverage."""
    head = ["", "accepted (%)", "right of accepted (%)", "plain threshold (%)", "difference (points)"]
    head += ["right of ambiguous (%)", "AUGRC (%)", "AURC (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            found = model.get("selective")
            if found is None or title(name) == "β = 0":  # it does not classify
                continue
            verdicts, plain = found["verdicts"], found["plain"]
            yield (
                f"**{title(name)}**",
                _share(verdicts, "coverage"),
                _share(verdicts, "accepted"),
                _share(plain, "accepted"),
                _difference(found),
                _share(verdicts, "ambiguous"),
                *(f"{100 * found[key]:.2f}" for key in ("augrc", "aurc")),
            )

    return head, rows()


def accepted_figures(model: Mapping[str, Any]) -> dict[str, str]:
    """Return what the card of a model says of its verdicts; nothing if they were not measured."""
    found = model.get("selective")
    if found is None or found["difference"] is None:
        return {}
    verdicts = found["verdicts"]
    figures = {
        "accepted by verdicts (%)": _share(verdicts, "coverage"),
        "right of accepted (%)": _share(verdicts, "accepted"),
        "the same, plain threshold at equal coverage (%)": _share(found["plain"], "accepted"),
        "right of ambiguous (%)": _share(verdicts, "ambiguous"),
    }
    figures |= {f"accepted of {name} (%)": _share_of(verdicts, name) for name in verdicts["foreign"]}
    return figures | {"AUGRC (%)": f"{100 * found['augrc']:.2f}"}


def _share(rule: Mapping[str, Any], key: str) -> str:
    return between(rule[key], rule["intervals"][key])


def _share_of(rule: Mapping[str, Any], name: str) -> str:
    return between(rule["foreign"][name], rule["intervals"]["foreign"][name])


def _difference(found: Mapping[str, Any]) -> str:
    value, low, high = (f"{100 * found['difference'][key]:+.2f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
