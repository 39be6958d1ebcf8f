"""What every storey uses: errors, options, files, randomness, processes, progress, text."""

# The one place that holds the version.
__version__ = "0.1.0"
