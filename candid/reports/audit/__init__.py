"""Everything about one or more models, side by side, as one page and one JSON file."""
