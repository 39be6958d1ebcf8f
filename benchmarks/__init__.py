"""Side-by-side measurements: ``python -m benchmarks`` runs all of them, ``--quick`` at small sizes."""

import candid as candid  # it bounds threads and spinning, which must happen before torch is loaded
