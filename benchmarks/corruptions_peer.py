"""Runs imagecorruptions-imaug for :mod:`benchmarks.corruptions`, in an interpreter that has it.

``python corruptions_peer.py PHOTOS.npy`` takes 8-bit photos (N, H, W, 3). For every line 'NAME SEVERITY' on
standard input it corrupts all of them, one by one, and answers with a line of JSON: the seconds that took and
the mean absolute change of a pixel, in levels of 255.
"""

import json
import sys
import time

import numpy as np
from imagecorruptions import corrupt  # type: ignore[import-not-found]

SEEDED = ("glass_blur", "impulse_noise")  # these two don't take NumPy's global seed


def main() -> None:
    photos = np.load(sys.argv[1])
    for first in (1, 3):  # numba compiles it for each type of its parameters
        corrupt(photos[0], corruption_name="glass_blur", severity=first)
    for line in sys.stdin:
        name, severity = line.split()
        change = seconds = 0.0
        for i, photo in enumerate(photos):
            np.random.seed(i)
            more = {"seed": i} if name in SEEDED else {}
            start = time.perf_counter()
            corrupted = corrupt(photo, corruption_name=name, severity=int(severity), **more)
            seconds += time.perf_counter() - start
            change += np.abs(corrupted.astype(np.float64) - photo).mean()
        print(json.dumps({"seconds": seconds, "change": change / len(photos)}), flush=True)


if __name__ == "__main__":
    main()
