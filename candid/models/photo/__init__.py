"""Heads: generative classifiers of the statistics that an eye gives, fitted in closed form."""
