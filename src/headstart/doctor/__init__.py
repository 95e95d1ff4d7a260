"""Why is the first token slow although the cache hits? From what somebody has to causes and fixes.

`readers` make facts of files, `rules` find mechanisms in them, `diagnose` weighs and ranks. A
library without output; `headstart doctor` prints.
"""
