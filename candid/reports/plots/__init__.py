"""Figures: one module for each kind, imported one at a time; the only place that imports matplotlib."""
