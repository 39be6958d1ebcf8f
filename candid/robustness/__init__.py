"""How a classifier behaves on corrupted and on attacked images."""
