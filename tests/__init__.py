import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several tests at once would wait for each other

import candid as candid  # it bounds spinning, which must happen before torch is loaded
