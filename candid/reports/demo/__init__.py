"""The page of ``candid demo``: photos with their verdicts, figures, tables, and commands to go on with."""
