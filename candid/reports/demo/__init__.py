"""The page of ``candid demo``: photos with their verdicts, figures, tables, and commands to go on with."""

from pathlib import Path

SAMPLES = Path(__file__).parent / "samples"


def sample_photos(model: str, channels: int) -> list[Path]:
    """Return the photos that a bundled model can be tried with; models without their own get everyday ones.

    >>> [photo.stem for photo in sample_photos("waste", 3)]
    ['bottle', 'cat', 'jeans', 'jug', 'tin', 'vodka']
    """
    if channels != 3:
        return []
    folder = SAMPLES / model
    return sorted((folder if folder.is_dir() else SAMPLES / "everyday").glob("*.jpg"))
