"""Figures, tables and the audit."""
