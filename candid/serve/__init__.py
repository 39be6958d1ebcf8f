"""A model as a web page and a JSON API; needs the extra ``web``."""
