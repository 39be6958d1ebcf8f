import candid as candid  # it bounds threads and spinning, which must happen before torch is loaded
