"""How the bundled models and the results page are made: ``python -m experiments.models`` and ``.results``."""
