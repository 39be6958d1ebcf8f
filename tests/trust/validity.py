"""What it means that p-values are valid, on many draws."""

from collections.abc import Iterable

from candid._support.numbers import Array


def assert_valid_p_values(p: Array, levels: Iterable[float], uniform: bool = False) -> None:
    """P(p <= t) is at most t at each level t, or t if ``uniform``, but for four standard deviations."""
    for t in levels:
        share, noise = float((p <= t + 1e-9).mean()), 4 * (t * (1 - t) / len(p)) ** 0.5
        assert share <= t + noise, f"{share} of the p-values are at most {t}"
        if uniform:
            assert share >= t - noise, f"{share} of the p-values are at most {t}"
