"""What every storey uses: errors, options, files, randomness, processes, progress, text."""
