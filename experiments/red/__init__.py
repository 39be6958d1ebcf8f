"""Attacks on the server, models, data and caches: ``make red``. Outside the test suite: they take minutes."""
