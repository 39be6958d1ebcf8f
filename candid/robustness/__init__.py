"""What a classifier does when images get worse."""

from candid.robustness.corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupt

__all__ = ["CORRUPTIONS", "SEVERITIES", "Corruption", "corrupt"]
